"""A network with all that belongs to it, and how it is written: checkpoint, statistics and run card."""

import copy
import hashlib
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes, compute_sha256, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, made_now
from swin_quant.cards.lineage import calibrated_again, dependents, refuse_to_replace
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CheckpointRecord, PassRecord
from swin_quant.checkpoint.ranges import is_range
from swin_quant.checkpoint.save import calibrated_bytes, save_float
from swin_quant.config import from_dict
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import list_exchanges
from swin_quant.quant.calibration import Calibration
from swin_quant.quant.outputs import joined, named
from swin_quant.quant.passes import choosing_ranges
from swin_quant.quant.passes.places import take_back
from swin_quant.quant.policy import Policy, policy_from_dict
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.statistics_file import SUFFIX, statistics_bytes
from swin_quant.quant.watch import eval_mode
from swin_quant.report.nodes import NodeRow, list_nodes
from swin_quant.score.engine import engine_under


def place_for(folder: Path, model: nn.Module, card: RunCard) -> Path:
    """The file for a calibrated model: see `choose_checkpoint_path`."""
    content = calibrated_bytes(model)

    def holds(file: Path) -> bool:
        """Whether a file has that content, calibrated under the same policy."""
        if file.stat().st_size != len(content) or file.read_bytes() != content:
            return False
        try:
            there = RunCard.read(card_path(file))
        except SwinQuantError:
            return True
        return (there.policy or {}).get("rules") == (card.policy or {}).get("rules")

    return choose_checkpoint_path(folder, card.name, card.policy, holds)


def choose_checkpoint_path(
    folder: Path, name: str, policy: Mapping[str, Any] | None, holds: Callable[[Path], bool], tell: bool = True
) -> Path:
    """The file for a calibrated checkpoint: <NAME>_calib.pth, or the file that holds the same checkpoint (`holds`).

    Another checkpoint from which something was made stays: the new name gets the policy's, and if need be a number.
    """
    usual = folder / f"{name}_calib.pth"
    own = f"{name}_calib_{re.sub('[^A-Za-z0-9.]+', '-', (policy or {}).get('name', '')).strip('-.')[:80] or 'other'}"
    numbered = (folder / f"{own}_{number}.pth" for number in count(2))
    tried = [usual, folder / f"{own}.pth"]
    tried += takewhile(Path.exists, islice(numbered, 1000))
    found = next((place for place in tried if place.is_file() and holds(place)), None)
    free = found or next((place for place in tried if not dependents(place)), folder / f"{own}_{len(tried)}.pth")
    if tell and free != usual and not found:
        needed = listed(map(str, dependents(usual)), 1)
        log.warning("%s stays, because %s was made from it: this calibration is written to %s", usual, needed, free)
    return free


def save_calibrated(
    model: nn.Module, path: Path, card: RunCard, calibration: Calibration | None = None, by_channel: bool = False
) -> RunCard:
    """Write a calibrated checkpoint, the statistics of its `calibration`, then the card, which is returned.

    UsageError if something was made of another checkpoint there.
    """
    content = calibrated_bytes(model, by_channel)
    refuse_to_replace(path, content)
    atomic_write_bytes(path, content)
    kept, counted = path.with_suffix(SUFFIX), None
    if calibration:
        counted = statistics_bytes(calibration.statistics) if calibration.statistics else None
        if card.calibration:
            record = CheckpointRecord(file=kept.name, sha256=hashlib.sha256(counted).hexdigest()) if counted else None
            card = replace(card, calibration={**card.calibration, "statistics": record})
        if counted:
            atomic_write_bytes(kept, counted)
        else:
            kept.unlink(missing_ok=True)  # an earlier calibration's, whose checkpoint is gone too
    card = replace(card, checkpoint={"file": path.name, "sha256": compute_sha256(path)})
    card.write(path.with_suffix(".json"))
    for what, file in (("calibrated checkpoint", path), ("run card", path.with_suffix(".json"))):
        log.info("%s: %s", what, file)
    if counted:
        log.info("statistics: %s", kept)
    return card


def passes_in_weights(card: RunCard | None) -> list[PassRecord]:
    """The kept passes of a card that its weights have seen, in order; other passes chose ranges alone."""
    kept = card.kept_passes if card else []
    return [one for one in kept if not (one["keeps_function"] and choosing_ranges([one]))]


class Model:
    """A network, and its run card: config, preprocessing, policy, how its ranges were found, what was measured.

    `module` is any nn.Module of our parts (QuantLinear, Quantizer), images [B, 3, H, W] -> logits [B, classes] (or what
    `load(output_kind=...)` asks for). Called, a model gives the logits of its exported form: quantized under its policy
    once it is calibrated, else float; a wrapped one of several outputs gives them by name. `module(images)` is always
    float. `took`: the kind of input of the latest call, and how it was prepared. `examples`: some of the inputs that
    calibrated a wrapped module.
    """

    examples: Tensor | None = None
    given: CfgNode | None = None  # the config that it was loaded by; its DATA names pictures

    def __init__(
        self,
        module: nn.Module,
        name: str = "model",
        preprocess: Preprocess | None = None,
        card: RunCard | None = None,
        file: Path | None = None,
    ) -> None:
        named_nodes(module)  # gives the nodes their names
        self.module = module
        self.card = card or RunCard(name, {}, preprocess.to_dict() if preprocess else {})
        self.file = file
        self._saved = weights_digest(module) if file else None
        self._original: nn.Module | None = None
        self._stood_for = self._saved  # the weights of which `_original` is the float module
        self._has_warned = False  # of what it was called with
        self.took = ""
        self.calibration: Calibration | None = None

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def card_file(self) -> Path | None:
        """The run card beside its file, if there is one."""
        beside = card_path(self.file) if self.file else None
        return beside if beside and beside.is_file() else None

    @property
    def checkpoint(self) -> Path:
        """The file that it is in. UsageError where it was not saved yet."""
        if self.file is None:
            raise UsageError(f"{self.name}: is in no file yet: `save` it first")
        return self.file

    @property
    def policy(self) -> Policy | None:
        """The policy that it was calibrated, trained or loaded under."""
        return policy_from_dict(self.card.policy, f"the run card of {self.name}") if self.card.policy else None

    @property
    def policies(self) -> list[Policy]:
        """The policy, once every node has a range; else none."""
        return [self.policy] if self.policy and self.is_calibrated else []

    @property
    def config(self) -> CfgNode:
        """UsageError for a model that was not built from one."""
        if not self.card.config:
            raise UsageError(f"{self.name}: was not built from a config, and this needs one: load it by `load`")
        return from_dict(self.card.config, f"the run card of {self.name}")

    @property
    def network(self) -> Classifier:
        """The module as one that can be exported. UsageError for a module that was neither loaded nor wrapped."""
        if not isinstance(self.module, Classifier):
            raise UsageError(f"{type(self.module).__name__}: is not a network that can be exported: give it to `wrap`")
        return self.module

    def need_calibrated(self) -> None:
        """UsageError for a float model."""
        if not self.is_calibrated:
            raise UsageError(f"{self.name}: is a float model: calibrate it first")

    @property
    def preprocess(self) -> Preprocess:
        """How a picture becomes its input. UsageError where nobody said."""
        return self.prepared.known

    @property
    def classes(self) -> int:
        """The number of classes of its logits. UsageError for a network that does not say."""
        if self.card.config:
            count: int = self.config.MODEL.NUM_CLASSES
            return count
        if isinstance(self.module, Classifier):
            return self.module.classes
        heads = [module.out_features for module in self.module.modules() if isinstance(module, nn.Linear)]
        if not heads:
            raise UsageError(f"{self.name}: does not say how many classes it has: give it to `wrap`")
        return heads[-1]

    @property
    def class_names(self) -> list[str]:
        """The names of its classes, in the order of its logits; none where nobody said them."""
        return list(self.card.class_names)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def prepared(self) -> Prepared:
        """The check of tensors that the model is called with."""
        known = Preprocess.from_dict(self.card.preprocess) if self.card.preprocess else None
        shape, inputs = (getattr(self.module, name, None) for name in ("input_shape", "inputs"))
        return Prepared(known, shape, inputs=inputs)

    @property
    def is_changed(self) -> bool:
        """Whether its weights are no longer those of its `file`; ranges do not count. False where it has none."""
        return self.file is not None and weights_digest(self.module) != self._saved

    @property
    def original(self) -> nn.Module | None:
        """The float network of its weights as they were given, before a fold or a pass; None where it is not known: it
        was not kept, or other weights were loaded or trained since."""
        is_known = self._original is not None and weights_digest(self.module) == self._stood_for
        return self._original if is_known else None

    def keep_original(self, original: nn.Module | None = None) -> bool:
        """Keep the float network that comparisons refer to: `original`, else the one that is kept if the weights are
        still its own, else a copy of the module; False for a copy of weights that are new."""
        now = weights_digest(self.module)
        is_same = now == self._stood_for
        if original is not None:
            self._original = original
        elif not is_same or (self._original is None and not self.card.has_own_weights):
            self._original = copy.deepcopy(self.module)
            if self.card.wrapped:  # whoever gives a module with these weights later gives the reference
                self.card = replace(self.card, wrapped={**self.card.wrapped, "weights": now})
        self._stood_for = now
        return is_same or original is not None

    def keep_weights(self) -> None:
        """Note that a fold or passes changed the weights, whose original stays the same."""
        self._stood_for = weights_digest(self.module)

    @property
    def is_calibrated(self) -> bool:
        """Whether every node has a range."""
        nodes = named_nodes(self.module).values()
        return bool(nodes) and all(node.amax is not None for node in nodes)

    def __call__(self, images: Any) -> Any:
        """Logits [B, classes] of images as an engine takes them: float tensors [B, 3, H, W], preprocessed, or pictures
        (files, folders, PIL's, uint8 [B, H, W, 3] or a list of one of these). UsageError for anything else."""
        prepared = replace(self.prepared, has_warned=self._has_warned)
        engine = engine_under(self.module, self.device, self.policies)
        with torch.inference_mode(), eval_mode(self.module):
            found = joined([engine(part.to(self.device)) for part in prepared.batches(images)])
        self._has_warned, self.took = prepared.has_warned, prepared.took
        return named(found, self.card.wrapped["outputs"]) if self.card.wrapped else found

    def nodes(self) -> list[NodeRow]:
        """Every place where a tensor may be quantized: its setting under the policy, its range and shape."""
        shape = getattr(self.module, "input_shape", None) or (3, *self.preprocess.sides)
        return list_nodes(self.module, (1, *shape))

    def save(self, file: str | Path, dtype: str | None = None) -> Path:
        """Write the checkpoint and its run card beside it, both whole or not at all; returns the checkpoint's path.

        A calibrated model is saved in FasterTransformer's layout (with the statistics of its calibration, which the
        report page draws, and which give QAT its PTQ baseline at other bits), any other as float. Results measured with
        the weights of its file are left out where the weights have changed since.

        For other tools .safetensors, .ckpt (MindSpore's names, of Swin and ResNet) and any file with a `dtype`
        (float32, float16, bfloat16) hold float weights alone; the card keeps how they came about.

        Raises:
            SwinQuantError: A weight does not fit into `dtype`.
            UsageError: Something was made of the file that lies there, or the format has no names for this network.
        """
        path = Path(file)
        ensure_writable_dir(path.parent)
        if self.is_changed:
            if self.is_calibrated:
                told = "%s: its weights were changed since %s, its ranges were not: calibrate again"
                log.warning(told, self.name, self.file)
            self.card = self.card.with_new_weights(source=None)
        if dtype or path.suffix == ".ckpt" or (path.suffix == ".safetensors" and self.is_calibrated):
            self._save_for_others(path, dtype or "float32")
            return path
        if self.policy and (self.calibration or self.is_calibrated):
            self.card = save_calibrated(self.module, path, self.card, self.calibration)
        else:
            if self.is_changed or path != self.file:
                refuse_to_replace(path)
            save_float(self.module, path)
            self.card = self._write_float_card(path, self.card)
        self.file, self._saved = path, weights_digest(self.module)
        return path

    def _save_for_others(self, path: Path, dtype: str) -> None:
        if dtype not in (kinds := ("float32", "float16", "bfloat16")):
            raise UsageError(f"dtype {dtype}: must be {', '.join(kinds)}")
        model = self.card.config.get("MODEL", {})
        name = model["TIMM"]["ARCHITECTURE"] if model.get("TYPE") == "timm" else model.get("TYPE", "")
        if path.suffix == ".ckpt" and not name.startswith(("swin", "resnet")):
            raise UsageError(f"{path}: MindSpore's names are known of Swin and ResNet alone: write another format")
        if self.file and card_path(path).resolve() == card_path(self.file).resolve():
            raise UsageError(f"{path}: {self.file}, which was loaded, or its run card would be lost: give another name")
        refuse_to_replace(path)
        module = copy.deepcopy(self.module)
        for exchange in list_exchanges(module):  # other tools know the names of a trained network only
            take_back(module, exchange)
        save_float(module, path, getattr(torch, dtype))
        kept, passes = self.card.calibration, passes_in_weights(self.card)
        if kept:  # without the facts on its ranges
            kept = {**kept, "passes": passes, "check": None, "statistics": None, "advice": []} if passes else None
        training = calibrated_again(self.card) if self.card.is_qat else self.card.training
        self._write_float_card(path, self.card.with_new_weights(policy=None, calibration=kept, training=training))

    @staticmethod
    def _write_float_card(path: Path, card: RunCard) -> RunCard:
        """Write the card of a float checkpoint; returns it."""
        card = replace(card, checkpoint={"file": path.name, "sha256": compute_sha256(path)}, **made_now())
        card.write(card_path(path))
        return card

    def save_in(self, folder: Path, world: World) -> None:
        """Write a model that was just calibrated, on rank 0, to the file of `choose_checkpoint_path`."""
        assert self.calibration is not None, "save_in: is for a model that was just calibrated"
        there = [ensure_writable_dir(folder)] if world.is_main else []
        (place,) = gather([str(place_for(one, self.module, self.card)) for one in there])
        self.file = Path(place)
        if world.is_main:
            self.card = save_calibrated(self.module, self.file, self.card, self.calibration)
        self._saved = weights_digest(self.module)
        gather([])  # from here on every rank finds the files

    def show(self) -> None:
        """Print the file, or the model where it is in none; a message names the next step of a calibrated one."""
        print(self.file or self)
        if self.file and self.is_calibrated:
            log.info("next: swin-quant evaluate %s ‹data_path› DIR", shlex.quote(str(self.file)))

    def to_json(self) -> dict[str, Any]:
        """The run card."""
        return self.card.to_dict()

    def __repr__(self) -> str:
        count, record = sum(parameter.numel() for parameter in self.module.parameters()), self.card.calibration
        size = f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
        said = f"{self.name}: {type(self.module).__name__}, {size} parameters"
        if self.is_calibrated:
            found = f"by {record['method']} on {record['pictures']} pictures" if record else "yes"
            said += f", calibrated {found}"
        said += f", policy {self.policy.name}" if self.policy else ""
        return f"{said} ({self.file})" if self.file else said


def weights_digest(module: nn.Module) -> str:
    """A hash of all that a module computes with but the ranges of its nodes, which calibration and policies change."""
    seen = hashlib.sha256()
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and not is_range(name):
            seen.update(name.encode())
            seen.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()
