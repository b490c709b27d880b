"""What is updated, how fast, and along which schedule: parameter groups, the optimizer, the LR of every step."""

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import architecture_of, blocks_of
from swin_quant.train.recipe import Optimizer, Schedule


def decays(name: str, parameter: Tensor, no_decay: Collection[str] = ()) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, ranges of nodes and what `no_decay` names.

    Microsoft's lists (docs/reference, section 2.2) are those of Swin's architectures.
    """
    left_alone = ("_amax", "_bounds", *no_decay)
    return parameter.dim() > 1 and not name.endswith(".bias") and not any(part in name for part in left_alone)


def layers_to_head(model: Classifier) -> dict[str, int]:
    """How many layers lie between each parameter and the head: 0 for head and last norm, most for the embedding.

    What lies between two blocks belongs to the one before, as Swin's merging does.
    """
    blocks, found, seen = blocks_of(model), {}, 0
    for name, module in model.named_modules():
        seen += name in blocks
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        behind = seen == len(blocks) and not inside
        for own, _ in module.named_parameters(recurse=False):
            found[f"{name}.{own}" if name else own] = 0 if behind else len(blocks) - seen + 1
    return found


def parameter_groups(model: Classifier, recipe: Optimizer, lr: float) -> list[dict[str, Any]]:
    """Groups of equal LR and weight decay, in a fixed order, for a torch optimizer; `role` says what a group holds.

    The LR of a learned range is relative to its size, rounded to a power of two so that groups stay few: Adam's step
    has the size of the LR whatever the gradient, and ranges differ by factors of a hundred.
    """
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    no_decay, distance = architecture_of(model).no_decay, layers_to_head(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(("_amax", "_bounds")):
            size = 2.0 ** round(math.log2(parameter.detach().float().abs().mean().item()))
            key = ("amax", recipe.amax_lr * size, 0.0)
        else:
            scale = recipe.layer_decay ** distance[name]
            key = ("weights", lr * scale, recipe.weight_decay if decays(name, parameter, no_decay) else 0.0)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay, "role": role}
        for (role, lr, decay), parameters in groups.items()
    ]


def make_optimizer(model: Classifier, recipe: Optimizer, pictures: int, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW, or SGD with Nesterov momentum, for steps of `pictures` pictures over all ranks and accumulation steps."""
    lr = recipe.lr * (pictures / recipe.lr_batch if recipe.lr_batch else 1.0)
    groups = parameter_groups(model, recipe, lr)
    if recipe.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=recipe.momentum, nesterov=recipe.momentum > 0, fused=fused)
    return torch.optim.AdamW(groups, lr=lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def lr_factor(step: int, recipe: Schedule, steps: int, warmup: int) -> float:
    """The share of the LR at `step` (from 0) of `steps`, of which the first `warmup` warm up."""
    if step < warmup:
        return recipe.warmup_from + (1 - recipe.warmup_from) * (step + 1) / warmup
    if recipe.name == "constant":
        return 1.0
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return recipe.end + (1 - recipe.end) * 0.5 * (1 + math.cos(math.pi * progress))


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Schedule, epochs: int, steps_per_epoch: int) -> LambdaLR:
    """The schedule over a whole run; call `.step()` once after every step of the optimizer.

    A warm-up that would be longer than half of the run is cut to that.
    """
    steps = epochs * steps_per_epoch
    warmup = min(round(recipe.warmup_epochs * steps_per_epoch), steps // 2)
    return LambdaLR(optimizer, partial(lr_factor, recipe=recipe, steps=steps, warmup=warmup))


def current_lr(optimizer: torch.optim.Optimizer, role: str) -> float | None:
    """The largest LR among the groups of a role, None where there is none."""
    return max((group["lr"] for group in _groups(optimizer) if group["role"] == role), default=None)


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    yield from optimizer.param_groups
