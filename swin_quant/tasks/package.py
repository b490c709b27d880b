"""From an artifact to a folder that runs without torch and without this package."""

from dataclasses import dataclass, field
from pathlib import Path

from swin_quant.backends.artifact import Artifact
from swin_quant.base.progress import log
from swin_quant.config.outputs import LOGITS
from swin_quant.exported import config_of, labels_in
from swin_quant.ship.facts import PackageFacts, facts_of
from swin_quant.ship.folder import check_place, write_package
from swin_quant.ship.repository import Serving
from swin_quant.tasks.predict import class_names


@dataclass(frozen=True)
class Packaging:
    """`labels`: a file of class names, one a line; None: those of the artifact, else ImageNet's, else none."""

    labels: str | None = None
    overwrite: bool = False
    serving: Serving = field(default_factory=Serving)


def package(artifact: Artifact, folder: str | Path, how: Packaging = Packaging()) -> Path:  # noqa: B008
    """Write the package of an ONNX artifact; returns `folder`. UsageError for what cannot be packaged, or a folder
    that is there; SwinQuantError for a disk that fails, whatever was there before being left."""
    check_place(Path(folder), how.overwrite)
    cfg = config_of(artifact)
    facts = facts_of(artifact)
    if cfg.MODEL.OUTPUT_KIND == LOGITS:
        names = class_names(cfg.MODEL.NUM_CLASSES, how.labels, labels_in(artifact))
        facts = facts_of(artifact, names)
    written = write_package(facts, how.serving, folder, how.overwrite)
    log.info("package: %s, %.1f MB of model; next: python %s PICTURE ...", facts.name, _megabytes(facts),
             Path(folder) / "infer.py")  # fmt: skip
    return written


def _megabytes(facts: PackageFacts) -> float:
    return facts.artifact.file.stat().st_size / 1e6
