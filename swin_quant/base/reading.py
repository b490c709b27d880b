"""Read foreign files: one boundary for every error, and bounded reading of zip archives."""

import functools
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, ParamSpec, TypeVar

from swin_quant.base.errors import SwinQuantError, is_out_of_gpu_memory, one_line

_Arguments = ParamSpec("_Arguments")
_Found = TypeVar("_Found")
_LONGEST = 200  # characters of a library's message
ENCRYPTED = 0x1  # bit of the general purpose flag (PKWARE APPNOTE 4.4.4)


@contextmanager
def reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Inside the context, any error about an untrusted file becomes a SwinQuantError that names the file; `what` it
    should be, e.g. "statistics file". Our own errors pass, and those of the machine: a package that is not installed, a
    GPU without memory."""
    try:
        yield
    except (SwinQuantError, ImportError):
        raise
    except Exception as error:
        if is_out_of_gpu_memory(error):
            raise
        # The first line of a library's message; our own ValueErrors need no name of their class
        reason = one_line(next(iter(str(error).strip().splitlines()), "")[:_LONGEST])
        if not reason or type(error) is not ValueError:
            reason = ": ".join(filter(None, (type(error).__name__, reason)))
        fault = f"not a readable {what}: it is damaged ({reason})"
        if isinstance(error, RecursionError):
            fault = f"not a readable {what}: it is damaged (it is nested too deeply)"
        elif isinstance(error, MemoryError):
            fault = f"the {what} takes more memory than there is"
        elif isinstance(error, OSError) and error.errno is not None:
            fault = f"the {what} cannot be read: {os.strerror(error.errno)}"
        raise SwinQuantError(f"{os.fspath(path)}: {fault}") from error


def reads(
    what: str, get_path: Callable[..., Any] = lambda path, *more, **named: path
) -> Callable[[Callable[_Arguments, _Found]], Callable[_Arguments, _Found]]:
    """Decorate a function to run inside `reading`; `get_path`: the file's path in its arguments, by default the
    first."""

    def guarded(read: Callable[_Arguments, _Found]) -> Callable[_Arguments, _Found]:
        @functools.wraps(read)
        def inside(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Found:
            with reading(get_path(*arguments, **named), what):
                return read(*arguments, **named)

        return inside

    return guarded


def opened(file: BinaryIO) -> zipfile.ZipFile:
    """The archive in `file`. ValueError says why it cannot be read."""
    try:
        return zipfile.ZipFile(file)
    except Exception as error:  # a damaged directory raises struct.error, NotImplementedError, ... beside BadZipFile
        raise ValueError(f"not a readable zip archive: {error}") from error


def unpacked(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """The bytes of a member, at most `limit`. ValueError says why it cannot be had."""
    try:
        member = archive.getinfo(name)
        if member.flag_bits & ENCRYPTED:
            raise ValueError("encrypted")
        if member.file_size > limit:
            raise ValueError(f"larger than {limit >> 20} MiB" if limit >> 20 else f"larger than {limit} bytes")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("compressed by another method than deflate")  # the others unpack without a bound
        with archive.open(member) as file:
            return file.read(member.file_size)  # without the bound it would unpack more than was declared
    except Exception as error:  # damage shows as BadZipFile, zlib.error, EOFError, struct.error, ...
        raise ValueError(str(error) or type(error).__name__) from error
