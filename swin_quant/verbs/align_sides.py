"""The two sides that `align` compares: checkpoints run by torch, artifacts on engines, or tensors that were dumped."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import backends, engine_named
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.preprocess import UNPREPARED, Preprocess
from swin_quant.exported import choose_engine, load_engines, on_its_device
from swin_quant.loading import ModelFile, load_for_scoring
from swin_quant.quant.policy import Policy
from swin_quant.report.engines import Alignment
from swin_quant.score import alignment
from swin_quant.score.alignment import IMAGES, LABELS, Trace
from swin_quant.score.engine import engine_under, is_float
from swin_quant.score.options import EngineOptions

FLOAT_BELOW, QUANTIZED_BELOW, MIXED_BELOW = 60.0, 30.0, 15.0  # dB: two float sides, two quantized ones, one of each


@dataclass(frozen=True)
class Side:
    """One side: `run` computes a trace of images [B, 3, H, W], or `dumped` is a trace that was written before.

    `quantized`: None where a dump does not say. `max_batch`: the most images that `run` takes.
    """

    name: str
    run: Callable[[Tensor], Trace] | None = None
    dumped: Trace | None = None
    preprocess: Preprocess | None = None
    quantized: bool | None = None
    max_batch: int | None = None
    model: nn.Module | None = None

    def trace(self, images: Tensor) -> Trace:
        """The trace of these images, computed in batches that `run` takes; a dump keeps its own."""
        if self.dumped is not None:
            return self.dumped
        assert self.run is not None
        parts = [self.run(part) for part in images.split(self.max_batch or max(len(images), 1))]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def open_side(file: ModelFile, policy: Policy | None, engine: str | None, options: EngineOptions, world: World) -> Side:
    """The side in a file: a dump (.npz, or a folder of .npy), an artifact, or a checkpoint.

    `policy` is for a checkpoint (None: the policy of its run card), `engine` and `options` for an artifact (None: the
    engine that it was made for).
    """
    path = Path(str(file.checkpoint))
    if path.suffix == ".npz" or (path.is_dir() and any(path.rglob("*.npy"))):
        return Side(str(path), dumped=alignment.read_dump(path))
    if path.suffix == ".onnx" or (card_path(path).is_file() and RunCard.read(card_path(path)).artifact):
        return artifact_side(open_artifact(path), engine, options)
    cfg, checkpoint = file.config(), file.need_checkpoint()
    model, policies = load_for_scoring(cfg, checkpoint, [policy] if policy else [], world, file.replace_head)
    return model_side(model.module, policies[:1], world, str(file.checkpoint), model.preprocess)


def model_side(
    model: nn.Module, policies: Sequence[Policy], world: World, name: str, preprocess: Preprocess | None = None
) -> Side:
    """A model that torch runs: quantized under the policy if that enables a node, else in float."""
    engine = engine_under(model, world.device, policies)
    trace = alignment.torch_trace(model, engine, name)

    def run(images: Tensor) -> Trace:
        return trace(images.to(world.device))

    shown, quantized = f"{name} ({engine.label})", engine.policy is not None
    return Side(shown, run, preprocess=preprocess, quantized=quantized, model=model)


def artifact_side(artifact: Artifact, engine: str | None = None, options: EngineOptions = EngineOptions()) -> Side:
    """An artifact on its engine: logits of the file as it is, all else of a copy that gives more (`Backend.inside`)."""
    name = choose_engine(artifact, engine)
    options = on_its_device(name, options)
    ((label, loaded),) = load_engines(artifact, [name], options).items()
    inner = engine_named(name).inside
    if inner is None:
        log.warning("%s shows nothing of its inside: logits only", name)
    look: Callable[[Tensor], Mapping[str, Tensor]] = function(inner)(artifact, options) if inner else lambda _: {}
    kind = backends().get(artifact.record["backend"])
    restore = function(kind.restore)(artifact) if kind and kind.restore else {}

    def run(images: Tensor) -> Trace:
        found = {}
        for module, tensor in look(images).items():
            back = restore.get(module, lambda own: own)
            if back is not None:
                found[f"forward/{module}"] = back(tensor)
        return {**found, **alignment.trace_output(loaded(images))}

    quantized = not is_float(artifact.record["precision"])
    preprocess = artifact.preprocess if artifact.card.preprocess else None
    return Side(label, run, preprocess=preprocess, quantized=quantized, max_batch=loaded.max_batch)


def take_step(side: Side, lr: float, pictures: tuple[Tensor, Tensor] | None, other: Side | None = None) -> Side:
    """The dump of one training step of a checkpoint; a dump is handed back.

    The step takes the images and labels of the `other` dump, so that a difference in preprocessing is not found again
    in all that follows. `pictures`, (images, labels), serve where that has none, and are compared as the group `input`.
    """
    if side.dumped is not None:
        return side
    if side.model is None or side.quantized:
        raise UsageError(f"{side.name}: a training step is of a float checkpoint: choose ‹policy› float")
    tensors = other.dumped if other and other.dumped else {}
    images = tensors.get(IMAGES, pictures[0] if pictures else None)
    labels = tensors.get(LABELS, pictures[1] if pictures else None)
    if images is None or labels is None:
        raise UsageError("a training step needs images and labels: give ‹data_path›, or a dump that holds both")
    classes = getattr(side.model, "classes", 0)
    if images.dim() != 4 or labels.shape != images.shape[:1] or not ((labels >= 0) & (labels < classes)).all():
        raise SwinQuantError(
            f"{other.name if other else side.name}: images {list(images.shape)} and labels {list(labels.shape)} are "
            f"not [B, 3, H, W] and [B] of {classes} classes"
        )
    with alignment.taking(images, side.name):
        trace = alignment.step_trace(side.model, images.float(), labels.long(), lr)
    if pictures:
        trace |= {IMAGES: pictures[0], LABELS: pictures[1]}
    return replace(side, run=None, dumped=trace)


def agree_on_preprocessing(sides: Sequence[Side]) -> Preprocess:
    """How pictures become the input of all sides. UsageError where they disagree, or none says."""
    known = [(side.name, side.preprocess) for side in sides if side.preprocess]
    if not known:
        raise UsageError(f"{UNPREPARED}; two dumps need no pictures")
    (a, first), (b, last) = known[0], known[-1]
    if first != last:
        theirs = asdict(last)
        apart = [f"{key} is {value} and {theirs[key]}" for key, value in asdict(first).items() if value != theirs[key]]
        raise UsageError(f"{a} and {b} take pictures differently: {'; '.join(apart)}")
    return first


def compare(
    a: Side, b: Side, batches: Iterable[Tensor] = (), below: float | None = None, is_step: bool = False
) -> Alignment:
    """Compare what both sides compute of the same images, batches [B, 3, H, W]; a dump brings its own, if it has any.

    `below`: the SQNR in dB under which two tensors differ. `is_step`: both are dumps of a training step (`take_step`),
    whose images and labels are compared, too. SwinQuantError where not one tensor can be compared.
    """
    if dumps := [side.dumped for side in (a, b) if side.dumped is not None]:
        own = next((dumped[IMAGES] for dumped in dumps if IMAGES in dumped), None)
        if own is None:
            own = torch.cat(list(batches)) if len(dumps) == 1 else torch.empty(0)
        batches = [own.float()]
    tally, pictures, given = alignment.Tally(), 0, () if is_step else (IMAGES, LABELS)
    for images in batches:
        pictures += len(images)
        traces = a.trace(images), b.trace(images)
        tally.add(*({name: one for name, one in trace.items() if name not in given} for trace in traces))
    if below is None:
        kinds = {a.quantized, b.quantized} - {None}
        below = MIXED_BELOW if len(kinds) > 1 else QUANTIZED_BELOW if kinds == {True} else FLOAT_BELOW
    rows, only = tally.rows(), tally.only
    if not rows:
        sides = (listed(sorted(names), 3) or "nothing" for names in only)
        raise SwinQuantError(f"{a.name} and {b.name}: they name no tensor alike: {' - '.join(sides)}")
    if all(row.problem and math.isnan(row.sqnr_db) for row in rows):
        raise SwinQuantError(
            f"{a.name} and {b.name}: no tensor can be compared ({rows[0].group}/{rows[0].name}: {rows[0].problem}): "
            "other pictures, or weights of another model"
        )
    return Alignment(a.name, b.name, rows, below, pictures, (len(only[0]), len(only[1])))
