"""Time engines in turns on seeded noise: another program or heat then slows down all alike. So are policies timed."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from tempfile import TemporaryDirectory

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import artifact_engine, targets
from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.model import Model
from swin_quant.quant.policy import Policy, apply_policy, described, load_policy
from swin_quant.score.engine import Engine, time_calls
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.export_target import ExportTarget, float_type_options

ROUNDS, SECONDS = 5, 0.2  # for each engine


@dataclass(frozen=True)
class Latency:
    """The median latency of a batch on an engine, in milliseconds, and how many times as fast as `beside` it is.

    `beside`: the first float that was timed on the same engine; else the first of all. Empty for the first itself.
    """

    subject: str
    batch: int
    ms: float
    speedup: float
    beside: str = ""

    @property
    def figures(self) -> str:
        rate = 1000 * self.batch / self.ms
        ratio = f", {self.speedup:.2f} times as fast as {self.beside}" if self.beside else ""
        return f"{self.ms:.2f} ms a batch of {self.batch}, {rate:.1f} images/s{ratio}"

    def __str__(self) -> str:
        return f"{self.subject}: {self.figures}"


def timed_in_turns(engines: Sequence[Engine], batch: int, shape: Sequence[int]) -> list[tuple[float, ...]]:
    """The milliseconds of each engine for a batch of seeded noise, round after round: the median within each."""
    for engine in engines:
        time_calls(engine, batch, shape, 0.0)  # compiles, and allocates memory
    return [tuple(median(time_calls(one, batch, shape, SECONDS)) for one in engines) for _ in range(ROUNDS)]


def compare_latency(engines: Mapping[str, Engine], batch: int, shape: Sequence[int]) -> tuple[Latency, ...]:
    """The latency of each engine, named with what runs it; speedups are medians of the ratios within rounds."""
    if batch < 1:
        raise UsageError(f"‹batch› {batch}: must be at least 1")
    engines = {name if " on " in name else f"{name} on {one.name}": one for name, one in engines.items()}
    rounds, names = timed_in_turns(list(engines.values()), batch, shape), list(engines)
    found = []
    for place, (name, engine) in enumerate(engines.items()):
        floats = [at for at, one in enumerate(engines.values()) if one.name == engine.name and not one.policy]
        beside = floats[0] if floats and floats[0] < place else 0
        ms, speedup = median(row[place] for row in rounds), median(row[beside] / row[place] for row in rounds)
        found.append(Latency(name, batch, ms, speedup, names[beside] if place else ""))
    return tuple(found)


class Timer:
    """Times a model's files on an engine, each in turns with the file of the `base` policy."""

    def __init__(
        self, model: Model, engine: str, policy: str | Policy | None, batch: int, options: EngineOptions
    ) -> None:
        self.backend, self.model, self.batch = timed_backend(engine, options.device), model, batch
        if batch < 1:
            raise UsageError(f"‹batch› {batch}: must be at least 1")
        base = load_policy(policy or self.backend.exporting.policies_for(model.card.config)[0])
        self.base = replace(base, name=described(base))  # no other candidate has its name
        self.options = replace(options, device=self.backend.home or options.device)
        self.export_options = float_type_options(self.backend, self.backend, options.float_type)

    def rounds(self, policy: Policy | None) -> list[tuple[float, ...]]:
        """The milliseconds of a batch in each round: of the base policy, and of `policy` (None: in float)."""
        return timed_in_turns([self._base, self._engine(policy)], self.batch, self.model.network.input_shape)

    def ratio(self, policy: Policy, beyond_chance: bool = False) -> float:
        """The time beside the base policy's, by the best rounds: other work makes calls slower, never faster.

        `beyond_chance`: 1 where rounds disagree which of both is faster.
        """
        rounds = self.rounds(policy)
        base, other = map(min, zip(*rounds, strict=True))
        signs = {mine > theirs for theirs, mine in [(base, other), *rounds]}
        return 1.0 if beyond_chance and len(signs) > 1 else other / base

    @cached_property
    def reference(self) -> tuple[float, float]:
        """Milliseconds of a batch under the base policy, and in float."""
        base, other = map(min, zip(*self.rounds(None), strict=True))
        return base, other

    @cached_property
    def _base(self) -> Engine:
        return self._engine(self.base)

    def _engine(self, policy: Policy | None) -> Engine:
        """The model under a policy (None: in float) on the engine."""
        target = ExportTarget.parse(self.backend.name, "int8" if policy else "float", self.export_options)
        card, file, module = self.model.card, self.model.checkpoint, deepcopy(self.model.network).cpu()
        used = target.policy(card, file, policy)
        apply_policy(module, used)
        with TemporaryDirectory(prefix="swin-quant-search-") as folder:
            made = target.write(module, card, file, folder, used)
            try:
                return artifact_engine(str(made.file), self.backend, self.options)
            except RuntimeError as error:
                raise SwinQuantError(f"{self.backend.name} could not be timed: {one_line(str(error))}") from error


def timed_backend(engine: str, device: str) -> Backend:
    """The backend of an engine that is timed on a device. UsageError for another, and one that is not installed."""
    known = {name: one for name, one in targets().items() if one.runs_its_export and one.is_fast_on(device)}
    if engine not in known:
        raise UsageError(f"‹engine› {engine}: latency is measured on {', '.join(known)}")
    if not known[engine].is_installed:
        raise UsageError(f"‹engine› {engine}: is not installed: {known[engine].remedy}")
    return known[engine]
