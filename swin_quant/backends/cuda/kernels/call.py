"""A launch before it is made: which kernel, on what grid, with which arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PreparedLaunch:
    """`arguments` are tensors, numbers and None; `constants` what the kernel is specialised for; `options` Triton's."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


def power_of_two(least: int) -> int:
    """The next one, `least` itself included."""
    return 1 << max(least - 1, 0).bit_length()
