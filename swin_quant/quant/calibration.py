"""Calibration (PTQ): observe the float values of every node, then search each node's range.

All nodes are observed, whatever the policy: the policy decides later which are on. Nothing is quantized meanwhile, so
ranges are the float model's. On a CPU they are bit-identical for any batch size (`Observation`).
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log, track
from swin_quant.quant import BY_BITS, CALIBRATORS, DEFAULT_PERCENTILE
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.fold import fold
from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.observers import ActivationObserver, NonFiniteError, PictureCount
from swin_quant.quant.outputs import rows
from swin_quant.quant.policy import dequantize, enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role, State, named_nodes
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.ranges import Range, search
from swin_quant.quant.statistics import Statistics
from swin_quant.quant.watch import eval_mode, watching

VALUES_PER_PICTURE = 16384
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Method:
    """The range method `name`; None: the default for a node's bits.

    `exact` counts all values, not `VALUES_PER_PICTURE` a picture and node. UsageError for a wrong name or percentile.
    """

    name: str | None = None
    percentile: float = DEFAULT_PERCENTILE
    exact: bool = False

    def __post_init__(self) -> None:
        if self.name not in (None, *CALIBRATORS):
            raise UsageError(f"‹calibrator› {self.name}: must be one of {', '.join(CALIBRATORS)}")
        if not 0 < self.percentile <= 100:
            raise UsageError(f"‹percentile› {self.percentile}: must be above 0 and at most 100")

    @classmethod
    def choose(cls, name: str | None, percentile: float | None, exact: bool = False) -> "Method":
        """The method by name; a percentile alone names it. UsageError for a percentile of another method."""
        if percentile is None:
            return cls(name, exact=exact)
        if name not in (None, "percentile"):
            raise UsageError(f"‹percentile› {percentile}: is for ‹calibrator› percentile, not {name}: give one of them")
        return cls("percentile", percentile, exact)

    def for_bits(self, bits: int) -> str:
        """The method for nodes with this many bits."""
        return self.name or BY_BITS[max(least for least in BY_BITS if bits >= least)]


@dataclass
class Calibration:
    """The observations of a model's nodes. `dead`: nodes that saw only zeros.

    `largest` magnitude and `ends`, low <= 0 <= high, of every activation node; no ends if signs were not kept.
    """

    pictures: int
    statistics: dict[str, Statistics]
    largest: dict[str, float]
    dead: list[str] = field(default_factory=list)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def beyond_half(self) -> list[str]:
        """Nodes with values that overflow float16, and a residual add's stream if its sum, which has no node, may."""
        found = []
        for name, largest in self.largest.items():
            branch = name.replace("_residual_input", "_local_input")
            if largest + (self.largest.get(branch, 0.0) if branch != name else 0.0) > LARGEST_HALF:
                found.append(name)
        return found


def calibrate(model: nn.Module, batches: Iterable[Tensor], method: Method = Method()) -> Calibration:
    """`observe`, then `set_ranges`: give every node of `model` its range from `batches`."""
    calibration = observe(model, batches, method)
    set_ranges(model, calibration, method)
    return calibration


def observe(model: nn.Module, batches: Iterable[Tensor], method: Method = Method()) -> Calibration:
    """The statistics of every activation node over `batches` of images [B, 3, H, W]; see `observing`."""
    with observing(model, method) as observation:
        for images in batches:
            observation.show(images)
    return observation.calibration()


class Observation:
    """A float model and the observers of its activation nodes, by name.

    On a CPU the nodes see the same bits of a picture in any batch, and with any number of threads: each part of a batch
    runs on one thread, and parts run side by side. Pictures run one by one in sizes of which the first or the last
    picture differs when it runs alone.
    """

    def __init__(self, model: nn.Module, nodes: Mapping[str, Quantizer], method: Method) -> None:
        parameter = next(model.parameters())
        self.model, self.nodes, self.pictures = model, list(nodes.values()), 0
        limit, counts = None if method.exact else VALUES_PER_PICTURE, method.name != "max"
        self._count = PictureCount()
        observed = {name: ActivationObserver(name, parameter.device, counts, limit, self._count) for name in nodes}
        self.observers = observed
        self._holds: dict[tuple[int, ...], bool] = {}  # by shape of the part
        sharded = hasattr(parameter, "full_tensor")  # a DTensor; importing the class takes a second
        # Single pictures are too slow for a GPU, and all ranks of a sharded model must run equally often.
        self._is_tried = parameter.device.type == "cpu" and not sharded

    @torch.inference_mode()
    def show(self, images: Tensor) -> Tensor:
        """Logits [B, classes], or other `rows`, of a batch [B, 3, H, W] that every node observes.

        SwinQuantError for NaN or infinity in weights or activations, naming the first module.
        """
        self.pictures += len(images)
        try:
            return self._run(images)
        except NonFiniteError as error:
            raise SwinQuantError(f"{first_non_finite(self.model, images)} (noticed at: {error})") from error

    @torch.inference_mode()  # which is a thread's own
    def _forward(self, images: Tensor) -> Tensor:
        self._count.pictures = len(images)
        logits = rows(self.model(images))
        if not logits.isfinite().all():
            raise NonFiniteError("the model's output")
        return logits

    def _run(self, images: Tensor) -> Tensor:
        if not self._is_tried or not len(images):
            return self._forward(images)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads) as pool:  # its threads have one of torch's each
                parts = images.tensor_split(min(threads, len(images)))
                pieces = [one for part in parts for one in ((part,) if self._is_alone(part, pool) else part.split(1))]
                return torch.cat(list(pool.map(self._forward, pieces)))
        finally:
            torch.set_num_threads(threads)

    def _is_alone(self, images: Tensor, pool: ThreadPoolExecutor) -> bool:
        """Whether the nodes see the first and the last picture as when these run alone."""
        shape, size = tuple(images.shape), len(images)
        if size > 1 and shape not in self._holds:
            together, first, last = self._hashed((images, images[:1], images[-1:]), pool)
            holds = torch.equal(together, torch.stack([first[:, 0], last[:, 1]], 1))
            if not holds and all(self._holds.values()):
                log.debug("calibrating one picture at a time: on this CPU the last bits depend on the batch")
            self._holds[shape] = holds
        return size == 1 or self._holds[shape]

    def _hashed(self, batches: Sequence[Tensor], pool: ThreadPoolExecutor) -> list[Tensor]:
        """For each batch, int32 [calls, 2]: a hash of the bits that each node sees of its first and last picture.
        Nothing is observed."""
        own = threading.local()
        observers = [node.observer for node in self.nodes]

        def see(x: Tensor) -> None:
            bits = x.detach().reshape(own.pictures, -1)[[0, -1]].float().view(torch.int32)
            # Squares, so that errors up and down do not cancel; modulo 2**32, which makes the sum four times as fast.
            own.hashes.append((bits * bits).sum(1, dtype=torch.int32))

        def hashed(images: Tensor) -> Tensor:
            own.pictures, own.hashes = len(images), []
            self._forward(images)
            return torch.stack(own.hashes)

        for node in self.nodes:
            node.observer = see
        try:
            return list(pool.map(hashed, batches))
        finally:
            for node, observer in zip(self.nodes, observers, strict=True):
                node.observer = observer

    def calibration(self) -> Calibration:
        """The result. SwinQuantError if there was no picture."""
        if self.pictures == 0:
            raise SwinQuantError("calibration saw no picture: check ‹data_path›")
        seen = self.observers.items()
        return Calibration(
            self.pictures,
            statistics={name: one.statistics() for name, one in seen if one.histograms},
            largest={name: one.largest for name, one in seen},
            ends={name: (one.lowest, one.highest) for name, one in seen},
        )


@contextmanager
def observing(model: nn.Module, method: Method = Method()) -> Iterator[Observation]:
    """Inside the context, every activation node of the float model observes the pictures.

    Foldable norms are folded first; afterwards every node is off. SwinQuantError for NaN or infinity in the weights.
    """
    _check_method(model, method)
    fold(model)
    check_weights(model)
    nodes = named_nodes(model)
    activations = {name: node for name, node in nodes.items() if node.role is not Role.GEMM_WEIGHT}
    observation = Observation(model, activations, method)
    dequantize(model)
    try:
        for name, node in activations.items():
            node.state, node.observer = State.CALIBRATE, observation.observers[name]
        with eval_mode(model):
            yield observation
    finally:
        for node in nodes.values():
            node.state, node.observer = State.OFF, None


def _check_method(model: nn.Module, method: Method) -> None:
    """UsageError for a method that does not take float8."""
    float8 = [name for name, node in enabled_nodes(model).items() if node.setting.format == FP8]
    if float8 and method.name and RANGE_METHODS[method.name].even_steps:
        steps = f"is for grids of equal steps, and {listed(float8, 2)} are in float8"
        raise UsageError(f"‹calibrator› {method.name}: {steps}: choose max or mse")


def set_ranges(model: nn.Module, calibration: Calibration, method: Method) -> None:
    """Search the range of every node, and list dead nodes in `calibration`. It runs no model and may be called again.

    Weights always take their maximum (docs/reference, section 1.6).
    """
    _check_method(model, method)
    device = next(model.parameters()).device
    ranges = search_ranges(model, calibration, method)
    ranges |= {name: Range(layer.weight.detach().abs().max().item()) for name, layer in weighted_layers(model).items()}
    calibration.dead = [name for name, found in ranges.items() if found.is_dead]
    for name, node in named_nodes(model).items():
        ranges[name].give(node, device)


def search_ranges(
    model: nn.Module, calibration: Calibration, method: Method, names: Collection[str] | None = None
) -> dict[str, Range]:
    """The ranges of all activation nodes, or of the nodes in `names`; no node is changed."""
    if method.name != "max" and len(calibration.statistics) < len(calibration.largest):
        which = f"calibrator {method.name}" if method.name else "the default calibrator"
        raise UsageError(f"{which} needs histograms, and max was observed: observe again")
    wanted = calibration.largest if names is None else names
    nodes, found = named_nodes(model), {}
    for name in track(wanted, "searching ranges", len(wanted), "nodes"):
        chosen = method.for_bits(nodes[name].setting.bits)
        if chosen == "max":
            found[name] = Range(calibration.largest[name], calibration.ends.get(name))
        else:
            found[name] = search(chosen, calibration.statistics[name], nodes[name], method.percentile)
    return found


def check_weights(model: nn.Module) -> None:
    """SwinQuantError naming the first parameter that holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        if values.numel() and not torch.stack(torch.aminmax(values)).isfinite().all():
            raise SwinQuantError(f"weight {name} holds NaN or infinity: the checkpoint is damaged")


def first_non_finite(model: nn.Module, images: Tensor) -> str:
    """Run again with nodes off, which they stay, and name the first module whose output is not finite."""
    if not images.isfinite().all():
        return "the input pictures hold NaN or infinity: check the preprocessing (mean, std)"
    found: list[str] = []

    def check(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if not rows(output).isfinite().all():
            found.append(name)

    dequantize(model)
    with watching({name: module for name, module in model.named_modules() if name}, check):
        model(images)
    first = found[0] if found else "an attention matmul"
    return f"module {first} is the first whose output holds NaN or infinity: the weights overflow on these pictures"
