"""The shipped configurations that a geometry fits, and the choice among them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swin_quant.base.errors import UsageError, listed
from swin_quant.checkpoint.geometry import Geometry, differing
from swin_quant.config import architecture, load_config
from swin_quant.config.files import shipped_configs


@dataclass(frozen=True)
class Candidate:
    """A shipped configuration: its geometry in the words of `geometry`, and how its pictures are prepared."""

    name: str
    file: Path
    geometry: Geometry
    preparation: tuple[Any, ...]

    @property
    def model(self) -> str:
        """The fields that tell this model from a candidate with the same shapes, heads aside."""
        without_head = {key: value for key, value in self.geometry.items() if key != "NUM_CLASSES"}
        return repr((sorted(without_head.items()), self.preparation))


def fitting(known: Geometry) -> list[Candidate]:
    """The shipped configurations that contradict nothing of `known`; a head of other classes is no contradiction."""
    same = [each for each in _shipped() if set(differing(known, each.geometry)) <= {"NUM_CLASSES"}]
    return [each for each in same if not differing(known, each.geometry)] or same


def windows_of(name: str, known: Geometry) -> Geometry:
    """The windows of timm's architecture `name`: a model built with other sizes keeps them."""
    own = next((each.geometry for each in _shipped() if _plain(each.name) == _plain(name)), {})
    windows = {key: own[key] for key in ("WINDOW_SIZE", "PRETRAINED_WINDOW_SIZES") if key in own}
    stages = len(known.get("DEPTHS", ()))
    return {key: value[:stages] if isinstance(value, list) else value for key, value in windows.items()}


def nearest(known: Geometry) -> Candidate:
    """The shipped configuration that contradicts `known` in the fewest keys, then by the smallest amount."""
    return min((each for each in _shipped() if each.geometry["TYPE"] == known["TYPE"]), key=partial(_distance, known))


def _distance(known: Geometry, candidate: Candidate) -> tuple[int, float]:
    keys = [key for key in differing(known, candidate.geometry) if key != "NUM_CLASSES"]
    pairs = [(_entries(known[key]), _entries(candidate.geometry[key])) for key in keys]
    return len(keys), sum(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=False))


def _entries(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def choose(candidates: Sequence[Candidate], known: Geometry, name: str, file: Path) -> Candidate:
    """The candidate that fits a model's name, or the plainest of several that differ in their training only.

    UsageError names the file and the candidates where these are different models.
    """
    left = _named_alike(candidates, _plain(name)) or candidates
    if len({each.model for each in left}) > 1:
        keys = {key for each in left for key in differing(left[0].geometry, each.geometry)} - known.keys()
        raise UsageError(
            f"{file}: fits several configurations, since its tensors do not tell {listed(sorted(keys))}: "
            f"give ‹cfg› NAME, one of {listed((each.name for each in left), len(left))}"
        )
    return min(left, key=lambda each: len(each.name))


def _named_alike(candidates: Sequence[Candidate], name: str) -> list[Candidate]:
    """The candidates with the longest name that begins `name`, or else those whose name begins with `name`."""
    begun = [each for each in candidates if name.startswith(_plain(each.name))]
    longest = max((len(each.name) for each in begun), default=0)
    return [each for each in begun if len(each.name) == longest] or [
        each for each in candidates if _plain(each.name).startswith(name)
    ]


def _plain(name: str) -> str:
    """A name without the parts that Microsoft, timm and Hugging Face write differently."""
    return name.lower().replace("-", "_").replace("_patch4", "").split(".")[0]


@functools.cache
def _shipped() -> tuple[Candidate, ...]:
    return tuple(_candidate(name, file) for name, file in shipped_configs().items())


def _candidate(name: str, file: Path) -> Candidate:
    cfg = load_config(file)
    told = {"TYPE": cfg.MODEL.TYPE, "IMG_SIZE": cfg.DATA.IMG_SIZE, "NUM_CLASSES": cfg.MODEL.NUM_CLASSES}
    told |= {key: value for key, value in architecture(cfg).items() if key != "QK_SCALE"}
    return Candidate(name, file, told, (cfg.TEST.CROP, cfg.DATA.INTERPOLATION))
