"""One process or many: start-up, and sums and lists over all ranks."""

import io
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.watchdog import Watchdog

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)  # torch's own timeout; the watchdog ends a wait for a lost rank earlier


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


_this: list[World] = []


def this_world(device: torch.device | None = None) -> World:
    """This process among those that a launcher started: alone, outside `process_group`.

    Args:
        device: In place of the process's own.
    """
    world = _this[-1] if _this else World()
    return world if device is None else replace(world, device=device)


def one_process(command: str) -> None:
    """UsageError under a launcher of several processes."""
    if this_world().size > 1:
        raise UsageError(f"{command} runs in one process: start it without torchrun")


@contextmanager
def _entered(world: World) -> Iterator[World]:
    _this.append(world)
    try:
        yield world
    finally:
        _this.pop()


def all_sum(values: Tensor, device: torch.device) -> Tensor:
    """Sum over ranks; with one rank, the values themselves. Back on the CPU."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values.cpu()
    values = values.to(device if device.type == "cuda" else "cpu")
    dist.all_reduce(values)
    return values.cpu()


def gather(items: list[T]) -> list[T]:
    """The items of every rank, in rank order, on every rank. They travel as JSON: strings, numbers, lists."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    mine = torch.frombuffer(bytearray(json.dumps(items).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = int(max(sizes))
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))))
    texts = [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
    return [item for text in texts for item in json.loads(text)]


def from_main(value: T) -> T:
    """Rank 0's value on every rank: tensors (on the CPU) and plain data, read without running code in them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    buffer = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(value, buffer)
    size = torch.tensor([buffer.tell()])
    dist.broadcast(size, 0)
    if dist.get_rank() == 0:
        dist.broadcast(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), 0)
        return value
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return torch.load(io.BytesIO(data.numpy().tobytes()), "cpu", weights_only=True)


def read_launcher_rank() -> int:
    """The RANK that a launcher gave this process, else 0."""
    return _number("RANK", 0)


def _number(name: str, default: int) -> int:
    """An environment variable as launchers set it. UsageError if it is no whole number."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"environment variable {name} is {text!r}: unset it, or start with torchrun, which sets it")
    return int(text)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes this rank's GPU if there is one, else the CPU. UsageError for a missing device."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"‹device› {name}: must be auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        seen = f"rank {local_rank} of this machine has no GPU, {count} are visible" if count else "no GPU is visible"
        raise UsageError(f"‹device› {name}: {seen}; use ‹device› cpu{' or fewer processes' if count else ''}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def world_on(device: str) -> World:
    """A command's process, or in Python this process alone, on torch's current GPU or the CPU. UsageError for a missing
    device."""
    if _this:
        return _this[-1]
    return World(device=choose_device(device, torch.cuda.current_device() if torch.cuda.is_available() else 0))


@contextmanager
def process_group(device: str = "auto", local_rank: int | None = None) -> Iterator[World]:
    """Join the ranks that torchrun or torch.distributed.launch started; a plain start is a world of one.

    An error of one rank ends the others within seconds with its reason; a rank that freezes, is killed or never comes
    ends them within a minute (see `watchdog`).
    """
    size = _number("WORLD_SIZE", 1) if "RANK" in os.environ else 1
    if size < 2:
        with _entered(World(device=choose_device(device))) as world:
            yield world
        return
    rank = _number("RANK", 0)
    if rank >= size:
        raise UsageError(f"RANK is {rank} of WORLD_SIZE {size}: ranks count from 0; torchrun sets both")
    host, port = _meeting_place()
    launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it keeps the store, rank 0 otherwise
    watchdog = Watchdog(rank, size, "the launcher" if launcher else "rank 0", f"{host}:{port}")
    try:
        try:  # the rank that keeps the store waits for no other here
            keeps = rank == 0 and not launcher
            store = dist.TCPStore(host, port, size, keeps, timeout=_PATIENCE, wait_for_workers=False)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
            raise SwinQuantError(f"cannot meet the other ranks at {host}:{port}: {problem}") from error
        watchdog.attach(store)
        chosen = choose_device(device, _number("LOCAL_RANK", local_rank or 0))
        if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; ranks started otherwise would each take every core
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
        watchdog.joined()
        with _entered(World(rank, size, chosen)) as world:
            yield world
        watchdog.closing()
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        is_broken = isinstance(error, dist.DistError) or "by peer" in str(error)
        gone = "another rank is gone: it ended without a word, or was killed" if is_broken else None
        reason = watchdog.read_failure_reason() or gone
        watchdog.report(reason or f"rank {rank} failed: {error}")
        if reason is None:
            raise
        raise SwinQuantError(f"stopped, since {reason}") from error
    except KeyboardInterrupt:
        watchdog.report(f"rank {rank} was interrupted")
        raise
    except BaseException as error:
        watchdog.report(f"rank {rank} failed: {str(error) or type(error).__name__}")
        raise
    finally:
        watchdog.stop()


def _meeting_place() -> tuple[str, int]:
    """The address at which a launcher lets the ranks meet. UsageError without one."""
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)
    try:
        if not host or not 0 < port < 2**16:
            raise ValueError("an address and a port are needed")
        socket.getaddrinfo(host, port)
    except (OSError, ValueError) as error:  # a UnicodeError is a ValueError
        raise UsageError(
            f"WORLD_SIZE asks for several ranks, but MASTER_ADDR and MASTER_PORT ({host}:{port}) do not say where they "
            f"meet: start with torchrun, which sets them ({error})"
        ) from error
    return host, port
