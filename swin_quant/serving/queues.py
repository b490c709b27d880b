"""Queues of bounded length: before the threads that decode, cheap requests first; before the engine, batch by batch.

Pictures that wait at the same time go through the engine in one batch.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import log
from swin_quant.quant.outputs import Output, cut, joined, parts_of
from swin_quant.score.engine import Run
from swin_quant.serving.limits import Hold, Refused, ServiceLimits

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


# Called for each batch with the number of pictures, that of requests, and the seconds of the engine.
Observer = Callable[[int, int, float], None]
_LAST = (float("inf"), 0)  # the turn that ends the loop


@dataclass(frozen=True, order=True)
class _Waiting:
    """`turn`: the part's number in its request, then its arrival: a large request does not delay a small one."""

    turn: tuple[float, int]
    images: Tensor = field(compare=False)
    answer: "asyncio.Future[Output]" = field(compare=False)

    def fits(self, other: "_Waiting") -> bool:
        """Whether the pictures of both are of one size, so that they may share a batch."""
        return self.images.shape[1:] == other.images.shape[1:]


class Batcher:
    """One engine, one thread that runs it, a queue of bounded length.

    `sizes`: the batch sizes that the engine has graphs for; a batch is filled up with zeros to the next size. Empty:
    the engine runs any size.
    """

    def __init__(
        self, run: Run, limits: ServiceLimits, sizes: Sequence[int] = (), observe: Observer | None = None
    ) -> None:
        self.run, self.limits, self.sizes, self.observe = run, limits, sorted(sizes), observe
        self.waiting: asyncio.PriorityQueue[_Waiting] = asyncio.PriorityQueue()
        self.count = itertools.count()
        self.pictures = 0  # waiting or running
        self.thread = ThreadPoolExecutor(1, "engine")
        self.loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.loop_task = asyncio.create_task(self._loop())

    async def close(self) -> None:
        """Answer all waiting requests, then end."""
        await self.waiting.put(_Waiting(_LAST, torch.empty(0), asyncio.get_running_loop().create_future()))
        if self.loop_task:
            await self.loop_task
        self.thread.shutdown()

    async def __call__(self, images: Tensor) -> Output:
        """Outputs [n, ...] for images float32 [n, 3, H, W]. Refused if the queue is full or the engine fails.

        The pictures of a client that stops waiting do not run, unless they are running already.
        """
        if self.pictures + len(images) > self.limits.max_queue:
            raise Refused(503, f"{self.pictures} pictures are waiting already: try again later")
        parts = images.split(self.limits.max_batch)
        answers = [asyncio.get_running_loop().create_future() for _ in parts]
        self.pictures += len(images)
        try:
            for place, (part, answer) in enumerate(zip(parts, answers, strict=True)):
                await self.waiting.put(_Waiting((place, next(self.count)), part, answer))
            found: Output = joined([await answer for answer in answers])
            return found
        finally:
            self.pictures -= len(images)
            for answer in answers:
                answer.cancel()

    async def _loop(self) -> None:
        left: _Waiting | None = None  # had no room in the last batch
        while (first := left or await self.waiting.get()).turn != _LAST:
            batch, left, ends = await self._gather(first)
            if batch:
                await self._answer(batch)
            if ends:
                if left:
                    await self._answer([left])
                return

    async def _gather(self, first: _Waiting) -> tuple[list[_Waiting], _Waiting | None, bool]:
        """The requests that run with `first`, one that had no room, and whether the loop ends."""
        batch, count = [first], len(first.images)
        end = time.monotonic() + self.limits.delay_us / 1e6
        while count < self.limits.max_batch:
            try:
                more = self.waiting.get_nowait()  # a waiting request costs no delay
            except asyncio.QueueEmpty:
                try:
                    more = await asyncio.wait_for(self.waiting.get(), max(0.0, end - time.monotonic()))
                except asyncio.TimeoutError:
                    break
            if more.turn == _LAST:
                return self._alive(batch), None, True
            if count + len(more.images) > self.limits.max_batch or not more.fits(first):
                return self._alive(batch), more, False
            batch, count = [*batch, more], count + len(more.images)
        return self._alive(batch), None, False

    def _alive(self, batch: list[_Waiting]) -> list[_Waiting]:
        return [one for one in batch if not one.answer.done()]

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Run a batch; if it fails, run each request alone: a request cannot fail another's."""
        try:
            outputs = await self._outputs(torch.cat([one.images for one in batch]), len(batch))
        except Exception as error:  # noqa: BLE001  # an engine's library may raise anything
            if len(batch) > 1:
                for one in batch:
                    await self._answer([one])
                return
            log.error("the engine failed: %s", error if isinstance(error, SwinQuantError) else repr(error))
            if not batch[0].answer.done():
                batch[0].answer.set_exception(Refused(500, "the engine failed on this request"))
            return
        for one, output in zip(batch, cut(outputs, [len(one.images) for one in batch]), strict=True):
            if not one.answer.done():
                one.answer.set_result(output)

    async def _outputs(self, images: Tensor, requests: int) -> Output:
        size = next((size for size in self.sizes if size >= len(images)), len(images))
        padded = torch.cat([images, images.new_zeros(size - len(images), *images.shape[1:])])
        start = time.perf_counter()
        outputs: Output = await asyncio.get_running_loop().run_in_executor(self.thread, self._run, padded)
        if self.observe:
            self.observe(len(images), requests, time.perf_counter() - start)
        return cut(outputs, [len(images), len(padded) - len(images)])[0]

    def _run(self, images: Tensor) -> Output:
        with torch.inference_mode():
            outputs: Output = self.run(images)
        if wrong := [len(part) for part in parts_of(outputs) if len(part) != len(images)]:
            raise SwinQuantError(f"gave {wrong[0]} outputs for {len(images)} pictures")
        return outputs
