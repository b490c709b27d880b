"""A program bound to memory: its buffers in one block of a device, every kernel with its arguments, ready to be called.

On a CPU that is done by the references of the kernels, or by the kernels themselves where Triton interprets them.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from swin_quant.backends.cuda.program import Program, TensorRef
from swin_quant.backends.cuda.tuning import NO_TILES, TileTable


@dataclass(frozen=True)
class Bound:
    """Fill `images` [batch, in, S, S], call it, and read `logits` [batch, classes]: both stay where they are.

    `buffers` are all, by name; a call for each launch, which overwrites what of them is dead.
    """

    images: Tensor
    logits: Tensor
    buffers: Mapping[str, Tensor] = field(repr=False)
    calls: tuple[Callable[[], None], ...] = field(repr=False)

    def __call__(self) -> None:
        for call in self.calls:
            call()


def memory(nbytes: int, device: torch.device) -> Tensor:
    """A block for the buffers of programs of so many bytes, and of smaller ones that take turns with them."""
    with torch.inference_mode(False):  # made in the first call, it is written by later ones outside of that mode too
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def by_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there, rather than their references."""
    return device.type == "cuda" or by_interpreter()


def by_interpreter() -> bool:
    """Whether Triton was told to interpret kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def bind(
    program: Program,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    device: torch.device,
    tuned: TileTable = NO_TILES,
    block: Tensor | None = None,
) -> Bound:
    """`program` on a device, which has the packed `tensors`. Nothing is allocated later.

    Kernels that were `tuned` run with those tiles, others with their own. `block`: for its buffers, see `memory`.
    """
    known = dict(tensors)
    block = memory(program.nbytes, device) if block is None else block
    with torch.inference_mode(False):
        for name, buffer in program.buffers.items():
            at = program.places[name]
            known[name] = block[at : at + buffer.nbytes].view(buffer.dtype).view(buffer.shape)

    def tensor(ref: TensorRef) -> Tensor:
        return known[ref.name].view(ref.shape)

    launched = by_kernels(device)
    calls: list[Callable[[], None]] = []
    for launch in program.launches:
        kernel = launch.kernel(tensor, scalars.__getitem__)
        tiles = tuned.tiles_for(launch, program.batch)
        calls.append(partial(kernel.launch, tiles) if launched else kernel.reference)
    buffers = {name: known[name] for name in program.buffers}
    return Bound(buffers[program.images.name], buffers[program.logits.name], buffers, tuple(calls))
