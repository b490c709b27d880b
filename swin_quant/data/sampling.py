"""Seeded samples: the pictures to take, each rank's share, a hash of the choice, and a key for every random draw.

A key is the seed and the picture's index; in training also the epoch and the position in it. So the draws for a picture
or batch depend neither on the number of ranks and loaders nor on earlier draws: a resumed run draws as if it had never
stopped.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from swin_quant.base.errors import UsageError

T = TypeVar("T")


def sample(total: int, count: int, seed: int) -> list[int]:
    """Draw `count` of the indices 0 to total - 1 without replacement; a smaller count gives the start of a larger one.

    Each index gets a random key, and the smallest keys win. The keys are from `random.Random(seed).random()`, the one
    stream that Python promises to keep across versions, so a run card's seed names the same pictures for years.

    Raises:
        UsageError: count is below 1 or above total.
    """
    if count < 1:
        raise UsageError(f"‹pictures› {count}: must be at least 1")
    if count > total:
        raise UsageError(f"‹pictures› asks for {count} pictures, the data holds {total}: lower it")
    stream = random.Random(seed)
    keys = [stream.random() for _ in range(total)]
    return sorted(range(total), key=keys.__getitem__)[:count]


def shard(items: Sequence[T], rank: int, world: int) -> Sequence[T]:
    """This rank's items: every world-th from `rank`. All ranks together hold each item exactly once."""
    return items[rank::world]


def chunks(indices: Sequence[int], size: int) -> list[list[int]]:
    """Cut indices into batches of `size`, in order; the last may be shorter."""
    if size < 1:
        raise UsageError(f"a batch holds at least 1 picture, not {size}")
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def digest(names: Iterable[str]) -> str:
    """The SHA-256, in hex, of names in order, each followed by a zero byte (which no file name holds)."""
    sha = hashlib.sha256()
    for name in names:
        sha.update(name.encode("utf-8") + b"\0")
    return sha.hexdigest()


def compute_key(*parts: int | str) -> int:
    """A 32-bit number that depends on all `parts`."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "little")


def seed_all(*parts: int | str) -> None:
    """Seed Python's, numpy's and torch's generators (on the GPUs too) by the key of `parts`."""
    key = compute_key(*parts)
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)


@contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Inside the context, the CPU's generators are seeded by the key of `parts`; afterwards they have their old
    states."""
    key = compute_key(*parts)
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
