"""Plan a network's time on a GPU, launch by launch; nothing is measured.

The least time comes from shapes and peaks (`cuda_plan`), an estimate from the compiled kernels (`static_plan`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.cuda.choose_fusions import chosen, fused_program, model_of
from swin_quant.backends.cuda.counts import KernelCounts, shipped_counts
from swin_quant.backends.cuda.estimates import Estimate, counts_of, estimate_of
from swin_quant.backends.cuda.floors import Floor, floor_of, gpu_of
from swin_quant.backends.cuda.fusions import CHOICES, merged, rows
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.program import Launch
from swin_quant.backends.cuda.spec import NetworkSpec, spec_of
from swin_quant.base.errors import UsageError
from swin_quant.config.swin import SWINV2
from swin_quant.models.geometry import geometry_of
from swin_quant.operators.roofline import Machine

PLANNED = "planned, not measured"
INT8, FP16, FP8 = "int8", "fp16", "fp8"
AS_EXECUTED, AS_FP16 = "as executed", "as fp16 is executed"
LARGEST_BATCH = 4096
ESTIMATED = "estimated from compiled kernels, not measured"
SPECS = {INT8: "int8", FP16: "float", FP8: "fp8"}


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch and its floor in each precision; the fusions are the same in all."""

    name: str
    op: str
    floors: Mapping[str, Floor]


@dataclass(frozen=True)
class Fused:
    """A program under one set of fusions: the number of launches, the bytes that they move, and the sum of their
    floors."""

    name: str
    launches: int
    bytes: int
    us: float


@dataclass(frozen=True)
class CudaPlan:
    """The floors of a network for `batch` pictures on a machine, fused as the engine runs it in int8.

    Precisions: int8, fp16 and, on GPUs that have it, fp8. All that is no product is in half precision.
    """

    model: str
    batch: int
    machine: Machine
    launches: Sequence[PlannedLaunch]
    fusions: Mapping[str, Sequence[Fused]]

    @property
    def precisions(self) -> tuple[str, ...]:
        """The planned precisions, int8 first."""
        return tuple(self.fusions)

    def us(self, precision: str) -> float:
        """The sum of all floors, in microseconds."""
        return sum(launch.floors[precision].us for launch in self.launches)

    @property
    def gain(self) -> float:
        """The most that int8 can be faster than float16, with the same launches."""
        return self.us(FP16) / self.us(INT8)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data for JSON."""
        return {
            "status": PLANNED,
            "model": self.model,
            "batch": self.batch,
            "machine": asdict(self.machine),
            "launches": [
                {"name": one.name, "op": one.op, "floors": {p: _floor(floor) for p, floor in one.floors.items()}}
                for one in self.launches
            ],
            "us": {precision: self.us(precision) for precision in self.precisions},
            "int8 at most": self.gain,
            "fusions": {precision: [asdict(one) for one in found] for precision, found in self.fusions.items()},
        }


def _floor(floor: Floor) -> dict[str, Any]:
    return asdict(floor) | {"us": floor.us, "bound": floor.bound}


def spec_of_config(cfg: CfgNode, precision: str = "int8") -> NetworkSpec:
    """The spec of a Swin by its shapes alone: every product in int8 or, with precision float, none."""
    return spec_of(geometry_of(cfg), 2 if cfg.MODEL.TYPE == SWINV2.name else 1, precision)


def cuda_plan(cfg: CfgNode, machine: Machine, batch: int) -> CudaPlan:
    """Plan the model that `cfg` describes. UsageError if it is no Swin, or the machine is no GPU that the engine runs
    on."""
    check_batch_of_plan(batch)
    precisions = precisions_of(machine)
    lists = {
        precision: program_of(spec_of_config(cfg, "float" if precision == FP16 else "int8"), batch).launches
        for precision in precisions
    }
    executed, in_fp16 = (chosen(lists[p], model_of(lists[p], machine)) for p in (INT8, FP16))
    launches, at = [], 0
    for one, (_, group) in zip(merged(executed), executed, strict=True):
        end = at + len(group)
        floors = {p: floor_of(found[at:end], machine, found[end:], fp8=p == FP8) for p, found in lists.items()}
        launches.append(PlannedLaunch(one.name, one.op, floors))
        at = end
    sizes = {name: [len(group) for _, group in found] for name, found in ((AS_EXECUTED, executed), (AS_FP16, in_fp16))}
    fusions = {p: choices(found, sizes, machine, p == FP8) for p, found in lists.items()}
    return CudaPlan(cfg.MODEL.NAME, batch, machine, launches, fusions)


def check_batch_of_plan(batch: int) -> None:
    """UsageError for a batch that no plan is made for."""
    if not 1 <= batch <= LARGEST_BATCH:
        raise UsageError(f"‹batch› {batch}: must be from 1 to {LARGEST_BATCH}")


def precisions_of(machine: Machine) -> tuple[str, ...]:
    """The precisions that a GPU is planned in. UsageError for a machine that is none."""
    return INT8, FP16, *([FP8] if gpu_of(machine).fp8_tflops else [])


def choices(
    launches: Sequence[Launch], executed: Mapping[str, Sequence[int]], machine: Machine, fp8: bool
) -> list[Fused]:
    """Launches, bytes and floors under the groupings in `executed` (sizes by name), then under each of CHOICES."""
    sizes = {**executed} | {
        name: [len(group) for _, group in rows(launches, fusions)] for name, fusions in CHOICES.items()
    }
    found = []
    for name, groups in sizes.items():
        ends = list(accumulate(groups))
        floors = [
            floor_of(launches[end - size : end], machine, launches[end:], fp8)
            for size, end in zip(groups, ends, strict=True)
        ]
        found.append(Fused(name, len(floors), sum(one.bytes for one in floors), sum(one.us for one in floors)))
    return found


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
                        "estimate": asdict(one.estimate) | {"bound": one.estimate.bound},
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
