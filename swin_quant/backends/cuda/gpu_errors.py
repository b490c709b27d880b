"""Errors of a GPU in one line that names the batch: it is out of memory, or Triton has no kernel for it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swin_quant.backends.cuda.launcher import building_told
from swin_quant.base.errors import SwinQuantError, is_out_of_gpu_memory

_MB = 2**20
_ASKED = re.compile(r"Tried to allocate (\d[\d.]* \w+)")  # torch's allocator; what asks the driver itself tells nothing


class NoKernel(SwinQuantError):
    """A GPU for which Triton has no kernel of what was asked for."""


@contextmanager
def gpu_errors(
    what: str, device: torch.device, need: int | None = None, remedy: str = "give a smaller ‹batch›"
) -> Iterator[None]:
    """Inside, errors of the GPU `device` become a SwinQuantError.

    `what` is being computed, e.g. a batch of 8; it takes `need` bytes in all. None if nobody knows: then the message
    says how many more were asked for.
    """
    try:
        with building_told():
            yield
    except SwinQuantError:
        raise  # it was told inside
    except Exception as error:
        reasons = list(_reasons(error))
        if full := next(filter(is_out_of_gpu_memory, reasons), None):
            free, total = torch.cuda.mem_get_info(device)
            raise SwinQuantError(
                f"out of GPU memory: {what} {_needs(need, full)}, {free / _MB:.0f} of {total / _MB:.0f} MB are free: "
                f"{remedy}"
            ) from error
        if not (tritons := next(filter(_is_tritons, reasons), None)):
            raise
        raise NoKernel(
            f"{torch.cuda.get_device_name(device)}: Triton has no kernel of {what} for it: "
            f"{type(tritons).__name__}: {tritons}"
        ) from error


def _needs(need: int | None, error: BaseException) -> str:
    if need is not None:
        return f"needs {need / _MB:.0f} MB"
    asked = _ASKED.search(str(error))
    return f"needs {asked[1]} more" if asked else "needs more"


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it: where a capture fails, torch raises only that the capture is invalid."""
    while error is not None:
        yield error
        error = error.__context__


def _is_tritons(error: BaseException) -> bool:
    """Whether Triton's compiler or launcher refused a kernel, as for too little shared memory."""
    return any(kind.__name__ == "TritonError" for kind in type(error).__mro__)
