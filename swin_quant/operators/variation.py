"""Trace a model again on other input shapes to see which shapes follow, and list the modules that only training
needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from swin_quant.base.errors import listed
from swin_quant.operators.trace import Call, NotTraceable, trace

_MORE = 16  # pixels: whole patches, and no map twice as large, which could pass for a batch of two


@dataclass(frozen=True)
class Variation:
    """Whether a dimension of the pictures may vary, how many operators' shapes follow it, and `why` not."""

    dimension: str
    free: bool
    calls: int
    why: str = ""


def variations(model: nn.Module, images: Sequence[int], calls: Sequence[Call]) -> list[Variation]:
    """Whether shapes follow another batch, square pictures of another size, and pictures that are not square.

    `calls`: the trace of `model` for pictures of shape `images`, [B, in, H, W].
    """
    batch, channels, height, width = images
    others = {
        "batch": (batch + 1, channels, height, width),
        "size": (batch, channels, height + _MORE, width + _MORE),
        "height alone": (batch, channels, height + _MORE, width),
    }
    return [_variation(name, model, other, calls) for name, other in others.items()]


def _variation(name: str, model: nn.Module, images: Sequence[int], calls: Sequence[Call]) -> Variation:
    try:
        found = trace(model, images)
    except NotTraceable as error:
        return Variation(name, False, 0, f"{error.module or 'the model itself'}: {error.reason}")
    if [call.name for call in found] != [call.name for call in calls]:
        return Variation(name, True, len(found), "other operators are called: control flow depends on it")
    changed = sum(a.inputs != b.inputs or a.outputs != b.outputs for a, b in zip(found, calls, strict=True))
    return Variation(name, True, changed)


def training_only(model: nn.Module) -> dict[str, list[str]]:
    """Names of modules without effect in evaluation, by kind: dropout and drop path."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd) or kind.lower() in ("droppath", "stochasticdepth"):
            found.setdefault(kind, []).append(name)
    return found


def sentence(variation: Variation) -> str:
    """The variation in words."""
    if not variation.free:
        return f"{variation.dimension}: fixed; {variation.why}"
    return f"{variation.dimension}: may vary; shapes of {variation.calls} calls follow it" + (
        f"; {variation.why}" if variation.why else ""
    )


def training_sentence(found: dict[str, list[str]]) -> str:
    """The modules that only training needs, in words."""
    return "; ".join(f"{len(names)} {kind} ({listed(names, 2)})" for kind, names in found.items()) or "none"
