"""A network's time on a GPU, estimated launch by launch from the compiled kernels; nothing is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.cuda.choose_fusions import fused_program
from swin_quant.backends.cuda.counts import KernelCounts, shipped_counts
from swin_quant.backends.cuda.estimates import Estimate, counts_of, estimate_of
from swin_quant.backends.cuda.floors import Floor, floor_of
from swin_quant.backends.cuda.planning import FP8, FP16, INT8, check_batch_of_plan, precisions_of, spec_of_config
from swin_quant.backends.cuda.program import Launch
from swin_quant.base.errors import UsageError
from swin_quant.operators.roofline import Machine

ESTIMATED = "estimated from compiled kernels, not measured"
SPECS = {INT8: "int8", FP16: "float", FP8: "fp8"}


@dataclass(frozen=True)
class StaticLaunch:
    """A launch with its floor, the counts of its kernel, and the estimate that follows from them."""

    launch: Launch
    floor: Floor
    counts: KernelCounts
    estimate: Estimate


@dataclass(frozen=True)
class StaticPlan:
    """The launches of a network for `batch` pictures on a machine by precision, each with its own fusions.

    `triton`: the compiler whose kernels were counted. A precision without counts is left out.
    """

    model: str
    batch: int
    machine: Machine
    triton: str
    launches: Mapping[str, Sequence[StaticLaunch]]

    def us(self, precision: str) -> tuple[float, float, float]:
        """The sum of the estimates in microseconds, and of the ends of their ranges."""
        found = [one.estimate for one in self.launches[precision]]
        return sum(one.us for one in found), sum(one.low for one in found), sum(one.high for one in found)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data for JSON."""
        return {
            "status": ESTIMATED,
            "model": self.model,
            "batch": self.batch,
            "triton": self.triton,
            "machine": asdict(self.machine),
            "us": {name: dict(zip(("us", "low", "high"), self.us(name), strict=True)) for name in self.launches},
            "launches": {
                precision: [
                    {
                        "name": one.launch.name,
                        "op": one.launch.op,
                        "floor": asdict(one.floor) | {"us": one.floor.us},
                        "counts": asdict(one.counts),
                        "estimate": one.estimate.to_dict(),
                    }
                    for one in found
                ]
                for precision, found in self.launches.items()
            },
        }


def static_plan(cfg: CfgNode, machine: Machine, batch: int) -> StaticPlan:
    """Estimate the model that `cfg` describes. UsageError if it is no Swin, if the machine is no GPU that the engine
    runs on, or if no counts of its kernels are at hand."""
    check_batch_of_plan(batch)
    launches = {}
    for precision in precisions_of(machine):
        program = fused_program(spec_of_config(cfg, SPECS[precision]), batch, machine)
        if counts := counts_of(program.launches, machine):
            launches[precision] = [_launch(one, counts[one.name], machine) for one in program.launches]
    if not launches:
        raise UsageError(
            f"{cfg.MODEL.NAME}, batch {batch}: its kernels were not counted: take a Swin or SwinV2 of 224 or 256 "
            "pixels at batch 1, 8 or 32, or run benchmarks/cuda_static.py for it"
        )
    return StaticPlan(cfg.MODEL.NAME, batch, machine, shipped_counts().triton, launches)


def _launch(launch: Launch, counts: KernelCounts, machine: Machine) -> StaticLaunch:
    return StaticLaunch(launch, floor_of([launch], machine), counts, estimate_of(launch, counts, machine))
