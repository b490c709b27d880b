"""One request from its first byte to its answer: deadline, body, bytes of the budget, client."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from io import BytesIO
from typing import Any, TypeVar

from swin_quant.serving.limits import MOST_FRAMES, ByteBudget, Hold, Refused, ServiceLimits

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's names for the frames around the same compression
_PIECE = 2**16  # bytes at a time: a fraction of a millisecond
_FORM = re.compile(r'multipart/form-data\s*;.*?boundary=("?)([^";]{1,70})\1', re.IGNORECASE)
_IS_FILE = re.compile(rb'form-data\s*;.*?(filename\s*=|\bname\s*=\s*"?file\b)', re.IGNORECASE | re.DOTALL)
_MOST_FIELDS, _HEAD = 8, 2**10  # fields of a form, bytes of a field's head
_TYPED = "application/x-www-form-urlencoded"  # curl -d and --data-binary say this of anything


async def expanded(parts: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """The bytes of a body in small pieces, expanded if its Content-Encoding says that it is compressed.

    Refused for another encoding (415), and for a stream that is not in the encoding it names (400).
    """
    if encoding in ("", "identity"):
        async for part in parts:
            yield part
        return
    if encoding not in _WINDOW:
        raise Refused(415, f"Content-Encoding {encoding:.20}: bodies are read as they are, or from gzip or deflate")
    reader = zlib.decompressobj(_WINDOW[encoding])
    async for part in parts:
        try:
            piece = b""
            while part or len(piece) == _PIECE:  # after a full piece zlib may hold more, with no input left
                piece = reader.decompress(part, _PIECE)
                part = reader.unconsumed_tail
                yield piece
                if reader.unused_data:
                    raise Refused(400, f"the body goes on behind its {encoding}")
                await asyncio.sleep(0)  # a body may grow a thousandfold: other requests go on meanwhile
        except zlib.error:
            raise Refused(400, f"the body is not {encoding}, as its Content-Encoding says") from None
    if not reader.eof:
        raise Refused(400, f"the body ends within its {encoding}")


def boundary_of(headers: Mapping[str, str]) -> bytes | None:
    """The boundary between the fields of a form (multipart/form-data); None for another body."""
    found = _FORM.match(headers.get("content-type", ""))
    return found[2].encode("latin-1", "replace") if found else None


def file_in(form: bytes, boundary: bytes) -> bytes:
    """The one file of a form: a field with a file's name, or called file. Refused for a form without one."""
    parts = (b"\r\n" + form).split(b"\r\n--" + boundary, _MOST_FIELDS + 2)
    fields = [part.partition(b"\r\n\r\n") for part in parts[1:] if part.startswith(b"\r\n")]
    files = [content for head, _, content in fields if _IS_FILE.search(head[:_HEAD])]
    if len(files) != 1 or len(fields) > _MOST_FIELDS or not parts[-1].startswith(b"--"):
        needs = f"one file and at most {_MOST_FIELDS} fields"
        raise Refused(400, f"the form must be whole, with {needs}: send it by curl -F file=@cat.jpg")
    return files[0]


def advice(headers: Mapping[str, str]) -> str:
    """The right call for a client whose picture cannot be read and who may have sent it by `curl -d`."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != _TYPED:
        return ""
    return ": curl -d changes a file's bytes: send it by curl --data-binary @cat.jpg, or by curl -F file=@cat.jpg"


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
        self.is_crowded, self.received = state.get("crowded", False), state.get("received", int)

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
                if self.received() > MOST_FRAMES + 2 * came:
                    raise Refused(400, "the body comes in chunks that are too small")
                yield part

        async def read() -> None:
            async for part in expanded(arriving(), encoding):
                self.hold.take(len(part))
                if self.hold.held > limits.max_bytes:
                    raise too_large
                whole.write(part)
                if _LARGE < self.hold.held < self.hold.budget.held:  # requests in work come first
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
