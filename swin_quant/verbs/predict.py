"""Classify pictures: the five most probable classes of each, from a checkpoint or an artifact on any engine.
With --output it writes Parquet files, under torchrun shared among processes, and goes on where it was cut off; with
--logits the outputs of an artifact for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swin_quant.arguments import checked
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Rare, refuse_artifact_flags, refuse_checkpoint_flags
from swin_quant.cli.output import Printed, sharding, tell
from swin_quant.config.outputs import need_logits
from swin_quant.config.sides import shortest, sides
from swin_quant.report.table import ReportTable

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.exported import Exported
    from swin_quant.model import Model
    from swin_quant.report.engines import AnswerRow
    from swin_quant.score.metrics import Guess
    from swin_quant.verbs.classify import Classifying

SCHEMA = "swin-quant/predictions/1"
EXAMPLES = """examples:
  swin-quant predict out/my_calib.pth cat.jpg                              (INT8 as its run card says)
  swin-quant predict out/my_int8.onnx holiday 'more/*.png' --engine openvino --json answers.json
  torchrun --nproc_per_node 2 -m swin_quant predict out/my_int8.onnx archive --threads 1 --output answers
  swin-quant predict out/my_int8.onnx --data-path imagenet --logits out

numpy.load("out/my_int8_logits.npz") holds: names, text [N]; logits, float32 [N, classes]; top1, int64 [N];
labels, int64 [N], -1 where there is none."""


@dataclass(frozen=True)
class AnswerOptions:
    """The answers for each picture, where they go, and how pictures are read."""

    TITLE = "answers"
    labels: Annotated[str | None, Flag("class names, one a line (default: the model's)", "FILE")] = None
    output: Annotated[str | None, Flag("write Parquet files there, and no table", "DIR")] = None
    shard: shared.Shard = None
    logits: Annotated[
        str | None, Flag("write <ARTIFACT>_logits.npz there, and no classes: outputs for other programs", "DIR")
    ] = None
    top: Annotated[int, Flag("classes a picture", "N", least=1)] = 5
    batch: Annotated[int, Flag("pictures at a time", "N")] = shared.DEFAULT_BATCH
    workers: Annotated[int, Rare("processes that load pictures, at most", "N")] = 8


@dataclass(frozen=True)
class PlaceOptions(shared.SplitOptions):
    """A split of a data set, in place of pictures by name; for --logits."""

    TITLE = "pictures of a data set, for --logits"
    max_unreadable: shared.MaxUnreadable = 0.01


@dataclass(frozen=True)
class PredictOptions:
    """The model, its pictures, and the answers that are printed or written."""

    model: Annotated[str, Flag("checkpoint or artifact; its run card lies beside it", "MODEL", place=True)]
    images: Annotated[tuple[str, ...], Flag("files, folders, 'patterns'", "IMAGE", place=True)] = ()
    geometry: shared.ModelOptions = shared.ModelOptions()
    replace_head: shared.ReplaceHead = False
    policy: shared.PolicyOptions = shared.PolicyOptions()
    engines: shared.EngineFlags = shared.EngineFlags()
    answers: AnswerOptions = AnswerOptions()
    place: PlaceOptions = PlaceOptions()
    json: shared.Json = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("default: a GPU if any")] = "auto"


class Guesses(dict[str, "list[Guess]"], Printed):
    """The most probable classes of each picture, by its name; printed, it is the table of `swin-quant predict`.

    `by`: the model and the engine.
    """

    def __init__(self, answers: Mapping[str, list[Guess]], by: str) -> None:
        super().__init__(answers)
        self.by = by

    def tables(self) -> list[ReportTable[AnswerRow]]:
        from swin_quant.report.engines import predictions_table

        best = {name: [(one.probability, one.index, one.name) for one in top] for name, top in self.items()}
        return [predictions_table(best, self.by)]


def _model_and_engine(by: Classifying) -> str:
    return f"{by.name}: {by.engine.label} on {by.engine.name}"


@checked
def predict(
    model: Model | Exported | str | Path,
    images: Any,
    top: int = 5,
    engine: str | None = None,
    *,
    device: str = "cpu",
) -> Guesses:
    """The `top` most probable classes of each picture, by its name: of files, folders, patterns, PIL's, uint8
    [B, H, W, 3], a list of one of these, or sq.pictures(...). Unreadable ones are left out.

    `device`: that of an artifact's engine, cpu or cuda, torch's current GPU; a model runs where it is.
    """
    from swin_quant.data.named import pictures_of
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.data.pictures import SomePictures
    from swin_quant.exported import Exported, subject_of
    from swin_quant.quant.watch import eval_mode
    from swin_quant.verbs.classify import Answers, classify, of_artifact, of_model

    model = subject_of(model)
    shown = images.of_split("val").open() if isinstance(images, PictureSet) else pictures_of(images)
    if shown is None:
        raise UsageError(
            "images: give pictures (files, folders, PIL's, uint8 [B, H, W, 3]); with tensors call the model"
        )
    if isinstance(images, PictureSet) and images.count is not None:
        shown = SomePictures(shown, images.indices(shown))
    network = [] if isinstance(model, Exported) else [model.module]
    if isinstance(model, Exported):
        by = of_artifact(model.artifact, shared.EngineFlags((engine,) if engine else ()), device)
    elif engine:
        raise UsageError(f"{model.name}: engine {engine} runs artifacts: export the model first")
    else:
        by = of_model(model, model.policies, model.name)
    with eval_mode(*network):
        found = classify(by, shown, Answers(top)).answers
    return Guesses(found, by=_model_and_engine(by))


def run(options: PredictOptions, world: World) -> None:
    from swin_quant.data.named import NamedPictures
    from swin_quant.exported import is_checkpoint
    from swin_quant.verbs.classify import Answers, classify, classify_shards, write_logits

    wanted = options.answers
    if wanted.logits:
        shared.one_process(world, "predict --logits")
        if is_checkpoint(options.model):
            raise UsageError(f"--logits: {options.model} is a checkpoint: export it, then name the artifact")
        place = shared.PictureOptions(
            **vars(options.place), images=options.images, batch=wanted.batch, workers=wanted.workers
        )
        write_logits(options.model, place, options.engines, wanted.logits, world.device.type)
        return
    if options.place != PlaceOptions():
        raise UsageError("--data-path, --zip, --split, --max-unreadable: are for --logits: name the pictures")
    if not options.images:
        raise UsageError("no pictures: name files, folders or patterns")
    if not wanted.output:
        shared.one_process(world, "predict without --output")
    if wanted.output and options.json:
        raise UsageError("--output and --json: choose one, Parquet files or JSON")
    if wanted.shard and not wanted.output:
        raise UsageError("--shard: is for --output")
    pictures = NamedPictures(list(options.images))
    by = (_of_checkpoint if is_checkpoint(options.model) else _of_artifact)(options, world)
    answers = Answers(wanted.top, wanted.labels, wanted.batch, wanted.workers)
    if shards := sharding(wanted.output, wanted.shard):
        manifest = classify_shards(by, pictures, shards, answers, world)
        if world.is_main:
            print(manifest)
        return
    if len(pictures) == 1 and (flaw := pictures.flaw(0)):
        raise SwinQuantError(flaw)
    found = classify(by, pictures, answers)
    for why in found.unreadable.values():
        log.warning("skipped: %s", why)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "model": by.name,
        "engine": by.engine.name,
        "precision": by.engine.precision,
        "policy": by.engine.policy,
        "pictures": [
            {"picture": name, "classes": [asdict(guess) for guess in top]} for name, top in found.answers.items()
        ],
        "unreadable": found.unreadable,
    }
    tell(options.json, Guesses(found.answers, _model_and_engine(by)).show, content)


def _of_artifact(options: PredictOptions, world: World) -> Classifying:
    from swin_quant.backends.open_artifact import open_artifact
    from swin_quant.verbs.classify import of_artifact

    artifact = open_artifact(options.model)
    refuse_checkpoint_flags(options.geometry, options.policy)
    return of_artifact(artifact, options.engines, world.device.type)


def _of_checkpoint(options: PredictOptions, world: World) -> Classifying:
    """Quantized as --policy or the card says, else in float."""
    from swin_quant.checkpoint.opened import open_checkpoint
    from swin_quant.loading import load_for_scoring
    from swin_quant.verbs.classify import of_model

    refuse_artifact_flags(options.engines)
    checkpoint = open_checkpoint(options.model)
    cfg = shared.config_of(checkpoint, options.geometry)
    need_logits(cfg.MODEL.OUTPUT_KIND, "predict")
    model, policies = load_for_scoring(cfg, checkpoint, options.policy.policies(), world, options.replace_head)
    made, taken = model.preprocess.sides, sides(cfg.DATA.IMG_SIZE)
    if made != taken:
        raise SwinQuantError(
            f"{checkpoint}: its run card resizes pictures to {shortest(made)}, the model takes {shortest(taken)}"
        )
    return of_model(model, policies, checkpoint.file.name)
