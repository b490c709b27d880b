"""The Starlette application of a service, and the uvicorn server that runs it."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from swin_quant.backends.description import VERSION, ModelDescription
from swin_quant.base.extras import library
from swin_quant.base.progress import log
from swin_quant.data.pictures import count_scans, decode, opened
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.outputs import list_tensors
from swin_quant.score.engine import Run
from swin_quant.score.scoring import top_classes
from swin_quant.serving import protocol
from swin_quant.serving.batcher import Batcher, Refused, ServiceLimits

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # buckets of the histograms
_DECODERS = 2  # threads
_BODIES = 32  # of the largest size that are held in memory at a time
_CONNECTIONS, _HEAD_BYTES, _GRACE_S = 1000, 2**14, 2
_FORM = re.compile(r'multipart/form-data\s*;.*?boundary=("?)([^";]{1,70})\1', re.IGNORECASE)
_IS_FILE = re.compile(rb'form-data\s*;.*?(filename\s*=|\bname\s*=\s*"?file\b)', re.IGNORECASE | re.DOTALL)
_FIELDS = 8  # of a form
_NO_PICTURES = {  # first bytes of what people send -> its name
    b"%pdf": "a PDF",
    b"{": "JSON, which /v2 takes",
    b"[": "JSON, which /v2 takes",
    b"<svg": "an SVG",
    b"<": "HTML or XML",
    b"pk\x03\x04": "a ZIP file",
}


@dataclass(frozen=True)
class Service:
    """An engine that is served. `sizes`: see `Batcher`. `about`: facts for GET /v2, of which `engine` names the
    backend."""

    model: ModelDescription
    run: Run
    preprocess: Preprocess
    sizes: tuple[int, ...] = ()
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    about: dict[str, Any] = field(default_factory=dict)


def build_app(service: Service) -> Any:
    """Return the Starlette application. UsageError without the extra `serve`."""
    library("starlette", "serve")
    prometheus: Any = library("prometheus_client", "serve")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    model, limits, preprocess = service.model, service.limits, service.preprocess
    registry = prometheus.CollectorRegistry()

    def metric(kind: str, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(prometheus, kind)(f"swin_quant_{name}", *arguments, registry=registry, **options)

    requests = metric("Counter", "requests", "Requests", ["route", "status"])
    seconds = metric("Histogram", "request_seconds", "Seconds of a request", ["route"], buckets=_SECONDS)
    sizes = metric("Histogram", "batch_size", "Pictures in a batch", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
    engine_seconds = metric("Histogram", "engine_seconds", "Seconds of the engine for a batch", buckets=_SECONDS)

    def observe(pictures: int, taken: float) -> None:
        sizes.observe(pictures)
        engine_seconds.observe(taken)

    batcher = Batcher(service.run, limits, service.sizes, observe)
    metric("Gauge", "waiting_pictures", "Pictures that wait or run").set_function(lambda: batcher.waiting)
    decoders = ThreadPoolExecutor(_DECODERS, "decoder")
    in_work = {"requests": 0, "bytes": 0}

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.serve())
        yield
        task.cancel()
        for threads in (decoders, batcher.thread):
            threads.shutdown(cancel_futures=True)

    async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(decoders, work, *arguments)

    async def infer(request: Request, body: bytes) -> Response:
        asked = await in_thread(protocol.read_request, body, request.headers, model, preprocess, limits.max_queue)
        values = await batcher(asked.images)
        content, headers = await in_thread(protocol.write_answer, model, values, asked)
        return Response(content, headers=headers)

    async def predict(request: Request, body: bytes) -> Response:
        if not model.classifies:
            given = ", ".join(end.name for end in model.outputs)
            raise Refused(400, f"the model gives {given}, no classes: ask /v2/models/{model.name}/infer")
        top = request.query_params.get("top", "5")
        if not (top.isascii() and top.isdigit() and len(top) < 8 and int(top) >= 1):
            raise Refused(400, "top must be a whole number from 1")
        kind = request.headers.get("content-type", "")
        logits = list_tensors(await batcher(await in_thread(_read_picture, body, kind, preprocess, limits)))[0]
        protocol.check_finite(logits)
        (best,) = top_classes(logits, model.labels, int(top))
        return JSONResponse({"model": model.name, "classes": [asdict(one) for one in best]})

    async def read_body(request: Request) -> bytes:
        if encoding := request.headers.get("content-encoding"):
            raise Refused(415, f"Content-Encoding {encoding:.20}: bodies must not be compressed")
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                in_work["bytes"] += len(part)
                if len(body) > limits.max_bytes:
                    raise Refused(413, f"the body is larger than {limits.max_megabytes:g} MB")
                if in_work["bytes"] > _BODIES * limits.max_bytes:
                    raise Refused(503, "too many large bodies are in work: try again later")
            return bytes(body)
        except ClientDisconnect as error:
            raise Refused(400, "the client went away") from error
        finally:
            request.state.held = len(body)

    def route(path: str, name: str, handler: Callable[[Request, bytes], Awaitable[Response]], method: str) -> Route:
        async def answer(request: Request) -> Response:
            start, late = time.perf_counter(), Refused(408, f"the body did not come within {limits.timeout_s:g} s")
            in_work["requests"] += 1
            request.state.held = 0
            try:
                if method == "POST" and in_work["requests"] > limits.max_queue:
                    raise Refused(503, "too many requests are in work: try again later")
                body = await asyncio.wait_for(read_body(request), limits.timeout_s) if method == "POST" else b""
                late = Refused(504, f"not answered within {limits.timeout_s:g} s: try again later")
                response = await asyncio.wait_for(handler(request, body), limits.timeout_s)
            except asyncio.TimeoutError:
                response = JSONResponse({"error": str(late)}, late.status)
            except Refused as refusal:
                retry = {"Retry-After": "1"} if refusal.status == 503 else None
                response = JSONResponse({"error": str(refusal)}, refusal.status, retry)
            except Exception as error:  # noqa: BLE001
                log.error("%s: %r", name, error)
                response = JSONResponse({"error": "internal error"}, 500)
            finally:
                in_work["requests"] -= 1
                in_work["bytes"] -= request.state.held
            requests.labels(name, str(response.status_code)).inc()
            seconds.labels(name).observe(time.perf_counter() - start)
            return response

        return Route(path, answer, methods=[method])

    async def unknown(request: Request, error: Any) -> Response:
        place = f"/v2/models/{model.name}"
        said = f"pictures go to /predict, tensors to {place}/infer; the model is {place}, version {VERSION}"
        why = f"no such place: {said}"
        if error.status_code == 405:
            why = f"this place takes the method {error.headers['Allow']}"
        return JSONResponse({"error": why}, error.status_code, error.headers)

    def answering(content: Any) -> Callable[[Request, bytes], Awaitable[Response]]:
        async def answer(request: Request, body: bytes) -> Response:
            return JSONResponse(content)

        return answer

    async def metrics(request: Request, body: bytes) -> Response:
        return Response(prometheus.generate_latest(registry), media_type=str(prometheus.CONTENT_TYPE_LATEST))

    server = {"name": "swin-quant", "version": service.about.get("version", ""), "extensions": ["binary_tensor_data"]}
    ready, engine = answering({"ready": True}), str(service.about.get("engine", "swin_quant"))
    routes = [
        route("/v2/health/live", "live", answering({"live": True}), "GET"),
        route("/v2/health/ready", "ready", ready, "GET"),
        route("/v2", "server", answering({**server, "model": service.about}), "GET"),
        route("/metrics", "metrics", metrics, "GET"),
        route("/predict", "predict", predict, "POST"),
    ]
    for place in (f"/v2/models/{model.name}", f"/v2/models/{model.name}/versions/{VERSION}"):
        routes += [
            route(place, "model", answering(model.metadata(engine)), "GET"),
            route(f"{place}/ready", "ready", ready, "GET"),
            route(f"{place}/infer", "infer", infer, "POST"),
        ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: unknown})


def _read_picture(body: bytes, content_type: str, preprocess: Preprocess, limits: ServiceLimits) -> Tensor:
    """The picture in a body, or in the one file of a form, as the model's input, float32 [1, 3, H, W]."""
    if found := _FORM.match(content_type):
        parts = (b"\r\n" + body).split(b"\r\n--" + found[2].encode("latin-1", "replace"), _FIELDS + 2)
        fields = [part.partition(b"\r\n\r\n") for part in parts[1:] if part.startswith(b"\r\n")]
        files = [content for head, _, content in fields if _IS_FILE.search(head[:1024])]
        if len(files) != 1 or len(fields) > _FIELDS or not parts[-1].startswith(b"--"):
            raise Refused(
                400, f"the form must be whole, with one file and at most {_FIELDS} fields: curl -F file=@cat.jpg"
            )
        body = files[0]
    try:
        image = opened(body)
        scans = count_scans(image, body)
        if image.width * image.height * scans > limits.max_megapixels * 1e6:
            size = f"{image.width} x {image.height} pixels, times {scans}"
            raise Refused(413, f"{size}: more than {limits.max_megapixels:g} megapixels")
        return preprocess(decode(image, "the body", preprocess.upright))[None]
    except Refused:
        raise
    except Exception as error:  # PIL raises a dozen unrelated types on damaged files
        start = bytes(body[:64]).lstrip().lower()
        kind = next((kind for first, kind in _NO_PICTURES.items() if start.startswith(first)), "")
        advice = f": it is {kind}" if kind else "" if body else ": it is empty"
        if not advice and content_type.startswith("application/x-www-form-urlencoded"):  # curl -d, drops line ends
            advice = ": send it by curl --data-binary @cat.jpg, or by curl -F file=@cat.jpg"
        raise Refused(400, f"the body: not a picture that can be read{advice}") from error


def build_server(app: Any, limits: ServiceLimits) -> Any:
    """Return the uvicorn server of an application, not yet running."""
    return library("uvicorn", "serve").Server(
        library("uvicorn", "serve").Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=max(1, round(limits.timeout_s)),
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
