"""One process or many: start-up, sums and lists over all ranks, and an end for all when one rank fails."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from swin_quant.errors import SwinQuantError, UsageError
from swin_quant.watchdog import Watchdog, broken_connection

T = TypeVar("T")
_JOIN_SECONDS = 50.0  # for all ranks to start; one that failed before it could join is not waited for


@dataclass(frozen=True)
class World:
    """This process among all: rank, their number, and the device this one computes on."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0


def all_sum(values: Tensor, device: torch.device) -> Tensor:
    """Sum over ranks; with one rank, the values themselves. Back on the CPU."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values.cpu()
    values = values.to(device if device.type == "cuda" else "cpu")
    dist.all_reduce(values)
    return values.cpu()


def gather(items: list[T]) -> list[T]:
    """The items of every rank, in rank order, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    gathered: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, items)
    return [item for part in gathered for item in part]


def rank_of_launcher() -> int:
    """The RANK that a launcher gave this process, else 0."""
    return _number("RANK", 0)


def _number(name: str, default: int) -> int:
    """An environment variable as launchers set them. UsageError where it is no whole number."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"environment variable {name} is {text!r}: unset it, or start with torchrun, which sets it")
    return int(text)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes this rank's GPU where there is one, else the CPU. UsageError for a device that is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {name}: must be auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: rank {local_rank} of this machine has no GPU, {torch.cuda.device_count()} are visible; "
            "use --device cpu or fewer processes"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device: str = "auto", local_rank: int | None = None) -> Iterator[World]:
    """Join the ranks that torchrun or torch.distributed.launch started; a plain start is a world of one.

    An error of one rank ends the others within seconds with its reason; a rank that is killed, within a minute.
    """
    if "RANK" not in os.environ or _number("WORLD_SIZE", 1) < 2:
        yield World(device=choose_device(device))
        return
    chosen = choose_device(device, _number("LOCAL_RANK", local_rank or 0))
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; ranks started otherwise would each take every core
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // _number("WORLD_SIZE", 1)))
    _join("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    world = World(dist.get_rank(), dist.get_world_size(), chosen)
    watchdog = Watchdog(world.rank, world.size, chosen)
    try:
        yield world
        watchdog.closing = True
        dist.barrier()
    except RuntimeError as error:
        reason = watchdog.reason_of_others() or broken_connection(error)
        watchdog.report(reason or error)
        if reason is None:
            raise
        raise SwinQuantError(f"stopped, since {reason}") from error
    except BaseException as error:
        watchdog.report(error)
        raise
    finally:
        watchdog.stop()
    dist.destroy_process_group()


def _join(backend: str) -> None:
    """Start the process group from the launcher's environment; patient only once everybody is there."""
    patience = timedelta(hours=2)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS)))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except ValueError as error:
        raise UsageError(
            f"WORLD_SIZE asks for several ranks, but MASTER_ADDR and MASTER_PORT ({address}) do not say where they "
            f"meet: start with torchrun, which sets them ({error})"
        ) from error
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        raise SwinQuantError(f"not all ranks met at {address} in {_JOIN_SECONDS:.0f} s: {problem}") from error
    store.set_timeout(patience)
