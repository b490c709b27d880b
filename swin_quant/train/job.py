"""What the training loop is given."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.models.classifier import Classifier
from swin_quant.train.batches import TrainingBatches, ValidationBatches
from swin_quant.train.recipe import Recipe


@dataclass
class Job:
    """What is trained, on what, how, and where it is written (`folder` None: nowhere).

    `snapshot` is the one to go on from; `settings` go into every one, for whoever resumes to compare. `after_step()`
    and `after_epoch(epochs done)` are for what else must follow the weights, such as ranges: what `after_epoch` returns
    is recorded with the epoch, and `histograms()` by TensorBoard.
    """

    model: Classifier
    recipe: Recipe
    batches: TrainingBatches
    validation: ValidationBatches | None
    seed: int = 0
    world: World = World()
    teacher: Classifier | None = None
    folder: Path | None = None
    snapshot: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tensorboard: bool = False
    after_step: Callable[[], None] = lambda: None
    after_epoch: Callable[[int], dict[str, float]] = lambda epoch: {}
    histograms: Callable[[], dict[str, list[float]]] = lambda: {}
