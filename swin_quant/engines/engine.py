"""What an engine is, and those that torch itself provides: the float model, its half form, the fake-quantized one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.data.prepared import Prepared
from swin_quant.engines.carry import Run

FAKE_QUANT = "torch fake-quant"
EAGER = "torch"
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
