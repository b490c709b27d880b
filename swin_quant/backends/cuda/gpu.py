"""GPUs that the kernels run on: the facts of known ones, the one of this machine, and a GPU's errors in one line.

Each known GPU is a file of `configs/machines`: peaks, the fusions that pay, tiles.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch

from swin_quant.backends.cuda.program import by_interpreter
from swin_quant.base.errors import SwinQuantError, UsageError, is_out_of_gpu_memory
from swin_quant.base.extras import library
from swin_quant.base.files import shipped_files
from swin_quant.base.progress import log
from swin_quant.base.schema import checked, within
from swin_quant.base.yaml_file import read_yaml, shipped_or_file
from swin_quant.quant.fake_quant import FP8

Peak = Annotated[float, within(above=0)]
LAUNCH_US = 1.6
OLDEST = {"int8": (8, 0), FP8: (8, 9)}  # oldest compute capability by operand format
_WHAT = {"int8": "the CUDA engine", FP8: "float8"}
_MB = 2**20
# torch's allocator says it; errors of the driver itself name no size
_ASKED = re.compile(r"Tried to allocate (\d[\d.]* \w+)")


@dataclass(frozen=True)
class GpuFacts:
    """GPU data for the kernels: compute capability (90 is 9.0), multiprocessors, and the float8 peak if it has one.

    `launch_us`: the least microseconds of a launch inside a CUDA graph. LAUNCH_US is the sum of two published
    measurements, neither on the newest GPUs: 1.1 for adding 1,024 numbers (pytorch issue 161104) and 0.5 between
    kernels (3.4 a kernel of 2.9: NVIDIA, "Getting Started with CUDA Graphs", 2019).
    `fusions`: for operands (int8, float8, half), a fusion's title and a width in channels, the tokens in a batch from
    which it is taken, left, taken again, and so on. `tiles`: a `program.TileTable`.
    """

    capability: Annotated[int, within(least=70, most=200)]
    sms: Annotated[int, within(least=1)]
    fp8_tflops: Annotated[float | None, within(above=0)] = None
    launch_us: Annotated[float, within(least=0)] = LAUNCH_US
    fusions: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict, repr=False)
    tiles: dict[str, dict[str, list[float]]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Machine:
    """A machine's peaks: float and int8 operations a second in units of 10^12 (a MAC is two), and memory bandwidth in
    units of 10^9 bytes a second; `source`: their source."""

    description: str
    source: str
    float_type: Literal["float32", "float16", "bfloat16"]
    float_tflops: Peak
    int8_tops: Peak
    bandwidth_gbs: Peak
    gpu: GpuFacts


def gpus() -> list[str]:
    """The names of the shipped machines."""
    return [path.stem for path in shipped_files("machines")]


def load_machine(name_or_path: str) -> Machine:
    """A shipped machine by name, or one from a YAML file. UsageError names the file and what is wrong."""
    path = shipped_or_file(name_or_path, shipped_files("machines"), "machine")
    return checked(Machine, read_yaml(path, "machine"), str(path))


def name_here() -> str:
    """The name of this GPU's file (`own_file`), else of that with the nearest compute capability and, among these, the
    nearest number of multiprocessors, which a line names."""
    gpu = torch.cuda.get_device_name()
    if own := own_file(gpu):
        return own
    capability, sms = capability_here(), torch.cuda.get_device_properties("cuda").multi_processor_count
    known = {name: load_machine(name).gpu for name in gpus()}
    nearest = min(known, key=lambda name: (abs(known[name].capability - capability), abs(known[name].sms - sms)))
    log.info("%s: no file of configs/machines is for it; fusions and tiles are those of the nearest, %s", gpu, nearest)
    return nearest


def own_file(gpu: str) -> str | None:
    """The name of the shipped machine whose words are all in the name of a GPU: a100_80gb, rather than a100.

    A100-SXM4-80GB has the words of a100_80gb, RTX 4090 that of rtx4090.
    """
    words = {name: set(re.split("[^a-z0-9]+", name.lower().replace("rtx ", "rtx"))) for name in (gpu, *gpus())}
    return max((name for name in gpus() if words[name] <= words[gpu]), key=lambda name: len(words[name]), default=None)


def capability_here() -> int:
    """This GPU's compute capability, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def check_gpu(format: str = "int8") -> None:
    """UsageError unless torch finds a GPU that runs kernels with operands of this format."""
    if not torch.cuda.is_available():
        raise UsageError("‹device› cuda: torch finds no GPU here: on a CPU (‹device› cpu) the engine is emulated")
    if by_interpreter():
        raise UsageError("TRITON_INTERPRET is set, and kernels would be interpreted on the GPU's tensors: unset it")
    found, oldest = torch.cuda.get_device_capability(), OLDEST[format]
    if found < oldest:
        named, have, need = torch.cuda.get_device_name(), *(f"{major}.{minor}" for major, minor in (found, oldest))
        remedy = ": export with ‹policy› cuda, in int8" if found >= OLDEST["int8"] else ""
        raise UsageError(f"{named}: is of compute capability {have}, and {_WHAT[format]} needs {need} or above{remedy}")


class NoKernel(SwinQuantError):
    """Triton has no kernel for this GPU."""


@contextmanager
def gpu_errors(
    what: str, device: torch.device, need: int | None = None, remedy: str = "give a smaller ‹batch›"
) -> Iterator[None]:
    """Inside the context, errors of the GPU `device` become a SwinQuantError.

    `what` is being computed, such as a batch of 8, and takes `need` bytes in all. With None the message tells the size
    of the allocation that failed.
    """
    try:
        with building_told():
            yield
    except SwinQuantError:
        raise  # an inner context has named it
    except Exception as error:
        reasons: list[BaseException] = [error]  # where a capture fails, torch raises only that the capture is invalid
        while (earlier := reasons[-1].__context__) is not None:
            reasons.append(earlier)
        if full := next(filter(is_out_of_gpu_memory, reasons), None):
            free, total = torch.cuda.mem_get_info(device)
            asked = _ASKED.search(str(full))
            needs = f"{need / _MB:.0f} MB" if need is not None else f"{asked[1]} more" if asked else "more"
            raise SwinQuantError(
                f"out of GPU memory: {what} needs {needs}, {free / _MB:.0f} of {total / _MB:.0f} MB are free: {remedy}"
            ) from error
        for one in reasons:  # Triton's compiler or launcher refused a kernel, for instance for its shared memory
            if any(kind.__name__ == "TritonError" for kind in type(one).__mro__):
                raise NoKernel(
                    f"{torch.cuda.get_device_name(device)}: Triton has no kernel of {what} for it: "
                    f"{type(one).__name__}: {one}"
                ) from error
        raise


def check_launcher() -> None:
    """Build the launcher now. UsageError if Triton is not installed, SwinQuantError if the build fails."""
    triton = library("triton", "cuda")
    with building_told():
        triton.runtime.driver.active.get_current_device()


@contextmanager
def building_told() -> Iterator[None]:
    """Inside the context, a failed build is a SwinQuantError that says what to install. Some versions of Triton build a
    launcher for each kernel."""
    try:
        yield
    except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
        # The C compiler is missing or failed. If it lacked a header, its own message is on standard error.
        if isinstance(error, OSError):
            is_compilers = error.filename is not None and error.filename == os.environ.get("CC")
        else:
            is_compilers = isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error)
        if not is_compilers:
            raise
        raise SwinQuantError(
            f"Triton cannot build what launches kernels ({error}): install a C compiler (gcc or clang; CC names "
            "another) and Python's headers (python3-dev)"
        ) from error
