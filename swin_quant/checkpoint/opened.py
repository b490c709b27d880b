"""A checkpoint opened once and passed on: its file, hash, run card, and weights, read without running code in them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError, first_line, listed
from swin_quant.base.files import compute_sha256, list_parts, open_plain, require_file, resolve_path
from swin_quant.base.pickled import Opaque
from swin_quant.base.reading import reading, reads
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_card
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import SourceRecord
from swin_quant.checkpoint.mindspore import read_ckpt
from swin_quant.checkpoint.names import INSERTED, to_microsoft
from swin_quant.checkpoint.ranges import BOUNDS, SUFFIX
from swin_quant.checkpoint.roots import choose_set, find_swin, is_tensor, satisfies, sets_in
from swin_quant.checkpoint.sources import local_file
from swin_quant.checkpoint.torch_file import MAX_DIMENSIONS, TYPES, read_pickled

_SNIFFED = 512  # bytes
_LONGEST_KEY = 512  # characters
_MAX_HEADER = 4 << 20  # bytes of names and shapes in a safetensors file
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"

# Files that a failed download leaves under a checkpoint's name: first bytes in lower case -> what it is, the remedy.
_NOT_WEIGHTS = (
    (rb"\s*<(!doctype|html|head|\?xml)", "is a web page: open its address in a browser and download the file itself"),
    (rb"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull` to get the file it stands for"),
    (rb"[\t\r\n\x20-\x7e]+\Z", "is a text file, not a checkpoint"),
)

VERSIONS = "versions"  # in a source's notes: {module: its version}, of a state_dict that tells them
_NOTES = ("config", "args", "arch")  # keys by which training scripts name the model, beside the weights


@dataclass(frozen=True)
class Source:
    """The origin of weights.

    Attributes:
        format: the container, and the convention of names.
        notes: plain data beside the tensors, unchecked.
        weights: the name of the set of weights that was read, of `several` in the file.
    """

    path: Path
    sha256: str
    format: str
    calibrated: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    weights: str = ""
    several: bool = False

    def record(self) -> SourceRecord:
        """The `source` section of a run card."""
        path = str(resolve_path(self.path))
        record: SourceRecord = {"file": self.path.name, "sha256": self.sha256, "format": self.format, "path": path}
        return record | {"weights": self.weights} if self.several else record


@dataclass(frozen=True)
class Weights:
    """A state_dict under Microsoft's names, and its source; `raw`: under its own; `asked`: the set that is wanted."""

    state: dict[str, Tensor]
    source: Source
    raw: Mapping[str, Tensor] | None = None
    asked: str = ""


@reads("checkpoint")
def read_state_dict(path: "Checkpoint", weights: str = "") -> tuple[dict[str, Tensor], Source]:
    """The tensors of a .pth, .safetensors or MindSpore .ckpt file, by the names in it, on the CPU, in their own types.

    A .pth may be a bare state_dict or nest one, or several, beside an optimizer, an epoch, a configuration; `weights`
    chooses as in `roots`. Errors (one line each): no such file, a directory, empty, a web page or text, cut short or
    damaged (checksums included), code or foreign classes (never executed), no tensors, an entry that is not dense.
    Where `path` is an index, the tensors are those of the files that it names.
    """
    checkpoint = path if isinstance(path, OpenedCheckpoint) else OpenedCheckpoint(Path(path))
    file = checkpoint.file
    if file.is_file() and (parts := list_parts(file)):
        if absent := [part.name for part in parts if not part.is_file()]:
            missing = f"names {listed(absent, 3)}, which must lie beside it"
            raise SwinQuantError(f"{file}: {missing}: download or copy it, too")
        found: dict[str, Tensor] = {}
        for part, keys in parts.items():
            state, source = read_state_dict(part)
            if unlike := {*keys} ^ state.keys():
                raise SwinQuantError(f"{part}: holds other tensors than {file.name} says: {listed(sorted(unlike), 3)}")
            found |= state
        return found, replace(source, path=file, sha256=checkpoint.sha256)
    require_file(file, "checkpoint")
    with open_plain(file) as stream:
        head = stream.read(_SNIFFED)
    if not head:
        raise SwinQuantError(f"{file}: is empty (0 bytes): download or copy it again")
    for pattern, advice in _NOT_WEIGHTS:
        if re.match(pattern, head.lower()):
            raise SwinQuantError(f"{file}: {advice}")
    header = int.from_bytes(head[:8], "little")  # its length in a safetensors file
    content: Any
    if file.suffix == ".ckpt" and head[:1] == b"\x0a":  # MindSpore's; torch's zip files may end in .ckpt, too
        kind, content = "ckpt", read_ckpt(file)
    # The hub's cache names files by their hash: they are known by their header
    elif file.suffix == ".safetensors" or (head[8:9] == b"{" and header <= _MAX_HEADER):
        from safetensors import safe_open

        wrong = f"{file}: is cut short or not a safetensors file"
        if len(head) < 8 or header > _MAX_HEADER:
            raise SwinQuantError(f"{wrong} (its header is too large)")
        try:
            with safe_open(file, "pt") as tensors:
                kind, content = "safetensors", {key: tensors.get_tensor(key) for key in tensors.keys()}
        except Exception as error:  # SafetensorError, and torch's errors for types and shapes that it lacks
            raise SwinQuantError(f"{wrong} ({first_line(error, 160)})") from error
    elif head.startswith((_ZIP, _PICKLE)):
        kind, content = "pth", read_pickled(file)
    else:
        raise SwinQuantError(f"{file}: is not a checkpoint: torch.save did not write it: download or copy it again")
    return choose_state(content, Source(file, checkpoint.sha256, kind), weights)


def choose_state(content: Any, source: Source, weights: str = "") -> tuple[dict[str, Tensor], Source]:
    """The tensors of the set in a file's content that is the model, and `source` with its name and the notes beside."""
    path = source.path
    if not isinstance(content, Mapping):
        raise SwinQuantError(f"{path}: holds a {type(content).__name__}, not a state_dict")
    sets = sets_in(content)
    if not sets:
        keys = listed(f"{key!r:.80}" for key in content) or "none"
        raise SwinQuantError(f"{path}: holds no tensors of a model (keys: {keys}): save a state_dict")
    tensors = {name: {key: x for key, x in each.items() if isinstance(x, Tensor)} for name, each in sets.items()}
    name = choose_set(path, tensors, weights)
    state = sets[name]
    for key, value in state.items():
        if not isinstance(key, str) or not key.isprintable() or len(key) > _LONGEST_KEY:
            raise SwinQuantError(f"{path}: {key!r:.80} is not the name of a tensor")
        usual = isinstance(value, Tensor) and value.dtype in TYPES.values() and value.dim() <= MAX_DIMENSIONS
        if is_tensor(value) and not usual:
            kind = value.what if isinstance(value, Opaque) else f"a tensor of {value.dtype}, {value.dim()} dimensions"
            raise SwinQuantError(f"{path}: entry {key} is not a dense tensor of a common type but {kind:.160}")
    notes = dict(source.notes)
    for part in (content, *filter(lambda value: isinstance(value, Mapping), content.values())):  # or one level deeper
        notes |= {key: part[key] for key in _NOTES if key not in notes and isinstance(part.get(key), Mapping | str)}
        notes |= {VERSIONS: part.versions} if hasattr(part, VERSIONS) else {}
    return tensors[name], replace(source, notes=notes, weights=name, several=len(sets) > 1)


def is_calibrated(state: Mapping[str, Tensor]) -> bool:
    """Whether a state_dict carries any calibrated range."""
    return any(key.endswith(SUFFIX) for key in state)


def named_weights(state: dict[str, Tensor], source: Source, weights: str = "") -> Weights:
    """The tensors of a file under Microsoft's names.

    `weights`: the set to take from a file of several (`roots`), UsageError without it; a file of ours holds one.
    """
    names = [INSERTED.sub("", key) for key in state]
    raw = dict(zip(names, state.values(), strict=True)) if len({*names}) == len(names) else state
    calibrated = is_calibrated(raw)
    asked = "" if calibrated or card_path(source.path).exists() else weights
    if asked and not any(satisfies(f"{source.weights}.{key.rpartition('.')[0]}", asked) for key in raw):
        raise UsageError(f"{source.path}: ‹weights› {asked}: it holds no such set of weights")
    found, root, several = find_swin(raw, asked, source.path)
    try:
        state, convention = to_microsoft(found)
    except SwinQuantError as error:
        raise SwinQuantError(f"{source.path}: {error}") from error
    name = ".".join(filter(None, (source.weights, root.removesuffix("."))))
    form = f"{source.format}, {convention} names"
    source = replace(source, format=form, calibrated=calibrated, weights=name, several=source.several or several)
    return Weights(state, source, raw, asked)


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
                self._read[asked] = named_weights(*read_state_dict(self, asked), asked)
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
