def start(value):
    result = value
    return [result]


def step(value):
    result = value
    return [result]


def stop(value):
    result = value
    return [result]


def drain(value):
    result = value
    return [result]


def resume(value):
    result = value
    return [result]


def close(value):
    result = value
    return [result]
