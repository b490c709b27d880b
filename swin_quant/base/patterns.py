"""Patterns over dotted names: a star stands for one word between dots."""

import re
from collections.abc import Sequence
from functools import cache


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """The words in `name` for the stars of `pattern`; None if it does not match."""
    match = _compiled(pattern).fullmatch(name)
    return tuple(match.groups()) if match else None


def filled(pattern: str, words: Sequence[str]) -> str:
    """`pattern` with the words in place of its stars."""
    left = iter(words)
    return re.sub(r"\*", lambda star: next(left), pattern)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
