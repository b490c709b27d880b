"""Serve an artifact over HTTP on this machine: KServe v2 protocol, or a picture in and its classes out."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from swin_quant.backends.registry import engine_named, takers
from swin_quant.base import __version__
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import reason
from swin_quant.base.progress import log
from swin_quant.cards.paths import card_path
from swin_quant.cli.flags import Flag
from swin_quant.cli.shared import AnyDevice, ArtifactFile, ClassNames, EngineFlags, one_process
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.serving.limits import ServiceLimits

if TYPE_CHECKING:
    from swin_quant.backends.artifact import Artifact
    from swin_quant.base.distributed import World
    from swin_quant.serving.app import Service

EXAMPLES = """examples:
  swin-quant serve out/my_int8.onnx
  swin-quant serve out/my_int8.onnx --engine openvino --max-batch 16 --delay-us 1000 --port 8080

  curl --data-binary @cat.jpg localhost:8000/predict
  curl -F file=@cat.jpg localhost:8000/predict

Ctrl-C or SIGTERM ends it. In production use a model server: `package` writes its folder (docs/shipping.md)."""


@dataclass(frozen=True)
class LimitFlags:
    """Limits for clients; `ServiceLimits` holds the defaults and checks the numbers."""

    TITLE = "limits"
    max_batch: Annotated[int, Flag("pictures at a time", "N")] = ServiceLimits.max_batch
    delay_us: Annotated[int, Flag("microseconds that a request waits for others", "N")] = ServiceLimits.delay_us
    max_queue: Annotated[int, Flag("requests in work at a time, and pictures that wait", "N")] = ServiceLimits.max_queue
    max_megabytes: Annotated[float, Flag("megabytes of a request", "N")] = ServiceLimits.max_megabytes
    timeout_s: Annotated[float, Flag("seconds for a body, and again for its answer", "N")] = ServiceLimits.timeout_s
    max_megapixels: Annotated[float, Flag("megapixels of a picture, counting all scans of a JPEG", "N")] = (
        ServiceLimits.max_megapixels
    )

    def limits(self) -> ServiceLimits:
        return ServiceLimits(**{name: getattr(self, name) for name in ServiceLimits.__dataclass_fields__})


@dataclass(frozen=True)
class ServeOptions:
    """The artifact to serve, its address, and the limits for clients."""

    artifact: ArtifactFile
    host: Annotated[str, Flag("address (default 127.0.0.1: this machine alone)")] = "127.0.0.1"
    port: Annotated[int, Flag("default 8000; 0 is any free one", "N")] = 8000
    name: Annotated[str | None, Flag("name of the model in URLs (default: its run card's)")] = None
    labels: ClassNames = None
    engines: EngineFlags = EngineFlags()
    limits: LimitFlags = LimitFlags()
    device: AnyDevice = "auto"


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

    `device`: cpu or cuda, torch's current GPU. `limits`: those of `ServiceLimits`.
    """
    from swin_quant.backends.open_artifact import open_artifact
    from swin_quant.serving.app import build_app

    engines = EngineFlags((engine,) if engine else (), threads)
    options = ServeOptions(str(file), name=name, labels=labels, engines=engines, limits=LimitFlags(**limits))
    return build_app(service_of(open_artifact(file), options, device))


def run(options: ServeOptions, world: World) -> None:
    """Serve until SIGTERM or Ctrl-C: then no more requests are taken, and those in work have two seconds to end."""
    from swin_quant.backends.open_artifact import open_artifact
    from swin_quant.serving.app import build_app, build_server

    one_process(world, "serve")
    limits = options.limits.limits()
    artifact = open_artifact(options.artifact)
    with private_copy(artifact) as copy, _listening(options.host, options.port) as listener:
        service = service_of(copy, options, world.device.type)
        server = build_server(build_app(service), limits)
        where = "http://{}:{}".format(*listener.getsockname()[:2])
        names = copy.file.name, service.about["engine"], where, service.model.name, where
        log.info("%s on %s: %s/v2/models/%s, pictures to %s/predict", *names)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:  # the server handles it, and raises it again when it has ended
            if not server.should_exit:
                raise
        log.info("stopped")


def service_of(artifact: Artifact, options: ServeOptions, device: str = "cpu") -> Service:
    """The artifact on its engine, every size of batch and one picture run once, so that the first client does not wait.

    UsageError for a classifier of pictures of any size; SwinQuantError where the engine cannot load or run it.
    """
    import torch
    from PIL import Image

    from swin_quant.backends.description import described
    from swin_quant.exported import config_of, labels_in, load_engines, one_engine, preprocess_of
    from swin_quant.quant.outputs import parts_of
    from swin_quant.score.metrics import class_names
    from swin_quant.serving.app import Service

    cfg, preprocess = config_of(artifact), preprocess_of(artifact)
    kind = cfg.MODEL.OUTPUT_KIND
    if kind != FEATURES and not preprocess.is_square:
        raise UsageError(f"{artifact.file}: classifies pictures of any size: only maps are served for these")
    chosen, limits = one_engine(artifact, options.engines.engine), options.limits.limits()
    powers = [2**power for power in range(12) if 2**power < limits.max_batch]
    sizes = (*powers, limits.max_batch) if engine_named(chosen).graph_per_shape else ()  # smaller batches are padded
    how = options.engines.options(device)
    (engine,) = load_engines(artifact, [chosen], replace(how, graphs=max(how.graphs, len(sizes)))).values()
    if engine.max_batch:
        sizes, limits = (), replace(limits, max_batch=min(limits.max_batch, engine.max_batch))
    preprocess(Image.new("RGB", preprocess.sides))  # imports what it needs now
    prepared = sizes or [*(size for size in engine.sizes if size < limits.max_batch), limits.max_batch]
    # The largest batch first: where programs share memory in turns, it needs the most.
    for size in reversed(prepared) if sizes or engine.sizes else (1,):
        with torch.inference_mode():
            outputs = engine(torch.zeros(size, 3, *preprocess.sides))
    names = class_names(cfg.MODEL.NUM_CLASSES, options.labels, labels_in(artifact)) if kind == LOGITS else []
    about = {
        "version": __version__,
        "file": artifact.file.name,
        "sha256": artifact.record["sha256"],
        "engine": engine.name,
        "precision": engine.precision,
        "policy": engine.policy,
    }
    model = described(artifact, names, options.name, parts_of(outputs)[0].shape[1])
    return Service(model, engine, preprocess, sizes, limits, about)


@contextmanager
def private_copy(artifact: Artifact) -> Iterator[Artifact]:
    """The artifact in a folder of its own: replacing the file while it is served changes nothing."""
    from swin_quant.backends.open_artifact import open_artifact

    with TemporaryDirectory(prefix="swin_quant_") as folder:
        names = [artifact.file.name, *(other["file"] for other in artifact.record["others"])]
        beside = [ending for backend in takers(artifact.record["backend"]) for ending in backend.beside]
        stem = escape(artifact.file.stem)
        there = {file for ending in beside for file in artifact.file.parent.glob(stem + ending) if file.is_file()}
        for name in (*names, card_path(artifact.file).name, *(file.name for file in there)):
            shutil.copyfile(artifact.file.with_name(name), Path(folder, name))
        try:
            yield open_artifact(Path(folder, artifact.file.name))
        except SwinQuantError as error:  # names the file that the user has
            raise type(error)(error.args[0].replace(f"{folder}/", f"{artifact.file.parent}/")) from error


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    if not 0 <= port <= 65535:
        raise UsageError(f"‹port› {port}: must be from 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1000)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        why = f"{os.strerror(errno.EADDRINUSE)}: give another ‹port›" if is_taken else reason(error)
        raise SwinQuantError(f"{host}:{port}: cannot be listened to: {why}") from error
    with listener:
        # Connections inherit it. asyncio does not set it for such a socket, and each answer, head and then body, would
        # wait 40 ms for the client's acknowledgement of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener
