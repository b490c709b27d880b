"""Errors that a user can mend: one line that names the file, key or node and says what to do.

The library does not know its caller. A message names an option as a field, `‹batch›`. Python shows `batch`; inside
`speaking` the field gets the caller's name, on the command line `--batch`.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

_LONGEST = 1500  # characters: more than any list of ours takes, less than a screenful
_FIELD = re.compile(r"‹([a-z][a-z0-9_]*)›")
_words: dict[str, str] = {}
_IN_PYTHON = {"data_path": "pictures", "cfg": "config"}


class SwinQuantError(Exception):
    """The work failed for a reason that is outside the program (exit code 1).

    The message is one printable line of bounded length, whatever file or library its words are from.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        line = one_line(" ".join(message.splitlines()))
        half = _LONGEST // 2
        super().__init__(line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}")

    def __str__(self) -> str:
        return in_words(self.args[0])


class UsageError(SwinQuantError):
    """The command, configuration or policy asks for something impossible (exit code 2)."""

    exit_code = 2


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown `word`: "; did you mean NAME?", or nothing where no name is near.

    A name is near, too, whose last part is the word: optimizer.lr for lr.
    """
    there = {name.lstrip("-"): name for name in names}  # equal dashes are no likeness
    close = difflib.get_close_matches(word.lstrip("-"), there, n=1)
    close = close or [name for name in there if name.endswith(f".{word}")]
    return f"; did you mean {there[close[0]]}?" if close else ""


def offered(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown `word`: the name that is near, else all of them.

    A name that merely holds the word is not near, unless it begins with it and is at most twice as long.
    """
    there = list(names)
    near = (one for one in there if word not in one or (one.startswith(word) and len(one) <= 2 * len(word)))
    return did_you_mean(word, near) or f": there are {', '.join(there) or 'none'}"


def in_words(text: str) -> str:
    """A message with the names that fields have in this context."""
    return _FIELD.sub(lambda match: _words.get(match[1]) or _IN_PYTHON.get(match[1], match[1]), text)


def as_flags(text: str) -> str:
    """A message with its fields as flags of a command, whoever reads it later."""
    return _FIELD.sub(lambda match: f"--{match[1].replace('_', '-')}", text)


@contextmanager
def speaking(words: Mapping[str, str]) -> Iterator[None]:
    """Give fields these `words` inside the context, and in errors that leave it."""
    before = dict(_words)
    _words.clear()
    _words.update(words)
    try:
        yield
    except (SwinQuantError, KeyboardInterrupt) as error:
        error.args = tuple(map(in_words, error.args))
        raise
    finally:
        _words.clear()
        _words.update(before)


def called(**words: str) -> AbstractContextManager[None]:
    """Rename these fields inside the context; every other field keeps its name."""
    return speaking({**_words, **words})


def is_command() -> bool:
    """Whether messages go to a command's user: fields have its flags as their names."""
    return bool(_words)


def is_offered(field: str) -> bool:
    """Whether the caller can set a field: in Python any, on the command line those of the command."""
    return not _words or field in _words


def called_in_python(**words: str) -> AbstractContextManager[None]:
    """Rename these fields for a caller in Python; a command's flags keep their names."""
    return nullcontext() if _words else speaking(words)


@contextmanager
def memory_errors_named() -> Iterator[None]:
    """Turn running out of memory into a SwinQuantError that names the field to lower, if the context has one."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        on_gpu = is_out_of_gpu_memory(error)
        if not (on_gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
            raise
        remedy = ": lower ‹batch›" if "batch" in _words else ""
        raise SwinQuantError(f"out of {'GPU ' if on_gpu else ''}memory{remedy}") from error


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether a GPU's memory ran out. Torch's allocator raises a class of its own, which need not be imported to be
    known by name; code that asks the driver itself (Triton's loader, CUDA graphs) says it in words alone.
    """
    in_words = isinstance(error, RuntimeError) and "CUDA" in str(error) and "out of memory" in str(error)
    return in_words or type(error).__name__ == "OutOfMemoryError"


def listed(names: Iterable[str], limit: int = 5) -> str:
    """`a, b, c and 12 more`: names for a one-line message, never a screenful."""
    names = list(names)
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException | None, most: int = 200) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def one_line(text: str) -> str:
    """Text of a file, fit to print: unprintable characters (line ends, escape codes) become Python escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def command_lines(command: str, width: int) -> list[str]:
    """The command in lines of at most `width` columns, which a shell joins; a flag and its values stay together."""
    parts: list[str] = []
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", command):
        if parts and parts[-1].startswith("--") and not word.startswith("--"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return lines
