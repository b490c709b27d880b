"""An artifact ready to run: its config and preprocessing, its engines, its checkpoint; and which of both a file is."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from yacs.config import CfgNode

from swin_quant.backends import engine_loader
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import backends, engine_named, takers, targets
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import compute_sha256, require_file
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_recorded_file
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import sha256_in
from swin_quant.config.load import from_dict, merge
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.config.sides import shortest, sides
from swin_quant.data.inputs import Inputs
from swin_quant.data.prepared import Prepared
from swin_quant.loading import ModelFile, load, load_for_scoring
from swin_quant.model import Model
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.outputs import named
from swin_quant.quant.policy import Policy, policy_from_dict
from swin_quant.quant.quantizer import named_nodes
from swin_quant.report.verdict import after_export
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

HUBS = ("timm:", "hf:")
CHECKPOINTS = (".pth", ".pt", ".safetensors", ".bin", ".ckpt")
NEEDS_MODULE = "it is of a wrapped module, which only Python builds: sq.artifact(FILE, module)"
_PARENTS = 2  # the artifact's own folder, and the one above it


@dataclass(frozen=True)
class Exported:
    """An exported artifact: its main file, and the run card beside it."""

    artifact: Artifact
    origin: Model | None = None  # the model of a wrapped module, which no file can build

    @property
    def file(self) -> Path:
        return self.artifact.file

    @property
    def card(self) -> RunCard:
        return self.artifact.card

    def load(self, engine: str | None = None, *, threads: int | None = None, float_type: str | None = None,
             device: str = "cpu", extensions: Sequence[str | Path] = ()) -> Engine:  # fmt: skip
        """The artifact on an engine (None: the one that it was made for): maps images to logits; several outputs of a
        wrapped module come by name.

        Images are float32 [B, 3, H, W], preprocessed, or pictures: files, folders, PIL's, uint8 [B, H, W, 3] or a list
        of one of these, which the run card's preprocessing prepares; `took` of the engine says which of the two.

        `device`: cpu or cuda, torch's current GPU. `extensions`: libraries with operators of your own, for OpenVINO.
        UsageError for an engine that is not installed, or does not run such artifacts.
        """
        options = EngineOptions(threads, float_type, device, extensions=tuple(map(str, extensions)))
        (loaded,) = load_engines(self.artifact, [choose_engine(self.artifact, engine)], options).values()
        if wrapped := self.card.wrapped:
            run = loaded.run
            loaded = replace(loaded, run=lambda images: named(run(images), wrapped["outputs"]))
        return loaded

    @property
    def _what(self) -> str:
        policy = f", policy {self.card.policy['name']}" if self.card.policy else ""
        return f"{self.artifact.record['precision']}{policy}"

    def show(self) -> None:
        """Print the file; messages name its policy, run card and next steps."""
        record = self.artifact.record
        log.info("%s: %s, %.1f MB", record["backend"], self._what, self.file.stat().st_size / 1e6)
        if runs := record["options"].get("runs_on"):
            log.info("runs on %s", " and ".join(f"{engine}{releases}" for engine, releases in runs.items()))
        for other in record["others"]:
            log.info("with it: %s", self.file.with_name(other["file"]))
        log.info("run card: %s", card_path(self.file))
        print(self.file)
        known = targets()
        target = known.get(str(record["options"].get("target"))) or known.get(record["backend"])
        for command in after_export(self.card, self.file, target) if target else ():
            log.info("next: %s", command)

    def to_json(self) -> dict[str, Any]:
        """The run card."""
        return self.card.to_dict()

    def __repr__(self) -> str:
        return f"{self.file}: {self.artifact.record['backend']}, {self._what}"


def artifact(file: str | Path, module: nn.Module | None = None) -> Exported:
    """An artifact that was exported before. SwinQuantError without a run card, or if one of its files was changed.

    `module`: one with the structure that was wrapped, for `evaluate` and `verify`, which compare with the checkpoint.
    """
    opened = open_artifact(file)
    if module is None:
        return Exported(opened)
    checkpoint = find_checkpoint(opened)
    if checkpoint is None:
        raise SwinQuantError(f"{file}: {no_checkpoint(opened)}")
    return Exported(opened, load(checkpoint, module))


def open_exported(given: Any, verb: str) -> Exported:
    """The artifact for a verb that takes no model. UsageError for a model or a checkpoint."""
    if isinstance(given, Exported):
        return given
    if isinstance(given, str | Path) and not is_checkpoint(str(given), "artifact"):
        return artifact(given)
    name = given if isinstance(given, str | Path) else getattr(given, "name", type(given).__name__)
    raise UsageError(f"{name}: is a model, and `{verb}` takes an artifact: export it first")


@dataclass(frozen=True)
class SubjectFiles(ModelFile):
    """A checkpoint, or artifacts, which all are scored on the same pictures.

    Args:
        files: a checkpoint, or artifacts with their run cards
        checkpoint: the checkpoint that artifacts were made from (default: looked for beside them)
    """

    files: tuple[str, ...] = ()

    def subjects(self) -> ModelFile | list[Exported]:
        """The checkpoint that is named, or the artifacts. UsageError for fields that do not fit, and for none."""
        files, checkpoint = self.files, self.checkpoint
        is_model = len(files) == 1 and is_checkpoint(files[0])
        if is_model and checkpoint:
            raise UsageError(f"{files[0]} and ‹checkpoint› {checkpoint} are both checkpoints: give one of them")
        if is_model or not files:
            if not files and not checkpoint:
                raise UsageError("no file: name a checkpoint or an artifact")
            given = {one.name: getattr(self, one.name) for one in fields(ModelFile)}
            return ModelFile(**{**given, "checkpoint": files[0] if files else checkpoint})
        plain = ModelFile(checkpoint=checkpoint, device=self.device)
        for one in fields(ModelFile):
            if getattr(self, one.name) != getattr(plain, one.name):
                raise UsageError(f"‹{one.name}› is not for artifacts: their run cards say that")
        return [Exported(open_artifact(file)) for file in dict.fromkeys(files)]


def is_checkpoint(path: str, wanted: str = "checkpoint or artifact") -> bool:
    """Whether a file is a checkpoint, not an artifact, by its run card or name. UsageError for neither (`wanted`)."""
    if path.startswith(HUBS) or os.path.isdir(path):
        return True
    require_file(path, wanted)
    card = card_path(path)
    return path.endswith(CHECKPOINTS) and not (card.is_file() and RunCard.read(card).artifact)


def open_model(given: Any) -> Model:
    """A Model, a module of our layers, or the checkpoint in a file. UsageError names the call for anything else."""
    found = given.load() if isinstance(given, ModelFile) else open_subject(given)
    if isinstance(found, Exported):
        raise UsageError(f"{found.file}: is an artifact, and this needs the model: give sq.load(CHECKPOINT)")
    return found


def open_subject(given: Any) -> Model | Exported:
    """A model, as `open_model`, or an artifact, in memory or in a file."""
    if isinstance(given, Model | Exported):
        return given
    if isinstance(given, str | Path):
        return load(given) if is_checkpoint(str(given)) else artifact(given)
    if isinstance(given, nn.Module) and named_nodes(given):
        return Model(given)
    ways = "sq.load(CHECKPOINT), sq.artifact(FILE), sq.wrap(module, SIZE) or a file"
    raise UsageError(f"{type(given).__name__}: is no model: give {ways}")


def read_config(artifact: Artifact, overrides: Mapping[str, Any] | None = None) -> CfgNode:
    """The config in the artifact's card, checked, with `overrides` (dotted keys). Its image size is preprocessing's."""
    where = str(card_path(artifact.file))
    config = artifact.card.config
    if wrapped := artifact.card.wrapped:  # the size and the outputs of a module that no config builds
        if (classes := wrapped.get("classes")) is None:
            raise SwinQuantError(f"{where}: does not say how many classes the module has: export it again")
        side = shortest(wrapped["shape"][-2:]) if len(wrapped["shape"]) == 3 else 1
        model: dict[str, Any] = {"TYPE": "timm", "TIMM": {"ARCHITECTURE": "wrapped"}}  # whose geometry nothing checks
        model |= {"OUTPUT_KIND": LOGITS if classes else FEATURES, "NUM_CLASSES": classes or 1}
        config = {"MODEL": model, "DATA": {"IMG_SIZE": side}}
    cfg = from_dict(config, f"{where}: config")
    taken = sides(cfg.DATA.IMG_SIZE)
    made = taken if wrapped and not artifact.card.preprocess else artifact.preprocess.sides
    if made != taken:
        told = f"preprocess.size is {shortest(made)}, but the model takes {shortest(taken)}"
        raise SwinQuantError(f"{where}: {told}: export again")
    cfg.defrost()
    merge(cfg, overrides or {}, "command line")
    cfg.freeze()
    return cfg


def prepared_by(artifact: Artifact) -> Prepared:
    """Makes inputs of whatever the artifact's engines are called with."""
    card = artifact.card
    named = card.wrapped.get("inputs") if card.wrapped else None
    return Prepared(
        artifact.preprocess if card.preprocess else None,
        tuple(card.wrapped["shape"]) if card.wrapped else None,
        takes_pixels=bool(artifact.record["options"].get("uint8_input")),
        inputs=Inputs.from_records(named) if named else None,
    )


def load_engines(artifact: Artifact, names: Sequence[str] | None, options: EngineOptions) -> dict[str, Engine]:
    """The artifact on each named engine, by `path on engine`: two folders may hold files with one name.

    Without `names`: the engine that it was exported for, else every installed one that takes it. UsageError for an
    engine that does not take this kind of artifact, or is not installed.
    """
    policy, engines = _read_policy(artifact), dict[str, Engine]()
    for name in list_engine_names(artifact, names):
        engine = engine_loader(name)(artifact, on_its_device(name, options))
        sha256 = policy.sha256 if policy and engine.policy else None
        engines[f"{artifact.file} on {name}"] = replace(engine, policy_sha256=sha256, prepared=prepared_by(artifact))
    return engines


def on_its_device(name: str, options: EngineOptions) -> EngineOptions:
    """The options with that engine's device."""
    return replace(options, device=engine_named(name).home or options.device)


def list_engine_names(artifact: Artifact, names: Sequence[str] | None = None) -> list[str]:
    """The engines that `load_engines` loads."""
    kind = artifact.record["backend"]
    able = {backend.name: backend for backend in takers(kind)}
    if not able:
        raise SwinQuantError(f"{card_path(artifact.file)}: artifact.backend is {kind!r:.40}: no engine runs that")
    if not names:
        target = artifact.record["options"].get("target")
        has_float8 = artifact.record["precision"] == FP8  # all nodes, or some by the policy
        if artifact.record["precision"] == "mixed" and (policy := _read_policy(artifact)):
            has_float8 = policy.has_float8
        if has_float8:
            able = {name: backend for name, backend in able.items() if backend.float8}
        installed = [name for name, backend in able.items() if backend.is_installed]
        if target in installed:
            return [target]
        if not installed:
            remedies = " or ".join(backend.remedy for backend in able.values())
            raise UsageError(f"{artifact.file}: no engine for it is installed: {remedies}")
        return installed
    for name in names:
        backend = engine_named(name)
        if name not in able:
            raise UsageError(f"{artifact.file}: {name} does not run {kind} artifacts: use {' or '.join(able)}")
        if not backend.is_installed:
            raise UsageError(f"engine {name} is not installed: {backend.remedy}")
    return list(dict.fromkeys(names))


def _read_policy(artifact: Artifact) -> Policy | None:
    """The policy in the artifact's card; errors name the card."""
    policy = artifact.card.policy
    return policy_from_dict(policy, str(card_path(artifact.file))) if policy else None


def choose_engine(artifact: Artifact, engine: str | None) -> str:
    """The named engine, by default the first that `load_engines` loads."""
    return list_engine_names(artifact, [engine] if engine else None)[0]


def find_checkpoint(artifact: Artifact, file: str | Path | None = None) -> Path | None:
    """The checkpoint that the artifact was made from: `file`, else where its card says, beside it or one folder up.

    Its SHA-256 identifies it; None if it is not found. SwinQuantError if `file` is another one, or the card names none.
    """
    record = artifact.card.checkpoint or artifact.card.source
    if file is not None:
        if record is None:
            raise SwinQuantError(f"{card_path(artifact.file)}: names no checkpoint that {file} could be compared with")
        if compute_sha256(file) != record["sha256"]:
            raise SwinQuantError(f"{file}: is not the checkpoint that {artifact.file.name} was exported from")
        return Path(file)
    return find_recorded_file(record, list_search_folders(artifact))


def list_search_folders(artifact: Artifact) -> list[Path]:
    """The folders to search for files that an artifact's card names, if they are not where it says."""
    return list(artifact.file.resolve().parents[:_PARENTS])


def no_checkpoint(artifact: Artifact) -> str:
    """Why `find_checkpoint` found none, for a message."""
    record = artifact.card.checkpoint or artifact.card.source
    if record is None:
        return "its run card names no checkpoint"
    file = record["file"]
    others = [str(folder / file) for folder in list_search_folders(artifact) if (folder / file).is_file()]
    seen = f" ({others[0]} is another file of that name)" if others else ""
    return f"its {file} is neither beside it nor in the folder above{seen}: name it with ‹checkpoint›"


def load_origin(
    artifact: Artifact, cfg: CfgNode, checkpoint: Path | None, world: World, origin: Model | None = None
) -> tuple[Model, list[Policy]]:
    """The torch model of the checkpoint, calibrated if the artifact is quantized, and the artifact's policy.

    That of a wrapped module is `origin`; UsageError where it is missing or changed. SwinQuantError without checkpoint.
    """
    policy = _read_policy(artifact)
    policies = [policy] if policy else []
    if artifact.card.wrapped is None:
        if checkpoint is None:
            raise SwinQuantError(f"{artifact.file}: nothing to compare with: {no_checkpoint(artifact)}")
        return load_for_scoring(cfg, str(checkpoint), policies, world)
    if origin is None:
        raise UsageError(f"{artifact.file}: nothing to compare with: {NEEDS_MODULE}")
    if sha256_in(origin.card.checkpoint) != sha256_in(artifact.card.checkpoint):
        raise UsageError(f"{artifact.file}: {origin.name} was changed since it was exported: sq.artifact(FILE, module)")
    return origin, policies


def labels_in(artifact: Artifact) -> list[str]:
    """The class names in an artifact, else in its card, fit to print; empty if neither has any."""
    backend = backends().get(artifact.record["backend"])
    own = function(backend.labels)(artifact) if backend and backend.labels else []
    return [one_line(name) for name in own or artifact.card.class_names]
