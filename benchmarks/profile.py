"""How long the GPU works while an engine serves; the rest of the time it waits for the host.

`start` and `stop` are for LLM.collective_rpc: torch's profiler runs in the worker.
"""

from collections.abc import Iterable


def start(worker) -> None:
    from torch.profiler import ProfilerActivity, profile

    worker.profile = profile(activities=[ProfilerActivity.CUDA])
    worker.profile.start()


def stop(worker) -> float:
    """Return the seconds in which the GPU was at work, in kernels and copies, since `start`."""
    import torch

    torch.cuda.synchronize()
    worker.profile.stop()
    on_gpu = (event for event in worker.profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return covered((event.time_range.start, event.time_range.end) for event in on_gpu) / 1e6


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ranges: kernels of several streams overlap."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
