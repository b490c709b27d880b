"""From logits to classes with names, and where the names come from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact
from swin_quant.base.errors import UsageError
from swin_quant.base.files import read_lines
from swin_quant.config.outputs import need_logits
from swin_quant.data.imagenet import english_of, wnids_of
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.exported import config_of, labels_in, load_engines, one_engine, preprocess_of
from swin_quant.quant.policy import Policy
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import infer
from swin_quant.score.torch_engines import torch_engines


@dataclass(frozen=True)
class Guess:
    """A class, its name (its index where it has none) and its probability, 0 to 1."""

    index: int
    name: str
    probability: float


@dataclass(frozen=True)
class Answering:
    """What answers: an engine, what its card says of its pictures and classes, the names of those that it carries.

    `sha256` is of the file, where there is one.
    """

    name: str
    engine: Engine
    preprocess: Preprocess
    classes: int
    names: Sequence[str] = ()
    sha256: str | None = None
    device: torch.device = torch.device("cpu")


@dataclass(frozen=True)
class Predictions:
    """The most probable classes of each readable picture, best first; and why others could not be read."""

    answers: dict[str, list[Guess]]
    unreadable: dict[str, str]


def answering_artifact(artifact: Artifact, engines: Sequence[str] | None, options: EngineOptions) -> Answering:
    """An artifact on one engine."""
    cfg, preprocess = config_of(artifact), preprocess_of(artifact)
    need_logits(cfg, "predict")
    (engine,) = load_engines(artifact, [one_engine(artifact, engines)], options).values()
    return Answering(artifact.file.name, engine, preprocess, cfg.MODEL.NUM_CLASSES, labels_in(artifact),
                     artifact.record["sha256"])  # fmt: skip


def answering_model(
    model: nn.Module,
    name: str,
    preprocess: Preprocess,
    classes: int,
    policies: Sequence[Policy],
    sha256: str | None = None,
    names: Sequence[str] = (),
) -> Answering:
    """A model in torch: quantized under the first of `policies`, else in float."""
    device = next(model.parameters()).device
    engine = list(torch_engines(model, device, None, policies[:1]).values())[-1]
    return Answering(name, engine, preprocess, classes, names, sha256, device)


def predict(
    by: Answering, pictures: Pictures, top: int = 5, labels: str | None = None, batch_size: int = 32, workers: int = 0
) -> Predictions:
    """The `top` classes of each picture, by name: from the file `labels`, else as `class_names` says."""
    names = class_names(by.classes, labels, by.names)
    inferred = infer(
        {by.engine.label: by.engine},
        pictures,
        by.preprocess,
        by.classes,
        batch_size=batch_size,
        workers=workers,
        device=by.device,
    )
    (logits,) = inferred.logits.values()
    answers = dict(zip(inferred.names, top_classes(logits, names, top), strict=True))
    index = {name: number for number, name in enumerate(pictures.names)} if inferred.unreadable else {}
    reasons = {name: pictures.flaw(index[name]) or f"{name}: cannot be read" for name in inferred.unreadable}
    return Predictions(answers, reasons)


def top_classes(logits: Tensor, names: Sequence[str], count: int = 5) -> list[list[Guess]]:
    """The `count` most probable classes (all, if there are fewer) of each row of logits [N, classes]; best first."""
    best = logits.double().softmax(1).topk(min(count, logits.shape[1]), dim=1)
    return [
        [Guess(index, names[index], probability) for index, probability in zip(indices, probabilities, strict=True)]
        for indices, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def class_names(classes: int, labels: str | None = None, carried: Sequence[str] = ()) -> list[str]:
    """Names of the classes: from the file `labels`, one a line; else those that a card or artifact has `carried` along,
    if they are as many; else ImageNet's where their number is that of one of its sets; else numbers.

    UsageError for a file of another number of names, SwinQuantError for one that cannot be read as text.
    """
    if labels is not None:
        names = read_lines(labels, "list of class names")
        if len(names) != classes:
            raise UsageError(f"‹labels› {labels}: has {len(names)} names, the model {classes} classes")
        return names
    named = carried if len(carried) == classes else wnids_of(classes) or range(classes)
    return [english_of(str(name)) for name in named]
