"""A fixed share of cases that test one path."""

from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def drawn(cases: Sequence[Case], one_in: int) -> list[Case]:
    """The first of each `one_in` cases."""
    return list(cases[::one_in])
