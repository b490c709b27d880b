"""The base of every kernel: its arguments, a reference in plain torch, and the launch of its Triton function."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.integer_arithmetic import rounded

LARGEST_E4M3 = 448.0
# The most registers of a thread: without this, ptxas spills some registers where that makes room for another program.
ALL_REGISTERS = {"maxnreg": 255}


@dataclass(frozen=True)
class PreparedLaunch:
    """`kernel`: module in `jit` and the function in it, which only a run imports; `arguments`: tensors, numbers and
    None; `constants`: the kernel is compiled for each; `options`: for Triton's compiler, beside those of the tiles."""

    kernel: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    tiles: Tiles
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        settle_cache_keys()
        # Fused multiply-add is the default, unless a kernel sets it: Triton 3.9 warns that its own default will change.
        options = {"enable_fp_fusion": True, "num_warps": self.tiles.warps, "num_stages": self.tiles.stages}
        self._launch(without_spills(options | dict(self.options), self.spilled))

    def spilled(self, options: Mapping[str, Any]) -> int:
        """Registers of a thread that spill to memory on this GPU with these options; 0 where Triton interprets."""
        made = self._launch(options, warmup=True)
        if made is None:
            return 0
        # Load the kernel, which counts the spills. Not by `run`: after a failed load, as for lack of memory, `run`
        # silently returns a kernel that cannot launch.
        getattr(made, "_init_handles", lambda: made.run)()
        return int(made.n_spills)

    def _launch(self, options: Mapping[str, Any], warmup: bool = False) -> Any:
        """With `warmup`, compile without launching."""
        module, name = self.kernel.split(".")
        kernel = getattr(importlib.import_module(f"{__package__}.jit.{module}"), name)
        return kernel.run(grid=self.grid, warmup=warmup, **self.arguments, **self.constants, **options)


def without_spills(options: Mapping[str, Any], spilled: Callable[[Mapping[str, Any]], int]) -> Mapping[str, Any]:
    """These options; with all registers if the kernel spills under the compiler's own choice and not with all.

    `spilled` gives a thread's spills under some options. It is measured since no rule predicts it: on 10.0 the same
    attention spills with 12 heads and not with 6. A kernel that does not spill keeps its options: with more registers a
    thread, fewer programs fit on a multiprocessor.
    """
    more = {**options, **ALL_REGISTERS}
    return more if spilled(options) and not spilled(more) else options


@cache
def settle_cache_keys() -> None:
    """Have Triton hash all kernels now, in a fixed order: the hashes are keys of its cache on disk.

    A kernel's hash includes the constants of the functions that it calls only if these were hashed before it (triton
    3.7, `DependenciesFinder._update_hash`). Without a fixed order the keys depend on what a process compiles first, and
    no process finds what another has compiled.
    """
    from triton.runtime.jit import JITFunction

    package = importlib.import_module(f"{__package__}.jit")
    for module in sorted(f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)):
        for _, value in sorted(vars(importlib.import_module(module)).items()):
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018


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


def as_type(x: Tensor, dtype: torch.dtype, levels: float | None = None) -> Tensor:
    """How references store x, times `levels` if given: rounded and saturated to int8, a NaN as 0; saturated to float8
    (E4M3); or converted to a float type."""
    x = x if levels is None else x * levels
    if dtype == torch.int8:
        return rounded(x).nan_to_num(0.0).to(dtype)
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)
