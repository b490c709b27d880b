"""Runs an ExecuTorch program by `executorch.runtime`, on this CPU as a phone does on its own."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name, refuse_card
from swin_quant.backends.executorch.export import ABOUT
from swin_quant.base.errors import SwinQuantError, UsageError, first_line, one_line
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
    if options.threads:  # of the process: the runtime has one pool
        library("executorch.extension.pybindings.portable_lib", "executorch")._unsafe_reset_threadpool(options.threads)
    forward = _method(artifact, "forward")
    batch, *shape = forward.metadata.input_tensor_meta(0).sizes()
    version = library("executorch.version", "executorch").__version__
    known = {"library": f"executorch {version}", "float_type": "float32", "threads": options.threads}
    products = checked(dict[str, str], artifact.record["options"].get("products"), str(artifact.file), "products")

    def run(images: Tensor) -> Tensor:
        if (given := [*images.shape[1:]]) != shape:
            fault = f"takes pictures of {shape}, not {given}"
            raise UsageError(f"{artifact.file}: {fault}: prepare them as its run card says")
        filled = torch.cat([images, images.new_zeros(batch - len(images), *shape)]).float().contiguous()
        with _runtime_errors(artifact):
            logits: Tensor = forward.execute((filled,))[0]
        return logits[: len(images)]

    details = Details(known, lambda: products)
    precision, policy = artifact.record["precision"], get_policy_name(artifact)
    return Engine(NAME, precision, policy, run, max_batch=batch, sizes=(batch,), details=details)


def _method(artifact: Artifact, name: str) -> Any:
    """A method of the program. SwinQuantError for a file that the runtime cannot read."""
    runtime = library("executorch.runtime", "executorch").Runtime.get()
    with _runtime_errors(artifact):
        return runtime.load_program(artifact.file).load_method(name)


@contextmanager
def _runtime_errors(artifact: Artifact) -> Iterator[None]:
    """Inside the context, an error of the runtime, which has numbers for them, is a SwinQuantError about the file."""
    try:
        yield
    except Exception as error:
        said = f"ExecuTorch cannot run it here ({one_line(first_line(error))}): it is damaged, or of another release"
        raise SwinQuantError(f"{artifact.file}: {said}: export it again") from error


def about(artifact: Artifact) -> dict[str, Any]:
    """The facts that the export wrote into the program: name, labels, and what a run card must repeat, by its key."""
    method = _method(artifact, ABOUT)
    with _runtime_errors(artifact):
        return checked(dict[str, Any], json.loads(method.execute(())[0]), str(artifact.file), ABOUT)


def read_labels(artifact: Artifact) -> list[str]:
    """The class names in the program; empty if it has none."""
    return checked(list[str], about(artifact).get("labels", []), str(artifact.file), "its labels")


def check_card(artifact: Artifact) -> None:
    """SwinQuantError where a run card contradicts its program: on the input, the precision or the batch."""
    inside, record = about(artifact), artifact.record
    said = {"artifact.precision": record["precision"], "artifact.options.batch": record["options"].get("batch")}
    for key, value in {"preprocess": artifact.card.preprocess, **said}.items():
        if inside.get(key) != value:
            refuse_card(artifact, key, inside.get(key))
