"""Orders of a map's tokens in memory, as permutations.

Norms, linears and additions work on each token alone, so a network may keep its tokens in the order of attention's
windows. Rolling, partitioning and their inverses then become one gather where two blocks differ, and nothing where they
agree. An order is int64 [T]: `order[p]` is the row-by-row number of the token at place p.
"""

import torch
from torch import Tensor

from swin_quant.models.windows import window_partition


def rows(side: int) -> Tensor:
    """Row by row, as a picture is read."""
    return torch.arange(side * side)


def windows(side: int, window: int, shift: int) -> Tensor:
    """Window by window, after rolling the map up and left by `shift`."""
    numbers = torch.roll(rows(side).view(1, side, side, 1), (-shift, -shift), dims=(1, 2))
    return window_partition(numbers, window).flatten()


def moves(present: Tensor, wanted: Tensor) -> Tensor | None:
    """The places [T] to gather from to bring tokens from the order `present` to `wanted`; None for equal orders."""
    return None if torch.equal(present, wanted) else torch.argsort(present)[wanted].int()


def neighbours(side: int, merged: Tensor) -> Tensor:
    """The order before patch merging: the four tokens of each token of the next map, whose order is `merged`.

    `side`: of the map before merging. The four come as (0, 0), (1, 0), (0, 1), (1, 1): docs/reference, section 1.2.
    """
    groups = rows(side).view(side // 2, 2, side // 2, 2).permute(0, 2, 3, 1).reshape(-1, 4)
    return groups[merged].flatten()
