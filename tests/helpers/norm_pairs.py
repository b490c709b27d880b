"""The norms of an architecture and the linears that read them, by name."""

from swin_quant.models.registry import get_architecture
from swin_quant.quant.passes.places import filled, matched


def pairs_of(model):
    """Names of the linears that read each norm, by the norm's name."""
    readers = {}
    for norm, linears in get_architecture(model).pairs:
        for name, _ in model.named_modules():
            words = matched(norm, name)
            if words is not None:
                readers[name] = tuple(filled(linear, words) for linear in linears)
    return readers
