"""Serve an artifact over HTTP on this machine: KServe v2 protocol, or a picture in and its classes out."""

import errno
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
from PIL import Image

from swin_quant.arguments import checked_class
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.description import described
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engine_named
from swin_quant.base import __version__
from swin_quant.base.arguments import Fields
from swin_quant.base.distributed import one_process, world_on
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import reason
from swin_quant.base.progress import log
from swin_quant.cards.paths import card_path
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.exported import Exported, choose_engine, labels_in, load_engines, open_exported, read_config
from swin_quant.quant.outputs import list_tensors
from swin_quant.score.options import EngineOptions
from swin_quant.score.scoring import class_names
from swin_quant.serving.app import Service, ServiceLimits, build_app, build_server

EXAMPLES = """swin-quant serve out/my_int8.onnx
swin-quant serve out/my_int8.onnx --engine openvino --max-batch 16 --port 8080
curl --data-binary @cat.jpg localhost:8000/predict
curl -F file=@cat.jpg localhost:8000/predict"""


def serve(
    artifact: str | Path,
    engine: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    labels: str | Path | None = None,
    threads: int | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    extension: tuple[str, ...] = (),
    limits: Annotated[ServiceLimits, Fields(ServiceLimits, "limits")] = ServiceLimits(),
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Serve an artifact over HTTP until SIGTERM or Ctrl-C; then requests in work have two seconds to end.

    In production use a model server: `package` writes its folder (docs/shipping.md). `sq.app(FILE)` is the same
    application for servers of your own.

    Args:
        artifact: exported file; its run card lies beside it
        engine: engine that runs it (default: the one it was exported for, else any)
        host: address (default 127.0.0.1: this machine alone)
        port: 0 is any free one
        name: name of the model in URLs (default: its run card's)
        labels: file of class names, one a line (default: the model's, ImageNet's)
        threads: threads of an engine (default: its own choice)
        float_type: type of float layers, where the engine chooses
        extension: openvino: libraries with operators of your own (docs/custom_operators.md)
        limits: Limits of batches and requests.
        device: auto: a GPU if there is one

    Raises:
        SwinQuantError: The address cannot be had, or the engine cannot run the file.
        UsageError: A limit that is impossible, or a model that cannot be served.
    """
    one_process("serve")
    options = EngineOptions(threads, float_type, world_on(device).device.type, extensions=extension)
    names = None if labels is None else str(labels)
    with private_copy(open_exported(artifact, "serve").artifact) as copy, _listening(host, port) as listener:
        service = load_service(copy, engine, options, limits, name, names)
        server = build_server(build_app(service))
        where = "http://{}:{}".format(*listener.getsockname()[:2])
        shown = copy.file.name, service.about["engine"], where, service.model.name, where
        log.info("%s on %s: %s/v2/models/%s, pictures to %s/predict", *shown)
        with suppress(ValueError):  # outside the main thread, which alone gets signals
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):  # the last is a postponed one (`cli.guard`)
                signal.signal(number, server.handle_exit)
        server.run(sockets=[listener])
        log.info("stopped")


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


def app(
    file: Exported | str | Path,
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
        file: An artifact, or its file with the run card beside it.
        engine: The engine (default: the one it was exported for, else any).
        name: Name of the model in URLs (default: its run card's).
        labels: File of class names, one a line (default: the model's, ImageNet's).
        threads: Threads of an engine (default: its own choice).
        device: cpu or cuda, torch's current GPU.
        limits: Those of `ServiceLimits`.

    Returns:
        The application.
    """
    limited, options = checked_class(ServiceLimits)(**limits), EngineOptions(threads, device=device)
    artifact = open_exported(file, "serve").artifact
    return build_app(load_service(artifact, engine, options, limited, name, labels))


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
    chosen = choose_engine(artifact, engine)
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
    about: dict[str, Any] = {"version": __version__, "file": artifact.file.name, "sha256": artifact.record["sha256"]}
    about |= {"engine": loaded.name, "precision": loaded.precision, "policy": loaded.policy}
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
