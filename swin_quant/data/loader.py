"""Load lists of indices as batches of tensors: in parallel, in order, and not stopped by a bad picture."""

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from swin_quant.base.compat import import_timm
from swin_quant.base.cpu import usable_cores
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.data.pictures import Pictures, UnreadablePicture
from swin_quant.data.preprocess import Preprocess, Transform
from swin_quant.data.sampling import sample

_FEW = 256  # pictures decoded in the time that workers take to start


class LoaderKilled(SwinQuantError):
    """A process that loads pictures is gone; what was computed from earlier batches is whole."""


@dataclass
class Batch:
    """The readable pictures of one batch, B of them, in the requested order.

    Attributes:
        images: float32 [B, 3, H, W]; B may be 0.
        labels: int64 [B].
        indices: B indices into the Pictures.
        unreadable: names of the pictures that were left out.
    """

    images: Tensor
    labels: Tensor
    indices: list[int]
    unreadable: list[str]


def load_batches(
    pictures: Pictures, transform: Transform, batches: Sequence[Sequence[int]], workers: int = 0
) -> Iterator[Batch]:
    """Yield one Batch for each list of indices, in order; the tensors do not depend on `workers`.

    Raises:
        SwinQuantError: the source itself broke (an archive that vanished).
        LoaderKilled: a worker process is gone.
    """
    if workers:
        import_timm()  # once here, where forked workers inherit it: it takes 2 s
    loader: DataLoader[Any] = DataLoader(
        batches,  # type: ignore[arg-type]  # any sequence is a data set
        batch_size=None,  # an item of the dataset is a whole batch
        collate_fn=partial(_load, pictures, transform),
        num_workers=workers,
        worker_init_fn=_leave_interrupts_to_parent,
        generator=torch.Generator(),  # the default would draw from, and so change, the global random state
    )
    try:
        before = signal.getsignal(signal.SIGCHLD)
        loaded = iter(loader)
        # Torch's handler raises wherever the main thread is, such as within a training step; the loop below finds a
        # dead worker, too, within seconds
        if before is not None and signal.getsignal(signal.SIGCHLD) != before:
            signal.signal(signal.SIGCHLD, before)
        for batch in loaded:
            if isinstance(batch, SwinQuantError):
                raise batch
            yield batch
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        what = "a process that loads pictures was killed (for want of memory, perhaps): fewer ‹workers›"
        raise LoaderKilled(what) from error


def _load(pictures: Pictures, transform: Transform, batch: Sequence[int]) -> Batch | SwinQuantError:
    """A batch, or the error that ends the run (raised in a worker it would come out as a traceback)."""
    images, indices, unreadable = [], [], []
    for index in batch:
        try:
            image = pictures.read(index, transform.upright)
        except UnreadablePicture:
            unreadable.append(pictures.names[index])
            continue
        except SwinQuantError as error:
            return error
        images.append(transform(image, index))
        indices.append(index)
    stacked = torch.stack(images) if images else torch.empty(0, 3, *transform.sides)
    labels = torch.tensor([pictures.labels[index] for index in indices], dtype=torch.int64)
    return Batch(stacked, labels, indices, unreadable)


def _leave_interrupts_to_parent(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def default_workers(configured: int | None, world: int, total: int | None = None) -> int:
    """The number of loading processes for one rank: at most its share of the CPU cores, none for a small job.

    Args:
        configured: DATA.NUM_WORKERS, the most processes; None for 8.
        world: ranks on this machine.
        total: pictures to load, if known.
    """
    if total is not None and total <= _FEW:
        return 0
    return max(0, min(8 if configured is None else configured, usable_cores() // world))


class UnreadableLimit:
    """Counts pictures that could not be read, and ends the run when there are too many.

    Args:
        total: pictures that the run reads.
        limit: share of them that may be unreadable, 0 to 1 (flag ‹max_unreadable›); None for 0.01.
    """

    def __init__(self, total: int, limit: float | None = None) -> None:
        limit = 0.01 if limit is None else limit
        if not 0 <= limit <= 1:
            raise UsageError(f"‹max_unreadable› {limit}: a share from 0 to 1 is needed")
        self.total, self.limit = total, limit
        self._names: dict[str, None] = {}

    @property
    def names(self) -> list[str]:
        """Unreadable pictures so far, each once, in order of appearance."""
        return list(self._names)

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, counting their unreadable pictures."""
        for batch in batches:
            self.count(batch.unreadable)
            yield batch

    def count(self, names: Iterable[str]) -> None:
        """Add names; a known name does not count again.

        SwinQuantError if more than limit x total pictures, or all of them, are unreadable.
        """
        self._names.update(dict.fromkeys(names))
        bad = len(self._names)
        if bad > round(self.limit * self.total, 6):
            advice = f"mend or remove them, or raise ‹max_unreadable› (now {self.limit:g})"
        elif bad and bad >= self.total:
            advice = "no picture is left"
        else:
            return
        raise SwinQuantError(f"{bad} of {self.total} pictures are unreadable: {listed(self._names)}; {advice}")


class DrawnBatches:
    """A seeded sample of pictures in batches; pictures of several sizes come one by one.

    Unreadable pictures are left out of their batch, and at the end replaced by the next readable pictures of the seeded
    order, in batches of their own. There are fewer pictures if the data hold no more.

    Args:
        pictures: The data.
        transform: Makes a tensor of a picture.
        wanted: The number of pictures.
        seed: Of the sample.
        size: Pictures in a batch.
        max_unreadable: The share of pictures that may be unreadable.
        workers: Processes that load pictures.
    """

    def __init__(
        self,
        pictures: Pictures,
        transform: Transform,
        wanted: int,
        seed: int,
        size: int,
        max_unreadable: float,
        workers: int = 0,
    ) -> None:
        has_one_size = not isinstance(transform, Preprocess) or transform.is_square
        self.pictures, self.transform, self.workers = pictures, transform, workers
        self.wanted, self.seed, self.size = wanted, seed, size if has_one_size else 1
        self.count = -(-wanted // self.size)
        self.limit = UnreadableLimit(len(pictures), max_unreadable)
        self._seen: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        total, wanted, seed, size = len(self.pictures), self.wanted, self.seed, self.size
        sample(total, wanted, seed)  # refuses more pictures than there are
        order = sample(total, total, seed)
        first = [order[:wanted][number * size : (number + 1) * size] for number in range(self.count)]
        missing, spare = 0, order[wanted:]
        for batch in self._loaded(first, self.workers):
            missing += len(batch.unreadable)
            yield batch
        while missing and spare:
            some = min(missing, size)
            batch, spare = next(self._loaded([spare[:some]])), spare[some:]
            missing -= len(batch.labels)
            yield batch

    def names(self) -> list[str]:
        """The pictures that were read, in order."""
        return [self.pictures.names[index] for index in self._seen]

    def unreadable(self) -> list[str]:
        """The pictures that could not be read."""
        return sorted(self.limit.names)

    def _loaded(self, indices: Sequence[Sequence[int]], workers: int = 0) -> Iterator[Batch]:
        for batch in load_batches(self.pictures, self.transform, indices, workers):
            self.limit.count(batch.unreadable)
            self._seen += batch.indices
            yield batch
