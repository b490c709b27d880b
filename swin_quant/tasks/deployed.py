"""An artifact as something to run: its config and preprocessing, the engines that take it, what it was made from."""

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends import ENGINES, engine_loader
from swin_quant.backends.artifact import Artifact
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import installing
from swin_quant.base.files import sha256_of
from swin_quant.cards.lineage import find
from swin_quant.cards.paths import card_path
from swin_quant.config.load import from_dict
from swin_quant.config.values import merge
from swin_quant.data.preprocess import Preprocess
from swin_quant.engines.engine import Engine
from swin_quant.engines.options import EngineOptions
from swin_quant.quant.policy import policy_from_dict
from swin_quant.tasks.evaluate import Subject, load_for_scoring

# Backend of an artifact -> the engines that run it, those of the first choice first.
RUN_BY = {
    "onnx": ("onnxruntime", "openvino"),
    "fastertransformer": ("fastertransformer",),
    "tensorrt": ("tensorrt",),
}
# Engine -> the package it needs, and how to get it. FasterTransformer's emulator is plain torch.
NEEDS = {
    "onnxruntime": ("onnxruntime", installing("onnx")),
    "openvino": ("openvino", installing("openvino")),
    "tensorrt": ("tensorrt", "pip install tensorrt-cu13 (or -cu12, of your CUDA), on a machine with an NVIDIA GPU"),
}
# Engine -> where it runs, whatever device torch has; others run where the options say.
HOME = {"onnxruntime": "cpu", "openvino": "cpu", "tensorrt": "cuda"}
_PARENTS = 2  # the artifact's own folder, and the one above it


def config_of(artifact: Artifact, overrides: Mapping[str, Any] | None = None) -> CfgNode:
    """The config in the artifact's card, checked, with `overrides` (dotted keys). Its image size is preprocessing's."""
    where = str(card_path(artifact.file))
    cfg = from_dict(artifact.card.config, f"{where}: config")
    size = preprocess_of(artifact).size
    if size != cfg.DATA.IMG_SIZE:
        raise SwinQuantError(
            f"{where}: preprocess.size is {size}, but the model takes {cfg.DATA.IMG_SIZE}: export again"
        )
    cfg.defrost()
    merge(cfg, overrides or {}, "command line")
    cfg.freeze()
    return cfg


def preprocess_of(artifact: Artifact) -> Preprocess:
    """How a picture becomes the artifact's input; errors name the card."""
    try:
        return Preprocess.from_dict(artifact.card.preprocess)
    except SwinQuantError as error:
        raise SwinQuantError(f"{card_path(artifact.file)}: {error}") from error


def load_engines(artifact: Artifact, names: Sequence[str] | None, options: EngineOptions) -> dict[str, Engine]:
    """The artifact on each engine called for, by `path on engine`: two folders may hold files of one name.

    None: on that which it was exported for, or on every one that takes it; of those that are installed. UsageError for
    an engine that does not take this kind of artifact, or is not installed.
    """
    policy = artifact.card.policy
    sha256 = policy_from_dict(policy, str(card_path(artifact.file))).sha256 if policy else None
    engines = {
        f"{artifact.file} on {name}": engine_loader(name)(artifact, on_its_device(name, options))
        for name in names_of_engines(artifact, names)
    }
    return {key: replace(engine, policy_sha256=sha256 if engine.policy else None) for key, engine in engines.items()}


def on_its_device(name: str, options: EngineOptions) -> EngineOptions:
    """The options with the device on which that engine runs."""
    return replace(options, device=HOME.get(name, options.device))


def names_of_engines(artifact: Artifact, names: Sequence[str] | None) -> list[str]:
    """Which engines `load_engines` takes."""
    backend = artifact.record["backend"]
    takers = RUN_BY.get(backend)
    if takers is None:
        raise SwinQuantError(f"{card_path(artifact.file)}: artifact.backend is {backend!r:.40}: no engine runs that")
    if names is None:
        target = artifact.record["options"].get("target")
        installed = [name for name in takers if is_installed(name)]
        if target in installed:
            return [target]
        if not installed:
            raise UsageError(f"{artifact.file}: no engine for it is installed: {' or '.join(map(_remedy, takers))}")
        return installed
    for name in names:
        if name not in ENGINES:
            raise UsageError(f"no engine {name!r}: there are {', '.join(ENGINES)}")
        if name not in takers:
            raise UsageError(f"{artifact.file}: {name} does not run {backend} artifacts: use {' or '.join(takers)}")
        if not is_installed(name):
            raise UsageError(f"engine {name} is not installed: {_remedy(name)}")
    return list(dict.fromkeys(names))


def is_installed(name: str) -> bool:
    """Whether the package that an engine needs can be found; it is not imported."""
    package = NEEDS[name][0] if name in NEEDS else None
    return package is None or package in sys.modules or importlib.util.find_spec(package) is not None


def _remedy(name: str) -> str:
    return NEEDS[name][1]


def find_checkpoint(artifact: Artifact, given: str | Path | None = None) -> Path | None:
    """The checkpoint that the artifact was made from: `given`, else where its card says, beside it or one folder up.

    It is known by its SHA-256.

    SwinQuantError if `given` is another one, or the card names none to compare it with; None if it is not found.
    """
    record = artifact.card.checkpoint or artifact.card.source
    if given is not None:
        if record is None:
            raise SwinQuantError(f"{card_path(artifact.file)}: names no checkpoint that {given} could be compared with")
        if sha256_of(given) != record["sha256"]:
            raise SwinQuantError(f"{given}: is not the checkpoint that {artifact.file.name} was exported from")
        return Path(given)
    return find(record, folders_of(artifact))


def folders_of(artifact: Artifact) -> list[Path]:
    """Where files that an artifact's card names may be, if not where it says."""
    return list(artifact.file.resolve().parents[:_PARENTS])


def no_checkpoint(artifact: Artifact) -> str:
    """Why `find_checkpoint` found none, for a message."""
    record = artifact.card.checkpoint or artifact.card.source
    if record is None:
        return "its run card names no checkpoint"
    return f"its {record['file']} is neither beside it nor in the folder above: name it with --resume"


def load_origin(artifact: Artifact, cfg: CfgNode, checkpoint: Path, world: World) -> Subject:
    """The torch model of the checkpoint, calibrated if the artifact is quantized, and the artifact's policy."""
    policy = artifact.card.policy
    policies = [policy_from_dict(policy, str(card_path(artifact.file)))] if policy else []
    return load_for_scoring(cfg, str(checkpoint), policies, world)


def labels_in(artifact: Artifact) -> list[str]:
    """The class names that an ONNX file carries in its metadata; none if it, or another artifact, has none."""
    if artifact.record["backend"] != "onnx":
        return []
    from swin_quant.backends.onnx_file import open_onnx
    from swin_quant.backends.onnx_metadata import LABELS

    try:
        names = json.loads(open_onnx(artifact.file).metadata.get(LABELS, "[]"))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SwinQuantError(f"{artifact.file}: its metadata {LABELS} is not a JSON list of names: export it again")
    return names
