"""How long one call of an engine takes, on whatever device it runs."""

import time
from collections.abc import Callable

import torch
from torch import Tensor


def milliseconds(engine: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Of one call on `images` [B, 3, H, W]; the device of the images is the engine's.

    On a GPU it is the time between two events of the stream, from the first kernel's place in the queue to the end of
    the last kernel: a clock here would stop when the work is queued, not when it is done.
    """
    if not images.is_cuda:
        start = time.perf_counter()
        engine(images)
        return 1000 * (time.perf_counter() - start)
    with torch.cuda.device(images.device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # what was queued before is not this call's
        first.record()
        engine(images)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)
