"""GPUs that the kernels run on: peaks, the fusions that pay, tiles. Each is a file of `configs/machines`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from swin_quant.base.files import shipped_files
from swin_quant.base.schema import checked, within
from swin_quant.base.yaml_file import read_yaml, shipped_or_file

Peak = Annotated[float, within(above=0)]
LAUNCH_US = 1.6


@dataclass(frozen=True)
class GpuFacts:
    """GPU data for the kernels: compute capability (90 is 9.0), multiprocessors, and the float8 peak if it has one.

    `launch_us`: the least microseconds of a launch inside a CUDA graph. LAUNCH_US is the sum of two published
    measurements, neither on the newest GPUs: 1.1 for adding 1,024 numbers (pytorch issue 161104) and 0.5 between
    kernels (3.4 a kernel of 2.9: NVIDIA, "Getting Started with CUDA Graphs", 2019).
    `fusions`: for operands (int8, float8, half), a fusion's title and a width in channels, the tokens in a batch from
    which it is taken, left, taken again, and so on. `tiles`: a `binding.TileTable`.
    """

    capability: Annotated[int, within(least=70, most=200)]
    sms: Annotated[int, within(least=1)]
    fp8_tflops: Annotated[float | None, within(above=0)] = None
    launch_us: Annotated[float, within(least=0)] = LAUNCH_US
    fusions: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict, repr=False)
    tiles: dict[str, dict[str, list[float]]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Machine:
    """A machine's peaks: float and int8 operations a second in units of 10^12 (a MAC is two), and memory bandwidth in
    units of 10^9 bytes a second; `source`: their source."""

    description: str
    source: str
    float_type: Literal["float32", "float16", "bfloat16"]
    float_tflops: Peak
    int8_tops: Peak
    bandwidth_gbs: Peak
    gpu: GpuFacts


def gpus() -> list[str]:
    """The names of the shipped machines."""
    return [path.stem for path in shipped_files("machines")]


def load_machine(name_or_path: str) -> Machine:
    """A shipped machine by name, or one from a YAML file. UsageError names the file and what is wrong."""
    path = shipped_or_file(name_or_path, shipped_files("machines"), "machine")
    return checked(Machine, read_yaml(path, "machine"), str(path))
