"""The changing state of a run, and its snapshots: a resumed run goes on as if it had never stopped.

A snapshot is written whole or not at all, and reading one runs no code from it. The newest `keep` stay; if the newest
is damaged, the one before is used.
"""

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from swin_quant.base.errors import SwinQuantError, first_line
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.base.reading import reading
from swin_quant.base.schema import check_record
from swin_quant.checkpoint.torch_file import read_pickled
from swin_quant.train.parallel import full_states, load_full_states

if TYPE_CHECKING:
    from timm.utils import ModelEmaV3

FORMAT = "swin-quant/snapshot/1"
Check = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of one run in their own folder: `step_<number>.pt` and `best.pt`."""

    folder: Path
    keep: int = 2

    def newest_first(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.pt"), reverse=True)

    def save(self, step: int, content: dict[str, Any]) -> None:
        """Write the snapshot of a step, then remove all but the newest `keep`."""
        _write(self.folder / f"step_{step:09d}.pt", content)
        for old in self.newest_first()[self.keep :]:
            old.unlink(missing_ok=True)

    def save_best(self, content: dict[str, Any]) -> None:
        """Write the best weights so far, {"model": weights, "epoch": their epoch}."""
        _write(self.best_file, content)

    @property
    def best_file(self) -> Path:
        return self.folder / "best.pt"

    def best(self, like: Mapping[str, Tensor], epoch: int) -> dict[str, Tensor] | None:
        """The best weights so far, with the names and shapes of `like`; None unless they are readable and from `epoch`.

        A run resumed from an older snapshot does not know a later epoch.
        """

        def check(content: dict[str, Any]) -> None:
            check_weights(content.get("model"), like)
            if content.get("epoch") != epoch:
                raise ValueError(f"it is of epoch {content.get('epoch')!s:.20}, not {epoch}")

        found = next(self._readable([self.best_file], check), None) if self.best_file.exists() else None
        return found and found["model"]

    def newest(self, check: Check = lambda content: None) -> dict[str, Any] | None:
        """The newest readable snapshot that passes `check`, with a warning for every newer one; None without snapshots.

        SwinQuantError if all snapshots are damaged.
        """
        files = self.newest_first()
        content = next(self._readable(files, check), None)
        if files and content is None:
            raise SwinQuantError(f"{self.folder}: no snapshot can be read: start again with ‹overwrite›")
        return content

    def _readable(self, files: list[Path], check: Check) -> Iterator[dict[str, Any]]:
        for file in files:
            try:
                with reading(file, "snapshot"):
                    content = read_pickled(file)
                    if not isinstance(content, dict) or content.get("format") != FORMAT:
                        raise ValueError("it is no snapshot of this version")
                    check(content)
            except SwinQuantError as error:
                log.warning("%s is damaged and is passed over (%s)", file, str(error).removeprefix(f"{file}: "))
            else:
                yield content

    def clear(self) -> None:
        """Remove every snapshot."""
        for file in [*self.newest_first(), self.best_file]:
            file.unlink(missing_ok=True)


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators as plain data and tensors."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (algorithm, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states from `random_states`."""
    random.setstate(states["python"])
    algorithm, keys, *rest = states["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])


def _write(path: Path, content: dict[str, Any]) -> None:
    ensure_writable_dir(path.parent)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    atomic_write_bytes(path, buffer.getbuffer())


def check_weights(weights: Any, like: Mapping[str, Tensor]) -> None:
    """ValueError unless `weights` are tensors with the names and shapes of `like`."""
    if not isinstance(weights, dict) or weights.keys() != like.keys():
        raise ValueError("its weights are those of another model")
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.shape != like[name].shape:
            raise ValueError(f"its {name} is that of another model")


@dataclass
class Position:
    """The position of a run: next epoch and step, the sum of this epoch's losses, and the result of every epoch."""

    epoch: int = 0
    step: int = 0
    total: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    best_acc1: float = -1.0
    best_epoch: int | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class TrainingState:
    """The parts of a run that change. `average` is None without an EMA."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    scaler: torch.amp.GradScaler
    average: "ModelEmaV3 | None"
    position: Position

    @property
    def scored(self) -> nn.Module:
        """The model that is validated and kept: the average if there is one."""
        return self.average.module if self.average else self.model

    def weights(self) -> dict[str, Any]:
        """The kept model's state_dict, unsharded."""
        return self.average.module.state_dict() if self.average else full_states(self.model, self.optimizer)[0]

    def capture(self) -> dict[str, Any]:
        """The whole state as tensors and plain data. For a sharded model all ranks must call; rank 0 gets it."""
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
        """Restore a state from `capture`. SwinQuantError if a part belongs to another run."""
        try:
            load_full_states(self.model, self.optimizer, (content["model"], content["optimizer"]))
            self.schedule.load_state_dict(content["schedule"])
            self.scaler.load_state_dict(content["scaler"])
            if self.average:
                self.average.module.load_state_dict(content["average"])
            set_random_states(content["random"])
        except Exception as error:  # torch's own methods raise anything for a damaged state
            what = first_line(error, 120)
            raise SwinQuantError(f"the snapshot cannot be resumed ({what}): ‹overwrite› starts anew") from error
        self.position = Position(**content["position"])


class _Parts(TypedDict):
    """The required parts of a snapshot; `average`, which may be None, is checked apart."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    random: dict[str, Any]
    settings: dict[str, Any]
    position: Position


def check_snapshot(content: dict[str, Any], model: nn.Module) -> None:
    """ValueError or SwinQuantError unless a snapshot has all its parts, of the right types and for this model."""
    check_record(_Parts, content, "its state", lenient=True)
    check_weights(content["model"], model.state_dict())
    try:
        json.dumps(content["settings"])
    except TypeError as error:
        raise ValueError("its settings are no plain values") from error
