"""Which launches one kernel could do the work of, and what that would save by the model of floors.

A fusion is chosen where it pays; the model says by how much it can, not that such a kernel would reach its floor.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swin_quant.backends.cuda.floors import Group, floor_of, reads
from swin_quant.backends.cuda.program import Launch
from swin_quant.operators.roofline import Machine

WIDEST_MLP = 384  # channels up to which the hidden ones of a tile of tokens can stay on the chip
_NORM1 = r"norm_quantize:.*(norm1|attn\.qkv\._input_quantizer)"
_NORM2 = r"(norm_quantize:.*norm2|norm_residual:.*norm1)"
_PROJ, _FC1, _FC2 = r"gemm:.*attn\.proj", r"gemm:.*mlp\.fc1", r"gemm:.*mlp\.fc2"


@dataclass(frozen=True)
class Fusion:
    """Launches in a row, each by a pattern of `op:name`, that become one where the first GEMM has `widest` inputs."""

    title: str
    patterns: tuple[str, ...]
    widest: int | None = None

    def fits(self, launches: Sequence[Launch]) -> bool:
        """Whether the first of these launches are such a row."""
        if len(launches) < len(self.patterns):
            return False
        row = launches[: len(self.patterns)]
        if not all(re.fullmatch(p, f"{one.op}:{one.name}") for p, one in zip(self.patterns, row, strict=True)):
            return False
        return self.widest is None or all(reads(one)[0].shape[-1] <= self.widest for one in row if one.op == "gemm")


PROLOGUE = Fusion("the norm, or the gathering, in front of qkv as its prologue", (_NORM1, r"gemm:.*attn\.qkv"))
EPILOGUE = Fusion("the norm behind the projection in its epilogue", (_PROJ, _NORM2))
MLP = Fusion("fc1, GELU and fc2", (_FC1, _FC2), 4 * WIDEST_MLP)
MLP_NORM = Fusion("fc1, GELU, fc2 and V2's norm", (_FC1, _FC2, r"norm_residual:.*norm2"), 4 * WIDEST_MLP)
FC2_NORM = Fusion("V2's norm behind fc2 in its epilogue", (_FC2, r"norm_residual:.*norm2"))
ATTENTION = Fusion("attention and the projection", (r"attention:.*", _PROJ))

CHOICES: dict[str, tuple[Fusion, ...]] = {
    "as executed": (),
    "norm1 into qkv": (PROLOGUE,),
    "norm2 into proj": (EPILOGUE,),
    f"one MLP up to {WIDEST_MLP} channels": (MLP_NORM, MLP),
    "attention with proj": (ATTENTION,),
    "all but attention with proj": (PROLOGUE, EPILOGUE, MLP_NORM, MLP, FC2_NORM),
}
"""By name, what is fused: of those that fit at a launch the first."""


@dataclass(frozen=True)
class Fused:
    """A choice of fusions in one program: how many launches are left, what they move, and the sum of their floors."""

    name: str
    launches: int
    bytes: int
    us: float


def fused(launches: Sequence[Launch], fusions: Sequence[Fusion]) -> Iterator[tuple[Group, Sequence[Launch]]]:
    """The launches in groups that one kernel each does, each with all launches behind it."""
    at = 0
    while at < len(launches):
        one = next((fusion for fusion in fusions if fusion.fits(launches[at:])), None)
        end = at + (len(one.patterns) if one else 1)
        yield launches[at:end], launches[end:]
        at = end


def choices(launches: Sequence[Launch], machine: Machine, fp8: bool = False) -> list[Fused]:
    """What each of CHOICES comes to on a machine."""
    found = []
    for name, fusions in CHOICES.items():
        floors = [floor_of(group, machine, after, fp8) for group, after in fused(launches, fusions)]
        found.append(Fused(name, len(floors), sum(one.bytes for one in floors), sum(one.us for one in floors)))
    return found
