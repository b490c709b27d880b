"""Two engines, checkpoints or frameworks on the same pictures, layer by layer: how far apart, and where they part."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact, open_artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import backends, engine_named
from swin_quant.base.arrays import read_arrays, write_arrays
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint.identify import config_for
from swin_quant.checkpoint.mindspore import from_mindspore, is_mindspore, to_mindspore
from swin_quant.checkpoint.sources import local_file
from swin_quant.data.loader import UnreadableLimit
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks
from swin_quant.exported import load_engines, on_its_device, one_engine, preprocess_of
from swin_quant.loading import load_for_scoring
from swin_quant.quant.policy import Policy
from swin_quant.score.alignment import (
    IMAGES,
    LABELS,
    Differences,
    Tally,
    Trace,
    from_arrays,
    of_output,
    step_trace,
    taking,
    to_arrays,
    torch_trace,
)
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import readable_batches
from swin_quant.score.torch_engines import torch_engines
from swin_quant.verbs.verify import is_quantized

FLOAT_BELOW, QUANTIZED_BELOW, BETWEEN_BELOW = (
    60.0,
    30.0,
    15.0,
)  # dB: of two float sides, two quantized ones, one of each
_PARAMETERS = ("weights", "gradients", "update")
OURS, MINDSPORE = "ours", "mindspore"


@dataclass(frozen=True)
class Side:
    """One side: what computes a trace of images [B, 3, H, W], or a trace that was dumped.

    `quantized`: None where a dump does not say.
    """

    name: str
    trace: Callable[[Tensor], Trace] | None = None
    dumped: Trace | None = None
    preprocess: Preprocess | None = None
    quantized: bool | None = None
    max_batch: int | None = None
    model: nn.Module | None = None

    @property
    def classes(self) -> int | None:
        """Of its model, if that says how many it has."""
        return getattr(self.model, "classes", None)

    def of(self, images: Tensor) -> Trace:
        """Its trace of the images, in batches that it takes; that which was dumped is of its own."""
        if self.dumped is not None:
            return self.dumped
        assert self.trace is not None
        parts = [self.trace(part) for part in images.split(self.max_batch or max(len(images), 1))]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def is_dump(place: str | Path) -> bool:
    """Whether a place holds tensors that were dumped: an .npz, or a folder of .npy."""
    path = Path(place)
    return path.suffix == ".npz" or (path.is_dir() and any(path.rglob("*.npy")))


def side_of(
    place: str | Path,
    policy: Policy | None = None,
    engine: str | None = None,
    options: EngineOptions = EngineOptions(),
    world: World = World(),
    cfg: CfgNode | None = None,
    wanted: Mapping[str, Any] | None = None,
) -> Side:
    """A checkpoint run by torch (under `policy`, else as its run card says), an artifact on `engine`, or a dump.

    A dump is an .npz, or a folder of .npy. `wanted`: keys of the config of a checkpoint that says the others.
    """
    path = Path(place)
    if is_dump(place):
        if policy or engine:
            raise UsageError(f"{place}: is a dump of tensors: it runs under no ‹policy› and on no ‹engine›")
        return Side(str(place), dumped=_in_our_names(from_arrays(read_arrays(path))))
    if path.suffix == ".onnx" or (card_path(path).is_file() and RunCard.read(card_path(path)).artifact):
        if policy:
            raise UsageError(f"{place}: is an artifact, whose policy is fixed: ‹policy› is for checkpoints")
        return of_artifact(open_artifact(path), engine, options)
    if engine:
        raise UsageError(f"{place}: ‹engine› is for artifacts: export the checkpoint, then name that")
    return of_checkpoint(str(place), policy, world, cfg, wanted)


def of_checkpoint(
    place: str,
    policy: Policy | None = None,
    world: World = World(),
    cfg: CfgNode | None = None,
    wanted: Mapping[str, Any] | None = None,
) -> Side:
    """A checkpoint run by torch, under one policy; `float` for a calibrated one unquantized.

    `cfg` None: it says it, but for the keys of `wanted`.
    """
    file = str(local_file(place))
    subject = load_for_scoring(cfg or config_for(file, wanted), file, [policy] if policy else [], world)
    preprocess = Preprocess.from_dict(subject.card.preprocess)
    return of_model(subject.model, subject.policies[:1], world, place, preprocess)


def of_model(
    model: nn.Module, policies: Sequence[Policy], world: World, name: str, preprocess: Preprocess | None = None
) -> Side:
    """A model run by torch, under the policy if there is one that enables a node."""
    engine = list(torch_engines(model, world.device, None, policies).values())[-1]
    run = torch_trace(model, engine, name)
    return Side(
        f"{name} ({engine.label})",
        lambda images: run(images.to(world.device)),
        preprocess=preprocess,
        quantized=engine.policy is not None,
        model=model,
    )


def of_artifact(
    artifact: Artifact,
    engine: str | None = None,
    options: EngineOptions = EngineOptions(),
) -> Side:
    """An artifact on its engine: logits of the file as it is, all else of a copy that gives more (`Backend.inside`)."""
    name = one_engine(artifact, [engine] if engine else None)
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
            back = restore.get(module, _as_it_is)
            if back is not None:
                found[f"forward/{module}"] = back(tensor)
        return {**found, **of_output(loaded(images))}

    quantized = is_quantized(artifact.record["precision"])
    return Side(label, run, preprocess=preprocess_of(artifact), quantized=quantized, max_batch=loaded.max_batch)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def align(a: Side, b: Side, batches: Iterable[Tensor] = (), below: float | None = None) -> Differences:
    """Compare what both compute of the same images, batches [B, 3, H, W]; a dump that holds `images` brings its own.

    `below`: the SQNR in dB under which two tensors differ. SwinQuantError where not one tensor can be compared.
    """
    tally, count = Tally(), 0
    for images in _batches(a, b, batches):
        count += len(images)
        tally.add(_without_input(a.of(images)), _without_input(b.of(images)))
    return _checked(Differences(a.name, b.name, tally.rows(), _limit(a, b, below), count, _only(tally)), tally)


def align_step(a: Side, b: Side, below: float | None = None) -> Differences:
    """Compare two dumps of a training step (`step_of`), group by group in the order of a step."""
    if a.dumped is None or b.dumped is None:
        raise UsageError("a training step is compared as tensors: take that of a checkpoint by step_of")
    tally = Tally()
    tally.add(a.dumped, b.dumped)
    count = len(next((dump[IMAGES] for dump in (a.dumped, b.dumped) if IMAGES in dump), ()))
    return _checked(Differences(a.name, b.name, tally.rows(), _limit(a, b, below), count, _only(tally)), tally)


def step_of(side: Side, lr: float, pictures: tuple[Tensor, Tensor] | None, other: Side | None = None) -> Side:
    """The training step of a checkpoint as a dump; a dump is one already.

    Images and labels are those that the `other` dump holds, so that one fault is not taken for another; what the
    pictures, (images, labels), are here is compared as the group `input`.
    """
    if side.dumped is not None:
        return side
    if side.model is None or side.quantized:
        raise UsageError(f"{side.name}: a training step is of a float checkpoint: choose ‹policy› float")
    given = other.dumped if other and other.dumped else {}
    images = given.get(IMAGES, pictures[0] if pictures else None)
    labels = given.get(LABELS, pictures[1] if pictures else None)
    if images is None or labels is None:
        raise UsageError("a training step needs images and labels: give ‹data_path›, or a dump that holds both")
    classes = side.classes or 0
    if images.dim() != 4 or labels.shape != images.shape[:1] or not ((labels >= 0) & (labels < classes)).all():
        raise SwinQuantError(
            f"{other.name if other else side.name}: images {list(images.shape)} and labels {list(labels.shape)} are "
            f"not [B, 3, H, W] and [B] of {classes} classes"
        )
    with taking(images, side.name):
        trace = step_trace(side.model, images.float(), labels.long(), lr)
    if pictures:
        trace |= {IMAGES: pictures[0], LABELS: pictures[1]}
    return replace(side, trace=None, dumped=trace)


def dump(side: Side, file: str | Path, images: Tensor | None = None, names: str = OURS) -> int:
    """Write the trace of a side, with the images that it is of, as an .npz; returns the number of tensors.

    `names`: of parameters, ours or MindSpore's.
    """
    trace = side.of(images) if images is not None else side.dumped or {}
    whole = {IMAGES: images, **trace} if images is not None else trace
    whole = _renamed(whole, to_mindspore) if names == MINDSPORE else whole
    write_arrays(file, to_arrays(whole))
    return len(whole)


def batches_of(
    pictures: Pictures, preprocess: Preprocess, count: int, size: int, max_unreadable: float = 0.01
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of `count` pictures, evenly spread over those there are."""
    count = min(count, len(pictures))
    chosen = [index * len(pictures) // count for index in range(count)]
    limit = UnreadableLimit(count, max_unreadable)
    for batch in readable_batches(pictures, preprocess, chunks(chosen, size), limit, 0, "aligning"):
        if batch.indices:
            yield batch.images, batch.labels


def preprocessing_of(a: Side, b: Side | None) -> Preprocess:
    """How pictures become the input of both. UsageError where they disagree, or neither says."""
    found = [side.preprocess for side in (a, b) if side and side.preprocess]
    if not found:
        raise UsageError("neither side says how a picture becomes its input: two dumps need no pictures")
    if found[0] != found[-1]:
        mine, theirs = map(asdict, found)
        apart = [f"{field} is {value} and {theirs[field]}" for field, value in mine.items() if value != theirs[field]]
        raise UsageError(f"{a.name} and {b.name if b else ''} take pictures differently: {'; '.join(apart)}")
    return found[0]


def _batches(a: Side, b: Side, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    dumps = [side.dumped for side in (a, b) if side.dumped is not None]
    if not dumps:
        yield from batches
        return
    own = next((found[IMAGES] for found in dumps if IMAGES in found), None)
    if own is None and len(dumps) == 1:
        own = torch.cat(list(batches))
    yield torch.empty(0) if own is None else own.float()


def _without_input(trace: Trace) -> Trace:
    return {name: tensor for name, tensor in trace.items() if name not in (IMAGES, LABELS)}


def _limit(a: Side, b: Side, below: float | None) -> float:
    if below is not None:
        return below
    kinds = {side.quantized for side in (a, b)} - {None}
    return BETWEEN_BELOW if len(kinds) > 1 else QUANTIZED_BELOW if kinds == {True} else FLOAT_BELOW


def _only(tally: Tally) -> tuple[int, int]:
    return len(tally.only[0]), len(tally.only[1])


def _checked(found: Differences, tally: Tally) -> Differences:
    if not found.rows:
        sides = (listed(sorted(names), 3) or "nothing" for names in tally.only)
        raise SwinQuantError(f"{found.a} and {found.b}: they name no tensor alike: {' - '.join(sides)}")
    if all(row.problem and math.isnan(row.sqnr_db) for row in found.rows):
        row = found.rows[0]
        raise SwinQuantError(
            f"{found.a} and {found.b}: no tensor can be compared ({row.group}/{row.name}: {row.problem}): "
            "other pictures, or weights of another model"
        )
    return found


def _in_our_names(trace: Trace) -> Trace:
    """Parameters in MindSpore's names under ours."""
    return _renamed(trace, lambda own: from_mindspore(own) if is_mindspore(own) else own)


def _renamed(trace: Trace, rename: Callable[[Trace], Trace]) -> Trace:
    """The trace with each group of parameters renamed as a whole."""
    found = dict(trace)
    for group in _PARAMETERS:
        own = {name.removeprefix(f"{group}/"): found.pop(name) for name in trace if name.startswith(f"{group}/")}
        found |= {f"{group}/{name}": value for name, value in rename(own).items()}
    return found
