"""Serve an artifact over HTTP on this machine: KServe v2 protocol, or a picture in and its classes out."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.arguments import Fields
from swin_quant.base.distributed import one_process, world_on
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import reason
from swin_quant.base.progress import log
from swin_quant.score.options import EngineOptions
from swin_quant.serving.app import build_app, build_server
from swin_quant.serving.limits import ServiceLimits
from swin_quant.verbs.service import load_service, private_copy

EXAMPLES = """swin-quant serve out/my_int8.onnx
swin-quant serve out/my_int8.onnx --engine openvino --max-batch 16 --delay-us 1000 --port 8080
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
    with private_copy(open_artifact(artifact)) as copy, _listening(host, port) as listener:
        service = load_service(copy, engine, options, limits, name, names)
        server = build_server(build_app(service), limits)
        where = "http://{}:{}".format(*listener.getsockname()[:2])
        shown = copy.file.name, service.about["engine"], where, service.model.name, where
        log.info("%s on %s: %s/v2/models/%s, pictures to %s/predict", *shown)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:  # the server handles it, and raises it again when it has ended
            if not server.should_exit:
                raise
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
