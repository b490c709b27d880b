"""Two engines, checkpoints or dumps on the same pictures, layer by layer: largest and mean difference, cosine,
SQNR, the first tensor that differs. Or one training step of two frameworks, group by group. A and B: a checkpoint (run
by torch), an artifact, or tensors that were dumped: an .npz, a folder of .npy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from swin_quant.arguments import checked
from swin_quant.base.errors import UsageError
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import tell
from swin_quant.report.table import print_table
from swin_quant.score.options import EngineOptions

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from swin_quant.base.distributed import World
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.data.pictures import Pictures
    from swin_quant.exported import Exported
    from swin_quant.model import Model
    from swin_quant.verbs.align_sides import Alignment, Side

    Compared: TypeAlias = Model | Exported | str | Path

EXAMPLES = """examples:
  swin-quant align out/my_calib.pth out/my_int8_openvino.onnx --policy cpu --images cat.jpg photo.jpg
  swin-quant align my.pth out/my_calib.pth --policy float qdq --data-path data      (the cost of each layer)
  swin-quant align out/my_int8.onnx out/my_int8.onnx --engine onnxruntime openvino --data-path data
  swin-quant align my.pth --to theirs.npz --data-path data                          (dump the images and all tensors)
  swin-quant align my.pth theirs.npz                                                (on the images that it holds)
  swin-quant align my.pth --step --to step.npz --data-path data
  swin-quant align my.pth step.npz --step --data-path data                          (one training step, in order)"""
PICTURES = 4
_BATCH = 8  # pictures at a time: every tensor of both sides is kept for them
_UNREADABLE = 0.01  # the share of pictures that may be unreadable


@dataclass(frozen=True)
class CompareOptions:
    """How each side is run, and which tensors are compared, printed and dumped."""

    TITLE = "comparing"
    policy: Annotated[
        tuple[str, ...],
        Flag("policy of a checkpoint: one for both, or A's and B's (default: their run cards')", "NAME|FILE"),
    ] = ()
    engine: Annotated[tuple[str, ...], Flag("engine of an artifact: one for both, or A's and B's", "NAME")] = ()
    extension: Annotated[tuple[str, ...], Flag("openvino: libraries with operators of your own", "FILE")] = ()
    float_type: shared.FloatType = None
    below: Annotated[
        float | None, Flag("SQNR below which tensors differ (default: 60; two INT8 sides: 30; one: 15)", "DB")
    ] = None
    pictures: Annotated[int, Flag("pictures, evenly spread", "N", least=1)] = PICTURES
    only: Annotated[tuple[str, ...], Flag("print tensors of these names (*, ?)", "NODES")] = ()
    to: Annotated[str | None, Flag("dump the images and A's tensors, as .npz", "FILE")] = None
    names: Annotated[
        Literal["ours", "mindspore"], Flag("names of parameters in --to (default ours); both are read")
    ] = "ours"
    step: Annotated[bool, Flag("one training step of float checkpoints, with labels")] = False
    lr: Annotated[float, Flag("learning rate of --step, plain SGD", "LR")] = 0.01


@dataclass(frozen=True)
class AlignOptions:
    """Two sides, how they are compared, and on which pictures."""

    a: Annotated[str, Flag("checkpoint, artifact or dump", "A", place=True)]
    b: Annotated[str | None, Flag("the other side; may be left out with --to", "B", place=True)] = None
    model: shared.ModelOptions = shared.ModelOptions()
    compare: CompareOptions = CompareOptions()
    place: shared.PlaceOfPictures = shared.PlaceOfPictures()
    json: shared.Json = None
    device: shared.AnyDevice = "auto"


@checked
def align(
    a: Compared,
    b: Compared,
    images: PictureSet | Iterable[Any] = (),
    *,
    engine: str | None = None,
    below: float | None = None,
    device: str = "cpu",
) -> Alignment:
    """Compare two sides layer by layer: `Model`s (quantized if calibrated), exported artifacts (on `engine`), or the
    place of a checkpoint, an artifact or a dump (.npz, or a folder of .npy).

    `device`: cpu or cuda, torch's current GPU, of artifacts and places; a model runs where it is.

    `images`: pictures, or batches of tensors [B, 3, H, W]; a dump that holds `images` brings its own. The rows are in
    the order computed; `first` is the first tensor whose SQNR is below `below` dB (default: 60 of two float sides, 30
    of two quantized ones, 15 of one of each).
    """
    from swin_quant.data.picture_set import PictureSet, batches, source_of
    from swin_quant.data.prepared import Prepared
    from swin_quant.model import Model
    from swin_quant.quant.watch import eval_mode
    from swin_quant.verbs.align_sides import compare

    images = source_of(images)
    sides = [_side(each, engine, device) for each in (a, b)]
    if isinstance(images, PictureSet):
        tensors = (images for images, _ in _batches(images.open, sides, images.count))
    else:
        known = next((side.preprocess for side in sides if side.preprocess), None)
        tensors = (batch.images for batch in batches(images, labelled=False, prepared=Prepared(known)))
    with eval_mode(*(each.module for each in (a, b) if isinstance(each, Model))):
        return compare(sides[0], sides[1], tensors, below)


def _side(each: Compared, engine: str | None, device: str) -> Side:
    from swin_quant.base.distributed import World, world_on
    from swin_quant.exported import Exported
    from swin_quant.model import Model
    from swin_quant.verbs.align_sides import of_artifact, of_model, open_side

    options = EngineOptions(device=device)
    if isinstance(each, Exported):
        return of_artifact(each.artifact, engine, options)
    if isinstance(each, Model):
        preprocess = each.preprocess if each.card.preprocess else None
        return of_model(each.module, each.policies, World(device=each.device), each.name, preprocess)
    return open_side(each, engine=engine, options=options, world=world_on(device))


def _batches(
    open_pictures: Callable[[], Pictures], sides: Sequence[Side], count: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of `count` pictures (None: all), evenly spread over all there are, as all sides take them.

    Nothing is opened before the first batch is taken: a dump may bring its own images.
    """
    from swin_quant.data.loader import UnreadableLimit
    from swin_quant.data.sampling import chunks
    from swin_quant.score.run_engines import evenly, readable_batches
    from swin_quant.verbs.align_sides import preprocessing_of

    preprocess, pictures = preprocessing_of(sides), open_pictures()
    chosen = evenly(len(pictures), count)
    limit = UnreadableLimit(len(chosen), _UNREADABLE)
    for batch in readable_batches(pictures, preprocess, chunks(chosen, _BATCH), limit, 0, "aligning"):
        if batch.indices:
            yield batch.images, batch.labels


def run(options: AlignOptions, world: World) -> None:
    from swin_quant.report.engines import alignment_data, alignment_table

    compare = options.compare
    shared.one_process(world, "align")
    if options.b is None and not compare.to:
        raise UsageError("nothing to compare with: give B, or --to FILE to dump A's tensors")
    if compare.to and not compare.to.endswith(".npz"):
        raise UsageError(f"--to {compare.to}: must end in .npz")
    found = (_steps if compare.step else _forward)(options, _sides(options, world))
    if found is not None:
        tell(options.json, lambda: print_table(alignment_table(found, compare.only)), alignment_data(found))


def _sides(options: AlignOptions, world: World) -> list[Side]:
    from swin_quant.quant.policy import load_policy
    from swin_quant.verbs.align_sides import open_side

    compare = options.compare
    places = [place for place in (options.a, options.b) if place]
    policies = _one_each("--policy", compare.policy, len(places))
    engines = _one_each("--engine", compare.engine, len(places))
    how = shared.EngineFlags(extension=compare.extension, float_type=compare.float_type).options(world.device.type)
    return [
        open_side(
            place,
            load_policy(policy) if policy else None,
            engine,
            how,
            world,
            lambda checkpoint: shared.config_of(checkpoint, options.model),
        )
        for place, policy, engine in zip(places, policies, engines, strict=True)
    ]


def _one_each(flag: str, words: Sequence[str], count: int) -> Sequence[str | None]:
    """One word stands for all sides, two for A and B; a side ignores a word that it cannot use."""
    if len(words) not in (0, 1, count):
        raise UsageError(f"{flag} {' '.join(words)}: give one of both sides, or one each")
    return words if len(words) == count else [words[0] if words else None] * count


def _forward(options: AlignOptions, sides: Sequence[Side]) -> Alignment | None:
    """Dump A's tensors, compare both sides, or do both."""
    import torch

    from swin_quant.verbs.align_sides import compare, dump

    wanted = options.compare
    batches: Iterable[Tensor] = (images for images, _ in _batches(options.place.open, sides, wanted.pictures))
    if wanted.to:
        batches = list(batches)
        dump(sides[0], wanted.to, torch.cat(batches), wanted.names)
    return compare(sides[0], sides[1], batches, wanted.below) if len(sides) > 1 else None


def _steps(options: AlignOptions, sides: Sequence[Side]) -> Alignment | None:
    """Dump A's training step, compare the steps of both sides, or do both."""
    import torch

    from swin_quant.verbs.align_sides import compare_steps, dump, take_step

    wanted, labelled = options.compare, None
    if options.place.data_path:
        classes = next((side.classes for side in sides if side.classes), None)
        images, labels = zip(*_batches(partial(options.place.open, classes), sides, wanted.pictures), strict=True)
        labelled = torch.cat(images), torch.cat(labels)
    others = [sides[-1], sides[0]] if len(sides) > 1 else [None]
    steps = [take_step(side, wanted.lr, labelled, other) for side, other in zip(sides, others, strict=True)]
    if wanted.to:
        dump(steps[0], wanted.to, names=wanted.names)
    return compare_steps(steps[0], steps[1], wanted.below) if len(steps) > 1 else None
