"""An end for all ranks when one fails.

A rank that fails leaves its reason in a key-value store; a rank that dies silently stops its heartbeat. A thread on
every rank looks for both and ends the process, so that no rank waits for a dead one.
"""

import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 40.0  # of a rank that never reported failure; all others end within a minute
_FAILURE, _BEAT = "swin_quant/failure", "swin_quant/beat"


def broken_connection(error: RuntimeError) -> str | None:
    """What a collective's error says of the other ranks, if it is about them."""
    broken = isinstance(error, dist.DistError) or "by peer" in str(error)
    return "another rank is gone: it ended without a word, or was killed" if broken else None


class Watchdog(threading.Thread):
    """Beats for this rank and listens to the others; `closing` says that this rank ends of itself."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.rank = rank
        self.closing = False
        self._stopped = threading.Event()
        port = _agree_on_port(rank, device)
        self._store = dist.TCPStore(os.environ["MASTER_ADDR"], port, size, rank == 0, timeout=timedelta(seconds=60))
        self._heard = {other: (0, time.monotonic()) for other in range(size) if other != rank}
        self.start()

    def run(self) -> None:
        beats = 0
        while not self._stopped.wait(_POLL_SECONDS):
            beats += 1
            try:
                self._store.set(f"{_BEAT}/{self.rank}", str(beats))
                reason = self._failure() or self._silence()
            except (dist.DistError, RuntimeError):
                reason = "rank 0 is gone"
            if reason and not self.closing and not self._stopped.is_set():
                print(f"error: rank {self.rank} stops: {reason}", file=sys.stderr, flush=True)
                os._exit(1)

    def reason_of_others(self) -> str | None:
        """Why a collective broke off: the reason that another rank left, if it left one in the next moment."""
        for _ in range(4):
            time.sleep(_POLL_SECONDS / 2)
            try:
                if reason := self._failure():
                    return reason
            except (dist.DistError, RuntimeError):
                return "rank 0 is gone"
        return None

    def report(self, error: BaseException | str) -> None:
        """Tell the other ranks why this one ends, and give them the time to read it. The first reason stays."""
        self.closing = True
        try:
            text = " ".join(str(error).split()) or type(error).__name__
            if self._failure() is None:
                self._store.set(_FAILURE, f"rank {self.rank} failed: {text}"[:500])
            if self.rank == 0:
                time.sleep(2 * _POLL_SECONDS)  # the store goes when this rank goes
        except (dist.DistError, RuntimeError):
            pass

    def stop(self) -> None:
        self._stopped.set()
        self.join(timeout=5)

    def _failure(self) -> str | None:
        return self._store.get(_FAILURE).decode() if self._store.check([_FAILURE]) else None

    def _silence(self) -> str | None:
        now = time.monotonic()
        for rank, (beats, when) in self._heard.items():
            key = f"{_BEAT}/{rank}"
            latest = int(self._store.get(key)) if self._store.check([key]) else 0
            if latest != beats:
                self._heard[rank] = (latest, now)
            elif now - when > _SILENCE_SECONDS:
                return f"rank {rank} stopped answering"
        return None


def _agree_on_port(rank: int, device: torch.device) -> int:
    """A free port of rank 0's machine, told to all ranks: the watchdog's store is apart from the launcher's."""
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port[0] = probe.getsockname()[1]
    if device.type == "cuda":
        port = port.to(device)
    dist.broadcast(port, 0)
    return int(port.item())
