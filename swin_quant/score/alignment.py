"""Trace the tensors inside a network, and compare two traces tensor by tensor."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.base.arrays import read_arrays, write_arrays
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.checkpoint.names import from_mindspore, is_mindspore, to_mindspore
from swin_quant.quant.distance import summed
from swin_quant.quant.outputs import Output
from swin_quant.quant.watch import watching
from swin_quant.score.engine import Engine

# `group/name` -> tensor, in the order computed; the first axis is the batch, or a multiple of it (windows).
Trace: TypeAlias = dict[str, Tensor]

GROUPS = ("input", "weights", "forward", "output", "loss", "gradients", "update")  # in the order of a training step
IMAGES, LABELS, LOGITS, LOSS = "input/images", "input/labels", "output/logits", "loss/loss"
_BARE = {"images": IMAGES, "labels": LABELS, "logits": LOGITS, "loss": LOSS}
_WEIGHTS = "_weight_quantizer"


@contextmanager
def tracing(model: nn.Module) -> Iterator[Trace]:
    """Yield a trace to which every forward pass inside adds each module's output, as `forward/<module>`.

    Weight nodes are left out, and modules that return their input (a node that is off, dropout).
    """
    modules = {name: module for name, module in model.named_modules() if name and not name.endswith(_WEIGHTS)}
    found: Trace = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        first = inputs[0] if inputs else None
        handed_on = isinstance(first, Tensor) and first.data_ptr() == output.data_ptr() and first.shape == output.shape
        if not handed_on:
            found[f"forward/{name}"] = output.detach()

    with watching(modules, look):
        yield found


@contextmanager
def taking(images: Tensor, name: str) -> Iterator[None]:
    """Turn an error into a SwinQuantError that names the model and the shape of the images that it refuses."""
    try:
        yield
    except (RuntimeError, UsageError) as error:
        why = str(error).splitlines()[0]
        raise SwinQuantError(f"{name}: does not take images of {list(images.shape)}: {why}") from error


def torch_trace(model: nn.Module, engine: Engine, name: str) -> Callable[[Tensor], Trace]:
    """A function from images [B, 3, H, W] to the trace of `model` while `engine`, which runs it, computes.

    It raises SwinQuantError, with `name` for the model, if the model refuses the images.
    """

    def run(images: Tensor) -> Trace:
        with torch.inference_mode(), tracing(model) as found, taking(images, name):
            output = engine(images)
        return {**found, **trace_output(output)}

    return run


def trace_output(output: Output) -> Trace:
    """A model's output as a trace: `output/logits`, or the maps of a backbone as `output/map.0`, ..."""
    if isinstance(output, Tensor):
        return {LOGITS: output.float()}
    return {f"output/map.{place}": part.float() for place, part in enumerate(output)}


def read_dump(path: Path) -> Trace:
    """The tensors in an .npz, or a folder of .npy, under our names.

    A name without a group belongs to the forward pass, except images, labels, logits and loss.
    """
    found: Trace = {}
    for name, array in read_arrays(path).items():
        known = name.partition("/")[0] in GROUPS and "/" in name
        key = name if known else _BARE.get(name, f"forward/{name}")
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        found[key] = torch.from_numpy(native if native.dtype.kind != "u" else native.astype(np.int64))
    return _renamed(found, lambda own: from_mindspore(own) if is_mindspore(own) else own)


def write_dump(file: str | Path, trace: Trace, names: str) -> None:
    """Write a trace for `read_dump`; its parameters get our `names`, or MindSpore's."""
    trace = _renamed(trace, to_mindspore) if names == "mindspore" else trace
    write_arrays(file, {name: tensor.detach().cpu().numpy() for name, tensor in trace.items()})
    log.info("%s: %d tensors", file, len(trace))


def _renamed(trace: Trace, rename: Callable[[Trace], Trace]) -> Trace:
    """The trace with each group of parameters renamed as a whole."""
    found = dict(trace)
    for group in ("weights", "gradients", "update"):
        own = {name.removeprefix(f"{group}/"): found.pop(name) for name in trace if name.startswith(f"{group}/")}
        found |= {f"{group}/{name}": value for name, value in rename(own).items()}
    return found


@dataclass(frozen=True)
class Aligned:
    """One tensor on both sides: largest and mean |Δ|, cosine, and SQNR of B against A in dB (inf: equal).

    `problem`: why it was not compared; the figures are then NaN.
    """

    group: str
    name: str
    max: float = math.nan
    mean: float = math.nan
    cosine: float = math.nan
    sqnr_db: float = math.nan
    problem: str | None = None

    def below(self, limit: float) -> bool:
        """Whether the sides differ: the SQNR is below `limit` dB, or there is none."""
        return self.problem is not None or not self.sqnr_db >= limit


class Tally:
    """Compares the traces of two sides batch by batch."""

    def __init__(self) -> None:
        self._sums: dict[str, list[list[float]]] = {}  # of each tensor, in float64, a list for each batch
        self._problems: dict[str, str] = {}
        self.only: tuple[set[str], set[str]] = (set(), set())  # names that only one side has

    def add(self, a: Trace, b: Trace) -> None:
        """Add one batch: the tensors that both have, in A's order."""
        for mine, names in zip(self.only, (a.keys() - b.keys(), b.keys() - a.keys()), strict=True):
            mine |= names
        for name in (name for name in a if name in b):
            batches = self._sums.setdefault(name, [])
            if a[name].numel() != b[name].numel():
                self._problems[name] = f"{list(a[name].shape)} against {list(b[name].shape)}"
                continue
            x, y = (side[name].detach().cpu().double().flatten() for side in (a, b))
            if broken := [side for side, values in (("A", x), ("B", y)) if not values.isfinite().all()]:
                self._problems[name] = f"NaN or infinity in {' and '.join(broken)}"
            elif x.numel():
                delta = (x - y).abs()
                sums = (delta.sum(), delta.square().sum(), x.square().sum(), y.square().sum(), torch.dot(x, y))
                batches.append([*(one.item() for one in sums), delta.numel(), delta.max().item()])

    def rows(self) -> list[Aligned]:
        """A row for each tensor, group by group, in the order computed."""
        found = []
        for key, batches in self._sums.items():
            group, _, name = key.partition("/")
            if key in self._problems or not batches:
                found.append(Aligned(group, name, problem=self._problems.get(key, "empty")))
                continue
            delta, noise, a, b, product, count, _ = summed(batches)
            norms = math.sqrt(a * b)
            cosine = product / norms if norms else 1.0 if noise == 0 else 0.0
            sqnr = math.inf if noise == 0 else -math.inf if a == 0 else 10 * math.log10(a / noise)
            found.append(Aligned(group, name, max(one[-1] for one in batches), delta / count, cosine, sqnr))
        return sorted(found, key=lambda row: GROUPS.index(row.group))


_RANDOM = ("Dropout", "DropPath")
_RUNNING = ("running_mean", "running_var")


def step_trace(model: nn.Module, images: Tensor, labels: Tensor, lr: float) -> Trace:
    """Take a step of plain SGD (weights - lr * gradient) on the mean cross-entropy; returns all its tensors.

    Dropout and stochastic depth are off; everything else is in training mode. images: [B, 3, H, W], labels: int64 [B].
    """
    model.train()
    for module in model.modules():
        if type(module).__name__.startswith(_RANDOM):
            module.eval()
    trace: Trace = {IMAGES: images, LABELS: labels}
    trace |= {f"weights/{name}": value.detach().clone() for name, value in _state(model)}
    with tracing(model) as found:
        logits = model(images)
    loss = F.cross_entropy(logits, labels)
    trace |= {**found, LOGITS: logits.detach(), LOSS: loss.detach()}
    model.zero_grad(set_to_none=True)
    loss.backward()
    with torch.no_grad():  # torch.optim would import torch's compiler, which takes seconds
        for name, value in model.named_parameters():
            if value.grad is not None:
                trace[f"gradients/{name}"] = value.grad.clone()
                value.sub_(value.grad, alpha=lr)
    trace |= {f"update/{name}": value.detach().clone() for name, value in _state(model)}
    model.eval()
    return trace


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, and the running statistics of batch norms, which are parameters in other frameworks."""
    running = [(name, value) for name, value in model.named_buffers() if name.endswith(_RUNNING)]
    return [*model.named_parameters(), *running]
