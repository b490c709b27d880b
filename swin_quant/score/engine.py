"""An engine: a function from images to logits, its name and its precision; its latency."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.cpu import BFLOAT16_FEATURES, features
from swin_quant.base.errors import UsageError
from swin_quant.data.prepared import Prepared
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.outputs import joined
from swin_quant.quant.policy import Policy, apply_settings, enabled_nodes, quantizing, settings_for, told_apart
from swin_quant.quant.quantizer import Role, Setting
from swin_quant.quant.watch import eval_mode

FAKE_QUANT = "torch fake-quant"
EAGER = "torch"
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# Images [B, 3, H, W] -> logits [B, classes], or another `quant.outputs.Output`.
Run = Callable[[Tensor], Any]


@dataclass(frozen=True, repr=False)
class Engine:
    """Images float32 [B, 3, H, W] to logits float [B, classes] (or an embedding [B, channels], or a list of maps).

    `precision` is one word; `policy` is set if the engine is quantized. `details`: facts for reports (versions, the
    types that layers run in). `weights`, `calibrator`: whose weights these are, and the method that found their ranges,
    as in a card's results. `device`: where it runs; images may come from any device, but code that measures time puts
    them there. `sizes`: the batch sizes that it has programs for; it fills up a batch to the next size. Empty: it runs
    any size. `run_open` is `run` of a file whose shapes are left open, as other programs load it; None where it is not
    known. `prepared` makes its input of whatever it is called with, and knows what that was (`took`); None: it takes
    tensors, unchecked.
    """

    name: str
    precision: str
    policy: str | None
    run: Run
    max_batch: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    policy_sha256: str | None = None
    weights: str | None = None
    calibrator: str | None = None
    device: str = "cpu"
    sizes: tuple[int, ...] = ()
    run_open: Run | None = field(default=None, compare=False)
    prepared: Prepared | None = field(default=None, compare=False)

    def __call__(self, images: Any) -> Any:
        """The outputs for float tensors [B, 3, H, W], preprocessed, or for pictures: files, folders, PIL's, uint8
        [B, H, W, 3] or a list of one of these, which are preprocessed here. UsageError, with the right call, for
        anything else."""
        if self.prepared is None:
            return self._within_limit(images)
        return joined([self._within_limit(part) for part in self.prepared.batches(images, self.max_batch)])

    def _within_limit(self, images: Tensor) -> Any:
        if self.max_batch and len(images) > self.max_batch:
            raise UsageError(f"{self.name}: a batch of {len(images)} is above its limit of {self.max_batch} pictures")
        return self.run(images)

    @property
    def took(self) -> str:
        """The input of the latest call and its preparation, in words."""
        return self.prepared.took if self.prepared else ""

    @property
    def facts(self) -> dict[str, str | None]:
        """The facts for `repr` and for a notebook, in words."""
        limit = f", at most {self.max_batch} at a time" if self.max_batch else ""
        return {
            "engine": f"{self.name} on {self.device}",
            "precision": self.precision,
            "policy": self.policy,
            "takes": f"float [B, 3, H, W], preprocessed, or pictures{limit}",
            "took": self.took or None,
        }

    def __repr__(self) -> str:
        return ", ".join(f"{key} {text}" for key, text in self.facts.items() if text)

    @property
    def label(self) -> str:
        """Precision and policy: unique among the engines of a model, unless two policies share a name."""
        return f"{self.precision} {self.policy}" if self.policy else self.precision


def is_float(precision: str) -> bool:
    """Whether an engine of this precision quantizes nothing."""
    return precision == "float32" or precision in HALF_TYPES


def half_type(name: str, device: torch.device) -> str | None:
    """`auto` is float16 on a GPU, and bfloat16 on a CPU that computes in it: others take several times float32's time.
    `none` leaves the half-precision engine out.
    """
    if name == "auto":
        return "float16" if device.type == "cuda" else "bfloat16" if features(BFLOAT16_FEATURES) else None
    if name == "none":
        return None
    if name not in HALF_TYPES:
        raise UsageError(f"‹half› {name}: must be auto, none, {' or '.join(HALF_TYPES)}")
    return name


def torch_engines(
    model: nn.Module, device: torch.device, half: str | None, policies: Sequence[Policy] = ()
) -> dict[str, Engine]:
    """Engines by label: float32 first, then `half` unless None, then one for each policy that enables a node.

    Half precision is autocast: matmuls in half, residual stream, LayerNorm and softmax in float32. Raises
    SwinQuantError with the names of enabled nodes that have no range, before any picture is read.
    """

    def run_with(settings: Mapping[str, Setting] | None = None, half: torch.dtype | None = None) -> Run:
        def run(images: Tensor) -> Tensor:
            # A model in evaluation mode is not walked, which would count as the network's time
            evaluating = eval_mode(model) if model.training else nullcontext()
            autocast = torch.autocast(device.type, half) if half else nullcontext()
            with evaluating, autocast, _quantizing(model, settings) if settings else nullcontext():
                return model(images)

        return run

    engines = [Engine(EAGER, "float32", None, run_with())]
    if half:
        engines.append(Engine(EAGER, half, None, run_with(half=HALF_TYPES[half])))
    for policy in policies:
        settings = settings_for(model, policy)
        with _quantizing(model, settings):
            if enabled_nodes(model):
                precision, run = get_precision(model), run_with(settings)
                engines.append(Engine(FAKE_QUANT, precision, policy.name, run, policy_sha256=policy.sha256))
    names = told_apart((engine.policy, engine.policy_sha256) for engine in engines if engine.policy)
    shown = (names[engine.policy, engine.policy_sha256] if engine.policy else None for engine in engines)
    labels = [replace(engine, policy=policy).label for engine, policy in zip(engines, shown, strict=True)]
    return {label: replace(engine, device=str(device)) for label, engine in zip(labels, engines, strict=True)}


def engine_under(model: nn.Module, device: torch.device, policies: Sequence[Policy]) -> Engine:
    """The model quantized under the last policy, or in float where none enables a node."""
    return list(torch_engines(model, device, None, policies).values())[-1]


@contextmanager
def _quantizing(model: nn.Module, settings: Mapping[str, Setting]) -> Iterator[None]:
    """Inside, the nodes that `settings` enable quantize; afterwards every node is off."""
    apply_settings(model, settings)
    with quantizing(model):
        yield


def get_precision(model: nn.Module) -> str:
    """`int8` or `fp8` if every enabled node is, `W4A8` by the bits of weights and activations, else `mixed`.

    16 stands for what is not quantized, as in `W4A16`: engines run it in a half type or in float32.
    """
    nodes = enabled_nodes(model).values()
    formats = {node.setting.format for node in nodes}
    if formats == {FP8}:
        return FP8
    weights = {node.setting.bits for node in nodes if node.role is Role.GEMM_WEIGHT}
    activations = {node.setting.bits for node in nodes if node.role is not Role.GEMM_WEIGHT}
    if max(len(formats), len(weights), len(activations)) > 1:
        return "mixed"
    if weights | activations == {8}:
        return "int8"
    return f"W{min(weights, default=16)}A{min(activations, default=16)}"


def time_calls(engine: Engine, batch: int, shape: Sequence[int], seconds: float) -> list[float]:
    """Milliseconds of each call on `batch` seeded inputs, for `seconds` at least, after one untimed call."""
    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(engine.device)
    with torch.inference_mode():
        engine(images)
        taken: list[float] = []
        while not taken or sum(taken) < 1000 * seconds:
            taken.append(milliseconds(engine, images))
    return taken


def now(device: torch.device) -> float:
    """The time in seconds when all work that a device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def milliseconds(engine: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """The time of one call on `images` [B, 3, H, W], on the engine's device.

    On a GPU it is the time between two events of the stream, before the first kernel and after the last: a CPU clock
    would stop when the work is queued, not when it is done.
    """
    if not images.is_cuda:
        start = time.perf_counter()
        engine(images)
        return 1000 * (time.perf_counter() - start)
    with torch.cuda.device(images.device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # otherwise work queued before would count
        first.record()
        engine(images)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


def throughput(
    engine: Callable[[Tensor], Tensor], images: Tensor, warm_up: int = 50, runs: int = 30, seconds: float = 60.0
) -> float:
    """Images/s of `engine` on `images` [B, 3, H, W]: FasterTransformer's 50 + 30 runs (docs/reference, section 2.5).

    The warm-up takes at most half of `seconds`, the timed runs the other half; each has one run at least.
    """

    def repeat(times: int) -> tuple[int, float]:
        start, done = now(images.device), 0
        while done < times and (done == 0 or time.perf_counter() - start <= seconds / 2):
            engine(images)
            done += 1
        return done, now(images.device) - start

    with torch.inference_mode():
        repeat(warm_up)
        done, elapsed = repeat(runs)
    return done * len(images) / elapsed
