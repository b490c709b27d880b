"""`app`: an artifact as an ASGI application."""

from pathlib import Path
from typing import Any

from swin_quant.score.options import EngineOptions
from swin_quant.serving.limits import ServiceLimits
from swin_quant.tasks.serve import Hosting, app_of


def app(file: str | Path, engine: str | None = None, *, name: str | None = None, labels: str | None = None,
        threads: int | None = None, device: str = "cpu", **limits: Any) -> Any:  # fmt: skip
    """What `swin-quant serve` runs, for servers and clusters of your own: routes as docs/shipping.md lists them.

    `device`: cpu or cuda, torch's current GPU. `limits`: max_batch, delay_us, max_queue, max_megabytes, timeout_s,
    max_megapixels, budget_megabytes.
    """
    options = EngineOptions(threads=threads, device=device)
    return app_of(file, Hosting([engine] if engine else None, options, ServiceLimits(**limits), name, labels))
