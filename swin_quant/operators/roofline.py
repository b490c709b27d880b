"""The least time of each block by a machine's peaks, and the most that INT8 can gain. Computed, never measured.

Williams et al., "Roofline: an insightful visual performance model", 2009: a call takes at least as long as its
arithmetic at the peak, and as its bytes at the bandwidth.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from swin_quant.base.errors import UsageError
from swin_quant.base.files import shipped_files
from swin_quant.base.schema import checked, within
from swin_quant.base.yaml_file import read_yaml, shipped_or_file
from swin_quant.operators.trace import Call

_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
TRACED = 4  # bytes of float32, in which calls are traced
OTHERS = "(other)"
Peak = Annotated[float, within(above=0)]
LAUNCH_US = 1.6


@dataclass(frozen=True)
class GpuFacts:
    """GPU data for the kernels: compute capability (90 is 9.0), multiprocessors, and the float8 peak if it has one.

    `launch_us`: the least microseconds of a launch inside a CUDA graph. LAUNCH_US is the sum of two published
    measurements, neither on the newest GPUs: 1.1 for adding 1,024 numbers (pytorch issue 161104) and 0.5 between
    kernels (3.4 a kernel of 2.9: NVIDIA, "Getting Started with CUDA Graphs", 2019).
    `fusions`: for operands (int8, float8, half), a fusion's title and a width in channels, the tokens in a batch from
    which it is taken, left, taken again, and so on.
    """

    capability: Annotated[int, within(least=70, most=200)]
    sms: Annotated[int, within(least=1)]
    fp8_tflops: Annotated[float | None, within(above=0)] = None
    launch_us: Annotated[float, within(least=0)] = LAUNCH_US
    fusions: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Machine:
    """A machine's peaks: float and int8 operations a second in units of 10^12 (a MAC is two), and memory bandwidth in
    units of 10^9 bytes a second. `source`: their source. `gpu`: for GPUs that our kernels run on."""

    description: str
    source: str
    float_type: Literal["float32", "float16", "bfloat16"]
    float_tflops: Peak
    int8_tops: Peak
    bandwidth_gbs: Peak
    gpu: GpuFacts | None = None


def machines() -> list[str]:
    """The names of the shipped machines."""
    return [path.stem for path in shipped_files("machines")]


def gpus() -> list[str]:
    """The names of the shipped machines that our CUDA kernels run on."""
    return [name for name in machines() if load_machine(name).gpu]


def load_machine(name_or_path: str) -> Machine:
    """A shipped machine by name, or one from a YAML file. UsageError names the file and what is wrong."""
    path = shipped_or_file(name_or_path, shipped_files("machines"), "machine")
    return checked(Machine, read_yaml(path, "machine"), str(path))


def gpu_of(machine: Machine) -> GpuFacts:
    """The machine's GPU data. UsageError for a machine that the kernels do not run on."""
    if machine.gpu is None:
        raise UsageError(f"{machine.description}: is no GPU that the CUDA engine runs on: its file has no key `gpu`")
    return machine.gpu


@dataclass(frozen=True)
class Limit:
    """The least time of a block for the traced batch, in microseconds, and by how much INT8 can shorten it.

    `float_us`, `int8_us`: each call on its own. `fused_us`, `fused_int8_us`: matrix products alone, as if all else were
    fused away. `bound`: the limit (bytes or arithmetic) for most of the products' time in float.
    """

    block: str
    macs: int
    bytes: int
    float_us: float
    int8_us: float
    fused_us: float
    fused_int8_us: float
    bound: str

    @property
    def gain(self) -> float:
        """The upper bound of the speedup, with each call on its own."""
        return self.float_us / self.int8_us if self.int8_us else 1.0

    @property
    def fused_gain(self) -> float:
        """The upper bound of the speedup, with all but products fused away."""
        return self.fused_us / self.fused_int8_us if self.fused_int8_us else 1.0


def limits(calls: Sequence[Call], blocks: Iterable[str], machine: Machine) -> list[Limit]:
    """A limit for each block of these names, one for all other calls, and the whole model last."""
    names = list(blocks)
    parts: dict[str, list[Call]] = {name: [] for name in (*names, OTHERS)}
    for call in calls:
        parts[_block_of(call.module, names)].append(call)
    found = [_limit(name, part, machine) for name, part in parts.items() if part]
    return [*found, _limit("all", calls, machine)]


def _block_of(module: str, names: Sequence[str]) -> str:
    return next((name for name in names if module == name or module.startswith(f"{name}.")), OTHERS)


def _limit(block: str, calls: Sequence[Call], machine: Machine) -> Limit:
    width = _WIDTHS[machine.float_type] / TRACED
    floats = [_us(call, machine.float_tflops, width, machine) for call in calls]
    int8 = [
        max(_us(call, machine.int8_tops, 1 / TRACED, machine)) if call.macs else max(both)
        for call, both in zip(calls, floats, strict=True)
    ]
    products = [(both, after) for call, both, after in zip(calls, floats, int8, strict=True) if call.macs]
    fused, fused_int8 = sum(max(both) for both, _ in products), sum(after for _, after in products)
    by_compute = sum(compute for (compute, memory), _ in products if compute >= memory)
    bound = "compute" if 2 * by_compute >= fused and fused else "memory"
    macs, moved = sum(call.macs for call in calls), sum(call.bytes for call in calls)
    return Limit(block, macs, int(moved * width), sum(map(max, floats)), sum(int8), fused, fused_int8, bound)


def _us(call: Call, tera: float, width: float, machine: Machine) -> tuple[float, float]:
    """Microseconds of arithmetic and of memory."""
    return 2 * call.macs / (tera * 1e6), call.bytes * width / (machine.bandwidth_gbs * 1e3)
