"""Everything that changes while a run goes on, in one place, so that a snapshot can hold all of it."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from swin_quant.compat import import_timm
from swin_quant.train.snapshot import random_states, set_random_states


@dataclass
class Position:
    """How far a run is: the epoch and step to do next, what this epoch's losses add up to, and every epoch's result."""

    epoch: int = 0
    step: int = 0
    total: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    best_acc1: float = -1.0
    best_epoch: int | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class State:
    """The parts of a run that have a state of their own. `average` is None where no EMA is kept."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    scaler: torch.amp.GradScaler
    average: nn.Module | None
    position: Position

    @property
    def scored(self) -> nn.Module:
        """The model that is validated and kept: the average where there is one."""
        return self.average.module if self.average else self.model

    def capture(self) -> dict[str, Any]:
        """All of it as tensors and plain data."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.module.state_dict() if self.average else None,
            "position": asdict(self.position),
            "random": random_states(),
        }

    def restore(self, content: dict[str, Any]) -> None:
        """Become what `capture` gave."""
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        self.scaler.load_state_dict(content["scaler"])
        if self.average:
            self.average.module.load_state_dict(content["average"])
        self.position = Position(**content["position"])
        set_random_states(content["random"])


def make_average(model: nn.Module, decay: float) -> nn.Module | None:
    """timm's moving average of the weights, in float32, its decay rising to `decay` as steps go by; None if it is 0."""
    if not decay:
        return None
    import_timm()
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=decay, use_warmup=True, dtype=torch.float32)
