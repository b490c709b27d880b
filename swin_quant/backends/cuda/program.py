"""The launch list: one forward of a network for one batch size, kernel by kernel, and its place in memory.

A program is data: planning reads its bytes and operations. `bind` places its buffers in one block of a device, and
gives every kernel its arguments. On a CPU the kernels' references run, or the kernels themselves where Triton
interprets them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels import KERNELS
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.base.errors import SwinQuantError

SOME_NUMBER = 0.5
ALIGNMENT = 256  # bytes, as in the CUDA allocator: vector loads rely on it
FARTHEST = 4  # tiles serve batches up to this many times larger or smaller
# Tiles that `python tools/cuda/tune.py` timed, in the GPU's file in `configs/machines`; other launches take the default
# tiles of `kernels.tiles`. `format_shape(launch)` -> batch -> the fields of its `Tiles`, then microseconds.
TileTable = Mapping[str, Mapping[str, Sequence[float]]]
NO_TILES: TileTable = MappingProxyType({})


@dataclass(frozen=True)
class TensorRef:
    """A tensor by name: a buffer of the program or, if `packed`, a tensor of the network's file.

    `times`: a factor of the file that is multiplied in when the program is bound.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    packed: bool = False
    times: "TensorRef | ScalarRef | None" = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ScalarRef:
    """A float32 of the network's file, by name."""

    name: str


@dataclass(frozen=True)
class Launch:
    """One kernel: `op` is its name in `KERNELS`, `name` the part of the network that it computes.

    `arguments` go to the kernel by name: operands, scalars (also as fields of a dataclass) and constants. `operations`
    counts those of its matrix products, two a multiply-add; `products` is their operand type ("" without products).
    """

    op: str
    name: str
    arguments: Mapping[str, Any]
    operations: int = 0
    products: str = ""

    @property
    def operands(self) -> dict[str, TensorRef]:
        """The arguments that are tensors."""
        return {key: value for key, value in self.arguments.items() if isinstance(value, TensorRef)}


@dataclass(frozen=True)
class Program:
    """The launches in order for `batch` pictures, and each buffer's offset in one block of `nbytes` bytes.

    Buffers whose lives do not overlap share bytes. `images` is the input, `logits` the output.
    """

    batch: int
    launches: tuple[Launch, ...]
    images: TensorRef
    logits: TensorRef
    places: Mapping[str, int]
    nbytes: int

    @property
    def buffers(self) -> dict[str, TensorRef]:
        """Every buffer by name, in the order of first use."""
        return {one.name: one for launch in self.launches for one in launch.operands.values() if not one.packed}

    @property
    def packed(self) -> dict[str, TensorRef]:
        """Every tensor that the program takes from the network's file."""
        stored = (one for launch in self.launches for one in launch.operands.values() if one.packed)
        parts = (part for one in stored for part in (one, one.times))
        return {part.name: part for part in parts if isinstance(part, TensorRef)}

    @property
    def scalars(self) -> list[str]:
        """Every scalar that the program takes from the network's file."""
        values = (value for launch in self.launches for value in launch.arguments.values())
        inner = (
            part for value in values for part in (value, getattr(value, "times", None), *get_fields(value).values())
        )
        return list(dict.fromkeys(value.name for value in inner if isinstance(value, ScalarRef)))


def make_program(batch: int, launches: tuple[Launch, ...], images: TensorRef, logits: TensorRef) -> Program:
    """A program with its buffers placed: each at the lowest offset that overlaps no live buffer.

    A buffer lives from the first launch that names it to the last; `images` and `logits` live throughout.
    """
    lives: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    for number, launch in enumerate(launches):
        for operand in launch.operands.values():
            if not operand.packed:
                lives[operand.name] = lives.get(operand.name, (number, number))[0], number
                sizes[operand.name] = -(-operand.nbytes // ALIGNMENT) * ALIGNMENT
    lives |= dict.fromkeys((images.name, logits.name), (0, len(launches)))
    places: dict[str, int] = {}
    for name, (first, last) in lives.items():
        living = (other for other in places if lives[other][0] <= last and first <= lives[other][1])
        at = 0
        for start, end in sorted((places[other], places[other] + sizes[other]) for other in living):
            if at + sizes[name] <= start:
                break
            at = max(at, end)
        places[name] = at
    nbytes = max((places[name] + sizes[name] for name in places), default=0)
    return Program(batch, launches, images, logits, places, nbytes)


def make_kernel(
    launch: Launch,
    tensor: Callable[[TensorRef], Tensor] = lambda ref: torch.empty(ref.shape, dtype=ref.dtype, device="meta"),
    number: Callable[[str], float] = lambda name: SOME_NUMBER,
) -> Kernel:
    """The launch's kernel: `tensor` is called once a tensor, `number` once a scalar.

    By default its tensors are on the meta device, where they have only a shape and a type, and its numbers arbitrary.
    """
    made = {ref: tensor(ref) for ref in dict.fromkeys(launch.operands.values())}

    def found(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return made[value]
        if isinstance(value, ScalarRef):
            return number(value.name)
        inner = {word: found(part) for word, part in get_fields(value).items() if isinstance(part, ScalarRef)}
        return replace(value, **inner) if inner else value

    return KERNELS[launch.op](**{word: found(value) for word, value in launch.arguments.items()})


def get_fields(value: Any) -> dict[str, Any]:
    """The fields of an argument that is a dataclass of the kernels; {} for any other argument."""
    if not is_dataclass(value) or isinstance(value, (type, TensorRef, ScalarRef)):
        return {}
    return {field.name: getattr(value, field.name) for field in fields(value)}


@dataclass(frozen=True)
class Bound:
    """Fill `images` [batch, in, S, S], call it, and read `logits` [batch, classes]; both stay at the same address.

    `buffers`: every buffer by its name. `calls`: one a launch; a call may overwrite buffers that no later call reads.
    """

    images: Tensor
    logits: Tensor
    buffers: Mapping[str, Tensor] = field(repr=False)
    calls: tuple[Callable[[], None], ...] = field(repr=False)

    def __call__(self) -> None:
        for call in self.calls:
            call()


def memory(nbytes: int, device: torch.device) -> Tensor:
    """A block of `nbytes` for a program's buffers; smaller programs may take turns with it."""
    with torch.inference_mode(False):  # later calls outside of inference mode write to it too
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def by_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device, rather than their references."""
    return device.type == "cuda" or by_interpreter()


def by_interpreter() -> bool:
    """Whether Triton is set to interpret kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def bind(
    program: Program,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    device: torch.device,
    tiles: TileTable = NO_TILES,
    block: Tensor | None = None,
) -> Bound:
    """`program` on a device that holds the packed `tensors`. Nothing is allocated after this.

    Kernels run with their `tiles`, or with their defaults. `block`: memory for the buffers (see `memory`).
    """
    known = dict(tensors)
    block = memory(program.nbytes, device) if block is None else block
    with torch.inference_mode(False):
        for name, buffer in program.buffers.items():
            at = program.places[name]
            known[name] = block[at : at + buffer.nbytes].view(buffer.dtype).view(buffer.shape)

    def tensor(ref: TensorRef) -> Tensor:
        found = known[ref.name].view(ref.shape)
        if ref.times is None:
            return found
        return found * (scalars[ref.times.name] if isinstance(ref.times, ScalarRef) else tensor(ref.times))

    calls: list[Callable[[], None]] = []
    for launch in program.launches:
        kernel = make_kernel(launch, tensor, scalars.__getitem__)
        if by_kernels(device):
            calls.append(partial(kernel.launch, tiles_for(launch, program.batch, tiles)))
        else:
            calls.append(kernel.reference)
    buffers = {name: known[name] for name in program.buffers}
    return Bound(buffers[program.images.name], buffers[program.logits.name], buffers, tuple(calls))


def format_shape(launch: Launch) -> str:
    """All that a launch's time depends on except the batch, in one line."""

    def shape(value: Any) -> str:
        if isinstance(value, TensorRef):
            sides = value.shape if value.packed else value.shape[1:]
            return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, sides))}]"
        if isinstance(value, ScalarRef | float):
            return "number"
        if inner := get_fields(value):
            return f"({','.join(f'{word}={shape(part)}' for word, part in inner.items())})"
        return str(value)

    return f"{launch.op} {' '.join(f'{word}={shape(value)}' for word, value in launch.arguments.items())}"


def tiles_for(launch: Launch, batch: int, table: TileTable) -> Tiles | None:
    """The tiles of a launch, from the nearest batch that was timed; None if none is near.

    Raises:
        SwinQuantError: The launch's kernel does not take the tiles: the table is older than the kernel.
    """
    timed = {int(other): found for other, found in table.get(format_shape(launch), {}).items()}
    nearest = min(timed, key=lambda other: (max(batch, other) / min(batch, other), -other), default=None)
    if nearest is None or max(batch, nearest) > FARTHEST * min(batch, nearest):
        return None
    tiles = Tiles(*map(int, timed[nearest][:-1]))
    try:
        make_kernel(launch).prepare(tiles)
    except SwinQuantError as error:
        how = "run `python tools/cuda/tune.py` again"
        raise SwinQuantError(f"configs/machines: tiles of {launch.op}: {error}: {how}") from error
    return tiles
