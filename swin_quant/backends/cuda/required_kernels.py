"""The kernels that a launch list needs, for compiling without a GPU."""

from collections.abc import Callable, Iterable

import torch

from swin_quant.backends.cuda.crosscompile import KernelCall, recorded
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.program import Launch, TensorRef

SOME_NUMBER = 0.5


def kernels_of(launches: Iterable[Launch]) -> list[KernelCall]:
    """The kernels that these launches need, each once. Nothing is allocated or run."""
    return kernels_with_tiles((launch, None) for launch in launches)


def kernels_with_tiles(wanted: Iterable[tuple[Launch, Tiles | None]]) -> list[KernelCall]:
    """The same for given tiles; None is the kernel's default."""
    with recorded() as found:
        for launch, tiles in wanted:
            kernel_of(launch).launch(tiles)
    return found


def without_memory(ref: TensorRef) -> torch.Tensor:
    """A tensor on the meta device, which has only a shape and a type."""
    return torch.empty(ref.shape, dtype=ref.dtype, device="meta")


def kernel_of(launch: Launch, tensor: Callable[[TensorRef], torch.Tensor] = without_memory) -> Kernel:
    """The launch's kernel, with tensors made by `tensor` and an arbitrary number for each scalar."""
    return launch.kernel(tensor, lambda name: SOME_NUMBER)
