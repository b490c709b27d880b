"""The least time that a launch can take on a GPU, computed from the launch list and the GPU's peaks, never measured.

A launch, or several fused into one, takes at least as long as its bytes at the memory's bandwidth, as its products at
their type's peak, and as an empty launch. Every tensor counts as read or written once, whatever the caches hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from swin_quant.backends.cuda.program import Launch, TensorRef
from swin_quant.base.errors import UsageError
from swin_quant.operators.roofline import GpuFacts, Machine

Group = Sequence[Launch]
"""Launches, in order, that one kernel can replace."""
RESULTS = ("out", "out_quantized")


@dataclass(frozen=True)
class Floor:
    """One kernel's bytes, operations, and three lower bounds of its time in microseconds."""

    bytes: int
    operations: int
    memory_us: float
    compute_us: float
    launch_us: float

    @property
    def us(self) -> float:
        """The largest of the three times."""
        return max(self.memory_us, self.compute_us, self.launch_us)

    @property
    def bound(self) -> str:
        """The limit that decides: memory, products or launch."""
        times = {"launch": self.launch_us, "products": self.compute_us, "memory": self.memory_us}
        return max(times, key=times.__getitem__)


def floor_of(group: Group, machine: Machine, after: Sequence[Launch] = (), fp8: bool = False) -> Floor:
    """The floor of one kernel that does the work of `group`.

    `after`: the launches that follow, which decide what a fused kernel must write to memory. `fp8`: int8 products run
    at the peak of float8; the bytes are the same.
    """
    moved = bytes_of(group, after)
    seconds = sum(launch.operations / _peak(launch.products, machine, fp8) for launch in group if launch.operations)
    return Floor(
        moved,
        sum(launch.operations for launch in group),
        moved / (machine.bandwidth_gbs * 1e3),
        seconds * 1e6,
        gpu_of(machine).launch_us,
    )


def bytes_of(group: Group, after: Sequence[Launch] = ()) -> int:
    """Bytes read and written, if each tensor from outside is read once and each that is read later is written once.

    A single launch moves its `bytes_moved`, whether or not anything reads its results.
    """
    if len(group) == 1:
        return group[0].bytes_moved
    known: set[str] = set()
    written: dict[str, TensorRef] = {}
    moved = 0
    for launch in group:
        for operand in reads(launch):
            moved += 0 if operand.name in known else operand.nbytes
            known.add(operand.name)
        for operand in writes(launch):
            known.add(operand.name)
            written[operand.name] = operand
    return moved + sum(operand.nbytes for name, operand in written.items() if _needed(name, after))


def writes(launch: Launch) -> list[TensorRef]:
    """The tensors that a launch writes."""
    return [operand for word, operand in launch.operands.items() if word in RESULTS]


def reads(launch: Launch) -> list[TensorRef]:
    """The tensors that a launch reads; a tensor that it updates also appears as an operand."""
    return [operand for word, operand in launch.operands.items() if word not in RESULTS]


def _needed(name: str, after: Sequence[Launch]) -> bool:
    """Whether a buffer is read before it is written again."""
    for launch in after:
        if any(operand.name == name for operand in reads(launch)):
            return True
        if any(operand.name == name for operand in writes(launch)):
            return False
    return False


def _peak(products: str, machine: Machine, fp8: bool) -> float:
    """Operations a second. Float32 products, the head's alone, get the peak of half precision."""
    if products not in ("int8", "fp8"):
        return machine.float_tflops * 1e12
    if products == "int8" and not fp8:
        return machine.int8_tops * 1e12
    return (gpu_of(machine).fp8_tflops or nan) * 1e12


def gpu_of(machine: Machine) -> GpuFacts:
    """The machine's GPU data. UsageError for a machine that the kernels do not run on."""
    if machine.gpu is None:
        raise UsageError(f"{machine.description}: is no GPU that the CUDA engine runs on: its file has no key `gpu`")
    return machine.gpu
