"""torch.compile around what computes the logits of a training step, for recipes that ask for it."""

from typing import cast

import torch
from torch import nn

from swin_quant.base.errors import UsageError
from swin_quant.train.recipe import Recipe


def check_compiler(recipe: Recipe, device: torch.device) -> None:
    """UsageError where the recipe's `compile` cannot work.

    Whether there is a working compiler is known only by using it: on a CPU it is one of C++, on a GPU Triton.
    """
    if not recipe.compile:
        return
    if recipe.memory.fsdp:
        raise UsageError("‹compile› does not go with ‹fsdp›: leave one of them out")
    try:
        tell_cpus_apart()
        torch.compile(torch.sin, fullgraph=True)(torch.zeros(2, device=device))
    except Exception as error:  # whatever a broken compiler raises
        reason = next(line for line in f"{error}\n{type(error).__name__}".splitlines() if line.strip())
        raise UsageError(f"‹compile›: torch.compile does not work here ({reason}): leave it out") from error


def tell_cpus_apart() -> None:
    """Make the width of this CPU's vectors part of the key under which torch keeps compiled graphs.

    By itself (torch 2.13) torch leaves it out: a CPU that finds the graphs of a wider one in a shared cache folder
    computes wrong numbers with them, silently.
    """
    from torch._inductor import config, cpu_vec_isa

    config.cpp.simdlen = cpu_vec_isa.pick_vec_isa().bit_width()


def compiled(network: nn.Module, recipe: Recipe) -> nn.Module:
    """`network` compiled, if the recipe asks for it; parameters, hooks and names stay those of the module inside."""
    return cast(nn.Module, torch.compile(network)) if recipe.compile else network
