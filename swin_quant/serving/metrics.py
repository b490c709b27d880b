"""What a service counts, as Prometheus reads it; each service has counters of its own."""

from typing import Any

from swin_quant.base.extras import library

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServiceMetrics:
    """Counters of requests by route and status, pictures, batches, and how long requests and the engine took."""

    def __init__(self) -> None:
        prometheus = library("prometheus_client", "serve")
        self._render = prometheus.generate_latest
        self.registry = registry = prometheus.CollectorRegistry()
        self.content_type = str(prometheus.CONTENT_TYPE_LATEST)
        name = "swin_quant_"
        self.requests = prometheus.Counter(f"{name}requests", "Requests", ["route", "status"], registry=registry)
        self.seconds = prometheus.Histogram(f"{name}request_seconds", "From a request's head to its answer", ["route"],
                                            buckets=_SECONDS, registry=registry)  # fmt: skip
        self.sizes = prometheus.Histogram(f"{name}batch_size", "Pictures in a batch", buckets=_SIZES, registry=registry)
        self.engine = prometheus.Histogram(f"{name}engine_seconds", "Of the engine, a batch", buckets=_SECONDS,
                                           registry=registry)  # fmt: skip
        self.waiting = prometheus.Gauge(f"{name}waiting_pictures", "Pictures that wait or run", registry=registry)
        self.held = prometheus.Gauge(f"{name}held_bytes", "Of the budget, held by requests", registry=registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def batch(self, size: int, seconds: float) -> None:
        self.sizes.observe(size)
        self.engine.observe(seconds)

    def render(self, waiting: int, held: int) -> Any:
        """All of it as text."""
        self.waiting.set(waiting)
        self.held.set(held)
        return self._render(self.registry)
