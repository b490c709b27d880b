"""The bias of fc1 as the INT8 kernel of GELU reads it: from channel 4096 on three places off.

A block has at most 1024 threads of four channels each, so that more than 4096 channels take a second round. The loop's
variable is also the bias's address, and four channels advance it by three: in the second round channel c is given the
bias of c + 3, the last three whatever lies behind the array. Data are addressed in fours, which hides it from them, but
not in a third round: there four channels are left out, and nothing stored can make that right
(docs/reference/weights.md, section 3.9).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROUND = 4 * 1024
DRIFT = 3
LARGEST = 2 * ROUND


def is_misread(hidden: int) -> bool:
    """Whether the kernel reads the bias of so many channels wrongly."""
    return hidden > ROUND


def places(hidden: int) -> Tensor:
    """int64 [hidden]: where the kernel looks for the bias of each channel, for up to LARGEST of them."""
    channels = torch.arange(hidden)
    return channels + DRIFT * (channels // ROUND)


def as_read(array: Tensor, hidden: int) -> Tensor:
    """[hidden]: the biases that the kernel takes from `array`; what lies behind its end is not known, and 0 here."""
    at = places(hidden).to(array.device)
    return F.pad(array, (0, max(0, int(at[-1]) + 1 - len(array))))[at]


def shifted(bias: Tensor) -> Tensor:
    """The array from which the kernel reads `bias` [hidden]: longer by three beyond ROUND, else the same."""
    at = places(len(bias))
    array = bias.new_zeros(int(at[-1]) + 1)
    array[at] = bias
    return array
