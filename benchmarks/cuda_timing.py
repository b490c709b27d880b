"""The time of one call on a GPU, by replays of a CUDA graph."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

REPLAYS, WARM_UP, WARM_S = 40, 5, 0.1


@torch.inference_mode()
def milliseconds(run: Callable[[Tensor], object], images: Tensor) -> tuple[float, str]:
    """images [N, B, ...] take turns. Returns the median over replays of a CUDA graph, without the copy into it.

    If a graph cannot be captured, the median of plain calls, and a note. Replays are queued back to back, so that time
    in which the GPU waits for the next launch does not count.
    """
    if not images.is_cuda:
        start = time.perf_counter()
        run(images[0])
        return 1000 * (time.perf_counter() - start), ""
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
    events = []
    for number in range(REPLAYS):
        static.copy_(images[number % len(images)])
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        events.append((first, last))
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events), note
