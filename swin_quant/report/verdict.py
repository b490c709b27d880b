"""The end of a run in three lines: the file to deploy, its cost in accuracy and gain in time, the next command."""

import os
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import backends, takers, targets
from swin_quant.backends.saturation import may_saturate, saturates
from swin_quant.base.errors import command_lines
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_recorded_file
from swin_quant.cards.paths import portable_path
from swin_quant.cards.records import ORIGINAL, PTQ, QAT, TriedPolicies
from swin_quant.config.outputs import LOGITS
from swin_quant.quant.policy import Policy, policy_from_dict
from swin_quant.report.accuracy.rows import dataset_key, is_simulated, latency, list_rows
from swin_quant.report.table import NARROW, folded, html_facts
from swin_quant.score.scoring import is_guessing

DIR = "DIR"  # a folder of pictures, where none is known
TIME = "swin-quant evaluate {file} --no-accuracy"
EXPORT_FLOAT = "swin-quant export {checkpoint} --for {target} --precision float --output {folder}"
_EXPORT_FOUND = "swin-quant export {checkpoint} --for {target} --policy {policy} --output {folder}"
_SEARCH = "swin-quant search {checkpoint} --data-path {data} --engine {target} --max-drop {drop} --output {folder}"
_EXPORT = "swin-quant export {checkpoint} --for {target} --output {folder}"
_SERVE = "swin-quant serve {file} --engine {engine}"
_TIME_ON = "swin-quant evaluate {file} --no-accuracy --engine {engine}"
_FINETUNE = "swin-quant finetune {checkpoint} --data-path {data} --output {folder}"
_SHOW = "swin-quant show {file}"
_EXPORT_SAFE = "swin-quant export {checkpoint} --for {target} --saturation-safe --output {folder}"
_PYTHON_SAFE = 'sq.export(model, "{target}", "{folder}", saturation_safe=True)'
_PYTHON_FLOAT = 'sq.export(model, "{target}", "{folder}", precision="float")'
_PYTHON_SEARCH = 'sq.search(model, pictures, "{target}", budget=sq.Budget(max_drop={drop}))'


def has_classes(card: RunCard) -> bool:
    """Whether the model of a card classifies."""
    if card.wrapped:
        return bool(card.wrapped.get("classes"))
    kind: str = card.config.get("MODEL", {}).get("OUTPUT_KIND", LOGITS)
    return kind == LOGITS


def fill(template: str, **words: object) -> str:
    """A command with its words, quoted for a shell; an engine is called as flags call it."""
    words |= {key: _flag_for(str(words[key])) for key in ("engine", "target") if key in words}
    return template.format(**{key: shlex.quote(str(word)) for key, word in words.items()})


def _flag_for(engine: str) -> str:
    """The name of an engine in flags. Results have its maker's spelling, such as ExecuTorch."""
    return next((name for name in backends() if name.lower() == engine.lower()), engine)


def to_export(policy: Policy | None, checkpoint: Path, folder: Path, template: str = _EXPORT) -> str:
    """The command that exports a trained checkpoint, for a backend that takes its policy: by preference one whose
    engine runs its files here, and whose own the policy is."""
    known = list(targets().values())
    named = [one for one in known if policy and policy.name in one.exporting.policies]
    able = [*named, *(one for one in known if policy is None or one.takes(policy))] or known
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs_here = (one for one in able if one.runs_its_export and one.is_installed and one.is_fast_on(device))
    target = next(runs_here, able[0])
    return fill(template, checkpoint=checkpoint, target=target.name, folder=folder)


def after_export(card: RunCard, file: Path, target: Backend, data: str = DIR) -> list[str]:
    """The commands behind an export, in order; what no file can build is timed alone."""
    if card.wrapped:
        return [fill(TIME, file=file)]
    if not has_classes(card) or (card.policy is None and target.only_quantized):
        return []
    return [fill(step, file=file, data=data) for step in target.exporting.next_step]


FLOAT = "the float model"
_MUCH = 1.0  # points of top-1 that are to be won back next
_RUINED = 10.0  # with as many lost, float is what to deploy
_AS_FAST = 1.05  # two times nearer than that are alike
_INDENT = 8


@dataclass(frozen=True)
class DeployVerdict:
    """The file to deploy, and the reason. Printed, it is three lines.

    `deploy`: a file, or FLOAT. `next`: a command. `delta_acc1` and its standard error are in points against float32, of
    QAT `delta_ptq` against PTQ, on `pictures`; `ms` and `float_ms` are of a picture (of a batch, in a search) on
    `engine`, whose fastest float has the type `float_type`. None: not measured. `refused`: what float replaces.
    """

    deploy: str
    summary: str
    next: str
    pictures: int = 0
    delta_acc1: float | None = None
    delta_acc1_se: float | None = None
    delta_ptq: float | None = None
    delta_ptq_se: float | None = None
    engine: str | None = None
    ms: float | None = None
    float_ms: float | None = None
    float_type: str | None = None
    refused: str | None = None

    @property
    def choice(self) -> str:
        """The file to deploy; or float, and in place of which file."""
        return f"{self.deploy}, not {self.refused}" if self.refused else self.deploy

    @property
    def speedup(self) -> float | None:
        """How many times faster than the same engine's float; None where one of both was not timed."""
        return self.float_ms / self.ms if self.ms and self.float_ms else None

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return {**asdict(self), "speedup": self.speedup}

    def text(self, width: int = NARROW) -> str:
        """The lines for a terminal of `width` columns."""
        lines = []
        said = {
            "deploy": [self.deploy],  # a path stays whole, to copy
            "result": folded(self.summary, width - _INDENT),
            "next": command_lines(self.next, width - _INDENT),
        }
        for title, (first, *more) in said.items():
            lines += [f"{title + ':':<{_INDENT}}{first}", *(" " * _INDENT + line for line in more)]
        return "".join(f"{line}\n" for line in lines)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return html_facts("verdict", {"deploy": self.deploy, "result": self.summary, "next": self.next})


def best_first(verdicts: Iterable[DeployVerdict]) -> list[DeployVerdict]:
    """Files to deploy before float models, the file that gains most time first."""
    return sorted(verdicts, key=lambda one: (one.deploy == FLOAT, -(one.speedup or 0.0)))


def loss_in_words(delta: float | None, error: float | None, pictures: int) -> str:
    """The top-1 delta in points, and whether so many pictures can show it.

    Pictures that all change alike have a standard error of 0; the weight of one picture then takes its place.
    """
    if delta is None:
        return "its cost in accuracy is not known, since float32 was not scored"
    if error is None:
        return f"{delta:+.2f} points of top-1"
    figures = f"{delta:+.2f} ±{error:.2f} points of top-1"
    if abs(delta) <= 2 * (error or 100 / pictures):
        return f"no loss that {pictures:,} pictures can show ({figures})"
    return f"{'costs' if delta < 0 else 'gains'} {abs(delta):.2f} ±{error:.2f} points of top-1 on {pictures:,} pictures"


def speed_in_words(ms: float | None, float_ms: float | None, float_type: str | None, engine: str | None) -> str:
    """The ratio of two latencies on one engine."""
    if not ms or not float_ms:
        return f"no float was timed on {engine}" if engine else "no latency: fake-quant is a simulation"
    ratio, beside = float_ms / ms, f"{float_type} on {engine} ({ms:.2f} ms, {float_ms:.2f})"
    if 1 / _AS_FAST <= ratio <= _AS_FAST:
        return f"as fast as {beside}"
    return f"{ratio:.1f} times as fast as {beside}" if ratio > 1 else f"slower than {beside}"


def artifact_verdict(card: RunCard, file: Path, checkpoint: Path | None, data_path: str) -> DeployVerdict | None:
    """The verdict on an artifact by the results in its card, on its fastest engine; None where it was not scored.

    Of several data sets the one with the most pictures counts, and is named. `checkpoint`: None if it is not found.
    """
    rows = [row for row in list_rows([card]) if row.is_quantized and not is_simulated(row.result.engine)]
    if not rows:
        return None
    row = min(rows, key=lambda row: (-row.result.pictures, latency(row.result)))
    result, own = row.result, row.own
    delta, error = row.delta("acc1"), row.delta_acc1_se
    float_ms, float_type = (own.ms_per_picture, own.precision) if own else (None, None)
    ms = result.ms_per_picture
    is_slow = bool(ms and float_ms and float_ms / ms < 1 / _AS_FAST)
    is_wrong = row.verified == "NO"
    if is_slow or is_wrong:
        target = card.artifact["options"].get("target", card.artifact["backend"]) if card.artifact else result.engine
        words = {"checkpoint": checkpoint, "target": target, "folder": file.parent}
        engine, made = _flag_for(result.engine), Artifact(file, card)
        is_saturated = is_wrong and card.artifact and engine in backends() and may_saturate(engine, made)
        by_file, in_python = EXPORT_FLOAT, _PYTHON_FLOAT
        if is_saturated and saturates(engine):  # on this CPU, and a file with weights of 7 bits would not
            by_file, in_python = _EXPORT_SAFE, _PYTHON_SAFE
        then = fill(by_file, **words) if card.wrapped is None else in_python.format(**words)
        if checkpoint is None and card.wrapped is None:
            then = fill(_SHOW, file=file)
    else:  # serve it where pictures can be prepared for it
        then = fill(_SERVE if card.preprocess else _TIME_ON, file=file, engine=result.engine)
    is_searched = any(one["engine"] == _flag_for(result.engine) for one in card.searches)
    is_bad = delta is not None and delta < -max(_MUCH, 2 * (error or 0.0))
    is_spent = (is_searched and (card.is_qat or card.wrapped)) or not (checkpoint or card.wrapped)
    if is_bad and not (is_slow or is_wrong or is_spent):
        # Accuracy is won back by a search for layers to leave float; behind one, by QAT.
        words = {"checkpoint": checkpoint, "data": data_path, "target": result.engine, "folder": file.parent}
        words |= {"drop": f"{_MUCH:g}"}
        then = fill(_FINETUNE if is_searched else _SEARCH, **words)
        if card.wrapped:
            then = _PYTHON_SEARCH.format(**words | {"target": _flag_for(result.engine)})
    times: dict[str, Any] = {"engine": result.engine, "ms": ms, "float_ms": float_ms, "float_type": float_type}
    loss = loss_in_words(delta, error, result.pictures)
    right = round((result.acc1 - (delta or 0.0)) * result.pictures / 100)
    classes = (card.wrapped["classes"] if card.wrapped else card.config.get("MODEL", {}).get("NUM_CLASSES")) or 0
    if delta is not None and classes > 1 and (not right or is_guessing(right, result.pictures, classes)):
        right_about = f"float32 is right about {right} of {result.pictures:,}"
        loss = f"the loss cannot be measured: {right_about}, and guessing among {classes:,} classes does as well"
        if result.agreement is not None:
            loss += f"; both agree on {result.agreement:.0f} % of them"
    summary = f"{loss}; {speed_in_words(**times)}"
    if len({dataset_key(one.dataset) for one in rows}) > 1:
        summary = f"on {row.place}: {summary}"
    if is_wrong:
        summary = f"NOT verified, the engine computes something else than the model; {summary}"
    figures = (result.pictures, delta, error)
    is_float = is_slow or is_wrong or (is_bad and delta is not None and delta < -_RUINED)
    refused = str(file) if is_float else None
    return DeployVerdict(FLOAT if is_float else str(file), summary, then, *figures, **times, refused=refused)


def export_verdict(
    artifact: Artifact, target: Backend, engine: str | None, checkpoint: Path, data: str, unscored: str
) -> DeployVerdict:
    """The verdict on a file that was just exported; `unscored` says why one that its `engine` runs was not scored."""
    file = artifact.file
    if found := artifact_verdict(artifact.card, file, checkpoint, data):
        return found
    if engine is not None:
        none = "it gives no classes, whose accuracy could be scored"
        said = f"not scored: {unscored}" if has_classes(artifact.card) else none
        return DeployVerdict(str(file), f"verified; {said}", fill(TIME, file=file))
    engines = [target] if target.load else takers(target.exporting.artifact)
    remedies = " or ".join(backend.remedy for backend in engines if backend.remedy)
    why = f"neither verified nor scored: {target.name} does not run its file here as it is ({remedies})"
    then = after_export(artifact.card, file, target, data)
    return DeployVerdict(str(file), why, then[-1] if then else fill(_SHOW, file=file))


def card_verdict(card: RunCard, path: Path, folder: Path) -> DeployVerdict | None:
    """The verdict by a run card alone, which lies at `path`; None where nothing was scored.

    Files are named as seen from `folder`, and the folder of pictures, which no card knows, is DIR.
    """
    if card.artifact:
        found = find_recorded_file(card.checkpoint, [path.parent])
        artifact = path.with_name(card.artifact["file"])
        return artifact_verdict(card, seen_from(folder, artifact), seen_from(folder, found) if found else None, DIR)
    if card.training and card.checkpoint:
        return training_verdict(card, path.with_name(card.checkpoint["file"]), folder)
    return None


def seen_from(folder: Path, file: Path) -> Path:
    """A relative path, which tells nothing of the machine, unless only an absolute one leads there."""
    return Path(portable_path(os.path.abspath(file), Path(folder).absolute()) or file)


def search_verdict(record: TriedPolicies, file: Path, checkpoint: str, float_type: str) -> DeployVerdict:
    """The verdict on the policy that a search found and wrote to `file`."""
    engine, pictures = record["engine"], record["pictures"]
    found = next(one for one in record["tried"] if one["found"])
    beside = next((one["ms"] for one in record["tried"] if not one["nodes"]), None)
    loss, ms = found["loss"], found["ms"]
    error = loss.get("drop_error", 0.0)
    drop = loss_in_words(-loss["drop"], error, pictures).replace("points", "expected points")
    speed = speed_in_words(ms, beside, float_type, engine) if ms else "no latency was measured"
    sqnr = "equal logits" if loss["sqnr_db"] is None else f"SQNR {loss['sqnr_db']:.1f} dB"
    summary = f"{drop}, {sqnr}; {speed}"
    keeps_float = not found["nodes"] or bool(ms and beside and beside <= ms)
    words = {"checkpoint": checkpoint, "target": engine, "policy": file, "folder": file.parent}
    then = fill(EXPORT_FLOAT if keeps_float else _EXPORT_FOUND, **words)
    if not record["met"]:
        summary = f"the budget is NOT met ({record['budget']}); the best that was found: {summary}"
    figures = (pictures, -loss["drop"], error)
    times = {"engine": engine, "ms": ms, "float_ms": beside, "float_type": float_type}
    return DeployVerdict(FLOAT if keeps_float else str(file), summary, then, *figures, **times)  # type: ignore[arg-type]


def training_verdict(card: RunCard, file: Path, folder: Path = Path()) -> DeployVerdict | None:
    """The verdict on QAT: float, PTQ and QAT by the results in its card; None where QAT was not scored. Files are named
    as seen from `folder`."""
    measured = card.measured()
    qat = next((one for one in measured if one.weights == QAT and one.policy), None)
    if qat is None:
        return None
    ptq = next((one for one in measured if one.weights == PTQ and one.policy_sha256 == qat.policy_sha256), None)
    original = next((one for one in measured if one.weights == ORIGINAL and one.precision == "float32"), None)
    names = {"float32": original, "PTQ": ptq, "QAT": qat}
    figures = ", ".join(f"{name} {one.acc1:.2f}" for name, one in names.items() if one) + " % top-1"
    start_file = Path(card.start.get("path") or file.with_name(card.start["file"])) if card.start else None
    deltas, deploy = (qat.delta_acc1, qat.delta_acc1_se, qat.delta_ptq, qat.delta_ptq_se), file
    advice = ""
    if ptq is None or qat.delta_ptq is None or qat.delta_ptq_se is None:
        said = loss_in_words(qat.delta_acc1, qat.delta_acc1_se, qat.pictures)
    else:
        delta, shown = qat.delta_ptq, 2 * (qat.delta_ptq_se or 100 / qat.pictures)
        said = f"QAT - PTQ {delta:+.2f} ±{qat.delta_ptq_se:.2f} points on {qat.pictures:,} pictures"
        advice = ": deploy QAT" if delta > shown else f": PTQ is {'better' if delta < -shown else 'as good'}: keep it"
        if delta <= shown and start_file is not None:
            deploy = start_file
    policy = policy_from_dict(card.policy, card.name) if card.policy else None
    if policy and not any(one.takes(policy) for one in targets().values() if one.exporting.activation_bits):
        said = f"{figures}; {said}; no engine computes with {qat.precision}, which is simulated"
        source, trained = seen_from(folder, start_file or file), seen_from(folder, file)
        then = to_export(None, source, source.parent, EXPORT_FLOAT)
        return DeployVerdict(FLOAT, said, then, qat.pictures, *deltas, refused=str(trained))
    deploy = seen_from(folder, deploy)
    then = to_export(policy, deploy, deploy.parent)
    return DeployVerdict(str(deploy), f"{figures}; {said}{advice}", then, qat.pictures, *deltas)
