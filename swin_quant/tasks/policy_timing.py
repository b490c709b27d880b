"""Milliseconds of policies on an engine, timed in turns: what differs is policies, not what else the machine does."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from swin_quant.backends.engine_loading import artifact_engine
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import track
from swin_quant.exported import on_its_device
from swin_quant.quant.policy import Policy
from swin_quant.score.candidate import BenchCandidate
from swin_quant.score.cpu import usable_cores
from swin_quant.score.interleave import Timing, interleave
from swin_quant.tasks.measuring import Measuring
from swin_quant.verbs.export import export_checkpoint

_AT_ONCE = 6  # engines in memory while they are timed in turns
_ALL_ON, _FLOAT = "all", "float"


def extremes(asked: Measuring) -> tuple[float, float]:
    """Milliseconds with all on, and with all float."""
    timings = _interleaved(asked, {_ALL_ON: asked.start, _FLOAT: None})
    return _ms(timings[_ALL_ON]), _ms(timings[_FLOAT])


def timed(
    asked: Measuring, policies: Mapping[str, Policy], ratio: Callable[[Timing, Timing], float] | None = None
) -> Iterator[dict[str, float]]:
    """How many times the milliseconds of all on each takes: by their best rounds, or as `ratio` tells.

    A few at a time, each worth keeping at once: to export, load and time them takes minutes.
    """
    names = list(policies)
    starts = range(0, len(names), _AT_ONCE - 1)
    for first in track(starts, f"timing on {asked.engine}", len(starts)):
        some = {name: policies[name] for name in names[first : first + _AT_ONCE - 1]}
        timings = _interleaved(asked, {_ALL_ON: asked.start, **some})
        yield {name: (ratio or _ratio)(timings[name], timings[_ALL_ON]) for name in some}


def _interleaved(asked: Measuring, policies: Mapping[str, Policy | None]) -> dict[str, Timing]:
    with TemporaryDirectory(prefix="swin-quant-search-") as workspace:
        candidates = []
        for number, (name, policy) in enumerate(policies.items()):
            precision = "int8" if policy else "float"
            folder, told = Path(workspace) / str(number), asked.told_exporter
            artifact, _ = export_checkpoint(asked.checkpoint, asked.engine, folder, asked.cfg, policy, precision, told)
            load = partial(
                artifact_engine, str(artifact.file), asked.backend, on_its_device(asked.engine, asked.options)
            )
            candidates.append(BenchCandidate(name, load, artifact.file))
        threads = asked.options.threads or usable_cores()
        side = asked.cfg.DATA.IMG_SIZE
        timings = interleave(candidates, [asked.batch], asked.rounds, asked.seconds, side, threads)
    for timing in timings:
        if timing.failure:
            raise SwinQuantError(f"{asked.engine} could not be timed: {timing.failure}")
    return {timing.candidate: timing for timing in timings}


def _ms(timing: Timing) -> float:
    """Of the best round: what else the machine does makes calls slower, never faster."""
    if not timing.rounds:
        raise SwinQuantError(f"{timing.candidate}: was not timed")
    return min(map(median, timing.rounds))


def _ratio(timing: Timing, base: Timing) -> float:
    return _ms(timing) / _ms(base)


def beyond_chance(timing: Timing, base: Timing) -> float:
    """The ratio of the best rounds; 1 where rounds do not agree which of both is the faster, nor with that.

    On a busy machine the differences of layers drown in noise, which would otherwise choose among them.
    """
    best = _ratio(timing, base)
    each = [median(theirs) / median(ours) for theirs, ours in zip(timing.rounds, base.rounds, strict=True)]
    return best if min(best, *each) > 1 or max(best, *each) < 1 else 1.0
