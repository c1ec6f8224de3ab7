def select_a(value):
    result = value
    return [result]


def select_b(value):
    result = value
    return [result]
