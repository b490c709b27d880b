"""Addresses of rows in window order: window partition, cyclic shift and their inverses."""

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def find_token(self, rows: Tensor) -> Tensor:
        """The row in map order of each row in window order; any shape and integer type."""
        y, x = self._shifted(rows)
        y, x = (y + self.shift) % self.side, (x + self.shift) % self.side
        return (rows // self.side**2 * self.side + y) * self.side + x

    def find_region(self, rows: Tensor) -> Tensor:
        """The region of the map that a row was in before the shift, as a number: only tokens of one region attend to
        each other.

        Meaningless without a shift.
        """
        y, x = self._shifted(rows)
        return 3 * self._band(y) + self._band(x)

    def constants(self) -> dict[str, int]:
        """Constants for which kernels are compiled."""
        return {"SIDE": self.side, "WINDOW": self.window, "SHIFT": self.shift}

    def all_tokens(self, rows: int, device: torch.device) -> Tensor:
        """int64 [rows]: `find_token` for rows 0, 1, 2, ..."""
        return self.find_token(torch.arange(rows, device=device))

    def _shifted(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Line and column on the shifted map."""
        across = self.side // self.window
        place, token = rows // self.tokens % self.count, rows % self.tokens
        line = place // across * self.window + token // self.window
        return line, place % across * self.window + token % self.window

    def _band(self, place: Tensor) -> Tensor:
        return (place >= self.side - self.window).int() + (place >= self.side - self.shift).int()


def whole_map(side: int) -> Windows:
    """Map order, as one window of the whole map."""
    return Windows(side, side)
