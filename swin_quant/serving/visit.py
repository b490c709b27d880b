"""One request from its first byte to its answer: deadline, body, bytes of the budget, client."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from io import BytesIO
from typing import Any, TypeVar

from swin_quant.serving.bodies import expanded
from swin_quant.serving.limits import MOST_FRAMES, ByteBudget, Hold, Refused, ServiceLimits

_LARGE = 2**20  # bytes of a body that are read without a pause
_PAUSE_S = 0.001
CLOSED = 499  # for logs and metrics: the client went away and reads no status
T = TypeVar("T")


class Visit:
    """One request. Our server passes on when its first byte came (by the event loop's clock), how many bytes came after
    its head, and whether there are too many connections; another server passes on nothing."""

    def __init__(self, request: Any, limits: ServiceLimits, budget: ByteBudget) -> None:
        state = request.scope.get("state", {})
        self.request, self.limits, self.hold = request, limits, Hold(budget)
        self.clock = asyncio.get_running_loop().time
        self.deadline = state.get("began", self.clock()) + limits.timeout_s
        self.is_crowded, self.came = state.get("crowded", False), state.get("came", int)

    async def body(self) -> bytes:
        """The whole body, expanded if it is compressed. Refused if it is too large, or late."""
        from starlette.requests import ClientDisconnect

        limits, whole, headers = self.limits, BytesIO(), self.request.headers
        encoding = headers.get("content-encoding", "").strip().lower()
        too_large = Refused(413, f"the body is larger than {limits.max_megabytes:g} MB")
        declared = headers.get("content-length", "")
        size = int(declared[:20]) if declared.isascii() and declared.isdigit() else 0
        if size > limits.max_bytes:
            raise too_large
        if self.is_crowded:
            raise Refused(503, "too many connections: try again later")
        self.hold.check(size)

        async def arriving() -> AsyncIterator[bytes]:
            came = 0
            async for part in self.request.stream():
                came += len(part)
                if self.came() > MOST_FRAMES + 2 * came:
                    raise Refused(400, "the body comes in chunks that are too small")
                yield part

        async def read() -> None:
            async for part in expanded(arriving(), encoding):
                self.hold.take(len(part))
                if self.hold.held > limits.max_bytes:
                    raise too_large
                whole.write(part)
                if _LARGE < self.hold.held < self.hold.budget.held:  # others' requests are in work: they come first
                    await asyncio.sleep(_PAUSE_S)

        try:
            await asyncio.wait_for(read(), self._left())
        except asyncio.TimeoutError as error:
            raise Refused(408, f"the body did not come within {limits.timeout_s:g} s") from error
        except ClientDisconnect as error:
            raise Refused(CLOSED, "the client went away") from error
        return whole.getvalue()

    async def until_answered(self, answer: Coroutine[Any, Any, T]) -> T:
        """The result of `answer`, which is cancelled if the client goes away, and at the deadline."""
        work = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({work, gone}, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise Refused(CLOSED, "the client went away")
            raise Refused(504, f"not answered within {self.limits.timeout_s:g} s: try again later")
        finally:
            work.cancel()
            gone.cancel()

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def _left(self) -> float:
        return max(0.0, self.deadline - self.clock())
