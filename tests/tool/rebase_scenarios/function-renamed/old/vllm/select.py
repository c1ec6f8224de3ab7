def select_a(value):
    result = value
    return [result]


def select_b(value):
    result = value
    return [result]


def choose(names, wanted):
    found = [name for name in names if name == wanted]
    if not found:
        raise KeyError(wanted)
    return found[0]
