"""The server on a real socket: clients that send a head slowly, nothing at all, or take no answer, are cut off."""

import socket
import time
from contextlib import contextmanager

import pytest
from served import listening

from swin_quant.serving.limits import ServiceLimits

pytest.importorskip("uvicorn")
from swin_quant.serving.server import server_of  # noqa: E402

SECONDS = 0.3
LARGE = b"x" * (64 << 20)  # more than the buffers of a socket take


async def app(scope, receive, send):
    """Answers at once, without looking at the body."""
    if scope["type"] == "lifespan":
        while True:
            event = await receive()
            await send({"type": event["type"] + ".complete"})
            if event["type"] == "lifespan.shutdown":
                return
    body = LARGE if scope["path"] == "/large" else b"hello"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def connect():
    """connect() -> a socket to a running server whose limit is SECONDS."""
    with listening(server_of(app, ServiceLimits(timeout_s=SECONDS))) as address:

        @contextmanager
        def one():
            with socket.create_connection(address, timeout=10) as connection:
                yield connection

        yield one


def until_closed(connection, send=b""):
    """Send `send` byte by byte; the bytes that came until the other side closed, and the seconds that this took."""
    start, came = time.monotonic(), b""
    connection.settimeout(0.05)
    for byte in [send[i : i + 1] for i in range(len(send))] + [b""] * 200:
        try:
            if byte:
                connection.sendall(byte)
            more = connection.recv(65536)
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            more = b""
        if not more:
            return came, time.monotonic() - start
        came += more
    pytest.fail("it was never closed")


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 30
GOOD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_head_that_trickles_is_not_waited_for(connect):
    """A byte wins no more time, and other clients are answered meanwhile."""
    with connect() as slow, connect() as good:
        slow.sendall(HEAD[:20])
        good.sendall(GOOD)
        assert good.recv(4096).startswith(b"HTTP/1.1 200")
        came, seconds = until_closed(slow, HEAD)
    assert came.startswith(b"HTTP/1.1 408 ") and came.endswith(b'{"error": "the request did not come in time"}')
    assert seconds < 10 * SECONDS


def test_a_silent_connection_is_closed_and_a_second_head_has_the_same_time(connect):
    with connect() as silent:
        came, seconds = until_closed(silent)
    assert came == b"" and seconds < 10 * SECONDS
    with connect() as slow:
        slow.sendall(GOOD + GOOD)
        came, _ = until_closed(slow, HEAD)
    assert came.count(b"HTTP/1.1 200") == 2 and came.count(b"HTTP/1.1 408") == 1


def test_a_body_that_nobody_wants_does_not_keep_a_connection(connect):
    """The answer was sent: the server does not wait for bytes that trickle in behind it."""
    with connect() as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        came, seconds = until_closed(slow, b"b" * 300)
    assert came.startswith(b"HTTP/1.1 200") and seconds < 10 * SECONDS


@pytest.mark.slow
def test_who_takes_no_answer_is_cut_off(connect):
    """The client gets the bytes in the buffers, then the end of the connection."""
    with connect() as deaf:
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(3 * SECONDS)
        size = 0
        try:
            while part := deaf.recv(1 << 20):
                size += len(part)
        except ConnectionResetError:
            pass
    assert size < len(LARGE)
    with connect() as reader:  # who reads gets it whole
        reader.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size = 0
        while part := reader.recv(1 << 20):
            size += len(part)
    assert size > len(LARGE)
