"""`plan` in memory."""

from dataclasses import dataclass
from typing import Any

from swin_quant.backends.cuda.planning import CudaPlan
from swin_quant.model import Model
from swin_quant.report.plan import fusion_table, plan_table, plan_text
from swin_quant.report.table import html_table
from swin_quant.tasks.plan import BATCH, GPU
from swin_quant.tasks.plan import plan as plan_config

_WIDTH = 100


@dataclass(frozen=True)
class Planned:
    """What the CUDA engine can at best give, planned and not measured. `found` has all of it as data."""

    found: CudaPlan

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return self.found.to_dict()

    def __str__(self) -> str:
        return plan_text(self.found, _WIDTH)

    def _repr_html_(self) -> str:
        return html_table(plan_table(self.found)) + html_table(fusion_table(self.found))


def plan(model: Model, gpu: str = GPU, batch: int = BATCH) -> Planned:
    """The least time of each launch of the CUDA engine for `batch` pictures on `gpu`: a name, or a YAML file of peaks.

    UsageError for a model that is no Swin.
    """
    return Planned(plan_config(model.config, gpu, batch))
