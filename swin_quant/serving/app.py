"""The Starlette application of a service, the queue in front of its engine, and the uvicorn server that runs it."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swin_quant.backends.description import VERSION, ModelDescription
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.progress import log
from swin_quant.base.schema import check_limits
from swin_quant.data.pictures import TooLargePicture, count_scans, decode, opened
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.outputs import Output, cut, joined, list_tensors
from swin_quant.score.engine import Run
from swin_quant.score.scoring import top_classes
from swin_quant.serving import protocol

_BODIES = 16  # of the largest size that are in work at a time, each twice in memory
_SIZES = tuple(2**power for power in range(8))  # buckets of the histogram of batches
_FORM = re.compile(r'multipart/form-data\s*;.*?boundary=("?)([^";]{1,70})\1', re.IGNORECASE)
_FIELDS = 8  # of a form
_Job: TypeAlias = "tuple[Tensor, asyncio.Future[Output]]"  # pictures of a request, and their outputs


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of batches and requests. UsageError for an impossible number.

    Args:
        max_batch: pictures that run at a time
        max_queue: pictures of all requests that wait for the engine
        max_megabytes: megabytes of a body
        timeout_s: seconds from the head of a request to its answer
        max_megapixels: megapixels of a picture; each scan of a progressive JPEG counts again
    """

    max_batch: int = 8
    max_queue: int = 256
    max_megabytes: float = 32
    timeout_s: float = 30
    max_megapixels: float = 128

    def __post_init__(self) -> None:
        sizes = {"max_megabytes": (0.001, 4096), "timeout_s": (0.001, 3600), "max_megapixels": (0.001, 2048)}
        check_limits(self, {"max_batch": (1, 4096), "max_queue": (1, 10**6), **sizes})


class Batcher:
    """Runs an engine in a thread of its own.

    Args:
        run: the engine.
        most: pictures that run at a time.
        sizes: batch sizes that the engine is compiled for; smaller batches are padded with zeros. Empty: any size runs.
        observe: called with the number of pictures of each batch.
    """

    def __init__(self, run: Run, most: int, sizes: Sequence[int], observe: Callable[[int], None]) -> None:
        self.run, self.most, self.sizes, self.observe = run, most, sorted(sizes), observe
        self.queue: deque[_Job] = deque()
        self.waiting = 0  # pictures in the queue and in the engine
        self.thread = ThreadPoolExecutor(1, "engine")
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, images: Tensor) -> Output:
        """Return the outputs [n, ...] for images float32 [n, 3, H, W]. SwinQuantError if the engine fails."""
        loop = asyncio.get_running_loop()
        jobs: list[_Job] = [(part, loop.create_future()) for part in images.split(self.most)]
        self.queue += jobs
        self.waiting += len(images)
        if self.task is None or self.task.done():
            self.task = loop.create_task(self._empty_queue())
        try:
            outputs: Output = joined([await result for _, result in jobs])
            return outputs
        finally:
            self.waiting -= len(images)
            for _, result in jobs:
                result.cancel()  # a job that nobody waits for does not run

    async def _empty_queue(self) -> None:
        while self.queue:
            batch, room, shape = list[_Job](), self.most, self.queue[0][0].shape[1:]
            while self.queue and self.queue[0][0].shape[1:] == shape and len(self.queue[0][0]) <= room:
                batch.append(self.queue.popleft())
                room -= len(batch[-1][0])
            if batch := [job for job in batch if not job[1].done()]:
                await self._answer(batch)

    async def _answer(self, batch: list[_Job]) -> None:
        images = [images for images, _ in batch]
        try:
            found = await asyncio.get_running_loop().run_in_executor(self.thread, self._compute, images)
            self.observe(sum(map(len, images)))
        except Exception as error:  # noqa: BLE001  # an engine's library may raise anything
            log.error("the engine failed: %s", error if isinstance(error, SwinQuantError) else repr(error))
            for _, result in batch:
                if not result.done():
                    result.set_exception(SwinQuantError("the engine failed on this request or one beside it"))
            return
        for (_, result), output in zip(batch, found, strict=True):
            if not result.done():
                result.set_result(output)

    def _compute(self, images: list[Tensor]) -> list[Output]:
        counts = [len(part) for part in images]
        size = next((size for size in self.sizes if size >= sum(counts)), sum(counts))
        padding = images[0].new_zeros(size - sum(counts), *images[0].shape[1:])
        with torch.inference_mode():
            return cut(self.run(torch.cat([*images, padding])), [*counts, len(padding)])[:-1]


@dataclass(frozen=True)
class Service:
    """An engine that is served. `sizes`: see `Batcher`. `about`: facts for GET /v2; `engine` is the backend."""

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
    place, registry = f"/v2/models/{model.name}", prometheus.CollectorRegistry()
    most_bytes, in_memory = int(limits.max_megabytes * 2**20), 0

    requests = prometheus.Counter("swin_quant_requests", "Requests", ["route", "status"], registry=registry)
    seconds = prometheus.Histogram("swin_quant_request_seconds", "Seconds of a request", ["route"], registry=registry)
    sizes = prometheus.Histogram("swin_quant_batch_size", "Pictures in a batch", buckets=_SIZES, registry=registry)
    batcher = Batcher(service.run, limits.max_batch, service.sizes, sizes.observe)
    waiting = prometheus.Gauge("swin_quant_waiting_pictures", "Pictures that wait or run", registry=registry)
    waiting.set_function(lambda: batcher.waiting)
    decoders = ThreadPoolExecutor(2, "decoder")

    async def run(images: Tensor) -> Output:
        if batcher.waiting + len(images) > limits.max_queue:
            raise HTTPException(503, f"{batcher.waiting} pictures are waiting already: try again later")
        return await batcher(images)

    async def in_pool(work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(decoders, work, *arguments)

    async def infer(request: Request, body: bytes) -> Response:
        images, *how = await in_pool(protocol.read_request, body, request.headers, model, preprocess, limits.max_queue)
        content, headers = await in_pool(protocol.write_answer, model, await run(images), *how)
        return Response(content, headers=headers)

    async def predict(request: Request, body: bytes) -> Response:
        if not re.fullmatch("[1-9][0-9]{0,6}", top := request.query_params.get("top", "5")):
            raise UsageError("top must be a whole number from 1")
        how = body, request.headers.get("content-type", ""), preprocess, limits.max_megapixels
        logits = list_tensors(await run(await in_pool(_read_picture, *how)))[0]
        (best,) = top_classes(logits, model.labels, int(top))
        return JSONResponse({"model": model.name, "classes": [asdict(one) for one in best]})

    async def refuse(request: Request, error: Exception) -> Response:
        """The one line that answers a request which failed."""
        if isinstance(error, HTTPException):
            status, why = error.status_code, error.detail
            named = re.match("/v2/models/([^/]*)", request.url.path)
            if status == 404:
                is_other = named and named[1] != model.name
                what = f"no model {named[1]!r:.80}" if named and is_other else why
                why = f"{what}: this server has {model.name if is_other else ', '.join(served)}"
            why = f"{why}: use {min((error.headers or {})['Allow'].split(', '))}" if status == 405 else why
        elif isinstance(error, TimeoutError | ClientDisconnect):
            status, why = 504, f"not received and answered within {limits.timeout_s:g} s"
        elif isinstance(error, SwinQuantError):
            status, why = 400 if isinstance(error, UsageError) else 500, str(error)
        else:
            status, why = 500, "internal error"
            log.error("%s: %r", request.url.path, error)
        return JSONResponse({"error": why}, status, {"Retry-After": "1"} if status == 503 else None)

    async def refuse_unserved(request: Request, error: Exception) -> Response:
        response = await refuse(request, error)
        requests.labels("none", str(response.status_code)).inc()
        return response

    def post(path: str, handler: Callable[[Request, bytes], Awaitable[Response]]) -> Route:
        async def answer(request: Request) -> Response:
            nonlocal in_memory
            start, body = time.perf_counter(), bytearray()
            try:
                async with asyncio.timeout(limits.timeout_s):
                    async for part in request.stream():
                        body += part
                        in_memory += len(part)
                        if len(body) > most_bytes:
                            raise HTTPException(413, f"the body is larger than {limits.max_megabytes:g} MB")
                        if in_memory > _BODIES * most_bytes:
                            raise HTTPException(503, "too many large bodies are in work: try again later")
                    response = await handler(request, bytes(body))
            except Exception as error:  # noqa: BLE001
                response = await refuse(request, error)
            finally:
                in_memory -= len(body)
            requests.labels(handler.__name__, str(response.status_code)).inc()
            seconds.labels(handler.__name__).observe(time.perf_counter() - start)
            return response

        return Route(path, answer, methods=["POST"])

    async def metrics(request: Request) -> Response:
        return Response(prometheus.generate_latest(registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    server = {"name": "swin-quant", "version": service.about.get("version", ""), "extensions": ["binary_tensor_data"]}
    facts: dict[str, Any] = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
    facts["/v2"] = {**server, "model": service.about}
    description = model.metadata(str(service.about.get("engine", "swin_quant")))
    routes = [Route("/metrics", metrics, methods=["GET"]), *([post("/predict", predict)] if model.classifies else [])]
    for path in (place, f"{place}/versions/{VERSION}"):
        facts |= {path: description, f"{path}/ready": {"ready": True}}
        routes.append(post(f"{path}/infer", infer))
    routes += [Route(path, JSONResponse(content), methods=["GET"]) for path, content in facts.items()]
    served = [route.path for route in routes]
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse_unserved})


def _read_picture(body: bytes, content_type: str, preprocess: Preprocess, most_megapixels: float) -> Tensor:
    """The picture in a body, or in the one file of a form, as the model's input, float32 [1, 3, H, W]."""
    if found := _FORM.match(content_type):
        parts = (b"\r\n" + body).split(b"\r\n--" + found[2].encode("latin-1", "replace"), _FIELDS + 2)
        fields = [part.partition(b"\r\n\r\n") for part in parts[1:]]
        files = [content for head, _, content in fields if b"filename=" in head[:1024].lower()]
        if len(files) != 1 or not parts[-1].startswith(b"--"):
            raise UsageError(f"the form must be whole, with one file and at most {_FIELDS} fields")
        (body,) = files
    how = "send a picture by curl --data-binary @cat.jpg, or curl -F file=@cat.jpg"
    if not body:
        raise UsageError(f"the body: is empty: {how}")
    try:
        image = opened(body)
        megapixels = image.width * image.height * count_scans(image, body) / 1e6
        if megapixels > most_megapixels:
            raise TooLargePicture(f"{megapixels:.0f} megapixels, multiplied by scans: more than {most_megapixels:g}")
        return preprocess(decode(image, "the body", preprocess.upright))[None]
    except Exception as error:  # PIL raises a dozen unrelated types on damaged files
        if why := next((one for one in (error, error.__cause__) if isinstance(one, TooLargePicture)), None):
            refusal = f"the body: {why}; max_megapixels is {most_megapixels:g}"
            raise library("starlette.exceptions", "serve").HTTPException(413, refusal) from error
        raise UsageError(f"the body: not a picture that can be read: {how}") from error


def build_server(app: Any) -> Any:
    """Return the uvicorn server of an application, not yet running."""
    uvicorn = library("uvicorn", "serve")
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="critical",
        log_config=None,  # configuring closes all handlers, and absl closes standard error with its own
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=2**14,
        limit_concurrency=1000,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
