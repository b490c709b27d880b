"""Trace the tensors inside a network, and compare two traces tensor by tensor."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, UsageError
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


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Trace:
    """A dumped trace. A name without a group belongs to the forward pass, except images, labels, logits and loss."""
    found: Trace = {}
    for name, array in arrays.items():
        known = name.partition("/")[0] in GROUPS and "/" in name
        key = name if known else _BARE.get(name, f"forward/{name}")
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        found[key] = torch.from_numpy(native if native.dtype.kind != "u" else native.astype(np.int64))
    return found


def to_arrays(trace: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """A trace to dump, for `from_arrays` to read."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in trace.items()}


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


@dataclass
class _Sums:
    """The sums of one tensor over batches, in float64."""

    count: int = 0
    largest: float = 0.0
    delta: float = 0.0
    noise: float = 0.0
    a: float = 0.0
    b: float = 0.0
    product: float = 0.0
    problem: str | None = None


class Tally:
    """Compares the traces of two sides batch by batch."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self.only: tuple[set[str], set[str]] = (set(), set())  # names that only one side has

    def add(self, a: Trace, b: Trace) -> None:
        """Add one batch: the tensors that both have, in A's order."""
        for mine, names in zip(self.only, (a.keys() - b.keys(), b.keys() - a.keys()), strict=True):
            mine |= names
        for name in (name for name in a if name in b):
            sums = self._sums.setdefault(name, _Sums())
            if a[name].numel() != b[name].numel():
                sums.problem = f"{list(a[name].shape)} against {list(b[name].shape)}"
                continue
            x, y = (side[name].detach().cpu().double().flatten() for side in (a, b))
            if broken := [side for side, values in (("A", x), ("B", y)) if not values.isfinite().all()]:
                sums.problem = f"NaN or infinity in {' and '.join(broken)}"
                continue
            delta = (x - y).abs()
            sums.count += delta.numel()
            sums.largest = max(sums.largest, delta.max().item() if delta.numel() else 0.0)
            sums.delta += delta.sum().item()
            sums.noise += delta.square().sum().item()
            sums.a, sums.b = sums.a + x.square().sum().item(), sums.b + y.square().sum().item()
            sums.product += torch.dot(x, y).item()

    def rows(self) -> list[Aligned]:
        """A row for each tensor, group by group, in the order computed."""
        found = []
        for key, sums in self._sums.items():
            group, _, name = key.partition("/")
            if sums.problem or not sums.count:
                found.append(Aligned(group, name, problem=sums.problem or "empty"))
                continue
            norms = math.sqrt(sums.a * sums.b)
            cosine = sums.product / norms if norms else 1.0 if sums.noise == 0 else 0.0
            sqnr = math.inf if sums.noise == 0 else -math.inf if sums.a == 0 else 10 * math.log10(sums.a / sums.noise)
            found.append(Aligned(group, name, sums.largest, sums.delta / sums.count, cosine, sqnr))
        return sorted(found, key=lambda row: GROUPS.index(row.group))


@dataclass(frozen=True)
class Differences:
    """Two sides compared: a row for each tensor that both have, in the order computed.

    `below`: the SQNR in dB below which they differ. `only`: the number of tensors that only A, and only B, has.
    """

    a: str
    b: str
    rows: Sequence[Aligned]
    below: float
    pictures: int
    only: tuple[int, int] = (0, 0)

    @property
    def first(self) -> Aligned | None:
        """The first tensor that differs: the module that computes it is at fault, or its other inputs."""
        return next((row for row in self.rows if row.below(self.below)), None)

    @property
    def drop(self) -> tuple[Aligned, Aligned] | None:
        """The largest fall of SQNR in the forward pass, from the worst tensor so far to the next worse one."""
        best: tuple[float, Aligned, Aligned] | None = None
        worst: Aligned | None = None
        for row in self.rows:
            if row.group not in ("forward", "output") or row.problem:
                continue
            if worst is not None and row.sqnr_db < worst.sqnr_db and not math.isinf(worst.sqnr_db):
                fall = worst.sqnr_db - row.sqnr_db
                best = best if best and best[0] >= fall else (fall, worst, row)
            if worst is None or row.sqnr_db < worst.sqnr_db:
                worst = row
        return best and best[1:]


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
