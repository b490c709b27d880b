"""What a network can at best take on a GPU, launch by launch: planned from shapes and peaks, never measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.cuda.choose_fusions import chosen, modelled_us
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


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch of the engine, and its floor by precision, in each of which the same launches are fused."""

    name: str
    op: str
    floors: Mapping[str, Floor]


@dataclass(frozen=True)
class Fused:
    """A choice of fusions in one program: how many launches are left, what they move, and the sum of their floors."""

    name: str
    launches: int
    bytes: int
    us: float


@dataclass(frozen=True)
class CudaPlan:
    """The floors of a network for `batch` pictures on a machine, as the engine executes it in int8.

    By precision: int8, fp16 and, on GPUs that have it, fp8. What is no product is in half precision in each.
    """

    model: str
    batch: int
    machine: Machine
    launches: Sequence[PlannedLaunch]
    fusions: Mapping[str, Sequence[Fused]]

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those that are planned, int8 first."""
        return tuple(self.fusions)

    def us(self, precision: str) -> float:
        """The sum of the floors of all launches, in microseconds."""
        return sum(launch.floors[precision].us for launch in self.launches)

    @property
    def gain(self) -> float:
        """How many times as fast as float16 int8 can at most be, launch for launch."""
        return self.us(FP16) / self.us(INT8)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """What the engine computes of a Swin by its shapes alone: all products in int8, or with precision float none."""
    return spec_of(geometry_of(cfg), 2 if cfg.MODEL.TYPE == SWINV2.name else 1, precision)


def cuda_plan(cfg: CfgNode, machine: Machine, batch: int) -> CudaPlan:
    """Plan the model that `cfg` describes. UsageError for one that is no Swin, for a machine that is no GPU of ours."""
    if not 1 <= batch <= LARGEST_BATCH:
        raise UsageError(f"‹batch› {batch}: must be from 1 to {LARGEST_BATCH}")
    precisions = (INT8, FP16, *([FP8] if gpu_of(machine).fp8_tflops else []))
    lists = {
        precision: program_of(spec_of_config(cfg, "float" if precision == FP16 else "int8"), batch).launches
        for precision in precisions
    }
    executed, in_fp16 = (chosen(lists[p], lambda launch: modelled_us(launch, machine)) for p in (INT8, FP16))
    launches, at = [], 0
    for one, (_, group) in zip(merged(executed), executed, strict=True):
        end = at + len(group)
        floors = {p: floor_of(found[at:end], machine, found[end:], fp8=p == FP8) for p, found in lists.items()}
        launches.append(PlannedLaunch(one.name, one.op, floors))
        at = end
    sizes = {name: [len(group) for _, group in found] for name, found in ((AS_EXECUTED, executed), (AS_FP16, in_fp16))}
    fusions = {p: choices(found, sizes, machine, p == FP8) for p, found in lists.items()}
    return CudaPlan(cfg.MODEL.NAME, batch, machine, launches, fusions)


def choices(
    launches: Sequence[Launch], executed: Mapping[str, Sequence[int]], machine: Machine, fp8: bool
) -> list[Fused]:
    """What the groups that are `executed`, by their sizes, and then each of CHOICES come to on a machine."""
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
