"""What is updated, how fast, and along which schedule: parameter groups, the optimizer, the LR of every step."""

import math
import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from swin_quant.models.layers import Swin
from swin_quant.train.recipe import Optimizer, Schedule

# Microsoft's lists (docs/reference, section 2.2), V1 and V2 together, and the ranges of nodes.
_NO_DECAY = ("absolute_pos_embed", "relative_position_bias_table", "cpb_mlp", "logit_scale", "_amax")
_BLOCK = re.compile(r"layers\.(\d+)\.(?:blocks\.(\d+)|downsample)\.")


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, position tables, logit scales, ranges."""
    return parameter.dim() > 1 and not name.endswith(".bias") and not any(part in name for part in _NO_DECAY)


def blocks_to_head(name: str, depths: tuple[int, ...]) -> int:
    """How many layers lie between a parameter and the head: 0 for head and last norm, most for the embedding."""
    if name.startswith(("head.", "norm.")):
        return 0
    match = _BLOCK.match(name)
    if match is None:
        return sum(depths) + 1
    stage = int(match[1])
    block = int(match[2]) if match[2] else depths[stage] - 1  # merging belongs to the last block of its stage
    return sum(depths) - sum(depths[:stage]) - block


def parameter_groups(model: Swin, recipe: Optimizer, lr: float) -> list[dict]:
    """Groups of equal LR and weight decay, in a fixed order, for a torch optimizer; `role` says what a group holds.

    The LR of a learned range is relative to its size, rounded to a power of two so that groups stay few: Adam's step
    has the size of the LR whatever the gradient, and ranges differ by factors of a hundred.
    """
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith("_amax"):
            size = 2.0 ** round(math.log2(parameter.detach().float().mean().item()))
            key = ("amax", recipe.amax_lr * size, 0.0)
        else:
            scale = recipe.layer_decay ** blocks_to_head(name, model.geometry.depths)
            key = ("weights", lr * scale, recipe.weight_decay if decays(name, parameter) else 0.0)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay, "role": role}
        for (role, lr, decay), parameters in groups.items()
    ]


def make_optimizer(model: Swin, recipe: Optimizer, pictures: int, fused: bool = True) -> torch.optim.Optimizer:
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


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[dict]:
    yield from optimizer.param_groups
