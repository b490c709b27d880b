"""The weights of a checkpoint file under the house's names."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.reading import reads
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint.names import to_microsoft, without_inserted
from swin_quant.checkpoint.parts import RAW, satisfies
from swin_quant.checkpoint.ranges import SUFFIX
from swin_quant.checkpoint.read import Source, read_state_dict
from swin_quant.checkpoint.roots import find_swin
from swin_quant.checkpoint.sources import local_file


@dataclass(frozen=True)
class Weights:
    """A state_dict under Microsoft's names and its source; `raw`: the same under the file's own names; `asked`: the
    set that the user named, if it is still to be found."""

    state: dict[str, Tensor]
    source: Source
    raw: Mapping[str, Tensor] | None = None
    asked: str = ""


def is_calibrated(state: Mapping[str, Tensor]) -> bool:
    """Whether a state_dict carries any calibrated range."""
    return any(key.endswith(SUFFIX) for key in state)


@reads("checkpoint")
def read_weights(
    checkpoint: str | os.PathLike[str], weights: str = "", sha256: Callable[[], str] | None = None
) -> Weights:
    """The weights of a file; SwinQuantError as in `read_state_dict`.

    `weights`: the set to take from a file that holds several (`parts`); a file of ours holds one.
    """
    raw, source = read_state_dict(local_file(checkpoint), weights, sha256)
    raw = without_inserted(raw)
    calibrated = is_calibrated(raw)
    ours = calibrated or card_path(source.path).exists()
    asked = "" if ours or (weights != RAW and satisfies(source.weights, weights)) else weights
    found = find_swin(raw, asked, source.path)
    try:
        state, convention = to_microsoft(found.state)
    except SwinQuantError as error:
        raise SwinQuantError(f"{source.path}: {error}") from error
    name = ".".join(filter(None, (source.weights, found.root.removesuffix("."))))
    source = replace(
        source,
        format=f"{source.format}, {convention} names",
        calibrated=calibrated,
        weights=name,
        several=source.several or found.several,
    )
    return Weights(state, source, raw, "" if found.user_chose else asked)
