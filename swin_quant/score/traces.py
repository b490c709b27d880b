"""What a network computes on its way, tensor by tensor: names in the order computed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.quant.outputs import Output
from swin_quant.quant.watch import watching
from swin_quant.score.engine import Engine

Trace: TypeAlias = dict[str, Tensor]
"""`group/name` -> tensor; the first axis is the batch, or a multiple of it (windows)."""

GROUPS = ("input", "weights", "forward", "output", "loss", "gradients", "update")  # in the order of a training step
IMAGES, LABELS, LOGITS, LOSS = "input/images", "input/labels", "output/logits", "loss/loss"
_BARE = {"images": IMAGES, "labels": LABELS, "logits": LOGITS, "loss": LOSS}
_WEIGHTS = "_weight_quantizer"


@contextmanager
def tracing(model: nn.Module) -> Iterator[Trace]:
    """Inside, what each module of `model` gives is put into the trace that this gives, as `forward/<module>`.

    A module that hands on what it is given (a node that is off, dropout) is left out, as are weights.
    """
    modules = {name: module for name, module in model.named_modules() if name and not name.endswith(_WEIGHTS)}
    found: Trace = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and not _handed_on(inputs, output):
            found[f"forward/{name}"] = output.detach()

    with watching(modules, look):
        yield found


@contextmanager
def taking(images: Tensor, name: str) -> Iterator[None]:
    """Turn an error into one that names the model and the images that it does not take."""
    try:
        yield
    except (RuntimeError, UsageError) as error:
        why = str(error).splitlines()[0]
        raise SwinQuantError(f"{name}: does not take images of {list(images.shape)}: {why}") from error


def torch_trace(model: nn.Module, engine: Engine, name: str) -> Callable[[Tensor], Trace]:
    """From images [B, 3, H, W] to what `model` computes when `engine`, which runs it, is given them.

    SwinQuantError, which calls it `name`, for images that it does not take.
    """

    def run(images: Tensor) -> Trace:
        with torch.inference_mode(), tracing(model) as found, taking(images, name):
            output = engine(images)
        return {**found, **of_output(output)}

    return run


def of_output(output: Output) -> Trace:
    """What a model gives as a trace: `output/logits`, or the maps of a backbone as `output/map.0`, ..."""
    if isinstance(output, Tensor):
        return {LOGITS: output.float()}
    return {f"output/map.{place}": part.float() for place, part in enumerate(output)}


def _handed_on(inputs: tuple[Any, ...], output: Tensor) -> bool:
    given = inputs[0] if inputs else None
    return isinstance(given, Tensor) and (given.data_ptr(), given.shape) == (output.data_ptr(), output.shape)


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Trace:
    """A trace that was dumped: names without a group are of the forward pass, but for images, labels, logits, loss."""
    found: Trace = {}
    for name, array in arrays.items():
        known = name.partition("/")[0] in GROUPS and "/" in name
        key = name if known else _BARE.get(name, f"forward/{name}")
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        found[key] = torch.from_numpy(native if native.dtype.kind != "u" else native.astype(np.int64))
    return found


def to_arrays(trace: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """As `from_arrays` reads it."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in trace.items()}
