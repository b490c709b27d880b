"""Write a folder that runs an artifact without this package: ONNX alone or in a server, ExecuTorch on devices."""

from pathlib import Path
from typing import Annotated

from swin_quant.arguments import checked
from swin_quant.base.arguments import Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.progress import log
from swin_quant.config.outputs import LOGITS
from swin_quant.exported import Exported, labels_in, open_exported, read_config
from swin_quant.score.scoring import class_names
from swin_quant.ship import Serving, check_place, collect_facts, write_package

EXAMPLES = """swin-quant package out/my_int8.onnx --output out/package
swin-quant package out/my_int8.onnx --max-batch 16 --delay-us 1000 --output out/package --overwrite"""


@checked
def package(
    exported: Exported | str | Path,
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    *,
    labels: str | Path | None = None,
    overwrite: bool = False,
    max_batch: int = 32,
    delay_us: int = 2000,
    instances: int = 1,
) -> Path:
    """Write a folder that runs an artifact without this package: ONNX without torch, ExecuTorch on devices.

    In it: model, preprocessing as JSON and in numpy, labels, run card, infer.py, C++, Dockerfile, and a model
    repository with configurations of Triton Inference Server, OpenVINO Model Server and KServe (docs/shipping.md). For
    an ExecuTorch program: infer.py on its runtime, and the lines that load it on Android and iOS (docs/devices.md).

    Args:
        exported: an exported ONNX file or ExecuTorch program; its run card lies beside it
        folder: the package: a folder that is not there yet (default: output/<NAME>/package)
        labels: file of class names, one a line (default: the artifact's, else ImageNet's, else none)
        overwrite: replace a package that is there
        max_batch: servers: pictures at a time
        delay_us: servers: microseconds that a request waits for others
        instances: servers: copies of the model

    Returns:
        The folder.

    Raises:
        SwinQuantError: The disk fails; the folder is left as it was.
        UsageError: The artifact cannot be packaged, or the folder is there.
    """
    one_process("package")
    found = open_exported(exported, "package")
    serving, artifact = Serving(max_batch, delay_us, instances), found.artifact
    folder = Path("output", found.card.name, "package") if folder is None else Path(folder)
    check_place(folder, overwrite)
    cfg = read_config(artifact)
    given, names = None if labels is None else str(labels), list[str]()
    if cfg.MODEL.OUTPUT_KIND == LOGITS:
        names = class_names(cfg.MODEL.NUM_CLASSES, given, labels_in(artifact))
    facts = collect_facts(artifact, names)
    written = write_package(facts, serving, folder, overwrite)
    if facts.library:
        log.info("operators/: compiled operators, for infer.py on OpenVINO; models/: the plain file, for servers")
    told = facts.served.name, artifact.file.stat().st_size / 1e6, written / "infer.py"
    log.info("package: %s, %.1f MB of model; next: python %s PICTURE ...", *told)
    return written
