"""A checkpoint that is opened once and handed on: its file, hash, weights, run card and class names."""

import os
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import card_of
from swin_quant.checkpoint.geometry import Geometry, geometry
from swin_quant.checkpoint.ranges import BOUNDS
from swin_quant.checkpoint.sources import local_file
from swin_quant.checkpoint.weights import Weights, read_weights


class OpenedCheckpoint:
    """A checkpoint on its way through a verb. Nothing is read before it is asked for, and nothing twice:

        checkpoint = open_checkpoint("timm:swin_tiny_patch4_window7_224")  # a path or folder too
        cfg = config_for(checkpoint)  # geometry and preprocessing; or config_given("my.yaml", checkpoint)
        model = build_model(cfg)
        source = load_float(model, checkpoint)  # or load_calibrated
        names = names_of(cfg, checkpoint)
        checkpoint.card, made_before(checkpoint)  # the run card beside it; the card of the earlier work in it

    Each of these functions also takes a path, and opens it for itself alone. The weights stay in memory until `forget`,
    which `swin_quant.loading` calls when a model has them.
    """

    def __init__(self, file: Path, weights: Weights | None = None) -> None:
        """`weights`: those that were read already, or never lay in a file."""
        self.file, self._given = file, weights
        self._read: dict[str, Weights] = {}

    def __fspath__(self) -> str:
        return str(self.file)

    __str__ = __fspath__

    @property
    def exists(self) -> bool:
        """Whether there are weights to read."""
        return self._given is not None or self.file.is_file()

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file, and of the parts that an index names."""
        return self._given.source.sha256 if self._given else sha256_of(self.file)

    @cached_property
    def card(self) -> RunCard | None:
        """The run card beside the file, if there is one; SwinQuantError if it belongs to another file."""
        return card_of(self.file, lambda: self.sha256)

    def weights(self, asked: str = "") -> Weights:
        """The weights under the house's names; `asked` (ema, raw, a name) chooses where the file holds several sets."""
        if self._given is not None:
            return self._given
        if asked not in self._read:
            self._read[asked] = read_weights(self.file, asked, lambda: self.sha256)
        return self._read[asked]

    def forget(self) -> None:
        """Free the weights; who asks again reads them again."""
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
        """Whether both ends of the ranges were stored, which zero points need."""
        return any(key.endswith(BOUNDS) for key in self._any_weights.state)

    @property
    def geometry(self) -> Geometry:
        """The configuration's keys that names and shapes determine; empty for anything but a Swin."""
        return geometry(self._any_weights.state)


Checkpoint: TypeAlias = str | os.PathLike[str]
"""A file, a name as in `sources`, or an `OpenedCheckpoint`, which is a path too."""


def open_checkpoint(checkpoint: Checkpoint) -> OpenedCheckpoint:
    """Open a checkpoint; one that is open already is handed back."""
    return checkpoint if isinstance(checkpoint, OpenedCheckpoint) else OpenedCheckpoint(local_file(checkpoint))


def made_before(checkpoint: Checkpoint | None) -> RunCard | None:
    """The card of a checkpoint that was calibrated or has weights of its own; None for a plain float one.

    Whatever is made from the checkpoint came from the same original, through the same passes.
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
