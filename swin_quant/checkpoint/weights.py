"""The weights of a checkpoint under the house's names, read once and handed on."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.reading import reads
from swin_quant.checkpoint.names import to_microsoft
from swin_quant.checkpoint.ranges import BOUNDS, SUFFIX
from swin_quant.checkpoint.read import Source, read_state_dict
from swin_quant.checkpoint.sources import local_file


@dataclass(frozen=True)
class Weights:
    """A state_dict under Microsoft's names, and where it came from."""

    state: dict[str, Tensor]
    source: Source


def is_calibrated(state: Mapping[str, Tensor]) -> bool:
    """Whether a state_dict carries any calibrated range."""
    return any(key.endswith(SUFFIX) for key in state)


def knows_ends(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether a calibrated checkpoint has both ends of its ranges, which zero points need."""
    return any(key.endswith(BOUNDS) for key in read_weights(checkpoint).state)


Checkpoint = str | os.PathLike[str] | Weights
"""A file, a name as in `sources`, or what `read_weights` read from it."""


def file_of(checkpoint: Checkpoint, *more: Any, **named: Any) -> str | os.PathLike[str]:
    """Where weights come from."""
    return checkpoint.source.path if isinstance(checkpoint, Weights) else checkpoint


@reads("checkpoint", file_of)
def read_weights(checkpoint: Checkpoint) -> Weights:
    """The weights of a file; SwinQuantError as in `read_state_dict`. What was read already is handed back."""
    if isinstance(checkpoint, Weights):
        return checkpoint
    state, source = read_state_dict(local_file(checkpoint))
    try:
        state, convention = to_microsoft(state)
    except SwinQuantError as error:
        raise SwinQuantError(f"{source.path}: {error}") from error
    return Weights(
        state, replace(source, format=f"{source.format}, {convention} names", calibrated=is_calibrated(state))
    )
