"""The optimizer: the trained parameters in groups of equal LR and decay, and the LR of every step."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from swin_quant.base.errors import UsageError
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import get_architecture, list_blocks, list_stages
from swin_quant.quant.quantizer import Quantizer
from swin_quant.train.recipe import Optimizer, Schedule


def freeze_stages(model: nn.Module, count: int) -> set[str]:
    """Exclude the first `count` stages, and the patch embedding before them, from training; 0 excludes nothing.

    Their weights get no gradient, and their dropout is off. Returns the names of their nodes, whose ranges stay too.
    UsageError for more stages than the model has.
    """
    stages = list(list_stages(model))
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
    own = tuple(f"{name}." for name in ahead if name)  # a stem may have nodes too
    frozen = {name: module for name, module in model.named_modules() if name.startswith((*kept, *own))}
    for module in frozen.values():
        if isinstance(getattr(module, "rate", None), float):  # a DropPath; each architecture has its own class
            module.rate = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return {name for name, module in frozen.items() if isinstance(module, Quantizer)}


def layers_to_head(model: Classifier) -> dict[str, int]:
    """The number of layers between each parameter and the head: 0 for the head and the last norm, most for the
    embedding.

    A module between two blocks, such as Swin's patch merging, counts with the block before it.
    """
    blocks, found, seen = list_blocks(model), {}, 0
    for name, module in model.named_modules():
        seen += name in blocks
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        behind = seen == len(blocks) and not inside
        for own, _ in module.named_parameters(recurse=False):
            found[f"{name}.{own}" if name else own] = 0 if behind else len(blocks) - seen + 1
    return found


def make_optimizer(model: Classifier, recipe: Optimizer, pictures: int, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW, or SGD with Nesterov momentum, for steps of `pictures` pictures over all ranks and accumulation steps.

    Its groups have an equal LR and weight decay and a fixed order; their `role` is weights or amax. The LR of a learned
    range is relative to its size, which is rounded to a power of two to keep groups few: Adam's step has the size of
    the LR whatever the gradient, and ranges differ by factors of a hundred. Weight decay is for matrices, not for
    norms, biases, ranges, and what the architecture names (of Swin as Microsoft does, docs/reference, section 2.2).
    """
    lr = recipe.lr * (pictures / recipe.lr_batch if recipe.lr_batch else 1.0)
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    no_decay, distance = get_architecture(model).no_decay, layers_to_head(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(("_amax", "_bounds")):
            size = 2.0 ** round(math.log2(parameter.detach().float().abs().mean().item()))
            key = ("amax", recipe.amax_lr * size, 0.0)
        else:
            decays = parameter.dim() > 1 and not name.endswith(".bias") and not any(part in name for part in no_decay)
            key = ("weights", lr * recipe.layer_decay ** distance[name], recipe.weight_decay if decays else 0.0)
        groups.setdefault(key, []).append(parameter)
    rows: list[dict[str, Any]] = [
        {"params": parameters, "lr": rate, "weight_decay": decay, "role": role}
        for (role, rate, decay), parameters in groups.items()
    ]
    if recipe.name == "sgd":
        return torch.optim.SGD(rows, lr=lr, momentum=recipe.momentum, nesterov=recipe.momentum > 0, fused=fused)
    return torch.optim.AdamW(rows, lr=lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Schedule, epochs: int, steps_per_epoch: int) -> LambdaLR:
    """The schedule of a whole run; call `.step()` once after every optimizer step.

    A warm-up longer than half of the run is cut to half.
    """
    steps = epochs * steps_per_epoch
    warmup = min(round(recipe.warmup_epochs * steps_per_epoch), steps // 2)

    def compute_factor(step: int) -> float:
        if step < warmup:
            return recipe.warmup_from + (1 - recipe.warmup_from) * (step + 1) / warmup
        if recipe.name == "constant":
            return 1.0
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return recipe.end + (1 - recipe.end) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, compute_factor)
