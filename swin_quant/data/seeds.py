"""Give every random draw a key: the seed and the picture's index; in training also the epoch and the position in it.

The draws for a picture or batch depend neither on the number of ranks and loaders nor on earlier draws: a resumed run
draws as if it had never stopped.
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
    """Seed Python's, numpy's and torch's generators (on the GPUs too) by the key of `parts`."""
    key = key_of(*parts)
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)


@contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Inside the context, the CPU's generators are seeded by the key of `parts`; afterwards they have their old
    states."""
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
