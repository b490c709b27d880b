"""What an engine is, and those that torch itself provides: the float model, its half form, the fake-quantized one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.data.prepared import Prepared

DEVICES = ("cpu", "cuda")
MOST_THREADS = 1024  # libraries start as many as they are told to, until the process dies of it


@dataclass(frozen=True)
class EngineOptions:
    """How an artifact is run.

    `threads` None: the library's own choice. `float_type` (float32, bfloat16, float16) is the type of what is not int8,
    for engines that choose it themselves; None: float32, so that no engine is faster by a type that nobody asked for.
    `device`: cpu or cuda, torch's current GPU. `optimize`: whether the library may rewrite the graph. `extensions`:
    libraries with operators of the user's own, for engines that load such. `graphs`: how many an engine keeps that
    compiles one for each size of batch: 2 are that of full batches and that of the last one. UsageError for an
    impossible number or another device.
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
                f"‹device› {self.device!r:.40}: must be {' or '.join(DEVICES)}; which GPU is said by "
                "CUDA_VISIBLE_DEVICES or torch.cuda.set_device"
            )


FAKE_QUANT = "torch fake-quant"
EAGER = "torch"
Run = Callable[[Tensor], Any]
"""Images [B, 3, H, W] -> logits [B, classes], or another `quant.outputs.Output`."""

HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def half_type(name: str, device: torch.device) -> str | None:
    """`auto` is float16 on a GPU and bfloat16 on a CPU; `none` leaves the half-precision engine out."""
    if name == "auto":
        return "float16" if device.type == "cuda" else "bfloat16"
    if name == "none":
        return None
    if name not in HALF_TYPES:
        raise UsageError(f"‹half› {name}: must be auto, none, {' or '.join(HALF_TYPES)}")
    return name


@dataclass(frozen=True)
class Engine:
    """Images float32 [B, 3, H, W] to logits float [B, classes], at one precision and, if quantized, under one policy.

    Or to what else its model gives: an embedding [B, channels], a list of maps [B, C, h, w].
    `details` is what the engine knows of itself (versions, types that its layers really run in), for reports;
    `weights` is whose they are, and `calibrator` how their ranges were found, as in a card's results; `device` is where
    it runs: it takes images from anywhere, and what times it puts them there. `sizes`: the batches that it has programs
    for, each made when it is first needed; another is filled up to the next. Without, it runs any as it is.
    `prepared` looks at the images that it is called with; None: nobody does.
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
        """Unique among the engines of a model, but for policies of one name."""
        return f"{self.precision} {self.policy}" if self.policy else self.precision
