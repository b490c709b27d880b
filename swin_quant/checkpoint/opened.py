"""A checkpoint opened once and passed on: its file, hash, weights and run card."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import compute_sha256
from swin_quant.base.reading import reading
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_card
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint.names import INSERTED, to_microsoft
from swin_quant.checkpoint.ranges import BOUNDS, SUFFIX
from swin_quant.checkpoint.read import Source, read_state_dict
from swin_quant.checkpoint.roots import RAW, find_swin, satisfies
from swin_quant.checkpoint.sources import local_file


@dataclass(frozen=True)
class Weights:
    """A state_dict under Microsoft's names and its source.

    Attributes:
        raw: the same under the file's own names.
        asked: the set that the user named, if it is yet to be found.
    """

    state: dict[str, Tensor]
    source: Source
    raw: Mapping[str, Tensor] | None = None
    asked: str = ""


def is_calibrated(state: Mapping[str, Tensor]) -> bool:
    """Whether a state_dict carries any calibrated range."""
    return any(key.endswith(SUFFIX) for key in state)


def named_weights(state: dict[str, Tensor], source: Source, weights: str = "") -> Weights:
    """The tensors of a file under Microsoft's names.

    `weights`: the set to take from a file that holds several (`roots`); a file of ours holds one.
    """
    names = [INSERTED.sub("", key) for key in state]
    raw = dict(zip(names, state.values(), strict=True)) if len({*names}) == len(names) else state
    calibrated = is_calibrated(raw)
    ours = calibrated or card_path(source.path).exists()
    asked = "" if ours or (weights != RAW and satisfies(source.weights, weights)) else weights
    found = find_swin(raw, asked, source.path)
    try:
        state, convention = to_microsoft(found.state)
    except SwinQuantError as error:
        raise SwinQuantError(f"{source.path}: {error}") from error
    name = ".".join(filter(None, (source.weights, found.root.removesuffix("."))))
    form, several = f"{source.format}, {convention} names", source.several or found.several
    source = replace(source, format=form, calibrated=calibrated, weights=name, several=several)
    return Weights(state, source, raw, "" if found.user_chose else asked)


class OpenedCheckpoint:
    """A checkpoint on its way through a verb. Nothing is read before it is asked for, and nothing twice:

        checkpoint = open_checkpoint("timm:swin_tiny_patch4_window7_224")  # a path or folder too
        cfg = config_for(checkpoint)  # geometry and preprocessing; or config_given("my.yaml", checkpoint)
        model = build_model(cfg)
        source = load_float(model, checkpoint)  # or load_calibrated
        names = read_class_names(cfg, checkpoint)
        checkpoint.card, made_before(checkpoint)  # the run card beside it; the card of the earlier work in it

    Each of these functions also takes a path, and opens it for itself alone. The weights stay in memory until `forget`,
    which `swin_quant.loading` calls when a model has them.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read: dict[str, Weights] = {}

    def __fspath__(self) -> str:
        return str(self.file)

    __str__ = __fspath__

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file, and of the parts that an index names."""
        return compute_sha256(self.file)

    @cached_property
    def card(self) -> RunCard | None:
        """The run card beside the file, if there is one; SwinQuantError if it belongs to another file."""
        return find_card(self.file, lambda: self.sha256)

    def weights(self, asked: str = "") -> Weights:
        """The weights under Microsoft's names; `asked` (ema, raw, a name) chooses among several sets in the file."""
        if asked not in self._read:
            with reading(self.file, "checkpoint"):
                found = read_state_dict(self.file, asked, lambda file: self.sha256)
                self._read[asked] = named_weights(*found, asked)
        return self._read[asked]

    def forget(self) -> None:
        """Free the weights; the next call of `weights` reads them again."""
        self._read.clear()

    @property
    def _any_weights(self) -> Weights:
        return next(iter(self._read.values()), None) or self.weights()

    @property
    def is_calibrated(self) -> bool:
        """Whether the weights hold ranges; a float checkpoint does not."""
        return self._any_weights.source.calibrated

    @property
    def has_zero_points(self) -> bool:
        """Whether both ends of the ranges are stored, as zero points need."""
        return any(key.endswith(BOUNDS) for key in self._any_weights.state)


Checkpoint: TypeAlias = str | os.PathLike[str]
"""A file, a name as in `sources`, or an `OpenedCheckpoint`, which is a path too."""


def open_checkpoint(checkpoint: Checkpoint) -> OpenedCheckpoint:
    """Open a checkpoint; return it unchanged if it is open."""
    return checkpoint if isinstance(checkpoint, OpenedCheckpoint) else OpenedCheckpoint(local_file(checkpoint))


def made_before(checkpoint: Checkpoint | None) -> RunCard | None:
    """The card of a checkpoint that was calibrated or has weights of its own; None for a plain float one.

    A model made from the checkpoint inherits this card's original and passes.
    """
    if checkpoint is None:
        return None
    checkpoint = open_checkpoint(checkpoint)
    try:
        card = checkpoint.card
    except SwinQuantError:
        if checkpoint.is_calibrated:  # QAT may have trained it
            raise
        return None  # an unrelated JSON lies beside a float checkpoint
    if card is None or card.has_own_weights:
        return card
    is_other = card.source or card.kept_passes  # random weights that were calibrated are their own original
    return card if card.calibration and is_other else None
