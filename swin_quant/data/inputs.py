"""Several inputs by name, packed: those of one example lie in one row of float32, so that all code between the user and
the network handles one tensor [B, N]."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.base.errors import UsageError, listed
from swin_quant.base.schema import plain
from swin_quant.cards.records import InputRecord, TypeName

TYPES: dict[TypeName, torch.dtype] = {
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_LARGEST = 1 << 24  # float32 holds every whole number up to here


@dataclass(frozen=True)
class Input:
    """One input: its shape without the batch, and its type, one of `TYPES`.

    `example`: the values that stand in for a missing input of whole numbers: [] for zeros, one for all, or each.
    """

    name: str
    shape: tuple[int, ...]
    type: TypeName
    example: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.type == "float32"

    def fault(self, given: Tensor) -> str:
        """Why `given` cannot be this input, or empty."""
        if tuple(given.shape[1:]) != self.shape or given.dim() == 0 or given.is_floating_point() != self.is_float:
            wanted = ", ".join(map(str, ("B", *self.shape)))
            return f"{self.name} is {said(given)}: must be {self.type} [{wanted}]"
        if not self.is_float and given.numel() and (largest := int(given.long().abs().max())) > _LARGEST:
            return f"{self.name} holds {largest}: the largest is {_LARGEST}"
        return ""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a network, in order."""

    parts: tuple[Input, ...]

    @classmethod
    def from_examples(cls, examples: Mapping[str, Any]) -> "Inputs":
        """The inputs that `examples` [B, ...] describe. UsageError for an example that no network can take."""
        found = []
        for name, given in examples.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise UsageError(f"input {name!r:.60}: must be the name of an argument")
            if not isinstance(given, Tensor) or given.dim() == 0 or given.dtype not in _NAMES or not len(given):
                kinds = " or ".join(TYPES)
                raise UsageError(f"input {name} is {said(given)}: give an example of one or more: {kinds} [B, ...]")
            values = given[0].flatten().tolist() if not given.is_floating_point() else []
            example = values[:1] if len(set(values)) == 1 else values
            found.append(Input(name, tuple(given.shape[1:]), _NAMES[given.dtype], tuple(map(int, example))))
        if not found:
            raise UsageError("no inputs: give an example of each by its name")
        inputs = cls(tuple(found))
        inputs.pack(examples)  # checks the values
        return inputs

    @classmethod
    def from_records(cls, records: Iterable[InputRecord]) -> "Inputs":
        """The inputs in a run card, which `records` wrote."""
        found = [Input(one["name"], tuple(one["shape"]), one["type"], tuple(one["example"])) for one in records]
        return cls(tuple(found))

    def records(self) -> list[InputRecord]:
        """The inputs as a run card keeps them."""
        return [plain(asdict(one)) for one in self.parts]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.parts]

    @property
    def shape(self) -> tuple[int]:
        """The shape of a packed example."""
        return (sum(one.size for one in self.parts),)

    def pack(self, given: Any) -> Tensor:
        """Tensors or arrays [B, ...] by name as float32 [B, N]; packed ones as they are. UsageError for one that is
        missing or does not fit."""
        if isinstance(given, Tensor) and tuple(given.shape[1:]) == self.shape and given.dtype is torch.float32:
            return given
        if not isinstance(given, Mapping):
            raise UsageError(f"inputs are {said(given)}: give a mapping of {listed(self.names, 8)}")
        if missing := [name for name in self.names if name not in given]:
            raise UsageError(f"inputs lack {listed(missing, 8)}: give {listed(self.names, 8)}")
        if unknown := [str(name) for name in given if name not in self.names]:
            raise UsageError(f"no input {listed(unknown, 8)}: give {listed(self.names, 8)} alone")
        tensors = [_tensor(one, given[one.name]) for one in self.parts]
        if faults := [text for one, tensor in zip(self.parts, tensors, strict=True) if (text := one.fault(tensor))]:
            raise UsageError(f"input {faults[0]}")
        if len({len(one) for one in tensors}) > 1:
            counts = ", ".join(f"{name} {len(one)}" for name, one in zip(self.names, tensors, strict=True))
            raise UsageError(f"inputs are of several batch sizes: {counts}")
        return torch.cat([one.reshape(len(one), -1).float() for one in tensors], 1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """The inputs by name in [B, N], each in its shape and type."""
        columns = packed.split([one.size for one in self.parts], 1)
        return {
            one.name: part.reshape(len(packed), *one.shape).to(TYPES[one.type])
            for one, part in zip(self.parts, columns, strict=True)
        }

    def noise(self, count: int) -> Tensor:
        """Packed inputs: seeded normal noise for floats, the examples for whole numbers."""
        seeded = torch.Generator().manual_seed(0)
        columns = [
            torch.randn(count, one.size, generator=seeded)
            if one.is_float
            else torch.tensor(one.example or (0,)).float().expand(count, one.size)
            for one in self.parts
        ]
        return torch.cat(columns, 1)

    @property
    def kinds(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Names, shapes and types."""
        return [(one.name, one.shape, one.type) for one in self.parts]


def _tensor(one: Input, given: Any) -> Tensor:
    try:
        return given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"input {one.name} is {said(given)}: give a tensor") from None


def said(given: Any) -> str:
    """The type and shape of an array or tensor; of anything else its class."""
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"{str(given.dtype).removeprefix('torch.')} {list(shape)}"
