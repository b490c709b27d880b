"""One process or many: start-up, sums and lists over all ranks, and an end for all when one rank fails."""

import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)  # torch's own timeout; the watchdog ends a wait for a lost rank earlier
_TICK_SECONDS = 1.0
_JOIN_TICKS = 45  # time for all ranks to start
_SILENCE_TICKS = 40  # after which a silent rank counts as dead; a library may hold the interpreter for half as long
_NEWS_TICKS = 5
_GRACE_TICKS = 3  # time for the main thread to notice by itself that another rank failed, and to end in good order
_TELL_TICKS = 8  # time for a last word to reach the store
_ROUNDS = 3  # rounds of news to wait for after a collective broke off
_FAILURE, _BEAT = "failure", "beat"
_END_OF_BAR = "\r\x1b[2K\x1b[?25h"  # on a terminal: its line cleared, the cursor shown again


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
        raise UsageError(
            f"‹device› {name}: rank {local_rank} of this machine has no GPU, {torch.cuda.device_count()} are visible; "
            "use ‹device› cpu or fewer processes"
        )
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
    ends them within a minute (see `Watchdog`).
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
    problem = None if host and 0 < port < 2**16 else "an address and a port are needed"
    try:
        socket.getaddrinfo(host or None, port)
    except (OSError, UnicodeError) as error:
        problem = getattr(error, "strerror", None) or "no valid name"
    if problem:
        raise UsageError(
            f"WORLD_SIZE asks for several ranks, but MASTER_ADDR and MASTER_PORT ({host}:{port}) do not say where they "
            f"meet: start with torchrun, which sets them ({problem})"
        )
    return host, port


class Watchdog:
    """Ends all ranks when one fails, freezes, dies or never comes.

    It watches from the start: `attach` it to the store, and tell it when all have `joined`, and when `closing`. `host`
    keeps the store, "rank 0" or "the launcher"; `place` is where the ranks meet. Both are for messages.

    Each rank has two threads. One talks: through the store where the ranks met, it reports that this rank lives, and
    reads which others do and why one failed. The other counts: it compares the time of the last news with its own ticks
    and ends the process. It never touches the store, whose host may be frozen. Time in which this process did not run
    does not count against the others: a job that is stopped and continued as a whole goes on.
    """

    def __init__(self, rank: int, size: int, host: str, place: str) -> None:
        self.rank, self.host, self.place = rank, host, place
        self._others = [other for other in range(size) if other != rank]
        self._tick = 0
        self._answered: int | None = None  # the tick of the store's last answer
        self._rounds = 0  # rounds of news that the store answered in full
        self._heard: dict[int, int] = {}  # rank -> the tick of its last sign of life
        self._joined = self._closing = self._broken = False
        self._reason: str | None = None  # why another rank failed
        self._reason_tick = 0
        self._own_reason: str | None = None
        self._told, self._stopped = threading.Event(), threading.Event()
        self._last_word = threading.Lock()  # this process's: its main thread's, or this watchdog's
        self._signals = _Signals()
        self._asked_tick: int | None = None  # when a signal asked this process to end, before all had joined
        self._threads = [threading.Thread(target=self._count, name="watchdog", daemon=True)]
        self._threads[0].start()

    def attach(self, store: dist.TCPStore) -> None:
        """Start to talk."""
        self._threads.append(threading.Thread(target=self._talk, args=(store,), name="watchdog talk", daemon=True))
        self._threads[1].start()

    def joined(self) -> None:
        """All ranks are connected: from now on only silence counts."""
        self._heard = dict.fromkeys(self._others, self._tick)
        self._joined = True
        self._signals.close()

    def closing(self) -> None:
        """This rank has done its work: another rank may end before it, and take the store along."""
        self._closing = True

    def read_failure_reason(self) -> str | None:
        """Why a collective broke off: the reason that another rank left, if one did.

        Waits for news, not for a time: on a busy machine they are late. If none ever come, the other thread ends all.
        """
        last = self._rounds + _ROUNDS
        while not self._reason and not self._broken and self._rounds < last:
            time.sleep(_TICK_SECONDS / 4)
        return self._reason or (f"{self.host} is gone" if self._broken else None)

    def report(self, why: str) -> None:
        """Tell the other ranks why this one ends, and give them the time to read it. The first reason stays.

        Never returns if the watchdog was about to end the process with a message of its own: that is enough.
        """
        if not self._last_word.acquire(blocking=False):
            threading.Event().wait()
        self._tell(why)

    def stop(self) -> None:
        self._stopped.set()
        self._signals.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _tell(self, why: str) -> None:
        self._own_reason = " ".join(why.split())[:500]
        met = self._joined or self._answered is not None  # a rank may fail before this thread had its first answer
        if met and not self._broken and self._told.wait(_TELL_TICKS * _TICK_SECONDS):
            if self.host == f"rank {self.rank}":
                time.sleep(2 * _TICK_SECONDS)  # the store goes when this rank goes

    def _talk(self, meeting: dist.TCPStore) -> None:
        with suppress(RuntimeError):
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher's store outlives one attempt
            own = meeting.clone()  # type: ignore[attr-defined]  # not in torch's stubs; nobody else waits for it
            store = dist.PrefixStore(f"swin_quant/{attempt}", own)
            beats, latest = 0, dict.fromkeys(self._others, b"")
            while True:
                beats += 1
                store.set(f"{_BEAT}/{self.rank}", str(beats))
                if self._own_reason and not self._told.is_set():
                    store.compare_set(_FAILURE, "", self._own_reason)
                    self._told.set()
                elif not self._reason and store.check([_FAILURE]):
                    self._reason_tick, self._reason = self._tick, store.get(_FAILURE).decode(errors="replace")
                here = [rank for rank, beat in latest.items() if beat or store.check([f"{_BEAT}/{rank}"])]
                for rank, beat in zip(here, store.multi_get([f"{_BEAT}/{rank}" for rank in here]), strict=True):
                    if beat != latest[rank]:
                        latest[rank], self._heard[rank] = beat, self._tick
                self._answered = self._tick
                self._rounds += 1
                if self._stopped.wait(_TICK_SECONDS):
                    return
        self._broken = True

    def _count(self) -> None:
        while not self._stopped.wait(_TICK_SECONDS):
            self._tick += 1
            if self._asked_tick is None and not self._joined and self._signals.came():
                self._asked_tick = self._tick
            if (reason := self._verdict()) and self._last_word.acquire(blocking=False):
                self._tell(reason)
                with suppress(OSError, ValueError):  # standard error is closed or has no reader
                    bar = _END_OF_BAR if sys.stderr.isatty() else ""
                    print(f"{bar}error (rank {self.rank}): stopped, since {reason}", file=sys.stderr, flush=True)
                os._exit(1)

    def _verdict(self) -> str | None:
        """Why this process has to end now, if it has to."""
        now = self._tick
        if self._reason:
            return self._reason if self._broken or now - self._reason_tick >= _GRACE_TICKS else None
        if self._broken and not self._closing:
            return f"{self.host} is gone"
        if not self._joined and self._asked_tick is not None and now - self._asked_tick >= _GRACE_TICKS:
            return f"rank {self.rank} was interrupted"
        if not self._joined and now > _JOIN_TICKS:
            missing = [str(rank) for rank in self._others if rank not in self._heard]
            who = f"rank {', '.join(missing)}" if self._answered is not None else self.host
            why = f": {who} never came" if missing else ""
            return f"not all ranks met at {self.place} within {_JOIN_TICKS * _TICK_SECONDS:.0f} s{why}"
        if self._answered is None:
            return None
        if now - self._answered > _SILENCE_TICKS:
            return f"{self.host} stopped answering"
        if now - self._answered < _NEWS_TICKS:  # without the store no rank is heard, so none is blamed
            for rank, tick in self._heard.copy().items():
                if now - tick > _SILENCE_TICKS:
                    return f"rank {rank} stopped answering"
        return None


class _Signals:
    """Whether Ctrl-C or SIGTERM came, also while the main thread waits in a library, where no handler of ours runs.

    SIGALRM stands for a postponed one (`cli.guard`).
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._before: int | None = None
        with suppress(ValueError):  # not the main thread: it gets no signals
            self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def came(self) -> bool:
        with suppress(BlockingIOError):
            return bool({signal.SIGINT, signal.SIGTERM, signal.SIGALRM} & set(self._read.recv(4096)))
        return False

    def close(self) -> None:
        """Listen no longer; from the same thread."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            self._before = None
