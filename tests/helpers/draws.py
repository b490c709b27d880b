"""Cases that test one path: a run takes some of them, and in CI, which draws by the commit, all have their turn."""

import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")
DRAW = int(os.environ.get("DRAWS") or 0)


def drawn(cases: Sequence[Case], one_in: int) -> list[Case]:
    """One in so many of the cases; DRAWS=NUMBER takes others."""
    return list(cases[DRAW % one_in :: one_in])
