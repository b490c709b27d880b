"""A launch before it is made: which kernel, on what grid, with which arguments."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from swin_quant.backends.cuda.kernels.tiles import Tiles

# Of a thread, as many as there are: with no limit ptxas spills some where that makes room for another program.
ALL_REGISTERS = {"maxnreg": 255}
# Where a kernel does not say otherwise: Triton 3.9 warns that this will not be its default any more.
FUSED_MULTIPLY_ADD = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class PreparedLaunch:
    """`kernel`: module in `jit`, and the function in it, which only a run imports; `arguments` are tensors, numbers and
    None; `constants` what the kernel is specialised for; `options` of Triton's compiler, beside those of its tiles."""

    kernel: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    tiles: Tiles
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        settle_cache_keys()
        self._launch(without_spills({**FUSED_MULTIPLY_ADD, **self.tiles.options(), **self.options}, self.spilled))

    def spilled(self, options: Mapping[str, Any]) -> int:
        """Registers of a thread that are put into memory on this GPU with such options; 0 where Triton interprets."""
        made = self._launch(options, warmup=True)
        if made is None:
            return 0
        # Loads it into the GPU, which counts them. `run` tries that once: after a load that failed, as for want of
        # memory, it gives what cannot launch, and says nothing.
        getattr(made, "_init_handles", lambda: made.run)()
        return int(made.n_spills)

    def _launch(self, options: Mapping[str, Any], warmup: bool = False) -> Any:
        """`warmup`: compiled and not launched."""
        module, name = self.kernel.split(".")
        kernel = getattr(importlib.import_module(f"{__package__}.jit.{module}"), name)
        return kernel.run(grid=self.grid, warmup=warmup, **self.arguments, **self.constants, **options)


def without_spills(options: Mapping[str, Any], spilled: Callable[[Mapping[str, Any]], int]) -> Mapping[str, Any]:
    """These options of the compiler, with all registers where a kernel spills by the compiler's own choice of them and
    not with all.

    `spilled`: how much of a thread is in memory, compiled with such options. It is asked since no rule tells: of one
    attention on 10.0 12 heads spill and 6 do not. What does not spill stays as it is: with more registers a
    multiprocessor holds fewer programs.
    """
    more = {**options, **ALL_REGISTERS}
    return more if spilled(options) and not spilled(more) else options


@cache
def settle_cache_keys() -> None:
    """Have Triton hash all kernels now, in one order: their hashes are names in its cache on disk.

    A kernel's hash has the constants of functions that it calls only where these were hashed before it (triton 3.7,
    `DependenciesFinder._update_hash`), so that it would depend on what a process compiles first, and no process would
    find what another has compiled.
    """
    from triton.runtime.jit import JITFunction

    package = importlib.import_module(f"{__package__}.jit")
    for module in sorted(f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)):
        for _, value in sorted(vars(importlib.import_module(module)).items()):
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018
