"""In which order the tokens of a map lie in memory, as permutations.

Norms, linears and additions work on each token alone, so a network may keep its tokens in the order of the windows
that attention wants. Rolling, partitioning and their inverses then become one gather where two blocks differ, and
none where they agree. An order is int64 [T]: `order[p]` is the row-by-row number of the token at place p.
"""

import torch
from torch import Tensor

from swin_quant.models.windows import window_partition


def rows(side: int) -> Tensor:
    """Row by row, as a picture is read."""
    return torch.arange(side * side)


def windows(side: int, window: int, shift: int) -> Tensor:
    """Window by window, of the map rolled up and left by `shift`."""
    numbers = torch.roll(rows(side).view(1, side, side, 1), (-shift, -shift), dims=(1, 2))
    return window_partition(numbers, window).flatten()


def moves(present: Tensor, wanted: Tensor) -> Tensor | None:
    """The places [T] to gather from, so that tokens in the order `present` get the order `wanted`; None if they do."""
    return None if torch.equal(present, wanted) else torch.argsort(present)[wanted].int()


def neighbours(side: int, merged: Tensor) -> Tensor:
    """Before patch merging: each token of the next map (in the order `merged`) as its four, in the model's sequence.

    `side` is of the map before. The sequence is (0, 0), (1, 0), (0, 1), (1, 1): docs/reference, section 1.2.
    """
    groups = rows(side).view(side // 2, 2, side // 2, 2).permute(0, 2, 3, 1).reshape(-1, 4)
    return groups[merged].flatten()
