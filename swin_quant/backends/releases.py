"""The releases of engines that run a file rightly: configs/releases.yaml, which docs/results/releases.md measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import configs_dir
from swin_quant.base.schema import checked
from swin_quant.base.yaml_file import read_yaml
from swin_quant.config.outputs import FEATURES

if TYPE_CHECKING:
    from swin_quant.backends.artifact import Artifact
    from swin_quant.cards.card import RunCard

RUNS_ON = "runs_on"  # the option in an artifact's card: engine -> its releases that run the file, as pip reads them


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version: 2024.6.0-17404 is (2024, 6)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@dataclass(frozen=True)
class ReleaseFault:
    """A fault of the releases `below` one, or of the minor `releases`, with files that have the facts in `when`."""

    why: str
    when: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    below: str | None = None
    releases: tuple[str, ...] = ()

    def affects(self, version: str) -> bool:
        """Whether a version of the engine has it."""
        if self.below:
            return release(version) < release(self.below)
        return release(version) in map(release, self.releases)

    def shows_with(self, facts: Mapping[str, Any]) -> bool:
        """Whether it shows with a file of these facts."""
        return all(facts.get(fact) in values for fact, values in self.when.items())


@dataclass(frozen=True)
class EngineReleases:
    """Facts about the releases of an engine: the oldest that was tried, and the faults of some."""

    oldest: str
    faults: tuple[ReleaseFault, ...]

    def requirement(self, facts: Mapping[str, Any]) -> str:
        """The releases that run a file of these facts, as pip reads them: >=2023.2,!=2024.5.*."""
        faults = [fault for fault in self.faults if fault.shows_with(facts)]
        first = max((self.oldest, *(fault.below for fault in faults if fault.below)), key=release)
        left_out = sorted({one for fault in faults for one in fault.releases}, key=release)
        return ",".join([f">={first}", *(f"!={one}.*" for one in left_out if release(one) >= release(first))])


@cache
def known() -> Mapping[str, EngineReleases]:
    """Engine -> what is known of its releases."""
    file = configs_dir() / "releases.yaml"
    found = checked(dict[str, EngineReleases], read_yaml(file, "table of releases"), str(file))
    why = "is older than all that were tried"
    return {
        engine: replace(one, faults=(ReleaseFault(why, below=one.oldest), *one.faults)) for engine, one in found.items()
    }


def facts(card: RunCard, precision: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a file that `when` is about: precision, opset, batch, the model's type, whether it gives maps."""
    model = card.config.get("MODEL", {})
    return {
        "precision": precision,
        "opset": options.get("opset"),
        "batch": options.get("batch"),
        "type": model.get("TYPE"),
        "maps": model.get("OUTPUT_KIND") == FEATURES,
    }


def requirements(card: RunCard, precision: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Engine -> the releases that run the file, as pip reads them."""
    return {engine: one.requirement(facts(card, precision, options)) for engine, one in known().items()}


def refuse_wrong(engine: str, version: str, artifact: Artifact, batch: int | None = None) -> None:
    """SwinQuantError where a version of an engine does not run an artifact rightly; it names the ones that do.

    `batch`: what the engine fixes it to before it compiles, whatever the file is for.
    """
    record = artifact.record
    about = facts(artifact.card, record["precision"], record["options"]) | ({"batch": batch} if batch else {})
    for fault in known()[engine].faults:
        if fault.affects(version) and fault.shows_with(about):
            number, wanted = version.partition("-")[0], known()[engine].requirement(about)
            raise SwinQuantError(f"{artifact.file}: {engine} {number} {fault.why}: install '{engine}{wanted}'")


def list_faults(engine: str, version: str) -> list[str]:
    """The faults of a version of an engine with some files."""
    return [fault.why for fault in known()[engine].faults if fault.affects(version)] if engine in known() else []
