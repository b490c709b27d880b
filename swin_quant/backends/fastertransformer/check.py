"""`--check`: read an export back, undo every layout, and compare it with the model.

It compares with the model's own float32 values, so that a wrong layout, cast or rounding shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.fastertransformer.emulator import Emulator
from swin_quant.backends.fastertransformer.gelu_bias import is_misread
from swin_quant.backends.fastertransformer.slots import Slot
from swin_quant.backends.fastertransformer.stored import Stored, read_export
from swin_quant.backends.fastertransformer.weights import WeightSource
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.models.layers import Swin

# The largest relative error of storing: half a unit in the last place. Kernels are rounded to float16 before int8.
_HALF_ULP = {"float16": 2.0**-11, "float32": 2.0**-24}
PICTURES = 4
_SMALLEST = {"float16": 2.0**-25, "float32": 0.0}


@dataclass(frozen=True)
class Difference:
    """The largest difference between a stored tensor and its source: in the source's unit, for kernels in int8 steps.

    `allowed` is the most that rounding alone explains at that element.
    """

    slot: Slot
    largest: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.largest <= self.allowed


def check(artifact: Artifact, model: Swin) -> list[Difference]:
    """The differences of all tensors in the export. SwinQuantError names those beyond rounding."""
    stored = read_export(artifact)
    source = WeightSource(model, stored.case.form.int8)
    differences = [_difference(slot, stored, source) for slot in stored.entries if slot.layout != "empty"]
    head = [(stored.head[0] - model.head.weight.cpu()), (stored.head[1] - model.head.bias.cpu())]
    broken = [d.slot.name for d in differences if not d.holds]
    broken += [name for name, rest in zip(stored.manifest["head"], head, strict=True) if rest.abs().max() > 0]
    if broken:
        raise SwinQuantError(
            f"{artifact.file}: {len(broken)} tensors differ from the model by more than rounding: {listed(broken, 3)}; "
            "export again"
        )
    return differences


def _difference(slot: Slot, stored: Stored, source: WeightSource) -> Difference:
    got, want = stored.tensors[slot.name].double(), source(slot).double()
    if slot.container:
        steps = want * 127 / source.weight_range(slot)
        allowed = 0.5 + steps.abs() * _HALF_ULP["float16"] + 1e-4
        return _worst(slot, got, steps.clamp(-128, 127), allowed)
    allowed = want.abs() * _HALF_ULP[slot.dtype] + _SMALLEST[slot.dtype]
    return _worst(slot, got, want, allowed)


def _worst(slot: Slot, got: Tensor, want: Tensor, allowed: Tensor) -> Difference:
    difference = (got - want).abs()
    at = int((difference - allowed).argmax()) if (difference > allowed).any() else int(difference.argmax())
    return Difference(slot, difference.flatten()[at].item(), allowed.flatten()[at].item())


def misreading(artifact: Artifact) -> list[str]:
    """One line on the effect of fc1's biases that the GELU kernel misreads; none for models without such biases.

    Measured on seeded noise: the emulated export as the kernel reads it, against the same export with the right biases.
    """
    stored = read_export(artifact)
    if not stored.case.form.int8 or not is_misread(stored.case.widest):
        return []
    g = stored.case.g
    noise = torch.randn(PICTURES, g.in_chans, g.image_size, g.image_size, generator=torch.Generator().manual_seed(0))
    read, meant = (Emulator(stored, misread=misread)(noise) for misread in (True, False))
    if stored.case.form.fix_gelu_bias and torch.equal(read, meant):
        return [
            f"fc1's bias of {stored.case.widest} channels is read rightly by the kernel of GELU, for which it is stored"
        ]
    change = read - meant
    sqnr = 10 * (meant.square().sum() / change.square().sum()).log10()
    return [
        f"fc1's bias of {stored.case.widest} channels is read three places off by the kernel of GELU: on {PICTURES} "
        f"pictures of noise mean |Δlogit| {change.abs().mean():.3g}, max {change.abs().max():.3g}, SQNR {sqnr:.1f} dB; "
        "‹fix_gelu_bias› undoes it"
    ]


def summary(differences: Sequence[Difference]) -> list[str]:
    """One line for each kind of tensor: how many, and the largest difference."""
    lines = []
    kinds: dict[tuple[str, str], list[Difference]] = {}
    for difference in differences:
        kinds.setdefault((difference.slot.dtype, difference.slot.layout), []).append(difference)
    for (dtype, layout), group in kinds.items():
        worst = max(group, key=lambda d: d.largest)
        unit = " int8 steps" if worst.slot.container else ""
        lines.append(
            f"{dtype} {layout}: {len(group)} tensors, largest difference {worst.largest:.3g}{unit} ({worst.slot.name})"
        )
    return lines
