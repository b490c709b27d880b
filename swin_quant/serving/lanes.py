"""Threads that decode, the cheapest waiting request first, behind a queue of bounded length."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swin_quant.serving.limits import Hold, Refused

T = TypeVar("T")
_FULL = "too many requests are waiting to be decoded: try again later"


class Lane:
    """`threads` that work at a time; at most `most` requests wait for one."""

    def __init__(self, name: str, threads: int, most: int) -> None:
        self.threads, self.free, self.most = ThreadPoolExecutor(threads, name), threads, most
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self.count = itertools.count()

    async def __call__(self, cost: int, need: int, hold: Hold, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work(*arguments)`, which holds `need` bytes of the budget while it runs.

        Refused if the queue is full of cheaper requests, or the bytes are not to be had.
        """
        if self.free:
            self.free -= 1
        else:
            await self._turn(cost)
        try:
            hold.take(need)
            hold.work = running = asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)
        except BaseException:
            self._next()
            raise

        def ended(done: "asyncio.Future[T]") -> None:
            done.cancelled() or done.exception()  # an error that nobody reads is no warning of asyncio's
            hold.give(need)
            self._next()

        running.add_done_callback(ended)
        return await asyncio.shield(running)

    def close(self) -> None:
        self.threads.shutdown()

    async def _turn(self, cost: int) -> None:
        mine = (cost, next(self.count), asyncio.get_running_loop().create_future())
        heapq.heappush(self.waiting, mine)
        if len(self.waiting) > self.most:
            dearest = max(self.waiting)
            self._forget(dearest)
            dearest[2].set_exception(Refused(503, _FULL))
        try:
            await mine[2]
        except asyncio.CancelledError:
            if mine[2].done() and not mine[2].cancelled() and not mine[2].exception():
                self._next()  # the turn came in the same moment
            self._forget(mine)
            raise

    def _forget(self, one: tuple[int, int, "asyncio.Future[None]"]) -> None:
        self.waiting = [other for other in self.waiting if other is not one]
        heapq.heapify(self.waiting)

    def _next(self) -> None:
        while self.waiting:
            turn = heapq.heappop(self.waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1
