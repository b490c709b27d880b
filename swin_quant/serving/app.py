"""The ASGI application: routes, errors and counters around decoders and one batcher, for any engine."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from swin_quant.backends.description import VERSION, ModelDescription
from swin_quant.base.extras import library
from swin_quant.base.progress import log
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.outputs import Output, parts_of
from swin_quant.score.engine import Run
from swin_quant.score.metrics import top_classes
from swin_quant.serving import picture, protocol
from swin_quant.serving.limits import ByteBudget, Hold, Refused, ServiceLimits
from swin_quant.serving.queues import Batcher, Lane
from swin_quant.serving.visit import Visit, advice, boundary_of, file_in

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # buckets of the histograms
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_LIGHT_BYTES = 2**21  # a body of JSON and tensors that is read within tenths of a second
_AT_ONCE = 2**13  # numbers that are written within milliseconds
_NUMBER, _BINARY_NUMBER = 64, 12  # bytes of memory for a number while it is written in JSON, or as it is
Handler = Callable[[Any, Visit], Awaitable[Any]]


@dataclass
class Durations:
    """How often something ran, and for how long in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` times of so many seconds each."""
        self.count += count
        self.ns += round(seconds * 1e9) * count


class ModelStatistics:
    """Statistics of one model since the service began.

    `success` and `fail` are of whole requests, `compute_input` is from a body to a tensor, `waiting` from there to the
    engine's numbers, `compute_output` from these to an answer.
    """

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version, self.last_ms, self.pictures = name, version, 0, 0
        self.success, self.fail, self.compute_input, self.waiting, self.compute_output = (Durations() for _ in range(5))
        self.engine = Durations()  # the time of its batch, once for every request
        self.batches: dict[int, Durations] = defaultdict(Durations)

    def request(self, succeeded: bool, seconds: float) -> None:
        """A request was answered or refused."""
        (self.success if succeeded else self.fail).add(seconds)
        self.last_ms = round(time.time() * 1000)

    def batch(self, pictures: int, requests: int, seconds: float) -> None:
        """The engine ran a batch."""
        self.pictures += pictures
        self.batches[pictures].add(seconds)
        self.engine.add(seconds, requests)

    def to_dict(self) -> dict[str, Any]:
        """The answer to GET /v2/models/NAME/stats."""
        none, ran = Durations(), min(self.engine.ns, self.waiting.ns)
        times = {
            "success": self.success,
            "fail": self.fail,
            "queue": Durations(self.waiting.count, self.waiting.ns - ran),
            "compute_input": self.compute_input,
            "compute_infer": Durations(self.waiting.count, ran),
            "compute_output": self.compute_output,
            "cache_hit": none,
            "cache_miss": none,
        }
        unknown = {"compute_input": asdict(none), "compute_output": asdict(none)}
        sizes = sorted(self.batches.items())
        by_size = [{"batch_size": size, "compute_infer": asdict(one), **unknown} for size, one in sizes]
        about = {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_ms,
            "inference_count": self.pictures,
            "execution_count": sum(one.count for one in self.batches.values()),
            "inference_stats": {name: asdict(one) for name, one in times.items()},
            "batch_stats": by_size,
        }
        return {"model_stats": [about]}


class ServiceMetrics:
    """Prometheus counters of one service: requests by route and status, batches, and seconds of requests and engine."""

    def __init__(self) -> None:
        prometheus = library("prometheus_client", "serve")
        self._render = prometheus.generate_latest
        self.registry = prometheus.CollectorRegistry()
        self.content_type = str(prometheus.CONTENT_TYPE_LATEST)

        def metric(kind: str, name: str, *arguments: Any, **options: Any) -> Any:
            return getattr(prometheus, kind)(f"swin_quant_{name}", *arguments, registry=self.registry, **options)

        request_help = "From a request's head to its answer"
        self.requests = metric("Counter", "requests", "Requests", ["route", "status"])
        self.seconds = metric("Histogram", "request_seconds", request_help, ["route"], buckets=_SECONDS)
        self.sizes = metric("Histogram", "batch_size", "Pictures in a batch", buckets=_SIZES)
        self.engine = metric("Histogram", "engine_seconds", "Seconds of the engine for a batch", buckets=_SECONDS)
        self.waiting = metric("Gauge", "waiting_pictures", "Pictures that wait or run")
        self.held = metric("Gauge", "held_bytes", "Bytes of the budget that requests hold")

    def request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def batch(self, size: int, seconds: float) -> None:
        self.sizes.observe(size)
        self.engine.observe(seconds)

    def render(self, waiting: int, held: int) -> Any:
        """All counters as text."""
        self.waiting.set(waiting)
        self.held.set(held)
        return self._render(self.registry)


@dataclass(frozen=True)
class Service:
    """An engine that is served: images to the first output of `model`, or to all of its maps.

    `sizes`: see `Batcher`. `about`: facts for GET /v2, of which `engine` names the backend.
    """

    model: ModelDescription
    run: Run
    preprocess: Preprocess
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
    model = f"/v2/models/{service.model.name}"
    table: list[tuple[str, str, str, Handler]] = [
        ("GET", "/v2/health/live", "live", routes.live),
        ("GET", "/v2/health/ready", "ready", routes.ready),
        ("GET", "/v2", "server", routes.server),
        ("GET", "/v2/models/stats", "stats", routes.stats),
        ("GET", "/metrics", "metrics", routes.metrics),
        ("POST", "/predict", "predict", routes.predict),
    ]
    for place in (model, f"{model}/versions/{VERSION}"):
        table += [
            ("GET", place, "model", routes.model),
            ("GET", f"{place}/ready", "ready", routes.ready),
            ("GET", f"{place}/config", "config", routes.config),
            ("GET", f"{place}/stats", "stats", routes.stats),
            ("POST", f"{place}/infer", "infer", routes.infer),
        ]
    paths = [Route(path, routes.timed(name, handler), methods=[method]) for method, path, name, handler in table]
    handlers: Any = {HTTPException: routes.unknown}
    app = Starlette(routes=paths, lifespan=routes.lifespan, exception_handlers=handlers)
    app.state.count = routes.counters.request
    return app


class _Routes:
    def __init__(self, service: Service) -> None:
        from starlette.responses import JSONResponse, Response

        self.json, self.response = JSONResponse, Response
        self.service, self.counters, limits = service, ServiceMetrics(), service.limits
        self.statistics = ModelStatistics(service.model.name, str(VERSION))
        self.batcher = Batcher(service.run, limits, service.sizes, self._count_batch)
        self.budget = ByteBudget(int(limits.budget_megabytes * 2**20))
        # Long work has its own threads: short work never waits for it.
        self.light, self.medium, self.apart = (
            Lane(name, threads, limits.max_queue)
            for name, threads in (("light", service.decoders), ("medium", service.decoders), ("apart", 1))
        )
        self.is_ready = False

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """At the end all waiting requests are answered."""
        await self.batcher.start()
        self.is_ready = True
        try:
            yield
        finally:
            self.is_ready = False
            await self.batcher.close()
            for lane in (self.light, self.medium, self.apart):
                lane.close()

    async def live(self, request: Any, visit: Visit) -> Any:
        return self.json({"live": True})

    async def ready(self, request: Any, visit: Visit) -> Any:
        return self.json({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def server(self, request: Any, visit: Visit) -> Any:
        about = self.service.about
        server = {"name": "swin-quant", "version": about.get("version", ""), "extensions": protocol.EXTENSIONS}
        return self.json({**server, "model": about})

    async def model(self, request: Any, visit: Visit) -> Any:
        return self.json(self.service.model.metadata(self._engine))

    async def config(self, request: Any, visit: Visit) -> Any:
        limits = self.service.limits
        return self.json(self.service.model.triton(self._engine, limits.max_batch, limits.delay_us, instances=1))

    async def stats(self, request: Any, visit: Visit) -> Any:
        return self.json(self.statistics.to_dict())

    @property
    def _engine(self) -> str:
        return str(self.service.about.get("engine", "swin_quant"))

    def _count_batch(self, pictures: int, requests: int, seconds: float) -> None:
        self.counters.batch(pictures, seconds)
        self.statistics.batch(pictures, requests, seconds)

    async def metrics(self, request: Any, visit: Visit) -> Any:
        text = self.counters.render(self.batcher.pictures, self.budget.held)
        return self.response(text, media_type=self.counters.content_type)

    async def unknown(self, request: Any, error: Any) -> Any:
        what = {
            404: f"no such place: the model is /v2/models/{self.service.model.name}, version {VERSION}",
            405: f"this place takes the method {(error.headers or {}).get('Allow', 'POST')}",
        }
        self.counters.request("unknown", error.status_code, 0)
        return self.json({"error": what.get(error.status_code, "no such request")}, error.status_code, error.headers)

    def timed(self, route: str, handler: Handler) -> Callable[[Any], Awaitable[Any]]:
        """The handler, counted, with its errors as one line of JSON; no words of a library reach a client."""

        async def handle(request: Any) -> Any:
            start, visit = time.perf_counter(), Visit(request, self.service.limits, self.budget)
            try:
                response = await handler(request, visit)
            except Refused as refusal:
                response = self.json(refusal.to_dict(), refusal.status, refusal.headers)
                # A traceback keeps the frames with the body until the garbage collector runs: more than the budget has.
                refusal.__traceback__ = refusal.__cause__ = refusal.__context__ = None
            except Exception as error:  # noqa: BLE001
                log.error("%s: %r", route, error)
                response = self.json({"error": "internal error"}, 500)
            finally:
                visit.hold.end()
            seconds = time.perf_counter() - start
            self.counters.request(route, response.status_code, seconds)
            if route in ("infer", "predict"):
                self.statistics.request(response.status_code == 200, seconds)
            return response

        return handle

    async def infer(self, request: Any, visit: Visit) -> Any:
        work = self._inferred(visit, await visit.body(), dict(request.headers))
        content, headers = await visit.until_answered(work)
        return self.response(content, headers=headers)

    async def predict(self, request: Any, visit: Visit) -> Any:
        """The body is a picture file, or a form with one; ?top=N is the number of classes."""
        model = self.service.model
        if not model.classifies:
            given = ", ".join(end.name for end in model.outputs)
            raise Refused(400, f"the model gives {given}, no classes: ask /v2/models/{model.name}/infer")
        top = request.query_params.get("top", "5")
        if not (top.isascii() and top.isdigit() and len(top) < 8 and int(top) >= 1):
            raise Refused(400, "top must be a whole number from 1")
        found = await visit.until_answered(self._predicted(visit, await visit.body(), request.headers))
        (logits,) = parts_of(found)[0]
        protocol.check_finite(logits)
        (best,) = top_classes(logits[None], model.labels, int(top))
        return self.json({"model": model.name, "classes": [asdict(one) for one in best]})

    async def _inferred(self, visit: Visit, body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        service, hold, size = self.service, visit.hold, len(body)
        lane = self.light if size <= _LIGHT_BYTES else self.medium
        how = (headers, service.model, service.preprocess, service.limits.max_queue)
        with _timing(self.statistics.compute_input):
            inputs = await lane(size, 4 * size, hold, protocol.parse, body, *how)
        del body
        hold.give(size)
        values = await self._computed(inputs.images, hold)
        count = sum(part.numel() for part in parts_of(values))
        count *= len(service.model.outputs) if service.model.classifies else 1
        each = _BINARY_NUMBER if all(one.binary for one in inputs.outputs) else _NUMBER
        arguments = (service.model, values, inputs)
        with _timing(self.statistics.compute_output):
            if count <= _AT_ONCE:
                return protocol.answer(*arguments)
            return await self.medium(count, each * count, hold, protocol.answer, *arguments)

    async def _predicted(self, visit: Visit, body: bytes, headers: Mapping[str, str]) -> Output:
        hold, size = visit.hold, len(body)
        with _timing(self.statistics.compute_input):
            try:
                if boundary := boundary_of(headers):
                    body = await self.light(size, 2 * size, hold, file_in, body, boundary)
                images = await self._pictured(visit, body)
            except Refused as refusal:
                if refusal.status == 400:
                    raise Refused(400, f"{refusal}{advice(headers)}") from None
                raise
        del body
        hold.give(size)
        return await self._computed(images, hold)

    async def _computed(self, images: Tensor, hold: Hold) -> Output:
        hold.take(images.nbytes)
        with _timing(self.statistics.waiting):
            found = await self.batcher(images)
        hold.take(sum(part.nbytes for part in parts_of(found)))
        return found

    async def _pictured(self, visit: Visit, body: bytes) -> Tensor:
        preprocess, most = self.service.preprocess, visit.limits.max_megapixels
        images = await self.light(len(body), picture.SMALL, visit.hold, picture.begun, body, most, preprocess)
        return await self._decoded(images, visit.hold, body) if isinstance(images, picture.Cost) else images

    async def _decoded(self, cost: picture.Cost, hold: Hold, body: bytes) -> Tensor:
        if cost.is_light:
            return await self.medium(cost.work, cost.needs, hold, picture.prepared, body, self.service.preprocess)
        apart = picture.DecodedApart(body, self.service.preprocess)
        try:
            return await self.apart(cost.work, cost.needs, hold, apart)
        except asyncio.CancelledError:
            apart.stop()
            raise


@contextmanager
def _timing(durations: Durations) -> Iterator[None]:
    """Adds the seconds inside, unless they end in an error."""
    start = time.perf_counter()
    yield
    durations.add(time.perf_counter() - start)
