"""What a network can at best take on a GPU, launch by launch: planned from shapes and peaks, never measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.cuda.floors import Floor, floor_of, gpu_of
from swin_quant.backends.cuda.fusions import Fused, choices
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.spec import NetworkSpec, spec_of
from swin_quant.base.errors import UsageError
from swin_quant.config.swin import SWINV2
from swin_quant.models.geometry import geometry_of
from swin_quant.operators.roofline import Machine

PLANNED = "planned, not measured"
INT8, FP16, FP8 = "int8", "fp16", "fp8"
LARGEST_BATCH = 4096


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch of the engine, and its floor by precision; the launches of all precisions are the same."""

    name: str
    op: str
    floors: Mapping[str, Floor]


@dataclass(frozen=True)
class CudaPlan:
    """The floors of a network for `batch` pictures on a machine, and what each choice of fusions makes of them.

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
    launches = [
        PlannedLaunch(
            same[0].name,
            same[0].op,
            {p: floor_of([one], machine, fp8=p == FP8) for p, one in zip(precisions, same, strict=True)},
        )
        for same in zip(*lists.values(), strict=True)
    ]
    fusions = {precision: choices(found, machine, precision == FP8) for precision, found in lists.items()}
    return CudaPlan(cfg.MODEL.NAME, batch, machine, launches, fusions)
