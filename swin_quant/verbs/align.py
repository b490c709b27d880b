"""Compare two engines, checkpoints or dumps on the same pictures, layer by layer, or one training step of two."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields, Positional
from swin_quant.base.distributed import World, one_process, world_on
from swin_quant.base.errors import UsageError
from swin_quant.data.picture_set import PictureSet, Source, batches, resolve_source
from swin_quant.data.prepared import Prepared
from swin_quant.exported import Exported
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, policies_from
from swin_quant.quant.watch import eval_mode
from swin_quant.report.engines import Alignment
from swin_quant.score.alignment import IMAGES, write_dump
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import evenly, read_batches
from swin_quant.verbs.align_sides import (
    Side,
    agree_on_preprocessing,
    artifact_side,
    compare,
    model_side,
    open_side,
    take_step,
)

Compared: TypeAlias = Model | Exported | str | Path
EXAMPLES = """swin-quant align out/my_calib.pth out/my_int8_openvino.onnx --policy cpu --images cat.jpg photo.jpg
swin-quant align my.pth out/my_calib.pth --policy float qdq --data-path data
swin-quant align out/my_int8.onnx out/my_int8.onnx --engine onnxruntime openvino --data-path data
swin-quant align my.pth --to mine.npz --data-path data
swin-quant align my.pth theirs.npz
swin-quant align my.pth step.npz --step --data-path data"""
PICTURES = 4
_BATCH = 8  # pictures at a time: every tensor of both sides is kept for them
_WITHOUT = ("checkpoint", "random_weights", "device")
_UNUSED = ("seed", "workers", "cache_mode")
T = TypeVar("T")


@checked
def align(
    a: Compared,
    b: Annotated[Compared | None, Positional] = None,
    images: Annotated[Source | None, Fields(PictureSet, "pictures", (), _UNUSED)] = None,
    *,
    form: Annotated[ModelFile, Fields(ModelFile, "model of checkpoints", (), _WITHOUT)] = ModelFile(),
    policy: Annotated[Policies, Fields(PolicyChoice, "policy of checkpoints")] = None,
    engine: tuple[str, ...] | str | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    extension: tuple[str, ...] = (),
    below: float | None = None,
    only: tuple[str, ...] = (),
    to: str | Path | None = None,
    names: Literal["ours", "mindspore"] = "ours",
    step: bool = False,
    lr: float = 0.01,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Alignment | None:
    """Compare two sides layer by layer: largest and mean difference, cosine, SQNR, the first tensor that differs.

    A side is a model (quantized if it is calibrated), a checkpoint, an artifact, or tensors that were dumped: an .npz,
    or a folder of .npy. A dump that holds `images` brings its own. With `step` the sides are one training step of float
    checkpoints, group by group, on pictures with labels.

    Args:
        a: checkpoint, artifact or dump
        b: the other side; may be left out with --to
        images: Pictures, of which 4 are taken, evenly spread, or batches of tensors [B, 3, H, W].
        form: How checkpoints become models.
        policy: One for both sides, or one each (default: their run cards').
        engine: engine of an artifact: one for both, or A's and B's
        float_type: type of float layers, where the engine chooses
        extension: openvino: libraries with operators of your own
        below: SQNR in dB below which tensors differ (default: 60; two INT8 sides: 30; one: 15)
        only: print tensors of these names (*, ?)
        to: dump the images and A's tensors, as .npz
        names: names of parameters in --to; both are read
        step: one training step of float checkpoints, with labels
        lr: learning rate of --step, plain SGD
        device: auto: a GPU if there is one. A model in memory runs where it is.

    Returns:
        The tensors in the order computed; `first` is the first that differs. None without `b`.

    Raises:
        SwinQuantError: Not one tensor can be compared.
        UsageError: Options that do not fit the sides.
    """
    one_process("align")
    if b is None and not to:
        raise UsageError("nothing to compare with: give B, or ‹to› FILE to dump A's tensors")
    if to and not str(to).endswith(".npz"):
        raise UsageError(f"‹to› {to}: must end in .npz")
    world, given = world_on(device), [a] if b is None else [a, b]
    options = EngineOptions(float_type=float_type, device=world.device.type, extensions=extension)
    chosen = _one_each("policy", policies_from(policy), len(given))
    engines = _one_each("engine", [engine] if isinstance(engine, str) else engine or (), len(given))
    sides = []
    for each, one, on in zip(given, chosen, engines, strict=True):
        if isinstance(each, Exported):
            sides.append(artifact_side(each.artifact, on, options))
        elif isinstance(each, Model):
            preprocess, policies = each.preprocess if each.card.preprocess else None, [one] if one else each.policies
            sides.append(model_side(each.module, policies, World(device=each.device), each.name, preprocess))
        else:
            sides.append(open_side(replace(form, checkpoint=str(each)), one, on, options, world))
    source = images if isinstance(images, PictureSet) else resolve_source(images)
    with eval_mode(*(one.module for one in given if isinstance(one, Model))):
        if step:
            labelled: tuple[Tensor, Tensor] | None = None
            if not isinstance(source, PictureSet) or source.path:
                classes = next((found for side in sides if (found := getattr(side.model, "classes", None))), None)
                pictures, labels = zip(*_batches(source, sides, classes), strict=True)
                labelled = torch.cat(pictures), torch.cat(labels)
            others = [sides[-1], sides[0]] if len(sides) > 1 else [None]
            sides = [take_step(side, lr, labelled, other) for side, other in zip(sides, others, strict=True)]
        taken: Iterable[Tensor] = () if step else (pictures for pictures, _ in _batches(source, sides))
        if to and not step:
            taken = list(taken)
            images_ = torch.cat(taken)
            write_dump(to, {IMAGES: images_, **sides[0].trace(images_)}, names)
        elif to:
            write_dump(to, sides[0].dumped or {}, names)
        return replace(compare(sides[0], sides[1], taken, below, step), shown=only) if len(sides) > 1 else None


def _one_each(flag: str, given: Sequence[T], count: int) -> Sequence[T | None]:
    """One value stands for all sides, two for A and B; a side ignores a value that it cannot use."""
    if len(given) not in (0, 1, count):
        raise UsageError(f"‹{flag}›: {len(given)} are given: give one of both sides, or one each")
    return given if len(given) == count else [given[0] if given else None] * count


def _batches(
    source: PictureSet | Iterable[Any], sides: Sequence[Side], classes: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels (of `classes`, if needed). Nothing is opened before the first: a dump may bring its own."""
    if not isinstance(source, PictureSet):
        known = next((side.preprocess for side in sides if side.preprocess), None)
        yield from ((one.images, one.labels) for one in batches(source, classes is not None, Prepared(known), classes))
        return
    preprocess, pictures = agree_on_preprocessing(sides), source.with_default_split("val").open(classes)
    how = replace(source, batch=source.batch or _BATCH, workers=0)
    chosen = evenly(len(pictures), source.count or PICTURES)
    loaded, _ = read_batches(pictures, preprocess, chosen, how, "aligning")
    yield from ((batch.images, batch.labels) for batch in loaded if batch.indices)
