"""What Triton needs beside a GPU: a C compiler and Python's headers, by which it builds what launches kernels."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.extras import library


def check_launcher() -> None:
    """Have Triton build it now. UsageError where Triton is not installed, SwinQuantError where it cannot be built."""
    triton = library("triton", "cuda")
    with building_told():
        triton.runtime.driver.active.get_current_device()


@contextmanager
def building_told() -> Iterator[None]:
    """Inside, a build that fails is a SwinQuantError with what to install: of some versions each kernel has its own."""
    try:
        yield
    except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
        if not _is_of_compiler(error):
            raise
        raise SwinQuantError(
            f"Triton cannot build what launches kernels ({error}): install a C compiler (gcc or clang; CC names "
            "another) and Python's headers (python3-dev)"
        ) from error


def _is_of_compiler(error: Exception) -> bool:
    """Whether there is none, or it failed; where it stopped at a header, it has said so on standard error."""
    if isinstance(error, OSError):
        return error.filename is not None and error.filename == os.environ.get("CC")
    return isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error)
