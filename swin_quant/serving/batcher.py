"""One queue in front of an engine, with limits: pictures that wait at the same time run in one batch."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import log
from swin_quant.base.schema import check_limits
from swin_quant.quant.outputs import Output, cut, joined, list_tensors
from swin_quant.score.engine import Run

# The least and the most of each field of ServiceLimits.
_RANGES = {
    "max_batch": (1, 4096),
    "delay_us": (0, 10**7),
    "max_queue": (1, 10**6),
    "max_megabytes": (0.001, 4096),
    "timeout_s": (0.001, 3600),
    "max_megapixels": (0.001, 2048),
}


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of batches and requests. UsageError for an impossible number.

    Args:
        max_batch: pictures that run at a time
        delay_us: microseconds that a picture waits for a fuller batch
        max_queue: requests in work at a time, and pictures that wait for the engine
        max_megabytes: megabytes of a body
        timeout_s: seconds for the body of a request to arrive, and again for its answer
        max_megapixels: megapixels of a picture, multiplied by the scans of a progressive JPEG
    """

    max_batch: int = 8
    delay_us: int = 2000
    max_queue: int = 256
    max_megabytes: float = 32
    timeout_s: float = 30
    max_megapixels: float = 128

    def __post_init__(self) -> None:
        check_limits(self, _RANGES)

    @property
    def max_bytes(self) -> int:
        return int(self.max_megabytes * 2**20)


class Refused(Exception):
    """A request that is not answered: an HTTP status, and one line for the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(" ".join(why.split())[:500])
        self.status = status


@dataclass(frozen=True)
class _Job:
    images: Tensor
    result: "asyncio.Future[Output]"


class Batcher:
    """Runs an engine in a thread of its own.

    Args:
        run: the engine.
        limits: largest batch, delay and length of the queue.
        sizes: batch sizes that the engine is compiled for; smaller batches are padded with zeros. Empty: any size runs.
        observe: called after each batch with its pictures and the engine's seconds.
    """

    def __init__(
        self, run: Run, limits: ServiceLimits, sizes: Sequence[int], observe: Callable[[int, float], None]
    ) -> None:
        self.run, self.limits, self.sizes, self.observe = run, limits, sorted(sizes), observe
        self.queue: asyncio.Queue[_Job] = asyncio.Queue()
        self.waiting = 0  # pictures in the queue and in the engine
        self.thread = ThreadPoolExecutor(1, "engine")

    async def __call__(self, images: Tensor) -> Output:
        """Return the outputs [n, ...] for images float32 [n, 3, H, W].

        Raises:
            Refused: if the queue is full, or the engine fails.
        """
        if self.waiting + len(images) > self.limits.max_queue:
            raise Refused(503, f"{self.waiting} pictures are waiting already: try again later")
        loop = asyncio.get_running_loop()
        jobs = [_Job(part, loop.create_future()) for part in images.split(self.limits.max_batch)]
        self.waiting += len(images)
        try:
            for job in jobs:
                self.queue.put_nowait(job)
            outputs: Output = joined([await job.result for job in jobs])
            return outputs
        finally:
            self.waiting -= len(images)
            for job in jobs:
                job.result.cancel()  # a job that nobody waits for does not run

    async def serve(self) -> None:
        """Run batches until cancelled."""
        left: _Job | None = None  # did not fit into the last batch
        while True:
            batch = [left or await self.queue.get()]
            left, count = None, len(batch[0].images)
            end = time.monotonic() + self.limits.delay_us / 1e6
            while count < self.limits.max_batch and left is None:
                try:
                    rest = max(0.0, end - time.monotonic())
                    job = (
                        await asyncio.wait_for(self.queue.get(), rest)
                        if self.queue.empty()
                        else self.queue.get_nowait()
                    )
                except asyncio.TimeoutError:
                    break
                if count + len(job.images) > self.limits.max_batch or job.images.shape[1:] != batch[0].images.shape[1:]:
                    left = job
                else:
                    batch.append(job)
                    count += len(job.images)
            if batch := [job for job in batch if not job.result.done()]:
                await self._answer(batch)

    async def _answer(self, batch: list[_Job]) -> None:
        images, start = torch.cat([job.images for job in batch]), time.perf_counter()
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(self.thread, self._compute, images)
        except Exception as error:  # noqa: BLE001  # an engine's library may raise anything
            if len(batch) > 1:  # a request must not fail because of another one
                for job in batch:
                    await self._answer([job])
                return
            log.error("the engine failed: %s", error if isinstance(error, SwinQuantError) else repr(error))
            if not batch[0].result.done():
                batch[0].result.set_exception(Refused(500, "the engine failed on this request"))
            return
        self.observe(len(images), time.perf_counter() - start)
        for job, output in zip(batch, cut(outputs, [len(job.images) for job in batch]), strict=True):
            if not job.result.done():
                job.result.set_result(output)

    def _compute(self, images: Tensor) -> Output:
        size = next((size for size in self.sizes if size >= len(images)), len(images))
        with torch.inference_mode():
            padding = images.new_zeros(size - len(images), *images.shape[1:])
            outputs: Output = self.run(torch.cat([images, padding]))
        if wrong := [len(part) for part in list_tensors(outputs) if len(part) != size]:
            raise SwinQuantError(f"gave {wrong[0]} outputs for {size} pictures")
        return cut(outputs, [len(images), size - len(images)])[0]
