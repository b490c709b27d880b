"""Report a GPU's errors in one line that names the batch: out of memory, or a kernel that Triton cannot build.

Triton's launcher needs a C compiler and Python's headers.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swin_quant.base.errors import SwinQuantError, is_out_of_gpu_memory
from swin_quant.base.extras import library

_MB = 2**20
# torch's allocator says it; errors of the driver itself name no size
_ASKED = re.compile(r"Tried to allocate (\d[\d.]* \w+)")


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
