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


def throughput(
    engine: Callable[[Tensor], Tensor], images: Tensor, warm_up: int = 50, runs: int = 30, seconds: float = 60.0
) -> float:
    """Images/s of `engine` on `images` [B, 3, H, W]: FasterTransformer's 50 + 30 runs (docs/reference, section 2.5).

    Half of `seconds` bounds the warm-up and half the timed runs; at least one of each is done.
    """
    with torch.inference_mode():
        _repeat(engine, images, warm_up, seconds / 2)
        done, elapsed = _repeat(engine, images, runs, seconds / 2)
    return done * len(images) / elapsed


def _repeat(engine: Callable[[Tensor], Tensor], images: Tensor, times: int, seconds: float) -> tuple[int, float]:
    _wait(images)
    start = time.perf_counter()
    for done in range(1, times + 1):  # noqa: B007
        engine(images)
        if time.perf_counter() - start > seconds:
            break
    _wait(images)
    return done, time.perf_counter() - start


def _wait(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
