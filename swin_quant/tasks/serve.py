"""An artifact behind HTTP on this machine: what is served, and the server around it."""

import ctypes
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from swin_quant.backends.artifact import Artifact, open_artifact
from swin_quant.backends.registry import engine_named, takers
from swin_quant.base import __version__
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import reason
from swin_quant.base.progress import log
from swin_quant.cards.paths import card_path
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.exported import config_of, labels_in, load_engines, one_engine, preprocess_of
from swin_quant.score.options import EngineOptions
from swin_quant.serving.app import Service, build_app
from swin_quant.serving.limits import ServiceLimits
from swin_quant.serving.server import server_of
from swin_quant.ship.facts import fit_name
from swin_quant.tasks.predict import class_names

_BACKLOG = 1000
_M_MMAP_THRESHOLD, _KEPT = -3, 4 << 20  # bytes: larger blocks go back to the system when they are free
_SWITCH_S = 0.0001  # until a thread that decodes lets the one go on that answers: Python's own is fifty times that


@dataclass(frozen=True)
class Hosting:
    """What is chosen of a service. `name` None: the card's; `labels`: a file of class names, None: the model's own."""

    engines: Sequence[str] | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    name: str | None = None
    labels: str | None = None
    decoders: int = 2


def service_of(artifact: Artifact, how: Hosting = Hosting()) -> Service:  # noqa: B008
    """The artifact on its engine, every size of batch and one picture run once, so that the first client does not wait.

    UsageError for maps, and for pictures of any size; SwinQuantError where the engine cannot load or run it.
    """
    cfg, preprocess = config_of(artifact), preprocess_of(artifact)
    kind = cfg.MODEL.OUTPUT_KIND
    if kind == FEATURES or not preprocess.is_square:
        raise UsageError(f"{artifact.file}: gives maps, or takes pictures of any size: serve a classifier or embedding")
    chosen, limits = one_engine(artifact, how.engines), how.limits
    sizes = graphs_for(limits.max_batch) if engine_named(chosen).graph_per_shape else ()
    options = replace(how.options, graphs=max(how.options.graphs, len(sizes)))
    (engine,) = load_engines(artifact, [chosen], options).values()
    if engine.max_batch:
        sizes, limits = (), replace(limits, max_batch=min(limits.max_batch, engine.max_batch))
    preprocess(Image.new("RGB", (preprocess.size, preprocess.size)))  # what it needs is imported now
    # The largest first: where programs take turns in memory, it is that of all.
    for size in reversed(sizes or _prepared(engine.sizes, limits.max_batch)):
        with torch.inference_mode():
            outputs = engine(torch.zeros(size, 3, preprocess.size, preprocess.size))
    names = class_names(cfg.MODEL.NUM_CLASSES, how.labels, labels_in(artifact)) if kind == LOGITS else []
    about = {
        "version": __version__,
        "file": artifact.file.name,
        "sha256": artifact.record["sha256"],
        "engine": engine.name,
        "precision": engine.precision,
        "policy": engine.policy,
    }
    name = fit_name(how.name or artifact.card.name)
    return Service(name, engine, preprocess, outputs.shape[1], kind, names, sizes, limits, how.decoders, about)


def graphs_for(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the largest batch: what pictures are filled up to, where each size costs a graph."""
    powers = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return (*powers, largest)


def _prepared(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Batches by which an engine of such `sizes` makes all that any up to the largest needs."""
    return (*(size for size in sizes if size < largest), largest) if sizes else (1,)


@contextmanager
def private_copy(artifact: Artifact) -> Iterator[Artifact]:
    """The artifact in a folder of its own: whoever replaces the file while it is served changes nothing of it."""
    with TemporaryDirectory(prefix="swin_quant_") as folder:
        names = [artifact.file.name, *(other["file"] for other in artifact.record["others"])]
        beside = [ending for backend in takers(artifact.record["backend"]) for ending in backend.beside]
        stem = escape(artifact.file.stem)
        there = {file for ending in beside for file in artifact.file.parent.glob(stem + ending) if file.is_file()}
        for name in (*names, card_path(artifact.file).name, *(file.name for file in there)):
            shutil.copyfile(artifact.file.with_name(name), Path(folder, name))
        yield open_artifact(Path(folder, artifact.file.name))


def serve(artifact: Artifact, host: str, port: int, how: Hosting = Hosting()) -> None:  # noqa: B008
    """Serve until SIGTERM or Ctrl-C: then no more requests are taken, and those that came are answered.

    `port` 0 is any free one, which is logged. SwinQuantError for an address that cannot be had.
    """
    library("uvicorn", "serve")  # missing, it is missed before an engine is loaded
    with private_copy(artifact) as copy, _listening(host, port) as listener:
        service = service_of(copy, how)
        app = build_app(service)
        server = server_of(app, how.limits, app.state.count)
        where = "http://{}:{}".format(*listener.getsockname()[:2])
        log.info("%s on %s: %s/v2/models/%s, pictures to %s/predict", copy.file.name, service.about["engine"], where,
                 service.name, where)  # fmt: skip
        _tune_process()
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:  # which the server heard, and raises again when it has ended
            if not server.should_exit:
                raise
        log.info("stopped: what had come was answered")


def _tune_process() -> None:
    """Set what is the whole process's, which an application within another's may not."""
    sys.setswitchinterval(_SWITCH_S)
    with suppress(OSError, AttributeError):  # glibc's alone: else it keeps what a large picture took for the next
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _KEPT)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    if not 0 <= port <= 65535:
        raise UsageError(f"‹port› {port}: must be from 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SwinQuantError(f"{host}:{port}: cannot be listened to: {reason(error)}") from error
    with listener:
        # Connections take it over. asyncio leaves it out for such a socket, and each answer, head and then body, would
        # wait 40 ms for the client's acknowledgement of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def app_of(file: str | Path, how: Hosting = Hosting()) -> Any:  # noqa: B008
    """The ASGI application of an artifact, for servers and clusters of the user's own."""
    return build_app(service_of(open_artifact(file), how))
