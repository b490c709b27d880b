"""Check the build of Triton's launcher, which needs a C compiler and Python's headers."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.extras import library


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
        if not _is_of_compiler(error):
            raise
        raise SwinQuantError(
            f"Triton cannot build what launches kernels ({error}): install a C compiler (gcc or clang; CC names "
            "another) and Python's headers (python3-dev)"
        ) from error


def _is_of_compiler(error: Exception) -> bool:
    """Whether the C compiler is missing or failed. If it lacked a header, its own message is on standard error."""
    if isinstance(error, OSError):
        return error.filename is not None and error.filename == os.environ.get("CC")
    return isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error)
