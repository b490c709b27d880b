"""A launch as data: kernel, grid, arguments. It can be run, or compiled for a GPU that is not there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; what divides by it lets a kernel load and store whole vectors
_TYPES = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}


@dataclass(frozen=True)
class KernelCall:
    """`arguments` are tensors, numbers and None; `constants` what the kernel is specialised for; `options` Triton's."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)

    def source(self) -> Any:
        """What `triton.compiler.compile` takes, with `options`: the kernel that `run` would have compiled.

        Tensors may be on the device "meta".
        """
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        constants = {name: value for name, value in self.arguments.items() if value is None} | dict(self.constants)
        kinds = {name: "constexpr" if name in constants else _kind(self.arguments[name]) for name in names}
        aligned = {
            (place,): [["tt.divisibility", ALIGNMENT]]
            for place, name in enumerate(names)
            if name not in constants and _is_aligned(self.arguments[name])
        }
        return ASTSource(self.kernel, kinds, constants, aligned)


def power_of_two(least: int) -> int:
    """The next one, `least` itself included."""
    return 1 << max(least - 1, 0).bit_length()


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


def _is_aligned(value: Any) -> bool:
    """As a launch sees it; a tensor without an address is taken for aligned."""
    if isinstance(value, Tensor):
        return value.is_meta or value.data_ptr() % ALIGNMENT == 0
    return isinstance(value, int) and value % ALIGNMENT == 0
