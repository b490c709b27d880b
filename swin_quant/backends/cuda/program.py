"""The launch list: one forward of a network for one batch size, kernel by kernel.

It is data: the engine runs it by the kernels or their references; planning reads its bytes and operations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

import torch

from swin_quant.backends.cuda.kernels import KERNELS
from swin_quant.backends.cuda.kernels.kernel import Kernel

SOME_NUMBER = 0.5
ALIGNMENT = 256  # bytes, as in the CUDA allocator: vector loads rely on it


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

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written, if each operand is moved once."""
        return sum(operand.nbytes for operand in self.operands.values())

    def kernel(self, tensor: Callable[[TensorRef], torch.Tensor], number: Callable[[str], float]) -> Kernel:
        """The kernel with its arguments: `tensor` is called once a tensor, `number` once a scalar."""
        made = {ref: tensor(ref) for ref in dict.fromkeys(self.operands.values())}

        def found(value: Any) -> Any:
            if isinstance(value, TensorRef):
                return made[value]
            if isinstance(value, ScalarRef):
                return number(value.name)
            inner = {word: found(part) for word, part in get_fields(value).items() if isinstance(part, ScalarRef)}
            return replace(value, **inner) if inner else value

        return KERNELS[self.op](**{word: found(value) for word, value in self.arguments.items()})


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


def make_kernel(launch: Launch, tensor: Callable[[TensorRef], torch.Tensor] | None = None) -> Kernel:
    """The launch's kernel, with an arbitrary number for each scalar, and tensors made by `tensor`; None: on the meta
    device, where they have only a shape and a type."""
    made = tensor or (lambda ref: torch.empty(ref.shape, dtype=ref.dtype, device="meta"))
    return launch.kernel(made, lambda name: SOME_NUMBER)


def get_fields(value: Any) -> dict[str, Any]:
    """The fields of an argument that is a dataclass of the kernels; {} for any other argument."""
    if not is_dataclass(value) or isinstance(value, (type, TensorRef, ScalarRef)):
        return {}
    return {field.name: getattr(value, field.name) for field in fields(value)}
