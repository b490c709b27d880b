"""The fastest file for this machine: the policies and compiled operators of a target, timed where they will run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import artifact_engine, torch_engine
from swin_quant.base.cpu import cpu_kind, usable_cores
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.config.outputs import LOGITS, need_logits
from swin_quant.config.sides import sides
from swin_quant.quant.policy import Policy, is_builtin, load_policy, policy_from_dict
from swin_quant.score.bench import BenchPlan, BenchReport, measure, noise
from swin_quant.score.candidate import BenchCandidate
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.export_target import ExportTarget

BATCHES, ROUNDS, SECONDS = (1, 8), 3, 0.5
WITHIN_DB = 0.3  # of the best SQNR, what a faster file may lose
_REFERENCE = "float32"


class _Candidate(NamedTuple):
    """A policy, and the plugins of a file under it; `name`: of both."""

    name: str
    policy: str
    plugins: tuple[str, ...]


def check_tunable(target: ExportTarget, policy: str | Policy | None, card: RunCard | None, kind: str = LOGITS) -> None:
    """UsageError for a target that has no operators, options that choose what would be tuned, a wrapped module, and a
    model without logits (`kind`, or its card says), of a policy of the user's own, or trained under one."""
    options, backend = target.options, target.backend
    if backend.exporting.with_operators is None:
        raise UsageError(f"‹tune›: means nothing to ‹backend› {backend.name}")
    if (
        target.precision == "float"
        or policy
        or target.plain
        or options.plugin
        or options.replace
        or options.int4_weights
    ):
        raise UsageError(
            "‹tune› chooses policy and operators: leave ‹policy›, ‹plugin›, ‹replace›, ‹int4_weights› and ‹plain› out"
        )
    if not backend.is_installed:
        raise UsageError(f"‹tune› times files on {backend.name}: {backend.remedy}")
    if card and not card.config.get("MODEL"):
        raise UsageError(f"‹tune›: {card.name} is a module that only Python builds: leave it out")
    need_logits(card.config["MODEL"].get("OUTPUT_KIND", kind) if card else kind, "‹tune›")
    own = policy_from_dict(card.policy, card.name) if card and card.policy else None
    if card and own and (card.is_qat or not is_builtin(own)):
        why = "the model was trained under it" if card.is_qat else "it is your own"
        raise UsageError(f"‹tune› would change policy {own.name}, and {why}: leave it out")


def tried_policies(target: ExportTarget) -> list[Policy]:
    """The policies of the files that are timed."""
    return [load_policy(name) for name in dict.fromkeys(one.policy for one in _candidates(target))]


def write_fastest(target: ExportTarget, module: nn.Module, card: RunCard, file: Path, folder: str | Path) -> Artifact:
    """Write the artifact of `module` under the policy and with the operators that take the least time here.

    The time is the product of those at the batches: `batch` of the target's options, else 1 and 8. Only files within
    0.3 dB of the best SQNR on seeded noise are compared, and the card's artifact has the table, `tuned`.
    """
    with TemporaryDirectory() as workspace:
        made = _written(target, module, card, file, Path(workspace))
        report = _timed(target, made, card, file)
    rows = []
    for one in made:
        if found := _row(report, one.name):
            rows.append({"policy": one.policy, "plugins": list(one.plugins)} | found)
            times = listed((f"{ms:.1f} ms at batch {batch}" for batch, ms in found["ms"].items()), len(found["ms"]))
            log.info("%s: %s, %.1f dB", one.name, times, found["sqnr_db"])
    best = fastest(rows)
    policy = load_policy(best["policy"])
    chosen = _with(target, best["plugins"])
    artifact = chosen.write(module, card, file, folder, policy)
    artifact.record["tuned"] = {"cpu": cpu_kind(), "files": rows}
    with one_at_a_time(artifact.file.parent):
        artifact.card.write(card_path(artifact.file))
    return artifact


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of least time, `ms` by batch, among those within 0.3 dB of the best `sqnr_db`.

    SwinQuantError without rows: no candidate ran.
    """
    if not rows:
        raise SwinQuantError("‹tune›: no file could be timed here: leave it out")
    least = max(row["sqnr_db"] for row in rows) - WITHIN_DB
    return min((row for row in rows if row["sqnr_db"] >= least), key=lambda row: prod(row["ms"].values()))


def _candidates(target: ExportTarget) -> list[_Candidate]:
    exports = target.backend.exporting
    with_operators = exports.with_operators[0] if exports.with_operators else ""
    found = [_Candidate(name, name, ()) for name in exports.policies if name != with_operators]
    plugins = {plugin.partition("=")[0]: plugin for plugin in exports.detail.compiled}
    for operators in exports.detail.tuned:
        name = f"{with_operators}, {' and '.join(operators)}"
        found.append(_Candidate(name, with_operators, tuple(plugins[operator] for operator in operators)))
    return found


def _with(target: ExportTarget, plugins: Sequence[str]) -> ExportTarget:
    return replace(target, options=replace(target.options, plugin=tuple(plugins), plain=not plugins))


def _written(
    target: ExportTarget, module: nn.Module, card: RunCard, file: Path, workspace: Path
) -> dict[_Candidate, Artifact]:
    """The artifact of each candidate that the model can be exported as. SwinQuantError where it is none."""
    made: dict[_Candidate, Artifact] = {}
    candidates = _candidates(target)
    for number, one in enumerate(candidates):
        try:
            folder = workspace / str(number)
            made[one] = _with(target, one.plugins).write(module, card, file, folder, load_policy(one.policy))
        except SwinQuantError as error:
            if not made and one is candidates[-1]:
                raise
            log.info("not timed: %s: %s", one.name, error)
    return made


def _timed(target: ExportTarget, made: dict[_Candidate, Artifact], card: RunCard, file: Path) -> BenchReport:
    backend, threads = target.backend, usable_cores()
    types = function(backend.float_types)() if backend.float_types else [None]
    options = EngineOptions(threads, types[-1])  # the narrowest float type that it runs
    candidates = [BenchCandidate(_REFERENCE, partial(torch_engine, str(file), card.config))]
    for one, artifact in made.items():
        candidates.append(BenchCandidate(one.name, partial(artifact_engine, str(artifact.file), backend, options)))
    batches = (target.options.batch,) if target.options.batch else BATCHES
    plan = BenchPlan(batches, ROUNDS, SECONDS, threads)
    return measure(card.name, candidates, plan, noise(max(8, *batches), (3, *sides(card.config["DATA"]["IMG_SIZE"]))))


def _row(report: BenchReport, name: str) -> dict[str, Any] | None:
    """Milliseconds by batch, and SQNR in dB; None for a candidate that failed."""
    rows = [row for row in report.rows if row.candidate == name]
    if any(row.p50_ms is None or row.sqnr_db is None for row in rows):
        log.warning("left out: %s: %s", name, rows[0].failure or "its logits cannot be compared with float32's")
        return None
    return {"ms": {str(row.batch): row.p50_ms for row in rows}, "sqnr_db": rows[0].sqnr_db}
