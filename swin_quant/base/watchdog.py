"""A thread beside each rank that ends all ranks when one fails, freezes, dies or never comes."""

import os
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

_TICK_SECONDS = 1.0
_JOIN_TICKS = 45  # time for all ranks to start
_SILENCE_TICKS = 40  # after which a silent rank counts as dead; a library may hold the interpreter for half as long
_NEWS_TICKS = 5
_GRACE_TICKS = 3  # time for the main thread to notice by itself that another rank failed, and to end in good order
_TELL_TICKS = 8  # time for a last word to reach the store
_ROUNDS = 3  # rounds of news to wait for after a collective broke off
_FAILURE, _BEAT = "failure", "beat"
_END_OF_BAR = "\r\x1b[2K\x1b[?25h"  # on a terminal: its line cleared, the cursor shown again


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
