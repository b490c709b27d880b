"""Turn the channels of attention heads by Hadamard matrices, which spreads a large channel over its whole head.

Products inside a head do not change if both sides are turned alike: v against proj, and q against k. The matrix is
folded into weights and biases: the float function stays, and nothing is computed at run time. (Ashkboos et al.,
"QuaRot", 2024; Liu et al., "SpinQuant", 2025, which also tries random signs, because matrices differ a lot.) A depth of
m 2^k channels, m odd, takes the Kronecker product of a Hadamard matrix and of the orthogonal cosine transform of m. A
turn is kept only if the quantized unit's output gets measurably better by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.improve_units import gain_db, note_of
from swin_quant.quant.passes.places import Turn, turn
from swin_quant.quant.passes.trial import Trial, restore, state_of, weights_in
from swin_quant.quant.passes.units import UnitRun, inside, through

_BETTER = 0.97  # share of the error before: a smaller gain may be chance
_EXACT = 1e-5  # of the norm of the unit's float output


@dataclass(frozen=True)
class HadamardOptions(SelfChecked):
    """`signs`: so many matrices are tried at each place, the first without random signs; `pictures` to measure on."""

    signs: Annotated[int, within(least=1, most=64)] = 4
    pictures: Annotated[int, within(least=1)] = 32
    seed: Annotated[int, within(least=0)] = 0


def hadamard(depth: int) -> Tensor:
    """An orthogonal matrix [depth, depth], float64, whose entries are alike in size: of one size if depth is a power of
    two."""
    odd = depth // (depth & -depth)
    k, n = torch.arange(odd, dtype=torch.float64)[:, None], torch.arange(odd, dtype=torch.float64)
    found = (math.pi / odd * (n + 0.5) * k).cos() * (2 / odd) ** 0.5
    found[0] = odd**-0.5
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * 0.5**0.5
    while len(found) < depth:
        found = torch.kron(pair, found)
    return found


def run(context: PassContext, options: HadamardOptions) -> str:
    """Turn the heads of each unit's attention by the best of some matrices, or leave them."""
    gains: dict[str, float] = {}
    for step in context.walk(options.pictures):
        places = [one for one in context.turns if all(inside(part.name, step.name) for part in one.parts)]
        if places:
            gains[step.name] = _turned(context, step, places, options)
    return note_of(gains, len(context.units)) if gains else "no attention whose heads can be turned"


def _turned(context: PassContext, step: UnitRun, places: Sequence[Turn], options: HadamardOptions) -> float:
    """Choose the matrix at each place of a unit; returns the gain at its output in dB, NaN if that is not finite."""
    trial = Trial(step, context.method.name)
    if not trial.nodes:
        return 0.0
    original = weights_in(state_of(step.unit))
    plain: tuple[int | None, ...] = (None,) * len(places)

    def apply(choice: Sequence[int | None]) -> None:
        restore(step.unit, original)
        for place, signs in zip(places, choice, strict=True):
            if signs is not None:
                turn(context.model, place, _matrix(place.depth(context.model), options.seed, signs))

    def error(choice: Sequence[int | None]) -> float:
        apply(choice)
        return trial.error()

    before = least = error(plain)
    best = plain
    for index in range(len(places)):
        for signs in range(options.signs):
            other = (*best[:index], signs, *best[index + 1 :])
            if (found := error(other)) < least * (_BETTER if best[index] is None else 1):
                best, least = other, found
    apply(best)
    if best != plain and not _is_exact(step):
        apply(plain)
        return 0.0
    return gain_db(before, least)


def _matrix(depth: int, seed: int, signs: int) -> Tensor:
    """Matrix number `signs`, 0 without random signs."""
    generator = torch.Generator().manual_seed(seed * 64 + signs)
    flips = torch.randint(0, 2, (depth, 1), generator=generator).double() * 2 - 1
    return hadamard(depth).T * (flips if signs else 1)


def _is_exact(step: UnitRun) -> bool:
    found = through(step.unit, step.inputs)
    wrong = sum(((y - t).double().square().sum().item() for y, t in zip(found, step.outputs, strict=True)), 0.0)
    return wrong <= _EXACT**2 * sum(t.double().square().sum().item() for t in step.outputs)


PASS = Pass(run, HadamardOptions, keeps_function=True)
