"""Stages that training leaves as they are, as detectors and segmenters leave the first stages of their backbones."""

from torch import nn

from swin_quant.base.errors import UsageError
from swin_quant.models.registry import stages_of
from swin_quant.quant.quantizer import Quantizer


def freeze_stages(model: nn.Module, count: int) -> set[str]:
    """Take the first `count` stages and what comes before them (patch embedding) out of training; 0: nothing.

    No weight of theirs gets a gradient, and nothing in them is dropped. Returns the names of their nodes, whose ranges
    are to stay as well. UsageError for more stages than there are.
    """
    stages = list(stages_of(model))
    if count > len(stages):
        raise UsageError(f"‹freeze_stages› {count}: the model has {len(stages)} stages")
    if not count:
        return set()
    first, kept = stages[0], tuple(f"{name}." for name in stages[:count])
    before, ahead = True, set()
    for name, parameter in model.named_parameters():
        before = before and not name.startswith(f"{first}.")
        if before:
            ahead.add(name.rpartition(".")[0])
        if before or name.startswith(kept):
            parameter.requires_grad_(False)
    own = tuple(f"{name}." for name in ahead if name)  # of a stem that has nodes, too
    frozen = {name: module for name, module in model.named_modules() if name.startswith((*kept, *own))}
    for module in frozen.values():
        if isinstance(getattr(module, "rate", None), float):  # a DropPath, whose class is the architecture's
            module.rate = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return {name for name, module in frozen.items() if isinstance(module, Quantizer)}
