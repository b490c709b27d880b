"""Recipes: which passes, in what order and with which options; shipped under configs/passes/, or a user's file.

name: mine
passes:
  - equalize
  - {name: gptq, pictures: 128}
below_8_bits:      # instead, if most nodes have fewer (7, for CPUs without VNNI, count as 8); optional
  - gptq
activations_below_8_bits:  # instead of either, if most activations have fewer; optional
  - reconstruct
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, TypedDict

from swin_quant.base.errors import UsageError
from swin_quant.base.files import shipped_files
from swin_quant.base.schema import checked, plain
from swin_quant.base.yaml_file import read_yaml, shipped_or_file
from swin_quant.quant.passes import Pass, passes


class _Recipe(TypedDict):
    """The file: names of passes, or mappings with a `name` and options."""

    name: NotRequired[str]
    description: NotRequired[str]
    passes: list[Any]
    below_8_bits: NotRequired[list[Any]]
    activations_below_8_bits: NotRequired[list[Any]]


@dataclass(frozen=True)
class PassStep:
    """One pass of a recipe, with its options."""

    name: str
    options: Any

    @property
    def kind(self) -> Pass:
        return passes()[self.name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in a recipe; options by name."""
        return {"name": self.name, **plain(asdict(self.options))}


@dataclass(frozen=True)
class PassRecipe:
    """The steps of a recipe, and those that replace them below 8 bits of most weights or activations, if there are."""

    steps: tuple[PassStep, ...]
    below_8_bits: tuple[PassStep, ...] | None = None
    activations_below_8_bits: tuple[PassStep, ...] | None = None

    def for_bits(self, bits: int, activations: int) -> tuple[PassStep, ...]:
        """The steps for a policy with at least `bits` at its nodes, and at least `activations` at activations."""
        if activations < _MANY_BITS and self.activations_below_8_bits is not None:
            return self.activations_below_8_bits
        return self.steps if bits >= _MANY_BITS or self.below_8_bits is None else self.below_8_bits


_MANY_BITS = 7


def load_passes(name_or_path: str) -> PassRecipe:
    """A shipped recipe by name, or a recipe from a YAML file. UsageError names the file and what is wrong."""
    path = shipped_or_file(name_or_path, shipped_files("passes"), "recipe of passes")
    data = checked(_Recipe, read_yaml(path, "recipe of passes"), str(path), error=UsageError)
    steps = parse_steps(data["passes"], str(path))
    below, activations = (
        None if (names := data.get(key)) is None else parse_steps(names, f"{path}: {key}")
        for key in ("below_8_bits", "activations_below_8_bits")
    )
    return PassRecipe(steps, below, activations)


def parse_steps(data: Any, source: str = "passes") -> tuple[PassStep, ...]:
    """Steps from names, mappings with a `name` and options, or steps. UsageError names `source` and what is wrong."""
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise UsageError(f"{source}: `passes` must be a list of passes")
    steps = tuple(_step(one, f"{source}: pass {number}") for number, one in enumerate(data, 1))
    ranged = changed = None
    for step in steps:
        if step.kind.observes_again and (ranged or changed):
            why = "ranges are found again" if ranged else "passes measure by the network that it leaves"
            raise UsageError(f"{source}: {step.name} after {ranged or changed}: {why} behind it: put it before")
        ranged = step.name if step.kind.sets_ranges else ranged
        changed = changed if step.kind.keeps_function else step.name
    return steps


def _step(step: Any, where: str) -> PassStep:
    if isinstance(step, PassStep):
        return step
    data = {"name": step} if isinstance(step, str) else step
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise UsageError(f"{where}: must be the name of a pass, or a mapping with `name` and its options")
    found = passes().get(data["name"])
    if found is None:
        raise UsageError(f"{where}: there is no pass {data['name']!r:.60}, only {', '.join(passes())}")
    options = {key: value for key, value in data.items() if key != "name"}
    where = f"{where} ({data['name']})"
    return PassStep(data["name"], checked(found.options, options, where, text=True, error=UsageError))
