"""The service of an artifact: its application, with the engine loaded and run once, of a copy of the file."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.description import described
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engine_named
from swin_quant.base import __version__
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.paths import card_path
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.exported import labels_in, load_engines, one_engine, read_config
from swin_quant.quant.outputs import list_tensors
from swin_quant.score.metrics import class_names
from swin_quant.score.options import EngineOptions
from swin_quant.serving.app import Service, build_app
from swin_quant.serving.limits import ServiceLimits


def app(
    file: str | Path,
    engine: str | None = None,
    *,
    name: str | None = None,
    labels: str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    **limits: Any,
) -> Any:
    """The ASGI application that `swin-quant serve` runs, for servers and clusters of your own (docs/shipping.md).

    Args:
        file: An exported file, with its run card beside it.
        engine: The engine (default: the one it was exported for, else any).
        name: Name of the model in URLs (default: its run card's).
        labels: File of class names, one a line (default: the model's, ImageNet's).
        threads: Threads of an engine (default: its own choice).
        device: cpu or cuda, torch's current GPU.
        limits: Those of `ServiceLimits`.

    Returns:
        The application.
    """
    options = EngineOptions(threads, device=device)
    return build_app(load_service(open_artifact(file), engine, options, ServiceLimits(**limits), name, labels))


def load_service(
    artifact: Artifact,
    engine: str | None = None,
    options: EngineOptions = EngineOptions(),
    limits: ServiceLimits = ServiceLimits(),
    name: str | None = None,
    labels: str | None = None,
) -> Service:
    """The artifact on its engine, every size of batch and one picture run once, so that the first client does not wait.

    UsageError for a classifier of pictures of any size; SwinQuantError where the engine cannot load or run it.
    """
    cfg, preprocess = read_config(artifact), artifact.preprocess
    kind = cfg.MODEL.OUTPUT_KIND
    if kind != FEATURES and not preprocess.is_square:
        raise UsageError(f"{artifact.file}: classifies pictures of any size: only maps are served for these")
    chosen = one_engine(artifact, [engine] if engine else [])
    powers = [2**power for power in range(12) if 2**power < limits.max_batch]
    sizes = (*powers, limits.max_batch) if engine_named(chosen).graph_per_shape else ()  # smaller batches are padded
    options = replace(options, graphs=max(options.graphs, len(sizes)))
    (loaded,) = load_engines(artifact, [chosen], options).values()
    if loaded.max_batch:
        sizes, limits = (), replace(limits, max_batch=min(limits.max_batch, loaded.max_batch))
    preprocess(Image.new("RGB", preprocess.sides))  # imports what it needs now
    prepared = sizes or [*(size for size in loaded.sizes if size < limits.max_batch), limits.max_batch]
    # The largest batch first: where programs share memory in turns, it needs the most.
    for size in reversed(prepared) if sizes or loaded.sizes else (1,):
        with torch.inference_mode():
            outputs = loaded(torch.zeros(size, 3, *preprocess.sides))
    names = class_names(cfg.MODEL.NUM_CLASSES, labels, labels_in(artifact)) if kind == LOGITS else []
    about = {
        "version": __version__,
        "file": artifact.file.name,
        "sha256": artifact.record["sha256"],
        "engine": loaded.name,
        "precision": loaded.precision,
        "policy": loaded.policy,
    }
    model = described(artifact, names, name, list_tensors(outputs)[0].shape[1])
    return Service(model, loaded, preprocess, sizes, limits, about)


@contextmanager
def private_copy(artifact: Artifact) -> Iterator[Artifact]:
    """The artifact in a folder of its own: replacing the file while it is served changes nothing."""
    with TemporaryDirectory(prefix="swin_quant_") as folder:
        names = [artifact.file.name, *(other["file"] for other in artifact.record["others"])]
        for name in (*names, card_path(artifact.file).name):
            shutil.copyfile(artifact.file.with_name(name), Path(folder, name))
        try:
            yield open_artifact(Path(folder, artifact.file.name))
        except SwinQuantError as error:  # names the file that the user has
            raise type(error)(error.args[0].replace(f"{folder}/", f"{artifact.file.parent}/")) from error
