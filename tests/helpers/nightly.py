"""Cases that only `make nightly` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def share(cases: Iterable[Any], one_in: int, *marks: pytest.MarkDecorator) -> list[Any]:
    """All cases with these marks; CI runs the first of each `one_in`, `make nightly` the others."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    nightly = (*marks, pytest.mark.nightly)
    return [pytest.param(*one, marks=nightly if number % one_in else marks) for number, one in enumerate(tuples)]
