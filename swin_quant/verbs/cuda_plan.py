"""The least time that the CUDA engine can take on a GPU: bytes, operations and floor of each launch. No GPU needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import Printed, tell
from swin_quant.report.table import NARROW, ReportTable, print_fitted

if TYPE_CHECKING:
    from swin_quant.backends.cuda.planning import CudaPlan
    from swin_quant.base.distributed import World
    from swin_quant.model import Model

MODEL = "swin_tiny_patch4_window7_224"
EXAMPLES = """examples:
  swin-quant cuda plan --gpu h200 --batch 32                                            (Swin-T, if no other is given)
  swin-quant cuda plan my.pth --gpu h200 --batch 32
  swin-quant cuda plan --cfg swin_tiny_patch4_window7_224 --gpu a100 --json plan.json   (shapes alone need no weights)
  swin-quant cuda plan --cfg swin_tiny_patch4_window7_224 --gpu l4 --output out         (plan.md, plan.csv, plan.json)
  swin-quant cuda plan --static --gpu h100 --batch 32 --output out                      (static.md, static.csv, ...)

Planned, not measured: the launches are those that the engine executes, their times the least that the peaks of a GPU's
data sheet allow. INT8 stands beside FP16 and, where the GPU has it, FP8; below it, what fusing launches would save.
With --static the times are estimates: the largest of what bytes, products, instructions by pipe and waves need, as
counted in the compiled kernels of Swin and SwinV2 of 224 and 256 pixels at batch 1, 8 and 32."""
GPU, BATCH = "h200", 32


@dataclass(frozen=True)
class PlanOptions:
    """Which model is planned, for which GPU."""

    checkpoint: Annotated[
        str | None, Flag("a Swin, float or calibrated, or timm:NAME, hf:NAME", "CHECKPOINT", or_flag=True)
    ] = None
    model: shared.ModelOptions = shared.ModelOptions()
    gpu: Annotated[str, Flag("a100, l4, rtx4090, h100, h200, b200, ... or a YAML file", "NAME|FILE")] = GPU
    batch: Annotated[int, Flag("pictures at a time", "N")] = BATCH
    static: Annotated[bool, Flag("estimate each launch from its compiled kernel instead, with a range")] = False
    output: Annotated[str | None, Flag("also write the plan there, as .md, .csv and .json", "DIR")] = None
    json: shared.Json = None
    device: shared.OnlyCpu = "cpu"


@dataclass(frozen=True)
class Planned(Printed):
    """The least possible latency of the CUDA engine, planned and not measured. `found` has all figures as data."""

    found: CudaPlan

    def to_dict(self) -> dict[str, Any]:
        """The plan for JSON."""
        return self.found.to_dict()

    def text(self, width: int, color: bool = False) -> str:
        from swin_quant.report.plan import plan_text

        return plan_text(self.found, width, color)

    def tables(self) -> list[ReportTable[Any]]:
        from swin_quant.report.plan import fusion_table, plan_table

        return [plan_table(self.found), fusion_table(self.found)]


def plan(model: Model, gpu: str = GPU, batch: int = BATCH) -> Planned:
    """The least time of each launch of the CUDA engine for `batch` pictures on `gpu`: a name, or a YAML file of peaks.

    UsageError for a model that is no Swin.
    """
    from swin_quant.backends.cuda.planning import cuda_plan
    from swin_quant.operators.roofline import load_machine

    return Planned(cuda_plan(model.config, load_machine(gpu), batch))


def run(options: PlanOptions, world: World) -> None:
    from swin_quant.backends.cuda.planning import cuda_plan, static_plan
    from swin_quant.operators.roofline import load_machine
    from swin_quant.report.plan import PLAN_FILES, STATIC_FILES, plan_text, static_text

    shared.one_process(world, "cuda plan")
    checkpoint, model = shared.opened(options.checkpoint), options.model
    if not checkpoint and not model.cfg:
        model = replace(model, cfg=MODEL)
    cfg, machine = shared.config_of(checkpoint, model), load_machine(options.gpu)
    static, planned = (static_plan, STATIC_FILES, static_text), (cuda_plan, PLAN_FILES, plan_text)
    make, files, text = static if options.static else planned
    found: Any = make(cfg, machine, options.batch)
    if options.output:
        folder = ensure_writable_dir(options.output)
        for name, write in files.items():
            atomic_write_bytes(folder / name, write(found).encode())
            log.info("plan: %s", folder / name)
    tell(options.json, lambda: print_fitted(partial(text, found), NARROW), found.to_dict())
