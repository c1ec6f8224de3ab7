def start(value):
    start_first = value
    start_second = start_first
    start_result = value
    start_last = start_result
    return start_result, start_second, start_last


def step(value, *more):
    step_first = value
    step_second = step_first
    step_result = value
    step_last = step_result
    return step_result, step_second, step_last


def stop(value):
    stop_first = value
    stop_second = stop_first
    stop_result = value
    stop_last = stop_result
    return stop_result, stop_second, stop_last


def drain(value):
    drain_first = value
    drain_second = drain_first
    drain_result = value
    drain_last = drain_result
    return drain_result, drain_second, drain_last


def resume(value):
    resume_first = value
    resume_second = resume_first
    resume_result = value
    resume_last = resume_result
    return resume_result, resume_second, resume_last


def close(value):
    close_first = value
    close_second = close_first
    close_result = value
    close_last = close_result
    return close_result, close_second, close_last
