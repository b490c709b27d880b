"""Addresses of rows in window order: window partition, cyclic shift and their inverses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.models.maps import window_partition


@dataclass(frozen=True)
class Windows:
    """A map of `side` x `side` tokens in windows of `window` x `window`, cyclically shifted by `shift`.

    Row m in window order is token m % L of a window, row by row; windows follow each other row by row within a picture,
    then pictures. One unshifted window as large as the map is map order.
    """

    side: int
    window: int
    shift: int = 0

    @property
    def tokens(self) -> int:
        """L, the tokens of one window."""
        return self.window**2

    @property
    def count(self) -> int:
        """Windows of a picture."""
        return (self.side // self.window) ** 2

    def constants(self) -> dict[str, int]:
        """Constants for which kernels are compiled."""
        return {"SIDE": self.side, "WINDOW": self.window, "SHIFT": self.shift}

    def find_tokens(self, rows: int, device: torch.device) -> Tensor:
        """int64 [rows]: the row in map order of each row in window order."""
        places = torch.arange(self.side**2, device=device).view(1, self.side, self.side, 1)
        order = window_partition(places.roll((-self.shift, -self.shift), dims=(1, 2)), self.window).flatten()
        first = torch.arange(0, rows, self.side**2, device=device)
        return (first[:, None] + order).flatten()


def whole_map(side: int) -> Windows:
    """Map order, as one window of the whole map."""
    return Windows(side, side)
