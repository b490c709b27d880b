"""The end of a run in three lines: the file to deploy, its cost in accuracy and gain in time, the next command."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swin_quant.base.errors import command_lines
from swin_quant.cards.card import RunCard
from swin_quant.cards.costs import TriedPolicies
from swin_quant.cards.lineage import find_recorded_file
from swin_quant.cards.paths import portable_path
from swin_quant.cards.records import ORIGINAL, PTQ, QAT
from swin_quant.quant.policy import policy_from_dict
from swin_quant.report import next_command
from swin_quant.report.accuracy.footnotes import is_simulated
from swin_quant.report.accuracy.rows import latency, list_rows
from swin_quant.report.next_command import DIR
from swin_quant.report.table import NARROW, folded, html_facts
from swin_quant.score.metrics import is_guessing

FLOAT = "the float model"
_MUCH = 1.0  # points of top-1 that are to be won back next
_AS_FAST = 1.05  # two times nearer than that are alike
_INDENT = 8


@dataclass(frozen=True)
class DeployVerdict:
    """The file to deploy, and the reason. Printed, it is three lines.

    `deploy`: a file, or FLOAT. `next`: a command. `delta_acc1` and its standard error are in points against float32, of
    QAT `delta_ptq` against PTQ, on `pictures`; `ms` and `float_ms` are of a picture (of a batch, in a search) on
    `engine`, whose fastest float has the type `float_type`. None: not measured.
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


def artifact_verdict(card: RunCard, file: Path, checkpoint: Path, data_path: str) -> DeployVerdict | None:
    """The verdict on an artifact by the results in its card, on its fastest engine; None where it was not scored."""
    rows = [row for row in list_rows([card]) if row.is_quantized and not is_simulated(row.result.engine)]
    if not rows:
        return None
    row = min(rows, key=lambda row: latency(row.result))
    result, own = row.result, row.own
    delta, error = row.delta("acc1"), row.delta_acc1_se
    float_ms, float_type = (own.ms_per_picture, own.precision) if own else (None, None)
    ms = result.ms_per_picture
    if is_slow := bool(ms and float_ms and float_ms / ms < 1 / _AS_FAST):
        target = card.artifact["options"].get("target", card.artifact["backend"]) if card.artifact else result.engine
        then = next_command.to_export_float(card, checkpoint, target, file.parent)
    elif delta is not None and delta < -max(_MUCH, 2 * (error or 0.0)):
        then = next_command.to_recover(card, file, checkpoint, data_path, result.engine, _MUCH)
    else:
        then = next_command.after_scoring(card, file, result.engine)
    times: dict[str, Any] = {"engine": result.engine, "ms": ms, "float_ms": float_ms, "float_type": float_type}
    loss = loss_in_words(delta, error, result.pictures)
    right = round((result.acc1 - (delta or 0.0)) * result.pictures / 100)
    known = card.wrapped["classes"] if card.wrapped else card.config.get("MODEL", {}).get("NUM_CLASSES")
    classes = known or 0
    if delta is not None and classes > 1 and is_guessing(right, result.pictures, classes):
        right_about = f"float32 is right about {right} of {result.pictures:,}"
        loss = f"no loss can be told: {right_about}, and guessing among {classes:,} classes does as well"
    summary = f"{loss}; {speed_in_words(**times)}"
    figures = (result.pictures, delta, error)
    return DeployVerdict(FLOAT if is_slow else str(file), summary, then, *figures, **times)


def card_verdict(card: RunCard, path: Path, folder: Path) -> DeployVerdict | None:
    """The verdict by a run card alone, which lies at `path`; None where nothing was scored.

    Files are named as seen from `folder`, and the folder of pictures, which no card knows, is DIR.
    """
    if card.artifact:
        found = find_recorded_file(card.checkpoint, [path.parent])
        checkpoint = found or path.with_name(card.checkpoint["file"] if card.checkpoint else "CHECKPOINT")
        artifact = path.with_name(card.artifact["file"])
        return artifact_verdict(card, _seen_from(folder, artifact), _seen_from(folder, checkpoint), DIR)
    if card.training and card.checkpoint:
        return training_verdict(card, path.with_name(card.checkpoint["file"]), folder)
    return None


def _seen_from(folder: Path, file: Path) -> Path:
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
    then = next_command.fill(next_command.EXPORT_FLOAT if keeps_float else next_command.EXPORT_FOUND, **words)
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
    deploy, start = file, card.start
    if ptq is None or qat.delta_ptq is None or qat.delta_ptq_se is None:
        said = loss_in_words(qat.delta_acc1, qat.delta_acc1_se, qat.pictures)
    else:
        delta, shown = qat.delta_ptq, 2 * (qat.delta_ptq_se or 100 / qat.pictures)
        said = f"QAT - PTQ {delta:+.2f} ±{qat.delta_ptq_se:.2f} points on {qat.pictures:,} pictures: "
        said += "deploy QAT" if delta > shown else f"PTQ is {'better' if delta < -shown else 'as good'}: keep it"
        if delta <= shown and start is not None:
            deploy = Path(start.get("path") or file.with_name(start["file"]))
    deploy = _seen_from(folder, deploy)
    policy = policy_from_dict(card.policy, card.name) if card.policy else None
    return DeployVerdict(
        str(deploy),
        f"{figures}; {said}",
        next_command.to_export(policy, deploy, _seen_from(folder, file).parent),
        qat.pictures,
        qat.delta_acc1,
        qat.delta_acc1_se,
        qat.delta_ptq,
        qat.delta_ptq_se,
    )
