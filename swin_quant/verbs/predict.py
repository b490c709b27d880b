"""Classify pictures by a checkpoint, a model in memory or an artifact on any engine; or write an artifact's logits."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process, this_world
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.base.shards import ROWS, Sharding
from swin_quant.config.outputs import need_logits
from swin_quant.config.sides import shortest, sides
from swin_quant.data.folder import collect_pictures
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.pictures import Pictures, SomePictures
from swin_quant.exported import (
    Exported,
    SubjectFiles,
    choose_engine,
    labels_in,
    load_engines,
    open_subject,
    read_config,
)
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, policies_from
from swin_quant.quant.policy import Policy
from swin_quant.quant.watch import eval_mode
from swin_quant.report.engines import Guesses
from swin_quant.score.engine import engine_under
from swin_quant.score.options import EngineOptions
from swin_quant.score.scoring import class_names
from swin_quant.verbs.classify import Classifying, classify, classify_shards, write_logits

EXAMPLES = """swin-quant predict out/my_calib.pth cat.jpg
swin-quant predict out/my_int8.onnx holiday 'more/*.png' --engine openvino --json answers.json
torchrun --nproc_per_node 2 -m swin_quant predict out/my_int8.onnx archive --threads 1 --output answers
swin-quant predict out/my_int8.onnx --data-path imagenet --logits out"""
_WITHOUT = ("random_weights", "output_kind")


@checked
def predict(
    model: Annotated[Model | Exported | str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",), _WITHOUT)],
    images: Annotated[Any, Fields(PictureSet, "pictures", ("images",))],
    top: int = 5,
    engine: str | None = None,
    *,
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    labels: str | Path | None = None,
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    shard: int | None = None,
    logits: str | Path | None = None,
    threads: int | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    extension: tuple[str, ...] = (),
    device: Annotated[str | None, Parameter(parse=False)] = None,
) -> Guesses | Path:
    """Classify pictures: the most probable classes of each, from a checkpoint or an artifact on an engine.

    CHECKPOINT is a checkpoint, quantized as --policy or its run card says, or an artifact. Pictures that cannot be read
    are left out and named. Parquet files go on where a run was cut off, and several ranks share them. `logits` writes
    <ARTIFACT>_logits.npz for other programs: names, text [N]; logits, float32 [N, classes]; top1, int64 [N]; labels,
    int64 [N], -1 where there is none.

    Args:
        model: A model, a checkpoint or an artifact.
        images: Files, folders, patterns, PIL's, uint8 [B, H, W, 3], a list of one of these, or sq.pictures(...).
        top: classes a picture
        engine: engine that runs an artifact (default: the one it was exported for, else any)
        policy: One, for a checkpoint or a model (default: its own).
        labels: file of class names, one a line (default: the model's)
        folder: write Parquet files there, and no table
        shard: pictures a Parquet file (default 10000)
        logits: folder for the logits of an artifact, in place of classes
        threads: threads of an engine (default: its own choice)
        float_type: type of float layers, where the engine chooses
        extension: openvino: libraries with operators of your own (docs/custom_operators.md)
        device: That of an artifact's engine: cpu or cuda, torch's current GPU. A model runs where it is.

    Returns:
        The answers by the names of pictures; the manifest of the Parquet files, or the file of logits.

    Raises:
        SwinQuantError: No picture can be read.
        UsageError: Options that do not fit the subject.
    """
    if top < 1:
        raise UsageError(f"‹top› {top}: must be at least 1")
    if shard is not None and folder is None:
        raise UsageError("‹shard›: is for ‹folder›")
    if folder is None:
        one_process("predict without --output")
    options = EngineOptions(threads, float_type, device or this_world().device.type, extensions=extension)
    subject: Model | ModelFile | Exported
    if isinstance(model, ModelFile):  # a checkpoint, or an artifact, which has no other fields
        given = {one.name: getattr(model, one.name) for one in fields(ModelFile)} | {"checkpoint": None}
        files = SubjectFiles(**given, files=(model.checkpoint,) if model.checkpoint else ()).subjects()
        subject = files if isinstance(files, ModelFile) else files[0]
    else:
        subject = open_subject(model)
    if isinstance(images, PictureSet):
        how = images.settled()
        pictures: Pictures = how.with_default_split("val").open()
        if how.count is not None:
            pictures = SomePictures(pictures, how.indices(pictures))
    else:
        how, named = PictureSet(), collect_pictures(images)
        if named is None:
            raise UsageError(
                "images: give pictures (files, folders, PIL's, uint8 [B, H, W, 3]); with tensors call the model"
            )
        pictures = named
    if logits is not None:
        if not isinstance(subject, Exported):
            raise UsageError("‹logits›: are of an artifact, and this is a checkpoint: export it, then name the file")
        return write_logits(subject.artifact, pictures, how, engine, options, logits)
    by = _classifier(subject, policies_from(policy), engine, options)
    by = replace(by, names=class_names(by.classes, None if labels is None else str(labels), by.names))
    if not isinstance(images, PictureSet) or images.max_unreadable is None:
        how = replace(how, max_unreadable=1.0)
    with eval_mode(*([subject.module] if isinstance(subject, Model) else [])):
        if folder is not None:
            shards = Sharding(Path(folder), ROWS if shard is None else shard)
            return classify_shards(by, pictures, how, top, shards, this_world())
        if len(pictures) == 1 and (flaw := pictures.flaw(0)):
            raise SwinQuantError(flaw)
        found, unreadable = classify(by, pictures, how, top)
    for why in unreadable.values():
        log.warning("skipped: %s", why)
    return Guesses(found, by.name, by.engine, unreadable)


def _classifier(
    subject: Model | ModelFile | Exported, policies: Sequence[Policy], engine: str | None, options: EngineOptions
) -> Classifying:
    """A model in torch, quantized under the first policy, else in float; or an artifact on one engine."""
    if isinstance(subject, Exported):
        if policies:
            raise UsageError(f"‹policy› is not for artifacts: {subject.file} has its own")
        artifact, cfg = subject.artifact, read_config(subject.artifact)
        need_logits(cfg.MODEL.OUTPUT_KIND, "predict")
        chosen = choose_engine(artifact, engine)
        (loaded,) = load_engines(artifact, [chosen], options).values()
        names, sha256 = labels_in(artifact), artifact.record["sha256"]
        return Classifying(subject.file.name, loaded, artifact.preprocess, cfg.MODEL.NUM_CLASSES, names, sha256)
    asked = {"engine": engine} | {one.name: getattr(options, one.name) for one in fields(options)}
    if given := [name for name in ("engine", "threads", "float_type", "extensions") if asked[name]]:
        raise UsageError(f"‹{given[0]}› is not for checkpoints: export the model first")
    model = subject.load(policies) if isinstance(subject, ModelFile) else subject
    if (cfg := model.given) is not None:
        need_logits(cfg.MODEL.OUTPUT_KIND, "predict")
        made, taken = model.preprocess.sides, sides(cfg.DATA.IMG_SIZE)
        if made != taken:
            raise SwinQuantError(
                f"{model.file}: its run card resizes pictures to {shortest(made)}, the model takes {shortest(taken)}"
            )
    name = model.file.name if isinstance(subject, ModelFile) and model.file else model.name
    under = engine_under(model.module, model.device, (policies or model.policies)[:1])
    own = model.classes, model.class_names, model.card.weights_sha256, model.device
    return Classifying(name, under, model.preprocess, *own)
