"""Errors inside a reader name its file in one line; errors that are not the file's fault pass."""

import errno
import re
import struct

import pytest

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.reading import reading, reads

DAMAGE = {
    "of a library": (struct.error("unpack requires 4 bytes"), "not a readable card: it is damaged (error: unpack"),
    "ours": (ValueError("a page of no size"), "not a readable card: it is damaged (a page of no size)"),
    "without words": (AssertionError(), "not a readable card: it is damaged (AssertionError)"),
    "of many lines": (RuntimeError("one\ntwo"), "it is damaged (RuntimeError: one)"),
    "in escape codes": (KeyError("\x1b[31m"), "it is damaged (KeyError: "),
    "nested": (RecursionError("maximum"), "not a readable card: it is damaged (it is nested too deeply)"),
    "memory": (MemoryError(), "the card takes more memory than there is"),
    "a disk": (OSError(errno.EIO, "Input/output error"), "the card cannot be read: Input/output error"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_raised_is_said_of_the_file(tmp_path, name):
    error, text = DAMAGE[name]

    @reads("card")
    def read(path, key=1):
        raise error

    for act in (lambda: read(tmp_path / "x"), lambda: read(path=str(tmp_path / "x"), key=2)):
        with pytest.raises(SwinQuantError, match=f"^{tmp_path / 'x'}: .*{re.escape(text)}") as caught:
            act()
        assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [UsageError("ours"), KeyboardInterrupt(), ImportError("none"), RuntimeError("CUDA out of memory")]
)
def test_what_is_not_of_the_file_passes(error):
    with pytest.raises(type(error)) as caught, reading("x", "card"):
        raise error
    assert caught.value is error


def test_the_path_may_be_another_argument():
    class Reader:
        @reads("card", lambda self, path: path)
        def read(self, path):
            raise KeyError(path)

    with pytest.raises(SwinQuantError, match="^here: not a readable card"):
        Reader().read("here")
