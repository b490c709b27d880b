"""The ASGI application: routes, limits and errors around one batcher. Nothing here knows which engine it is."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from swin_quant.base.extras import library
from swin_quant.base.progress import log
from swin_quant.config.outputs import LOGITS
from swin_quant.data.pictures import UnreadablePicture, decode
from swin_quant.data.preprocess import Preprocess
from swin_quant.engines.carry import Run
from swin_quant.serving import protocol
from swin_quant.serving.batcher import Batcher
from swin_quant.serving.limits import Refused, ServiceLimits
from swin_quant.serving.metrics import ServiceMetrics

VERSION = "1"
_CLOSED = 499  # nobody reads it: what logs and metrics say of a client that went away
_BODIES = 16  # of the largest that may come at the same time: what all of them hold in memory
T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """What is served: an engine by the name `name`, which gives `width` numbers a picture, called `output`.

    `names`: of the classes, where it gives logits. `sizes`: see `Batcher`. `about`: facts for GET /v2.
    """

    name: str
    run: Run
    preprocess: Preprocess
    width: int
    output: str = LOGITS
    names: Sequence[str] = ()
    sizes: Sequence[int] = ()
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    decoders: int = 2
    about: dict[str, Any] = field(default_factory=dict)


def build_app(service: Service) -> Any:
    """The Starlette application. UsageError without the extra `serve`."""
    library("starlette", "serve")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    routes = _Routes(service)
    model = f"/v2/models/{service.name}"
    table = [
        Route("/v2/health/live", routes.live),
        Route("/v2/health/ready", routes.ready),
        Route("/v2", routes.server),
        Route("/metrics", routes.metrics),
        Route("/predict", routes.timed("predict", routes.predict), methods=["POST"]),
    ]
    for place in (model, f"{model}/versions/{VERSION}"):
        table += [
            Route(place, routes.model),
            Route(f"{place}/ready", routes.ready),
            Route(f"{place}/infer", routes.timed("infer", routes.infer), methods=["POST"]),
        ]
    handlers: Any = {HTTPException: routes.unknown}
    return Starlette(routes=table, lifespan=routes.lifespan, exception_handlers=handlers)


class _Routes:
    def __init__(self, service: Service) -> None:
        from starlette.responses import JSONResponse, Response

        self.json, self.response = JSONResponse, Response
        self.service, self.counters = service, ServiceMetrics()
        self.batcher = Batcher(service.run, service.limits, service.sizes, self.counters.batch)
        self.decoders = ThreadPoolExecutor(service.decoders, "decoder")
        self.is_ready = False
        self.held = 0  # bytes of bodies that are coming

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """What waits at the end is answered."""
        await self.batcher.start()
        self.is_ready = True
        try:
            yield
        finally:
            self.is_ready = False
            await self.batcher.close()
            self.decoders.shutdown()

    async def live(self, request: Any) -> Any:
        return self.json({"live": True})

    async def ready(self, request: Any) -> Any:
        return self.json({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def server(self, request: Any) -> Any:
        return self.json({"name": "swin-quant", "version": self.service.about.get("version", ""),
                          "extensions": ["binary_tensor_data"], "model": self.service.about})  # fmt: skip

    async def model(self, request: Any) -> Any:
        service = self.service
        return self.json(protocol.metadata(service.name, service.output, service.width, service.preprocess))

    async def metrics(self, request: Any) -> Any:
        return self.response(self.counters.render(self.batcher.pictures), media_type=self.counters.content_type)

    async def unknown(self, request: Any, error: Any) -> Any:
        what = {
            404: "no such place: the model is /v2/models/" + self.service.name,
            405: "another method is needed here",
        }
        return self.json({"error": what.get(error.status_code, str(error.detail))}, error.status_code)

    def timed(self, route: str, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """The handler with its errors as one line of JSON, counted; no words of a library ever reach a client."""

        async def handle(request: Any) -> Any:
            start = time.perf_counter()
            try:
                response = await handler(request)
            except Refused as refusal:
                response = self.json(refusal.to_dict(), refusal.status)
                if refusal.status in (408, 413):  # the rest of the body is not wanted
                    response.headers["Connection"] = "close"
            except Exception as error:  # noqa: BLE001
                log.error("%s: %r", route, error)
                response = self.json({"error": "internal error"}, 500)
            self.counters.request(route, response.status_code, time.perf_counter() - start)
            return response

        return handle

    async def infer(self, request: Any) -> Any:
        service, body = self.service, await self._body(request)
        asked = await self._aside(protocol.parse, body, dict(request.headers), service.preprocess, service.output,
                                  service.limits.max_queue)  # fmt: skip
        values = await self._answered(request, asked.images)
        content, headers = protocol.answer(service.name, service.output, values, asked)
        return self.response(content, headers=headers)

    async def predict(self, request: Any) -> Any:
        """One picture, as its file is, in the body; ?top=N classes."""
        service = self.service
        if service.output != LOGITS:
            raise Refused(400, f"the model gives an {service.output}: ask /v2/models/{service.name}/infer")
        top = request.query_params.get("top", "5")
        if not (top.isascii() and top.isdigit() and len(top) < 8 and int(top) >= 1):
            raise Refused(400, "top must be a whole number from 1")
        images = await self._aside(self._prepared, await self._body(request))
        (logits,) = await self._answered(request, images)
        protocol.check_finite(logits)
        best = logits.double().softmax(0).topk(min(int(top), service.width))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        classes = [{"index": index, "name": service.names[index], "probability": share} for index, share in pairs]
        return self.json({"model": service.name, "classes": classes})

    def _prepared(self, body: bytes) -> Tensor:
        try:
            return self.service.preprocess(decode(body, "the body"))[None]
        except UnreadablePicture as error:
            raise Refused(400, str(error)) from error

    async def _aside(self, work: Callable[..., T], *given: Any) -> T:
        """Work in a thread of its own, so that others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, work, *given)

    async def _body(self, request: Any) -> bytes:
        """The whole body. Refused for one that is too large, or takes too long to come."""
        from starlette.requests import ClientDisconnect

        limits, parts, size = self.service.limits, [], 0
        too_large = Refused(413, f"the body is larger than {limits.max_megabytes:g} MB")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > limits.max_bytes:
            raise too_large

        async def read() -> None:
            nonlocal size
            async for part in request.stream():
                size, self.held = size + len(part), self.held + len(part)
                if self.held > _BODIES * limits.max_bytes:
                    raise Refused(503, "too much is coming at the same time: try again later")
                if size > limits.max_bytes:
                    raise too_large
                parts.append(part)

        try:
            await asyncio.wait_for(read(), limits.timeout_s)
        except asyncio.TimeoutError as error:
            raise Refused(408, f"the body did not come within {limits.timeout_s:g} s") from error
        except ClientDisconnect as error:
            raise Refused(_CLOSED, "the client went away") from error
        finally:
            self.held -= size
        return b"".join(parts)

    async def _answered(self, request: Any, images: Tensor) -> Tensor:
        """What the engine gives; given up when the client goes away, or after the time limit."""
        work = asyncio.ensure_future(self.batcher(images))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, timeout=self.service.limits.timeout_s,
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            if work.done():
                return work.result()
            if gone.done():
                raise Refused(_CLOSED, "the client went away")
            raise Refused(504, f"not answered within {self.service.limits.timeout_s:g} s: try again later")
        finally:
            work.cancel()
            gone.cancel()


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
