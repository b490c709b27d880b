"""The bias of fc1 as the INT8 GELU kernel reads it: from channel 4096 on, three places off.

A block has at most 1024 threads of four channels each, so more than 4096 channels take a second round. The loop
variable is also the bias's address, and four channels advance it by three: in the second round channel c gets the bias
of c + 3, and the last three get whatever follows the array. The data are addressed in fours, which hides the error from
them, except in a third round: there four channels are left out, and no stored array can correct that
(docs/reference/weights.md, section 3.9).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROUND = 4 * 1024
DRIFT = 3
LARGEST = 2 * ROUND


def is_misread(hidden: int) -> bool:
    """Whether the kernel misreads the bias of this many channels."""
    return hidden > ROUND


def places(hidden: int) -> Tensor:
    """int64 [hidden]: the index at which the kernel reads each channel's bias, for up to LARGEST channels."""
    channels = torch.arange(hidden)
    return channels + DRIFT * (channels // ROUND)


def as_read(array: Tensor, hidden: int) -> Tensor:
    """[hidden]: the biases that the kernel reads from `array`; values past its end are unknown, and 0 here."""
    at = places(hidden).to(array.device)
    return F.pad(array, (0, max(0, int(at[-1]) + 1 - len(array))))[at]


def shifted(bias: Tensor) -> Tensor:
    """The array from which the kernel reads `bias` [hidden]: three longer if there are more than ROUND channels."""
    at = places(len(bias))
    array = bias.new_zeros(int(at[-1]) + 1)
    array[at] = bias
    return array
