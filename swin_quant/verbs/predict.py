"""Classify pictures by a checkpoint, a model in memory or an artifact on any engine."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from swin_quant.arguments import checked
from swin_quant.backends.registry import engine_named
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process, this_world
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
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
from swin_quant.quant.watch import eval_mode
from swin_quant.report.engines import Guesses
from swin_quant.score.engine import engine_under
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import infer
from swin_quant.score.scoring import class_names, top_classes

EXAMPLES = """swin-quant predict out/my_calib.pth cat.jpg
swin-quant predict out/my_int8.onnx holiday 'more/*.png' --engine openvino --json answers.json
swin-quant predict out/my_int8.onnx --data-path imagenet --json answers.json"""
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
    threads: int | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    extension: tuple[str, ...] = (),
    device: Annotated[str | None, Parameter(parse=False)] = None,
) -> Guesses:
    """Classify pictures: the most probable classes of each, from a checkpoint or an artifact on an engine.

    CHECKPOINT is a checkpoint, quantized as --policy or its run card says, or an artifact. Pictures that cannot be read
    are left out and named.

    Args:
        model: A model, a checkpoint or an artifact.
        images: Files, folders, patterns, PIL's, uint8 [B, H, W, 3], a list of one of these, or sq.pictures(...).
        top: classes a picture
        engine: engine that runs an artifact (default: the one it was exported for, else any)
        policy: One, for a checkpoint or a model (default: its own).
        labels: file of class names, one a line (default: the model's)
        threads: threads of an engine (default: its own choice)
        float_type: type of float layers, where the engine chooses
        extension: openvino: libraries with operators of your own (docs/custom_operators.md)
        device: That of an artifact's engine: cpu or cuda, torch's current GPU. A model runs where it is.

    Returns:
        The answers by the names of pictures.

    Raises:
        SwinQuantError: No picture can be read.
        UsageError: Options that do not fit the subject.
    """
    if top < 1:
        raise UsageError(f"‹top› {top}: must be at least 1")
    one_process("predict")
    if engine:
        engine_named(engine)  # a wrong name is told first
    options = EngineOptions(threads, float_type, device or this_world().device.type, extensions=extension)
    subject: Model | ModelFile | Exported
    if isinstance(model, ModelFile):  # a checkpoint, or an artifact, which has no other fields
        same = {one.name: getattr(model, one.name) for one in fields(ModelFile)} | {"checkpoint": None}
        files = SubjectFiles(**same, files=(model.checkpoint,) if model.checkpoint else ()).subjects()
        subject = files if isinstance(files, ModelFile) else files[0]
    else:
        subject = open_subject(model)
    if isinstance(images, PictureSet):
        how = images.settled()
        pictures: Pictures = how.with_default_split("val").open()
        if how.count is not None:
            pictures = SomePictures(pictures, how.indices(pictures))
    else:
        how, named = PictureSet(workers=0), collect_pictures(images)
        if named is None:
            kinds = "files, folders, PIL's, uint8 [B, H, W, 3]"
            raise UsageError(f"images: give pictures ({kinds}); with tensors call the model")
        pictures = named
    policies = policies_from(policy)
    if isinstance(subject, Exported):
        if policies:
            raise UsageError(f"‹policy› is not for artifacts: {subject.file} has its own")
        cfg, preprocess, on = read_config(subject.artifact), subject.artifact.preprocess, torch.device("cpu")
        need_logits(cfg.MODEL.OUTPUT_KIND, "predict")
        (loaded,) = load_engines(subject.artifact, [choose_engine(subject.artifact, engine)], options).values()
        name, classes, names = subject.file.name, cfg.MODEL.NUM_CLASSES, labels_in(subject.artifact)
    else:
        asked = {"engine": engine, "threads": threads, "float_type": float_type, "extension": extension}
        if wrong := [name for name, value in asked.items() if value]:
            raise UsageError(f"‹{wrong[0]}› is not for checkpoints: export the model first")
        subject = subject.load(policies) if isinstance(subject, ModelFile) else subject
        if (given := subject.given) is not None:
            need_logits(given.MODEL.OUTPUT_KIND, "predict")
            made, taken = subject.preprocess.sides, sides(given.DATA.IMG_SIZE)
            if made != taken:
                told = f"its run card resizes pictures to {shortest(made)}, the model takes {shortest(taken)}"
                raise SwinQuantError(f"{subject.file}: {told}")
        name = subject.file.name if isinstance(model, ModelFile) and subject.file else subject.name
        preprocess, on, classes, names = subject.preprocess, subject.device, subject.classes, subject.class_names
        loaded = engine_under(subject.module, on, (policies or subject.policies)[:1])
    names = class_names(classes, None if labels is None else str(labels), names)
    if not isinstance(images, PictureSet) or images.max_unreadable is None:
        how = replace(how, max_unreadable=1.0)
    if len(pictures) == 1 and (flaw := pictures.flaw(0)):
        raise SwinQuantError(flaw)
    with eval_mode(*([subject.module] if isinstance(subject, Model) else [])):
        found = infer({name: loaded}, pictures, preprocess, classes, replace(how, count=None), on)
    answers = dict(zip(found.names, top_classes(found.logits[name], names, top), strict=True))
    index = {one: number for number, one in enumerate(pictures.names)} if found.unreadable else {}
    unreadable = {one: pictures.flaw(index[one]) or f"{one}: cannot be read" for one in found.unreadable}
    for why in unreadable.values():
        log.warning("skipped: %s", why)
    return Guesses(answers, name, loaded, unreadable)
