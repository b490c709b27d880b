"""The one boundary around whoever reads a file of others: all that is raised inside is about that file."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from swin_quant.base.errors import SwinQuantError, is_out_of_gpu_memory, one_line
from swin_quant.base.files import reason

_Path = TypeVar("_Path", bound="str | os.PathLike[str]")
_Rest = ParamSpec("_Rest")
_Found = TypeVar("_Found")
_LONGEST = 200  # characters of what a library says


@contextmanager
def reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Inside, whatever a library or our own code makes of a file that nobody vouched for is a SwinQuantError that names
    the file; `what` it should be, e.g. "statistics file". Errors that are ours already pass, and a GPU's memory.
    """
    try:
        yield
    except SwinQuantError:
        raise
    except Exception as error:
        if is_out_of_gpu_memory(error):
            raise
        raise SwinQuantError(f"{os.fspath(path)}: {_fault(error, what)}") from error


def reads(
    what: str,
) -> Callable[[Callable[Concatenate[_Path, _Rest], _Found]], Callable[Concatenate[_Path, _Rest], _Found]]:
    """A function whose first argument is the path of a file, so that it runs inside `reading`."""

    def guarded(
        read: Callable[Concatenate[_Path, _Rest], _Found],
    ) -> Callable[Concatenate[_Path, _Rest], _Found]:
        @functools.wraps(read)
        def inside(path: _Path, /, *more: _Rest.args, **named: _Rest.kwargs) -> _Found:
            with reading(path, what):
                return read(path, *more, **named)

        return inside

    return guarded


def _fault(error: Exception, what: str) -> str:
    if isinstance(error, MemoryError):
        return f"the {what} takes more memory than there is"
    if isinstance(error, OSError) and error.errno is not None:
        return f"the {what} cannot be read: {reason(error)}"
    said = "it is nested too deeply" if isinstance(error, RecursionError) else _first_line(error)
    return f"not a readable {what}: it is damaged ({said})"


def _first_line(error: Exception) -> str:
    """What a library says; ours says it all in a ValueError."""
    said = one_line(next(iter(str(error).strip().splitlines()), "")[:_LONGEST])
    return said if said and type(error) is ValueError else ": ".join(filter(None, (type(error).__name__, said)))
