"""Compile kernels for a GPU that is not here, or before their first launch: Triton's compiler needs no GPU.

Launches are recorded instead of made (`recorded`), so that the compiled kernels have the types, constants, warps and
stages of real launches. A recorded launch computes nothing: tensors on the meta device are enough. The compiler's
results go into Triton's cache on disk, under the names that the launches look up.
"""

import importlib
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from swin_quant.backends.cuda.kernels.kernel import settle_cache_keys, without_spills
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.program import Launch, make_kernel
from swin_quant.base.errors import UsageError

OLDEST_FLOAT8 = 89
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_ALIGNED = 16  # the launcher tells the compiler which addresses and integers are multiples of this
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class KernelCall(NamedTuple):
    """A launch without its data: the kernel by its module and name, since pickle cannot find a Triton function; types
    and constants by parameter, and the compiler's options."""

    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's own name."""
        return self.kernel.rpartition(".")[2]


@contextmanager
def recorded() -> Iterator[list[KernelCall]]:
    """Inside the context, add each distinct Triton launch to the list instead of making it."""
    from triton.runtime.jit import JITFunction

    found: list[KernelCall] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not warmup and (call := _call(self, args, kwargs)) not in found:
            found.append(call)

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = original


def _call(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KernelCall:
    from triton.runtime.jit import mangle_type

    names = {parameter.name for parameter in kernel.params}
    options = {name: value for name, value in kwargs.items() if name not in names}
    bound = kernel.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
    bound.apply_defaults()
    types, constants, aligned = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, bound.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % _ALIGNED == 0):
            aligned.append(name)
    known = tuple((name, options[name]) for name in _OPTIONS if name in options)
    own = f"{kernel.__module__}.{kernel.__name__}"
    return KernelCall(own, tuple(types.items()), tuple(constants.items()), tuple(aligned), known)


def compiled(call: KernelCall, capability: int) -> tuple[Any, Any]:
    """Triton's source and the compiled kernel of a call, for a GPU of this compute capability. Triton's cache keeps
    both, under the names that a launch on such a GPU looks up, with the options of `without_spills` as there.

    UsageError for float8 on a GPU older than 8.9, which does not have it.
    """
    if capability < OLDEST_FLOAT8 and "*fp8e4nv" in dict(call.types).values():
        raise UsageError(f"{call.name}: float8 needs compute capability 8.9, not {capability // 10}.{capability % 10}")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    settle_cache_keys()
    places = {name: (index,) for index, (name, _) in enumerate(call.types)}
    # A launch's attributes, in its order, are part of the key in Triton's cache. From Triton 3.7 on, arguments without
    # a known divisor have an empty entry, except floats.
    newer = tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)
    divisible = {name: [["tt.divisibility", _ALIGNED]] for name in call.aligned}
    attributes = {
        places[name]: divisible.get(name, [])
        for name, kind in call.types
        if name in divisible or (newer and not kind.startswith(("fp", "bf")))
    }
    constants = {places[name]: value for name, value in call.constants}
    kernel = getattr(importlib.import_module(call.kernel.rpartition(".")[0]), call.name)
    source = ASTSource(fn=kernel, signature=dict(call.types), constexprs=constants, attrs=attributes)

    def made(options: Mapping[str, Any]) -> Any:
        return compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))

    return source, made(without_spills(dict(call.options), lambda options: usage(made(options))[1]))


def usage(made: Any) -> tuple[int, int]:
    """Registers of a thread, and its bytes of stack and local memory, in a compiled kernel."""
    ((registers, stack, _, local),) = _USAGE.findall(tool("cuobjdump", "-res-usage", made))
    return int(registers), int(stack) + int(local)


def tool(name: str, how: str, made: Any) -> str:
    """The output of one of Triton's bundled tools for a kernel's machine code."""
    import triton.backends.nvidia

    place = Path(triton.backends.nvidia.__path__[0], "bin", name)
    with TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        return subprocess.run([place, how, cubin], check=True, capture_output=True, text=True).stdout


def list_kernels(wanted: Iterable[Launch | tuple[Launch, Tiles | None]]) -> list[KernelCall]:
    """The kernels that these launches need, each once, with the given tiles or the kernel's default. Nothing is
    allocated or run."""
    with recorded() as found:
        for one in wanted:
            launch, tiles = one if isinstance(one, tuple) else (one, None)
            make_kernel(launch).launch(tiles)
    return found


class CompiledAhead(NamedTuple):
    """Kernels compiled or found in the cache, the errors of those that were refused, and kernels not reached."""

    done: int
    refused: list[str]
    left: int


def compile_ahead(
    wanted: Iterable[tuple[Launch, Tiles | None]], capability: int, seconds: float, processes: int | None = None
) -> CompiledAhead:
    """Compile the kernels of the `wanted` launches with these tiles (None: the default) for a GPU of compute
    `capability`, by all cores.

    Stops after about `seconds` and ends its processes. Triton compiles the kernels that are left at their first launch.
    """
    end, said = time.monotonic() + seconds, []
    calls = list_kernels(wanted)
    context = multiprocessing.get_context("forkserver")  # a process with a GPU's context cannot be forked
    context.set_forkserver_preload([__name__])
    with context.Pool(processes or len(os.sched_getaffinity(0))) as pool, suppress(multiprocessing.TimeoutError):
        found = pool.imap_unordered(partial(compile_one, capability=capability), calls)
        for _ in calls:
            said.append(found.next(max(0.0, end - time.monotonic())))
    refused = [one for one in said if one]
    return CompiledAhead(len(said) - len(refused), refused, len(calls) - len(said))


def compile_one(call: KernelCall, capability: int) -> str:
    """Compile one kernel in a process of the pool. Returns "" or the kernel's name and the compiler's error."""
    try:
        source, made = compiled(call, capability)
    except Exception as error:  # tiles that do not fit: the tuner leaves them out
        return f"{call.name}: {type(error).__name__}: {str(error)[:200]}"
    with suppress(Exception):  # without the driver, or with a Triton that has no such class
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, made.metadata)  # the launcher in C, one for each signature
    return ""
