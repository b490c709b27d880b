"""The server around the application: uvicorn, with a limit at every place where a client could make it wait."""

import json
from collections.abc import Callable
from enum import Enum
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swin_quant.serving.limits import ServiceLimits

# Called with route, status and seconds of each request that never reached the application.
Count = Callable[[str, int, float], None]
_CONNECTIONS = 1000
_REST = 2**28  # bytes of a refused body to read, so that its sender gets as far as the answer
_HEAD = 2**14  # bytes; 2**16 hold 13,000 headers, which block the event loop for 50 ms
_READ = 2**10  # bytes at a time; they hold 170 chunks, which block the event loop for 1 ms
_READ_BODY = 2**16
_PROBE_S = 0.25
_LAST_CHUNK = b"0\r\n\r\n"


def server_of(app: Any, limits: ServiceLimits, count: Count = lambda route, status, seconds: None) -> Any:
    """The uvicorn server of an application, not yet running."""
    config = uvicorn.Config(
        app,
        http=type("Limited", (TimedProtocol,), {"seconds": limits.timeout_s, "count": staticmethod(count)}),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        h11_max_incomplete_event_size=_HEAD,
        timeout_keep_alive=max(1, round(limits.timeout_s)),
        timeout_graceful_shutdown=max(1, round(2 * limits.timeout_s)),
    )
    return uvicorn.Server(config)


class ConnectionState(Enum):
    """The progress of a connection's current request."""

    QUIET = "no byte of it has come"
    HEAD = "its head is coming"
    WORK = "the application has it; its body may still be coming"
    REST = "it is answered, and its body is still coming"


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a limit of `seconds` for the head of a request and for the client to read an answer.

    Otherwise a client that sends a head byte by byte, sends nothing, or reads no answer keeps its connection for ever.
    The application limits the time of a body; it is told when a request began.
    """

    seconds: float
    count: Count
    transport: Any
    head_timer: Any = None
    reading_timer: Any = None
    probe_timer: Any = None
    began = 0.0
    received = 0  # bytes after the head, or after the last answer
    ending = b""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin()
        if len(self.connections) > _CONNECTIONS:
            others: Any = self.connections - {self}
            silent = [one for one in others if one.state is not ConnectionState.WORK and not one.transport.is_closing()]
            if silent:
                min(silent, key=lambda one: one.began).transport.close()
        self._expect_a_head()

    @property
    def state(self) -> ConnectionState:
        if self.cycle and not self.cycle.response_complete:
            return ConnectionState.WORK
        if self.cycle and self.conn.their_state is h11.SEND_BODY:
            return ConnectionState.REST
        is_quiet = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        return ConnectionState.QUIET if is_quiet else ConnectionState.HEAD

    def data_received(self, data: bytes) -> None:
        if self.state is ConnectionState.QUIET:
            self._begin()
        self.received += len(data)
        if self.state is ConnectionState.REST:
            if self.received > _REST:
                self.transport.abort()
                return
            if self.received > _READ and not self._has_length():  # small chunks cost much: look for the last one only
                self.transport.max_size = _READ_BODY
                self.ending = (self.ending + data)[-len(_LAST_CHUNK) :]
                if self.ending == _LAST_CHUNK:
                    self.transport.close()
                return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self.received = len(self.cycle.body)
        if self._has_length():
            self.transport.max_size = _READ_BODY
        self._expect_a_head()

    def _has_length(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and any(name == b"content-length" for name, _ in self.headers)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio: True keeps the connection
        """A client that sends no more waits for its answer, or has gone: a probe finds out."""
        if self.state is not ConnectionState.WORK or self.cycle.more_body:
            if self.state is ConnectionState.WORK or self.conn.trailing_data[0]:
                self.send_400_response("")
            return False
        self.cycle.keep_alive = False
        if not self.probe_timer and self.cycle.scope["http_version"] == "1.1":
            self.probe_timer = self.loop.call_later(_PROBE_S, self._ask)
        return True

    def _ask(self) -> None:
        """Send a line that every client skips; if the client has gone, its system refuses it, and writing fails."""
        if not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.probe_timer = self.loop.call_later(_PROBE_S, self._ask)

    def on_response_complete(self) -> None:
        self._begin()
        super().on_response_complete()
        self._expect_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.head_timer, self.reading_timer, self.probe_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.reading_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self.reading_timer:
            self.reading_timer.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(400, "Bad Request", "the request is not HTTP/1.1, or it ends too early")
        self.transport.close()

    def _begin(self) -> None:
        self.began, self.received, self.transport.max_size = self.loop.time(), 0, _READ
        is_crowded = len(self.connections) > _CONNECTIONS
        self.app_state = {
            **self.app_state,
            "began": self.began,
            "crowded": is_crowded,
            "received": lambda: self.received,
        }

    def _expect_a_head(self) -> None:
        """While no request is in work, one timer runs; bytes that come meanwhile do not restart it."""
        if self.state is not ConnectionState.WORK:
            self.head_timer = self.head_timer or self.loop.call_later(self.seconds, self._give_up)
        elif self.head_timer:
            self.head_timer.cancel()
            self.head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:  # the head has begun
                self._refuse(408, "Request Timeout", "the request did not come in time")
            self.transport.close()

    def _refuse(self, status: int, phrase: str, why: str) -> None:
        body = json.dumps({"error": why})
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        self.count("head", status, self.loop.time() - self.began)
