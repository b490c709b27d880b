"""The base of every kernel: its arguments, a reference in plain torch, and its launch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.tiles import Tiles


@dataclass(frozen=True, eq=False)
class Kernel(ABC):
    """The fields of a subclass are its arguments; results are written into tensors among them."""

    @abstractmethod
    def reference(self) -> None:
        """Compute the results in plain torch, on any device."""

    @abstractmethod
    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        """The launch of the Triton kernel; None for the kernel's default tiles."""

    def launch(self, tiles: Tiles | None = None) -> None:
        """Compute the same results by the Triton kernel."""
        self.prepare(tiles).run()

    def values(self, **more: Any) -> dict[str, Any]:
        """The arguments that Triton takes unchanged (tensors, floats and None), and `more`."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {word: value for word, value in found.items() if isinstance(value, Tensor | float | None)} | more

    def part(self, kind: "type[Kernel]", **more: Any) -> "Kernel":
        """A kernel of class `kind` with this kernel's arguments of the same names, and `more`."""
        words = (field.name for field in fields(kind) if hasattr(self, field.name))
        return kind(**{word: getattr(self, word) for word in words} | more)
