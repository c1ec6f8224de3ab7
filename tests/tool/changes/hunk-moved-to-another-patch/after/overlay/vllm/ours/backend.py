def select():
    return 'ours'
