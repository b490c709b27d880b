"""Run batches so that every node sees the same bits of each picture as if it ran alone on one thread.

A CPU may add up a matrix product in an order that depends on the neighbouring rows and on the number of threads. MKL
promises that it does not (MKL_CBWR, see base/cpu.py), but only on some CPUs, and other libraries promise
nothing. So a batch of a new size is tried: its first and last picture also run alone, on one thread. If a node sees
different bits, its observer forgets the batch, and the pictures run one by one: slower, but with the same result on any
number of ranks and threads and in batches of any size.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swin_quant.base.progress import log
from swin_quant.quant.quantizer import Quantizer

Forward = Callable[[Tensor], Tensor]


class BatchInvariance:
    """Runs batches through the `forward` of `model`; each of its `nodes` has an observer."""

    def __init__(self, model: nn.Module, nodes: Iterable[Quantizer], forward: Forward) -> None:
        self.nodes, self.forward = list(nodes), forward
        self.holds: dict[tuple[int, ...], bool] = {}  # by shape of the batch
        parameter = next(model.parameters())
        sharded = hasattr(parameter, "full_tensor")  # a DTensor; importing the class takes a second
        # Single pictures are too slow for a GPU, and all ranks of a sharded model must run equally often.
        self.is_tried = parameter.device.type == "cpu" and not sharded

    def run(self, images: Tensor) -> Tensor:
        """The outputs of the batch [B, 3, H, W], run as a whole or picture by picture."""
        shape = tuple(images.shape)
        if not self.is_tried or not len(images) or self.holds.get(shape):
            return self.forward(images)
        if shape not in self.holds and (together := self._try(images)) is not None:
            return together
        with _one_thread():
            return torch.cat([self.forward(picture) for picture in images.split(1)])

    def _try(self, images: Tensor) -> Tensor | None:
        """The outputs of the batch; None, with all observers as before, if its first or last picture differs when it
        runs alone."""
        size = len(images)
        if size == 1 and torch.get_num_threads() == 1:
            return self.forward(images)
        ends = sorted({0, size - 1})
        before = [copy.deepcopy(vars(node.observer)) for node in self.nodes]
        outputs, together = self._hashed(images, ends, observe=True)
        with _one_thread():
            alone = torch.cat([self._hashed(images[at : at + 1], [0], observe=False)[1] for at in ends], dim=1)
        holds = torch.equal(together, alone)
        if not holds:
            for node, state in zip(self.nodes, before, strict=True):
                vars(node.observer).update(state)
            if all(self.holds.values()):
                log.info("pictures are calibrated one by one: in batches or on threads, this CPU's last bits differ")
        self.holds[tuple(images.shape)] = holds
        return outputs if holds else None

    def _hashed(self, images: Tensor, at: Sequence[int], observe: bool) -> tuple[Tensor, Tensor]:
        """The outputs, and int32 [calls, len(at)]: a hash of the bits that each node sees of the pictures `at`."""
        hashes: list[Tensor] = []
        observers = [node.observer for node in self.nodes]

        def hashing(observer: Callable[[Tensor], None] | None) -> Callable[[Tensor], None]:
            def see(x: Tensor) -> None:
                bits = x.detach().reshape(len(images), -1)[at].float().view(torch.int32)
                # Squares, so that errors up and down do not cancel; modulo 2**32, which makes the sum four times as
                # fast.
                hashes.append((bits * bits).sum(1, dtype=torch.int32))
                if observe and observer is not None:
                    observer(x)

            return see

        for node in self.nodes:
            node.observer = hashing(node.observer)
        try:
            outputs = self.forward(images)
        finally:
            for node, observer in zip(self.nodes, observers, strict=True):
                node.observer = observer
        return outputs, torch.stack(hashes)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
