"""Facts about a loaded engine. The type that each matrix product runs in is looked up only on request."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from swin_quant.backends.artifact import Artifact
from swin_quant.score.engine import HALF_TYPES

_FOUND = ("int8_gemms", "all_gemms", "gemms")


class Details(Mapping[str, Any]):
    """The facts `known`, and from one late call of `find`: `gemms` (product -> type), `int8_gemms`, `all_gemms`."""

    def __init__(self, known: Mapping[str, Any], find: Callable[[], Mapping[str, str]]) -> None:
        self._known, self._find = dict(known), find

    @cached_property
    def _all(self) -> dict[str, Any]:
        gemms = dict(self._find())
        types = Counter(gemms.values())
        return self._known | {"int8_gemms": types["int8"], "all_gemms": types.total(), "gemms": gemms}

    def __getitem__(self, key: str) -> Any:
        return self._all[key] if key in _FOUND else self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def policy_of(artifact: Artifact) -> str | None:
    """The name of the policy under which an artifact was exported; None for a float artifact."""
    if artifact.record["precision"] in ("float32", *HALF_TYPES) or artifact.card.policy is None:
        return None
    return artifact.card.policy["name"]
