"""Give every random draw a key: the seed and the picture's index; in training also the epoch and the place in it.

The draws for a picture or batch depend neither on the number of ranks and loaders nor on earlier draws; a run that goes
on draws as one that was never interrupted.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key_of(*parts: int | str) -> int:
    """A 32-bit number that depends on all `parts`."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "little")


def seed_all(*parts: int | str) -> None:
    """Seed python's, numpy's and torch's generators (those of the GPUs too) by the key of `parts`."""
    key = key_of(*parts)
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)


@contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Seed the generators of the CPU by the key of `parts` inside, and put their states back afterwards."""
    key = key_of(*parts)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(key)
    np.random.seed(key)
    torch.default_generator.manual_seed(key)  # torch.manual_seed would seed the GPUs, too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
