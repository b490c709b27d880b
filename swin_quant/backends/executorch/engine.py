"""Runs an ExecuTorch program by `executorch.runtime`, on this CPU as a phone does on its own."""

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, policy_of, refuse_card
from swin_quant.backends.executorch.export import ABOUT
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.schema import checked
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "ExecuTorch"


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """The engine of an ExecuTorch program, float32 besides its int8 products. It fills up a batch to the program's.

    UsageError for another type or device, and for extensions; SwinQuantError for a file that the runtime cannot read.
    """
    if options.float_type not in (None, "float32"):
        raise UsageError(f"‹float_type› {options.float_type}: the float layers of a program are float32")
    if options.device != "cpu":
        raise UsageError(f"{NAME}: runs on a CPU here, not on {options.device}")
    if options.extensions:
        raise UsageError(f"{NAME}: takes no ‹extension›: the runtime has its operators built in")
    program = _program(artifact)
    if options.threads:  # of the process: the runtime has one pool
        library("executorch.extension.pybindings.portable_lib", "executorch")._unsafe_reset_threadpool(options.threads)
    batch = int(about(artifact, program)["options"]["batch"])
    version = library("executorch.version", "executorch").__version__
    return Engine(
        NAME,
        artifact.record["precision"],
        policy_of(artifact),
        partial(_run, artifact, _method(artifact, program, "forward"), batch),
        max_batch=batch,
        sizes=(batch,),
        details=Details(
            {"library": f"executorch {version}", "float_type": "float32", "threads": options.threads},
            lambda: dict(artifact.record["options"]["products"]),
        ),
    )


def _program(artifact: Artifact) -> Any:
    runtime = library("executorch.runtime", "executorch").Runtime.get()
    try:
        return runtime.load_program(artifact.file)
    except Exception as error:  # RuntimeError, of a number that the library does not explain
        raise SwinQuantError(
            f"{artifact.file}: the ExecuTorch installed here cannot read it ({_line(error)}): it is damaged, or of "
            "another release: export it again"
        ) from error


def _method(artifact: Artifact, program: Any, name: str) -> Any:
    try:
        found = program.load_method(name)
    except Exception as error:
        raise SwinQuantError(f"{artifact.file}: ExecuTorch cannot load its {name} ({_line(error)})") from error
    if found is None:
        raise SwinQuantError(f"{artifact.file}: has no method {name}: export it by this program")
    return found


def _run(artifact: Artifact, method: Any, batch: int, images: Tensor) -> Tensor:
    count = len(images)
    given = torch.cat([images, images.new_zeros(batch - count, *images.shape[1:])]) if count < batch else images
    try:
        outputs = method.execute((given.float().contiguous(),))
    except Exception as error:
        raise SwinQuantError(f"{artifact.file}: ExecuTorch cannot run it ({_line(error)})") from error
    logits: Tensor = outputs[0]
    return logits[:count]


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def about(artifact: Artifact, program: Any = None) -> dict[str, Any]:
    """The facts that the export wrote into the program: name, precision, preprocess, options and labels."""
    (text,) = _method(artifact, program or _program(artifact), ABOUT).execute(())
    try:
        return checked(dict[str, Any], json.loads(text), str(artifact.file), ABOUT)
    except (TypeError, ValueError, RecursionError):
        raise SwinQuantError(f"{artifact.file}: its method {ABOUT} gives no JSON: export again") from None


def labels_of(artifact: Artifact) -> list[str]:
    """The class names in the program; empty if it has none."""
    return checked(list[str], about(artifact).get("labels", []), str(artifact.file), "its labels")


def check_card(artifact: Artifact) -> None:
    """SwinQuantError where a run card contradicts its program: on the input, the precision or the batch."""
    inside = about(artifact)
    own = {"precision": artifact.record["precision"], "preprocess": artifact.card.preprocess}
    own |= {f"options.{key}": value for key, value in artifact.record["options"].items()}
    said = {key: inside.get(key) for key in ("precision", "preprocess")}
    said |= {f"options.{key}": value for key, value in inside.get("options", {}).items()}
    for key, value in said.items():
        if own.get(key) != value:
            refuse_card(artifact, key if key == "preprocess" else f"artifact.{key}", value)
