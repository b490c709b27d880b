"""Threads that decode, the cheapest of what waits first: a queue of bounded length that forgets who stops waiting."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swin_quant.serving.budget import Hold
from swin_quant.serving.limits import Refused

T = TypeVar("T")
_FULL = "too many requests are waiting to be decoded: try again later"


class Lane:
    """`threads` that work at a time; at most `most` requests wait for one of them."""

    def __init__(self, name: str, threads: int, most: int) -> None:
        self.threads, self.free, self.most = ThreadPoolExecutor(threads, name), threads, most
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self.count = itertools.count()

    async def __call__(self, cost: int, need: int, hold: Hold, work: Callable[..., T], *given: Any) -> T:
        """What `work(*given)` returns. It takes `need` bytes of the budget while it runs.

        Refused where the queue is full of what costs less, or the bytes cannot be had.
        """
        if self.free:
            self.free -= 1
        else:
            await self._turn(cost)
        try:
            hold.take(need)
            hold.work = running = asyncio.get_running_loop().run_in_executor(self.threads, work, *given)
        except BaseException:
            self._next()
            raise

        def ended(done: "asyncio.Future[T]") -> None:
            done.cancelled() or done.exception()  # nobody may be left to whom it could be told
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
                self._next()  # the turn came at that moment
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
