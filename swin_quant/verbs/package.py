"""Write a folder that runs an ONNX artifact without torch and without this package, alone or in a model server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swin_quant.arguments import checked
from swin_quant.base.progress import log
from swin_quant.cli.flags import Flag
from swin_quant.cli.shared import ClassNames, one_process
from swin_quant.config.outputs import LOGITS

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.exported import Exported

EXAMPLES = """examples:
  swin-quant package out/my_int8.onnx --output out/package
  swin-quant package out/my_int8.onnx --max-batch 16 --delay-us 1000 --output out/package --overwrite

In it: model, preprocessing as JSON and in numpy, labels, run card, infer.py, C++, Dockerfile, and a model repository
with configurations of Triton Inference Server, OpenVINO Model Server and KServe (docs/shipping.md)."""
MAX_BATCH, DELAY_US, INSTANCES = 32, 2000, 1


@dataclass(frozen=True)
class ServerOptions:
    """How model servers run the package."""

    TITLE = "servers"
    max_batch: Annotated[int, Flag("pictures at a time", "N")] = MAX_BATCH
    delay_us: Annotated[int, Flag("microseconds that a request waits for others", "N")] = DELAY_US
    instances: Annotated[int, Flag("copies of the model", "N")] = INSTANCES


@dataclass(frozen=True)
class PackageOptions:
    """The artifact to package, and the folder for it."""

    artifact: Annotated[str, Flag("exported ONNX file; its run card lies beside it", "ARTIFACT", place=True)]
    output: Annotated[str, Flag("the package: a folder that is not there yet", "DIR")]
    overwrite: Annotated[bool, Flag("replace a package that is there")] = False
    labels: ClassNames = None
    servers: ServerOptions = ServerOptions()


def run(options: PackageOptions, world: World) -> None:
    from swin_quant.exported import artifact

    one_process(world, "package")
    servers = options.servers
    written = package(
        artifact(options.artifact),
        options.output,
        labels=options.labels,
        overwrite=options.overwrite,
        max_batch=servers.max_batch,
        delay_us=servers.delay_us,
        instances=servers.instances,
    )
    print(written)


@checked
def package(
    exported: Exported,
    folder: str | Path,
    *,
    labels: str | None = None,
    overwrite: bool = False,
    max_batch: int = MAX_BATCH,
    delay_us: int = DELAY_US,
    instances: int = INSTANCES,
) -> Path:
    """Write a folder that runs an ONNX artifact without torch and without this package (docs/shipping.md).

    `labels`: a file of class names, one a line; None: the artifact's, else ImageNet's, else none. `max_batch`,
    `delay_us` and `instances` are for model servers. UsageError for an artifact that cannot be packaged, or a folder
    that is there; SwinQuantError for a disk that fails, and then the folder is left as it was.
    """
    from swin_quant.exported import config_of, labels_in
    from swin_quant.score.metrics import class_names
    from swin_quant.ship import check_place, write_package
    from swin_quant.ship.facts import facts_of
    from swin_quant.ship.texts import Serving

    serving, artifact = Serving(max_batch, delay_us, instances), exported.artifact
    check_place(Path(folder), overwrite)
    cfg = config_of(artifact)
    is_classifier = cfg.MODEL.OUTPUT_KIND == LOGITS
    names = class_names(cfg.MODEL.NUM_CLASSES, labels, labels_in(artifact)) if is_classifier else ()
    facts = facts_of(artifact, names)
    written = write_package(facts, serving, folder, overwrite)
    if facts.library:
        log.info("operators/: compiled operators, for infer.py on OpenVINO; models/: the plain file, for servers")
    megabytes = artifact.file.stat().st_size / 1e6
    log.info(
        "package: %s, %.1f MB of model; next: python %s PICTURE ...", facts.served.name, megabytes, written / "infer.py"
    )
    return written
