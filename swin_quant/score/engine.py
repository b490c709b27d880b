"""An engine: a function from images to logits, its name, its precision, and the options that it runs with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.data.prepared import Prepared

FAKE_QUANT = "torch fake-quant"
EAGER = "torch"
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda")
MOST_THREADS = 1024  # a library starts as many threads as it is told to, until the process dies

# Images [B, 3, H, W] -> logits [B, classes], or another `quant.outputs.Output`.
Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class EngineOptions:
    """How an artifact is run; an engine refuses an option that it does not have.

    `threads`: None leaves the number to the library. `float_type`: float32, bfloat16 or float16 for all that is not
    int8, in engines that offer a choice; None is float32, so that no engine is faster by a type that nobody asked for.
    `device`: cpu, or cuda for torch's current GPU. `optimize`: whether the library may rewrite the graph. `extensions`:
    libraries with the user's own operators. `graphs`: how many graphs an engine keeps that compiles one for each size
    of batch; 2 are for full batches and the last one. UsageError for an impossible number or another device.
    """

    threads: int | None = None
    float_type: str | None = None
    device: str = "cpu"
    optimize: bool = True
    extensions: tuple[str, ...] = ()
    graphs: int = 2

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"‹threads› {self.threads}: must be at least 1, at most {MOST_THREADS}")
        if self.device not in DEVICES:
            raise UsageError(
                f"‹device› {self.device!r:.40}: must be {' or '.join(DEVICES)}; CUDA_VISIBLE_DEVICES or "
                "torch.cuda.set_device choose the GPU"
            )


@dataclass(frozen=True)
class Engine:
    """Images float32 [B, 3, H, W] to logits float [B, classes] (or an embedding [B, channels], or a list of maps).

    `precision` is one word; `policy` is set if the engine is quantized. `details`: facts for reports (versions, the
    types that layers run in). `weights`, `calibrator`: whose weights these are and how their ranges were found, as in
    a card's results. `device`: where it runs; images may come from any device, but what measures time puts them there.
    `sizes`: the batch sizes that it has programs for; it fills up a batch to the next size. Empty: it runs any size.
    `prepared` checks the images of each call; None checks nothing.
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
    prepared: Prepared | None = field(default=None, compare=False)

    def __call__(self, images: Tensor) -> Any:
        if self.prepared:
            self.prepared(images)
        if self.max_batch and len(images) > self.max_batch:
            raise UsageError(f"{self.name}: a batch of {len(images)} is above its limit of {self.max_batch} pictures")
        return self.run(images)

    @property
    def label(self) -> str:
        """Precision and policy: unique among the engines of a model, unless two policies share a name."""
        return f"{self.precision} {self.policy}" if self.policy else self.precision


def half_type(name: str, device: torch.device) -> str | None:
    """`auto` is float16 on a GPU and bfloat16 on a CPU; `none` leaves the half-precision engine out."""
    if name == "auto":
        return "float16" if device.type == "cuda" else "bfloat16"
    if name == "none":
        return None
    if name not in HALF_TYPES:
        raise UsageError(f"‹half› {name}: must be auto, none, {' or '.join(HALF_TYPES)}")
    return name
