"""Run batches of any size through programs of a few sizes; on a GPU each program is a CUDA graph, captured once.

Several threads may call a session; they take turns, since a program has one input buffer, and on a GPU all programs
share one block of memory. While one thread captures, no other may wait for the whole GPU (`torch.cuda.synchronize`):
CUDA then ends the capture.
"""

import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.fusions import fused_program
from swin_quant.backends.cuda.gpu import Machine, NoKernel, gpu_errors
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.network import Network
from swin_quant.backends.cuda.program import NO_TILES, Bound, Program, TileTable, bind, memory
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log

_KEPT = 2  # programs on a CPU: full batches, and the last, smaller one
# One batch size, and its CUDA graph: fill `images`, replay the graph on a stream, read `logits`. Allocates nothing.
Captured = tuple[Bound, Any]
# torch synchronizes the whole GPU before a capture, which would end another thread's capture.
_CAPTURING = threading.RLock()


class HostSession:
    """A network on the CPU: correct, not fast."""

    def __init__(self, network: Network) -> None:
        self.network, self.device, self.tensors = network, torch.device("cpu"), network.tensors
        self._bound: OrderedDict[int, Bound] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, images: Tensor) -> Tensor:
        """Pictures float [B, in, S, S] -> logits float32 [B, classes], on the pictures' device."""
        given = as_input(self.network, images)
        with self._lock:
            if (batch := len(images)) not in self._bound:
                while len(self._bound) >= _KEPT:
                    self._bound.popitem(last=False)
                program = build_program(self.network.spec, batch)
                self._bound[batch] = bind(program, self.tensors, self.network.scalars, self.device)
            self._bound.move_to_end(batch)
            bound = self._bound[batch]
            bound.images.copy_(given)
            bound()
            return bound.logits.clone().to(images.device)


class GraphSession:
    """A network on a GPU. A batch runs in the next larger captured size; the surplus logits are not read.

    Work is queued on the caller's stream; nothing waits for it before the session is dropped. With pictures on the GPU
    in the network's own format, a call allocates only the logits that it returns.
    Programs are captured when a batch first needs them, for `sizes` up to `largest`, with the fusions and
    tiles of `machine`. A program captured after a larger one shares its memory.
    """

    def __init__(self, network: Network, device: torch.device, largest: int, machine: Machine | None = None) -> None:
        self.network, self.device, self.largest, self.machine = network, device, largest, machine
        need = sum(tensor.nbytes for tensor in network.tensors.values())
        with gpu_errors(
            "a copy of the weights", device, need, "end what else has memory there, or export a smaller model"
        ):
            self.tensors = {name: tensor.to(device) for name, tensor in network.tensors.items()}
        self._captured: dict[int, Captured] = {}
        self._block: Tensor | None = None
        self._done = torch.cuda.Event()  # recorded after the last replay: the next caller's stream waits for it
        self._lock = threading.RLock()
        # Freed memory is reused once the stream that allocated it is done, but callers' streams may still replay.
        # (`record_stream` would query those streams, and another library may have destroyed its own.)
        weakref.finalize(self, _wait_for, self._done).atexit = False

    def __call__(self, images: Tensor) -> Tensor:
        """Pictures float [B, in, S, S] -> logits float32 [B, classes], on the pictures' device.

        A network that takes pixels also takes uint8 [B, S, S, in], without conversion.
        """
        count = len(images)
        with gpu_errors(f"a batch of {count}", self.device), torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    "the CUDA engine replays graphs of its own: call it outside of your CUDA graph's capture"
                )
            given = as_input(self.network, images)
            with self._lock:
                (bound, graph), stream = self.captured(count), torch.cuda.current_stream()
                stream.wait_event(self._done)
                # All that may fail comes before the replay.
                logits = torch.empty_like(bound.logits[:count])
                bound.images[:count].copy_(given, non_blocking=True)
                graph.replay()
                logits.copy_(bound.logits[:count])
                self._done.record(stream)
            return logits.to(images.device)

    def captured(self, batch: int) -> Captured:
        """The program that runs this batch, captured now if it is the first of its size."""
        size = next(size for size in sizes(self.largest) if size >= batch)
        with self._lock:
            if size not in self._captured:
                apart = build_program(self.network.spec, size)
                program = fused_program(self.network.spec, size, self.machine)
                tiles = self.machine.gpu.tiles if self.machine else NO_TILES
                try:
                    self._captured[size] = self._made(program, tiles)
                except NoKernel as refused:  # a fused kernel, or tiles of another GPU or compiler
                    if program.launches == apart.launches and not tiles:
                        raise
                    log.warning(
                        "%s: its launches run apart, with default tiles; `python tools/cuda/tune.py` may mend it",
                        refused,
                    )
                    self._captured[size] = self._made(apart, NO_TILES)
            return self._captured[size]

    def _made(self, program: Program, tiles: TileTable) -> Captured:
        with gpu_errors(f"a batch of {program.batch}", self.device, program.nbytes):
            if self._block is None or self._block.nbytes < program.nbytes:
                self._block = memory(program.nbytes, self.device)
            bound = bind(program, self.tensors, self.network.scalars, self.device, tiles, self._block)
            return self._capture(bound)

    def _capture(self, bound: Bound) -> Captured:
        # A failed capture may leave torch's own stream current: put the caller's back in any case.
        with _CAPTURING, torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            stream, callers = torch.cuda.Stream(), torch.cuda.current_stream()
            callers.wait_event(self._done)
            stream.wait_stream(callers)
            try:
                with torch.cuda.stream(stream):
                    bound()  # compiles kernels, which a graph must not contain
            finally:  # kernels queued before a failure may still write to the shared memory
                callers.wait_stream(stream)
                self._done.record(callers)
            graph = torch.cuda.CUDAGraph()
            # torch's default capture stream belongs to the GPU that first captured a graph. In the default mode, an
            # allocation by another thread would end the capture.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                bound()
        return bound, graph


def _wait_for(done: Any) -> None:
    with suppress(RuntimeError):  # a GPU that failed: the call has raised it already
        done.synchronize()


def sizes(largest: int) -> list[int]:
    """Batch sizes that programs are captured for: 1, 2, 3, 4, 6, 8, 12, 16, ... below `largest`, and `largest`.

    No batch is padded by more than half of its size.
    """
    steps = sorted({step for power in range(largest.bit_length()) for step in (2**power, 3 * 2**power)})
    return [step for step in steps if step < largest] + [largest]


def as_input(network: Network, images: Tensor) -> Tensor:
    """Pictures float [B, in, S, S] as the network takes them: unchanged, or the pixels that they were made from.

    Pixels, uint8 [B, S, S, in], pass unchanged if the network takes pixels. UsageError for another size or type.
    """
    g, is_pixels = network.spec.geometry, images.dtype == torch.uint8
    sides = g.image_size, g.image_size
    wanted = (*sides, g.in_chans) if is_pixels else (g.in_chans, *sides)
    if tuple(images.shape[1:]) != wanted:
        given, takes = (" x ".join(map(str, shape)) for shape in (images.shape[1:], wanted))
        raise UsageError(f"the engine takes pictures of {takes}, not {given}")
    if is_pixels and network.preprocess is None:
        raise UsageError("the engine takes normalised pictures, not pixels: export with ‹uint8_input›")
    images = images.detach()  # with a gradient, the buffers would hold its graph from call to call
    return images if is_pixels or network.preprocess is None else network.preprocess.pixels(images)
