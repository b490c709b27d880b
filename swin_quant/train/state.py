"""The state of a run that changes with every step, in one place for snapshots."""

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.schema import check_record
from swin_quant.train.parallel import full_states, load_full_states
from swin_quant.train.snapshot import check_weights, random_states, set_random_states

if TYPE_CHECKING:
    from timm.utils import ModelEmaV3


@dataclass
class Position:
    """The position of a run: the next epoch and step, the sum of this epoch's losses, and the result of every epoch."""

    epoch: int = 0
    step: int = 0
    total: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    best_acc1: float = -1.0
    best_epoch: int | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)

    def finish_step(self, loss: float, seconds: float) -> None:
        self.step, self.total = self.step + 1, self.total + 1
        self.loss_sum, self.seconds = self.loss_sum + loss, self.seconds + seconds

    def finish_epoch(self, result: dict[str, float]) -> None:
        """Keep an epoch's result and go to the next epoch."""
        self.epoch += 1
        self.epochs.append({"epoch": self.epoch, "total": self.total, **result, "seconds": self.seconds})
        self.step, self.loss_sum, self.seconds = 0, 0.0, 0.0

    def exhausted(self, patience: int | None) -> bool:
        """Whether validation has not improved for `patience` epochs."""
        return patience is not None and self.best_epoch is not None and self.epoch - self.best_epoch >= patience

    def summary(self, epochs: int) -> str:
        """The last epoch in one line."""
        row = self.epochs[-1]
        scored = f", val top-1 {row['acc1']:.2f} %, loss {row['val_loss']:.4f}" if "acc1" in row else ""
        best = f" (best {self.best_acc1:.2f} in epoch {self.best_epoch})" if self.best_epoch else ""
        return f"epoch {self.epoch}/{epochs}: loss {row['train_loss']:.4f}{scored}{best}, {row['seconds']:.0f} s"


@dataclass
class TrainingState:
    """The parts of a run that have a state. `average` is None without an EMA."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    scaler: torch.amp.GradScaler
    average: "ModelEmaV3 | None"
    position: Position

    @property
    def scored(self) -> nn.Module:
        """The model that is validated and kept: the average, if there is one."""
        return self.average.module if self.average else self.model

    def weights(self) -> dict[str, Any]:
        """The state_dict of the kept model, in one piece."""
        return self.average.module.state_dict() if self.average else full_states(self.model, self.optimizer)[0]

    def capture(self) -> dict[str, Any]:
        """The whole state as tensors and plain data; for a sharded model all ranks call, and rank 0 receives it."""
        model, optimizer = full_states(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.module.state_dict() if self.average else None,
            "position": asdict(self.position),
            "random": random_states(),
        }

    def restore(self, content: dict[str, Any]) -> None:
        """Restore a state that `capture` returned. SwinQuantError if a part belongs to another run."""
        try:
            load_full_states(self.model, self.optimizer, (content["model"], content["optimizer"]))
            self.schedule.load_state_dict(content["schedule"])
            self.scaler.load_state_dict(content["scaler"])
            if self.average:
                self.average.module.load_state_dict(content["average"])
            set_random_states(content["random"])
        except Exception as error:  # torch's own methods raise anything for a damaged state
            what = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SwinQuantError(f"the snapshot cannot be resumed ({what:.120}): ‹overwrite› starts anew") from error
        self.position = Position(**content["position"])


class _Parts(TypedDict):
    """The required parts of a snapshot; `average`, which may be None, is beside them."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    random: dict[str, Any]
    settings: dict[str, Any]
    position: Position


def check_snapshot(content: dict[str, Any], model: nn.Module) -> None:
    """ValueError or SwinQuantError unless a snapshot has all its parts, with the right types and for this model."""
    check_record(_Parts, content, "its state", unknown=[])
    check_weights(content["model"], model.state_dict())
    try:
        json.dumps(content["settings"])
    except TypeError as error:
        raise ValueError("its settings are no plain values") from error


def make_average(model: nn.Module, decay: float) -> "ModelEmaV3 | None":
    """timm's moving average of the weights, in float32, its decay rising to `decay` as steps go by; None if it is 0."""
    if not decay:
        return None
    import_timm()
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=decay, use_warmup=True, dtype=torch.float32)
