"""Milliseconds of policies on an engine, timed in turns, so that other work on the machine slows all alike."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.engine_loading import artifact_engine
from swin_quant.base.cpu import usable_cores
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import track
from swin_quant.exported import on_its_device
from swin_quant.loading import Subject
from swin_quant.quant.policy import Policy, apply_policy
from swin_quant.score.candidate import BenchCandidate
from swin_quant.score.interleave import Timing, interleave
from swin_quant.verbs.export import write_artifact
from swin_quant.verbs.export_target import exporter_options, policy_of
from swin_quant.verbs.search_settings import SearchSettings

WORKSPACE = "swin-quant-search-"  # first part of the name of a folder for exported files
_AT_ONCE = 6  # engines in memory while they are timed in turns
_ALL_ON, _FLOAT = "all", "float"


@dataclass(frozen=True)
class PolicyTimer:
    """Exports a loaded model under policies, and times the files. `file`: the model's checkpoint."""

    settings: SearchSettings
    subject: Subject
    file: Path
    _kept: TemporaryDirectory[str] = field(default_factory=partial(TemporaryDirectory, prefix=WORKSPACE))

    def export(self, policy: Policy | None, folder: Path) -> Artifact:
        """The model under a policy as an artifact in `folder`; None: the float model."""
        settings, card, precision = self.settings, self.subject.card, "int8" if policy else "float"
        options = exporter_options(settings.backend, precision, settings.exporter_options)
        used = policy_of(settings.engine, card, self.file, policy, precision)
        module = deepcopy(self.subject.model).cpu()
        apply_policy(module, used)
        return write_artifact(module, card, self.file, settings.backend, folder, used, precision, options)

    @cached_property
    def _base(self) -> Artifact:
        """The file of the base policy, which every lot is timed beside."""
        return self.export(self.settings.start, Path(self._kept.name))

    def extremes(self) -> tuple[float, float]:
        """Milliseconds with all nodes of the base policy on, and with all float."""
        timings = self._interleaved({_FLOAT: None})
        return _ms(timings[_ALL_ON]), _ms(timings[_FLOAT])

    def ratios(
        self, policies: Mapping[str, Policy], ratio: Callable[[Timing, Timing], float] | None = None
    ) -> Iterator[dict[str, float]]:
        """Name -> milliseconds relative to the base policy's, by the best rounds or by `ratio`.

        A few policies at a time. The caller should keep each lot at once: it took minutes to export, load and time.
        """
        names = list(policies)
        starts = range(0, len(names), _AT_ONCE - 1)
        for first in track(starts, f"timing on {self.settings.engine}", len(starts)):
            some = {name: policies[name] for name in names[first : first + _AT_ONCE - 1]}
            timings = self._interleaved(some)
            yield {name: (ratio or _ratio)(timings[name], timings[_ALL_ON]) for name in some}

    def _interleaved(self, policies: Mapping[str, Policy | None]) -> dict[str, Timing]:
        """The base policy and these, in turns."""
        settings = self.settings
        how = on_its_device(settings.engine, settings.options)
        with TemporaryDirectory(prefix=WORKSPACE) as workspace:
            files = {_ALL_ON: self._base.file}
            for number, (name, policy) in enumerate(policies.items()):
                files[name] = self.export(policy, Path(workspace) / str(number)).file
            candidates = [
                BenchCandidate(name, partial(artifact_engine, str(file), settings.backend, how), file)
                for name, file in files.items()
            ]
            threads = settings.options.threads or usable_cores()
            shape = self.subject.model.input_shape
            timings = interleave(candidates, [settings.batch], settings.rounds, settings.seconds, shape, threads)
        for timing in timings:
            if timing.failure:
                raise SwinQuantError(f"{settings.engine} could not be timed: {timing.failure}")
        return {timing.candidate: timing for timing in timings}


def _ms(timing: Timing) -> float:
    """Milliseconds of the best round: other work on the machine makes calls slower, never faster."""
    if not timing.rounds:
        raise SwinQuantError(f"{timing.candidate}: was not timed")
    return min(map(median, timing.rounds))


def _ratio(timing: Timing, base: Timing) -> float:
    return _ms(timing) / _ms(base)


def beyond_chance(timing: Timing, base: Timing) -> float:
    """The ratio of the best rounds; 1 where rounds disagree which of both is the faster.

    On a busy machine the differences of layers drown in noise, which would otherwise choose among them.
    """
    best = _ratio(timing, base)
    each = [median(theirs) / median(ours) for theirs, ours in zip(timing.rounds, base.rounds, strict=True)]
    return best if min(best, *each) > 1 or max(best, *each) < 1 else 1.0
