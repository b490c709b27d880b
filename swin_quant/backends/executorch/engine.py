"""Runs an ExecuTorch program by `executorch.runtime`, on this CPU as a phone does on its own."""

import json
from collections.abc import Callable
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
    if options.float_type not in (None, "float32") or options.device != "cpu" or options.extensions:
        raise UsageError(f"{NAME}: runs on a CPU here, in float32 beside int8, without ‹extension›")
    program = _program(artifact)
    if options.threads:  # of the process: the runtime has one pool
        library("executorch.extension.pybindings.portable_lib", "executorch")._unsafe_reset_threadpool(options.threads)
    forward = _asked(artifact, "load", lambda: program.load_method("forward"))
    batch = int(about(artifact)["options"]["batch"])
    version = library("executorch.version", "executorch").__version__
    known = {"library": f"executorch {version}", "float_type": "float32", "threads": options.threads}
    return Engine(
        NAME,
        artifact.record["precision"],
        policy_of(artifact),
        partial(_run, artifact, forward, batch),
        max_batch=batch,
        sizes=(batch,),
        details=Details(known, lambda: dict(artifact.record["options"]["products"])),
    )


def _program(artifact: Artifact) -> Any:
    runtime = library("executorch.runtime", "executorch").Runtime.get()
    return _asked(artifact, "read", lambda: runtime.load_program(artifact.file))


def _run(artifact: Artifact, forward: Any, batch: int, images: Tensor) -> Tensor:
    count = len(images)
    missing = images.new_zeros(batch - count, *images.shape[1:])
    given = torch.cat([images, missing]).float().contiguous()
    logits: Tensor = _asked(artifact, "run", lambda: forward.execute((given,)))[0]
    return logits[:count]


def _asked(artifact: Artifact, what: str, call: Callable[[], Any]) -> Any:
    """What `call` gives. The runtime has errors of numbers, and gives None for a method that is not there."""
    try:
        found = call()
    except Exception as error:
        found, said = None, (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    else:
        said = "no such method"
    if found is None:
        raise SwinQuantError(
            f"{artifact.file}: the ExecuTorch here cannot {what} it ({said}): it is damaged, or of another release: "
            "export it again"
        )
    return found


def about(artifact: Artifact) -> dict[str, Any]:
    """The facts that the export wrote into the program: name, precision, preprocess, options and labels."""
    program = _program(artifact)
    (text,) = _asked(artifact, "ask", lambda: program.load_method(ABOUT).execute(()))
    try:
        return checked(dict[str, Any], json.loads(text), str(artifact.file), ABOUT)
    except (TypeError, ValueError, RecursionError):
        raise SwinQuantError(f"{artifact.file}: its method {ABOUT} gives no JSON: export again") from None


def labels_of(artifact: Artifact) -> list[str]:
    """The class names in the program; empty if it has none."""
    return checked(list[str], about(artifact).get("labels", []), str(artifact.file), "its labels")


def check_card(artifact: Artifact) -> None:
    """SwinQuantError where a run card contradicts its program: on the input, the precision or the batch."""
    inside, record = about(artifact), artifact.record
    own: dict[str, Any] = {"preprocess": artifact.card.preprocess, "artifact.precision": record["precision"]}
    said: dict[str, Any] = {key: inside.get(key.removeprefix("artifact.")) for key in own}
    for key, value in checked(dict[str, Any], inside.get("options"), str(artifact.file), "options").items():
        own[f"artifact.options.{key}"], said[f"artifact.options.{key}"] = record["options"].get(key), value
    for key, value in said.items():
        if own[key] != value:
            refuse_card(artifact, key, value)
