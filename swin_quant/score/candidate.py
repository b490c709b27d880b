"""The latency of an engine: milliseconds of single calls, and images/s as FasterTransformer counts them."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swin_quant.score.engine import Engine


def time_calls(engine: Engine, batch: int, shape: Sequence[int], seconds: float) -> list[float]:
    """Milliseconds of each call on `batch` seeded inputs, for `seconds` at least, after one untimed call."""
    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(engine.device)
    with torch.inference_mode():
        engine(images)
        taken: list[float] = []
        while not taken or sum(taken) < 1000 * seconds:
            taken.append(milliseconds(engine, images))
    return taken


def milliseconds(engine: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """The time of one call on `images` [B, 3, H, W], on the engine's device.

    On a GPU it is the time between two events of the stream, before the first kernel and after the last: a CPU clock
    would stop when the work is queued, not when it is done.
    """
    if not images.is_cuda:
        start = time.perf_counter()
        engine(images)
        return 1000 * (time.perf_counter() - start)
    with torch.cuda.device(images.device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # otherwise work queued before would count
        first.record()
        engine(images)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


def throughput(
    engine: Callable[[Tensor], Tensor], images: Tensor, warm_up: int = 50, runs: int = 30, seconds: float = 60.0
) -> float:
    """Images/s of `engine` on `images` [B, 3, H, W]: FasterTransformer's 50 + 30 runs (docs/reference, section 2.5).

    The warm-up takes at most half of `seconds`, the timed runs the other half; each has one run at least.
    """

    def repeat(times: int) -> tuple[int, float]:
        def now() -> float:
            if images.is_cuda:
                torch.cuda.synchronize(images.device)
            return time.perf_counter()

        start, done = now(), 0
        while done < times and (done == 0 or time.perf_counter() - start <= seconds / 2):
            engine(images)
            done += 1
        return done, now() - start

    with torch.inference_mode():
        repeat(warm_up)
        done, elapsed = repeat(runs)
    return done * len(images) / elapsed
