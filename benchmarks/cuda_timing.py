"""Time one call of a network for `cuda_candidates.py`: by a CUDA graph, by plain calls, or once on the CPU."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

REPLAYS, WARM_UP, WARM_S = 40, 5, 0.1
Run = Callable[[Tensor], object]


@torch.inference_mode()
def milliseconds(run: Run, images: Tensor) -> tuple[float, str]:
    """images [INPUTS, B, ...] take turns. Returns the median over replays of a CUDA graph, without the copy into it.

    If a graph cannot be captured, the median of plain calls, and a note. Replays are queued back to back, so that time
    in which the GPU waits for the next launch does not count.
    """
    if not images.is_cuda:
        return by_plain_calls(run, images), ""
    static, note = images[0].clone(), ""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run(static)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    replay: Callable[[], object]
    try:
        graph = torch.cuda.CUDAGraph()
        # Puts the stream back if it fails
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            run(static)
        replay = graph.replay
    except RuntimeError as error:  # it synchronizes, or allocates memory
        torch.cuda.synchronize()
        replay, note = partial(run, static), f"no CUDA graph, plain calls: {' '.join(str(error).split())[:120]}"
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_S:  # the clock rises under load
        replay()
        torch.cuda.synchronize()
    return median_of_replays(replay, static, images), note


@torch.inference_mode()
def by_plain_calls(run: Run, images: Tensor) -> float:
    """The median milliseconds of a call in which the CPU launches every kernel."""
    if not images.is_cuda:
        return once(partial(run, images[0]))
    static = images[0].clone()
    run(static)
    torch.cuda.synchronize()
    return median_of_replays(partial(run, static), static, images)


def once(run: Callable[[], object]) -> float:
    """Milliseconds of one call on the CPU."""
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def median_of_replays(replay: Callable[[], object], static: Tensor, images: Tensor) -> float:
    """The median milliseconds of a replay."""
    events = []
    for number in range(REPLAYS):
        static.copy_(images[number % len(images)])
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        events.append((first, last))
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events)
