"""What every kernel has: its arguments, a reference in plain torch, and its launch."""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.tiles import Tiles


@dataclass(frozen=True, eq=False)
class Kernel(ABC):
    """A subclass's fields are its arguments; results are written into tensors among them."""

    @abstractmethod
    def reference(self) -> None:
        """Compute it in plain torch, on any device."""

    @abstractmethod
    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        """The launch of the Triton kernel, with the kernel's own tiles where none are given."""

    def launch(self, tiles: Tiles | None = None) -> None:
        """Compute what `reference` does, by the Triton kernel."""
        self.prepare(tiles).run()

    def values(self, **more: Any) -> dict[str, Any]:
        """The arguments that Triton is given as they are (tensors, floats and None) and `more`."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {word: value for word, value in found.items() if isinstance(value, Tensor | float | None)} | more

    def part(self, kind: "type[Kernel]", **more: Any) -> "Kernel":
        """A kernel of another class with this one's arguments of the same names, and `more`."""
        words = (field.name for field in fields(kind) if hasattr(self, field.name))
        return kind(**{word: getattr(self, word) for word in words} | more)


def kernel_class(op: str) -> type[Kernel]:
    """The class in the module `op` of this package: "norm_gemm" has NormGemmKernel."""
    module = importlib.import_module(f"{__package__}.{op}")
    found: type[Kernel] = getattr(module, op.title().replace("_", "") + "Kernel")
    return found
