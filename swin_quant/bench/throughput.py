"""Images per second of an engine, on one batch, over and over."""

import time
from collections.abc import Callable

import torch
from torch import Tensor


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
