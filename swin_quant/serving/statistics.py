"""Counts and times of a service: as Triton's statistics extension answers them, and for Prometheus."""

import time
from collections import defaultdict
from typing import Any

from swin_quant.base.extras import library

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # buckets of the histograms
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Durations:
    """How often something ran, and for how long in all."""

    def __init__(self, count: int = 0, ns: int = 0) -> None:
        self.count, self.ns = count, ns

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` times of so many seconds each."""
        self.count += count
        self.ns += round(seconds * 1e9) * count

    def to_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


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
        unknown = {"compute_input": none.to_dict(), "compute_output": none.to_dict()}
        sizes = sorted(self.batches.items())
        by_size = [{"batch_size": size, "compute_infer": one.to_dict(), **unknown} for size, one in sizes]
        about = {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_ms,
            "inference_count": self.pictures,
            "execution_count": sum(one.count for one in self.batches.values()),
            "inference_stats": {name: one.to_dict() for name, one in times.items()},
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
