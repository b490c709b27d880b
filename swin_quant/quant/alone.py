"""Batches whose pictures show every node, to the bit, what each of them shows alone on one thread.

In which order a CPU adds up a matrix product may depend on the rows beside a row and on the number of threads. MKL
promises that it does not (MKL_CBWR, see base/reproducible.py), but keeps that on some CPUs only, and other libraries
promise nothing. So a batch of a new size is tried: its first and last picture also run alone, on one thread. Where a
node sees other bits, what the batch has shown is taken back, and its pictures run one by one: slower, and the same on
every number of ranks and threads and in batches of any size.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swin_quant.base.progress import log
from swin_quant.quant.quantizer import Quantizer


class AsAlone:
    """Runs batches through `model`, whose `nodes` have an observer each."""

    def __init__(self, model: nn.Module, nodes: Iterable[Quantizer]) -> None:
        self.model, self.nodes = model, list(nodes)
        self.together: dict[tuple[int, ...], bool] = {}
        parameter = next(model.parameters())
        sharded = hasattr(parameter, "full_tensor")  # a DTensor, whose class takes a second to import
        # One by one is too slow for a GPU, and the ranks of a sharded model must run equally often.
        self.tried = parameter.device.type == "cpu" and not sharded

    def run(self, images: Tensor, show: Callable[[Tensor], None]) -> None:
        """`show` the batch [B, 3, H, W], or its pictures [1, 3, H, W] one by one; `show` runs the model."""
        size = tuple(images.shape)
        if not self.tried or not len(images) or self.together.get(size):
            show(images)
        elif size in self.together or not self._same_together(images, show):
            with _one_thread():
                for picture in images.split(1):
                    show(picture)

    def _same_together(self, images: Tensor, show: Callable[[Tensor], None]) -> bool:
        """Show the batch; if its first or last picture differs from itself alone, take that back and say False."""
        size = len(images)
        if size == 1 and torch.get_num_threads() == 1:
            show(images)
            return True
        ends = sorted({0, size - 1})
        before = [copy.deepcopy(vars(node.observer)) for node in self.nodes]
        together = self._prints(images, show, ends, beside=True)
        with _one_thread():
            alone = torch.cat([self._prints(images[at : at + 1], self.model, [0]) for at in ends], dim=1)
        same = torch.equal(together, alone)
        if not same:
            for node, state in zip(self.nodes, before, strict=True):
                vars(node.observer).update(state)
            if all(self.together.values()):
                log.info("pictures are calibrated one by one: in batches or on threads, this CPU's last bits differ")
        self.together[tuple(images.shape)] = same
        return same

    def _prints(self, images: Tensor, run: Callable[[Tensor], object], at: list[int], beside: bool = False) -> Tensor:
        """int32 [calls, len(at)]: of what each node sees of the pictures `at`, a number made of all its bits.

        `beside`: the nodes' own observers see it too.
        """
        prints: list[Tensor] = []
        kept = [node.observer for node in self.nodes]

        def watching(observer: Callable[[Tensor], None] | None) -> Callable[[Tensor], None]:
            def watch(x: Tensor) -> None:
                bits = x.detach().reshape(len(images), -1)[at].float().view(torch.int32)
                # Squares, since errors of one bit up and down must not cancel; modulo 2**32, where a sum takes a
                # quarter of the time.
                prints.append((bits * bits).sum(1, dtype=torch.int32))
                if beside and observer is not None:
                    observer(x)

            return watch

        for node in self.nodes:
            node.observer = watching(node.observer)
        try:
            run(images)
        finally:
            for node, observer in zip(self.nodes, kept, strict=True):
                node.observer = observer
        return torch.stack(prints)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
