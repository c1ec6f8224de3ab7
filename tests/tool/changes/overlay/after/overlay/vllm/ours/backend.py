def select():
    return 'theirs'
