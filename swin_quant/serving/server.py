"""The server around the application: uvicorn, with a limit of time wherever a client could keep it waiting."""

from typing import Any

from swin_quant.base.extras import library
from swin_quant.serving.limits import ServiceLimits

_CONNECTIONS = 1000
_LATE = b'{"error": "the request did not come in time"}'
_HEAD = b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "


def server_of(app: Any, limits: ServiceLimits) -> Any:
    """The uvicorn server of an application, not yet running."""
    uvicorn = library("uvicorn", "serve")
    config = uvicorn.Config(
        app,
        http=_protocol(limits.timeout_s),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=max(1, round(limits.timeout_s)),
        timeout_graceful_shutdown=max(1, round(2 * limits.timeout_s)),
    )
    return uvicorn.Server(config)


def _protocol(seconds: float) -> type[Any]:
    """uvicorn's HTTP/1.1, which gives a client `seconds` for the head of a request, and for taking what it is sent.

    Without, whoever sends a head byte by byte, nothing at all, or reads no answer, keeps a connection for ever. That a
    body comes in time is the application's business, which knows what it wants of it.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Punctual(H11Protocol):
        head: Any = None
        taking: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_a_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_a_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_a_head()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self.head, self.taking):
                if timer:
                    timer.cancel()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.taking = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            if self.taking:
                self.taking.cancel()
            super().resume_writing()

        def _expect_a_head(self) -> None:
            """While no request is in work, one timer runs: what comes meanwhile does not start it anew."""
            idle = self.cycle is None or self.cycle.response_complete
            if not idle and self.head:
                self.head.cancel()
                self.head = None
            elif idle and not self.head:
                self.head = self.loop.call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                if self.conn.trailing_data[0]:  # something came: it is told
                    self.transport.write(_HEAD + b"%d\r\n\r\n" % len(_LATE) + _LATE)
                self.transport.close()

    return Punctual
