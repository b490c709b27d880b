"""The bounds of a service on real sockets: a costly body is refused or waits, and delays no other client."""

import json
import socket
import struct
import threading
import time
import zlib
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from draws import drawn
from PIL import Image

from swin_quant.serving.limits import Refused, ServiceLimits

pytest.importorskip("uvicorn")
from served import INFER, MODEL, PREPROCESS, listening  # noqa: E402

from swin_quant.serving import picture, protocol, server, visit  # noqa: E402
from swin_quant.serving.app import Service, build_app  # noqa: E402
from swin_quant.serving.protocol import parse  # noqa: E402


def encoded(image, kind, **how):
    file = BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def repeated(scans, side=1024):
    """A progressive JPEG whose last scan comes again and again."""
    data = encoded(Image.new("RGB", (side, side), (90, 60, 30)), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:last] + data[last:end] * (scans + 1 - data.count(b"\xff\xda")) + data[end:]


GOOD = encoded(Image.new("RGB", (30, 30), (200, 30, 90)), "PNG")


class Engine:
    def __init__(self):
        self.pictures, self.opens = 0, threading.Event()
        self.opens.set()

    def __call__(self, images):
        assert self.opens.wait(20)
        self.pictures += len(images)
        return images.mean((2, 3))


@contextmanager
def running(engine=None, **limits):
    """The address of a service."""
    limits = ServiceLimits(**limits)
    app = build_app(Service(MODEL, engine or Engine(), PREPROCESS, limits=limits))
    with listening(server.server_of(app, limits, app.state.count)) as address:
        yield address


def head(body, path="/predict", **headers):
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {body if isinstance(body, int) else len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def sent(address, *parts, then=None):
    """Send bytes; the answer, read until it is whole or the other side closes."""
    with socket.create_connection(address, timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        if then is not None:
            connection.shutdown(then)
        return received(connection)


def received(connection):
    came = b""
    while more := connection.recv(65536):
        came += more
        line, split, rest = came.partition(b"\r\n\r\n")
        length = [row.split(b":")[1] for row in line.lower().split(b"\r\n") if row.startswith(b"content-length:")]
        if split and length and len(rest) >= int(length[0]):
            break
    line, _, rest = came.partition(b"\r\n\r\n")
    return int(line.split(b" ")[1]), json.loads(rest), line.lower()


def post(address, body, path="/predict"):
    return sent(address, head(body, path), body)


def metrics(address):
    with urlopen(Request("http://{}:{}/metrics".format(*address)), timeout=20) as answer:
        return answer.read().decode()


def held(address):
    (line,) = [line for line in metrics(address).splitlines() if line.startswith("swin_quant_held_bytes ")]
    return float(line.split()[1])


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


PART = struct.pack(">I4sI", 0, b"tIME", zlib.crc32(b"tIME"))


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (repeated(31), 413, "1024 x 1024 pixels, times 31: more than 16 megapixels"),
        (encoded(Image.new("L", (4500, 4500)), "PNG"), 413, "4500 x 4500 pixels, times 1: more"),
        (GOOD[:33] + PART * 100000 + GOOD[33:], 400, "it is made of too many parts"),
        (b"\xff\xd8" + b"\xff" * 1000000, 400, "it is made of too many parts"),
        (b"GIF89a\1\0\1\0\0\0\0" + b"!\xfe\1a\0" * 100000, 400, "it is made of too many parts"),
        (encoded(Image.new("RGB", (64, 64)), "PNG")[:-30], 400, "the body: not a picture that can be read"),
    ],
    ids=["scans", "pixels", "PNG", "JPEG", "GIF", "cut"],
)
def test_a_picture_that_is_dear_is_refused_by_its_header_in_our_words(body, status, says):
    with running(max_megapixels=16) as address:
        code, answer, _ = post(address, body)
        assert code == status and says in answer["error"]
        assert post(address, GOOD)[0] == 200
        assert f'route="predict",status="{status}"}} 1.0' in metrics(address) and held(address) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", drawn(["JPEG", "WEBP", "PNG"], 3))
def test_a_large_picture_is_decoded_apart_bit_by_bit_as_here(monkeypatch, kind):
    """The picture is also turned as its EXIF says, where the model asks for it."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    body = encoded(Image.fromarray(pixels), kind, exif=exif)
    for preprocess in (PREPROCESS, replace(PREPROCESS, upright=True)):
        assert torch.equal(picture.DecodedApart(body, preprocess)(), picture.prepared(body, preprocess))
    monkeypatch.setattr(picture, "_LIGHT", 0)
    monkeypatch.setattr(picture, "_LOCKED_LIGHT", 0)
    with running() as address:
        assert post(address, body)[0] == 200
        code, answer, _ = post(address, body[: len(body) // 2])
        assert code == 400 and answer["error"] == "the body: not a picture that can be read"


@pytest.mark.slow
def test_decoding_apart_ends_when_its_client_goes_or_time_is_up(monkeypatch):
    monkeypatch.setattr(picture, "_LIGHT", 0)
    began, stopped = threading.Event(), threading.Event()

    class Endless(picture.DecodedApart):
        def __call__(self):
            began.set()
            assert stopped.wait(20)
            raise RuntimeError("secret words")

        def stop(self):
            stopped.set()

    monkeypatch.setattr(picture, "DecodedApart", Endless)
    with running(timeout_s=0.5) as address:
        assert post(address, GOOD)[0] == 504 and stopped.wait(10)
    began.clear(), stopped.clear()
    with running(timeout_s=60) as address:
        with socket.create_connection(address) as connection:
            connection.sendall(head(GOOD) + GOOD)
            assert began.wait(10)
        assert stopped.wait(10)
        until(lambda: held(address) == 0)
        assert 'status="499"} 1.0' in metrics(address)


@pytest.mark.slow
def test_what_waits_for_a_decoder_is_bounded_and_the_cheapest_goes_first(monkeypatch):
    """While both decoders are busy, two large bodies may wait; a small body takes the place of one of them."""
    opens, order = threading.Event(), []

    def slow(body, *more):
        assert opens.wait(20)
        order.append(len(body))
        return begun(body, *more)

    begun = picture.begun
    monkeypatch.setattr(picture, "begun", slow)
    with running(max_queue=2) as address:
        answers = []

        def client(size):
            answers.append((size, *post(address, GOOD + bytes(size))))

        clients = []
        for size in (50000, 50000, 40000, 30000, 60000, 0):
            clients.append(threading.Thread(target=client, args=(size,)))
            clients[-1].start()
            time.sleep(0.1)
        until(lambda: len(answers) == 2)
        assert sorted(size for size, *_ in answers) == [40000, 60000]
        assert all(code == 503 and b"retry-after: 1" in line for _, code, _, line in answers)
        opens.set()
        for one in clients:
            one.join()
    assert [size for size in order if size != len(GOOD) + 50000] == [len(GOOD), len(GOOD) + 30000]


def test_work_of_clients_that_have_gone_is_dropped():
    """Twenty bodies come, their clients leave, and the engine, busy until then, never hears of them."""
    engine = Engine()
    engine.opens.clear()
    with running(engine, max_batch=1, delay_us=0) as address:
        for _ in range(20):
            with socket.create_connection(address) as connection:
                connection.sendall(head(GOOD) + GOOD)
        until(lambda: 'route="predict",status="499"} 20.0' in metrics(address))
        engine.opens.set()
        assert post(address, GOOD)[0] == 200
        assert engine.pictures <= 2 and held(address) == 0


@pytest.mark.slow
def test_who_sends_no_more_and_waits_is_answered():
    engine = Engine()
    with running(engine) as address:
        assert sent(address, head(GOOD), GOOD, then=socket.SHUT_WR)[0] == 200
        engine.opens.clear()
        threading.Timer(3 * server._PROBE_S, engine.opens.set).start()
        with socket.create_connection(address, timeout=20) as slow:
            slow.sendall(head(GOOD) + GOOD)
            slow.shutdown(socket.SHUT_WR)
            came = b""
            while more := slow.recv(65536):
                came += more
        *probes, final, _ = came.split(b"\r\n\r\n")
        assert set(probes) == {b"HTTP/1.1 100 Continue"} and final.startswith(b"HTTP/1.1 200")
        code, answer, _ = sent(address, head(500), b"x" * 100, then=socket.SHUT_WR)
        assert code == 400 and answer == {"error": "the request is not HTTP/1.1, or it ends too early"}


def test_a_body_that_is_too_large_is_read_on_until_its_sender_reads_the_answer(monkeypatch):
    with running(max_megabytes=0.1) as address:
        code, answer, _ = sent(address, head(40 << 20), bytes(40 << 20))
        assert code == 413 and "larger than 0.1 MB" in answer["error"]
        with socket.create_connection(address, timeout=20) as both:  # and the connection serves on
            both.sendall(head(1 << 20) + bytes(1 << 20))
            assert received(both)[0] == 413
            for request in (head(GOOD) + GOOD, CHUNKED + chunks(GOOD, len(GOOD))):
                both.sendall(request)
                assert received(both)[0] == 200
        monkeypatch.setattr(server, "_REST", 1 << 20)
        with pytest.raises(OSError):
            sent(address, head(80 << 20), *[bytes(1 << 20)] * 80)


CHUNKED = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(body, size):
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_body_has_no_more_frames_of_chunks_than_it_has_bytes(monkeypatch):
    """Each chunk holds the event loop for some microseconds. The rest of such a body is read, not taken apart."""
    import h11

    taken, next_event = [], h11.Connection.next_event
    monkeypatch.setattr(h11.Connection, "next_event", lambda self: taken.append(1) or next_event(self))
    with running() as address:
        assert sent(address, CHUNKED, chunks(GOOD + bytes(100_000), 8))[0] == 200
        assert sent(address, CHUNKED, chunks(GOOD, 1))[0] == 200
        taken.clear()
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(CHUNKED + chunks(bytes(500_000), 1))
            code, answer, _ = received(connection)
            assert code == 400 and answer == {"error": "the body comes in chunks that are too small"}
            assert connection.recv(1) == b"" and len(taken) < 10_000
        text = metrics(address)
    assert 'route="predict",status="400"} 1.0' in text and "held_bytes 0.0" in text


@pytest.mark.slow
def test_a_large_body_pauses_while_others_are_in_work(monkeypatch):
    """Reading 31 MB at a stretch takes a core for a tenth of a second."""
    monkeypatch.setattr(visit, "_PAUSE_S", 0.05)
    engine, body = Engine(), GOOD + bytes(4 << 20)
    engine.opens.clear()
    with running(engine) as address:
        with socket.create_connection(address, timeout=20) as other:
            other.sendall(head(GOOD) + GOOD)
            until(lambda: "waiting_pictures 1.0" in metrics(address))
            start = time.monotonic()
            with socket.create_connection(address, timeout=20) as large:
                large.sendall(head(body) + body)
                until(lambda: "waiting_pictures 2.0" in metrics(address))
            assert time.monotonic() - start > 0.3
            engine.opens.set()
            assert received(other)[0] == 200


def test_a_head_that_is_too_long_is_refused():
    with running() as address:
        code, answer, _ = sent(address, head(0).removesuffix(b"\r\n") + b"a:b\r\n" * 4000)
        assert code == 400 and answer == {"error": "the request is not HTTP/1.1, or it ends too early"}
        assert 'route="head",status="400"} 1.0' in metrics(address)


@pytest.mark.slow
def test_one_deadline_from_the_first_byte_to_the_answer():
    """Half of it goes to the head, half to the body: nothing is left for an engine that takes longer than the rest."""
    engine = Engine()
    engine.opens.clear()
    with running(engine, timeout_s=1) as address:
        with socket.create_connection(address, timeout=20) as slow:
            start = time.monotonic()
            for part in (head(GOOD)[:9], head(GOOD)[9:] + GOOD[:9], GOOD[9:]):
                slow.sendall(part)
                time.sleep(0.3)
            assert received(slow)[0] == 504 and time.monotonic() - start < 1.5
        engine.opens.set()


@pytest.mark.slow
def test_a_body_that_comes_too_late_is_told_so_while_it_still_comes():
    with running(timeout_s=0.5) as address, socket.create_connection(address, timeout=20) as slow:
        slow.sendall(head(5000))
        for _ in range(8):
            time.sleep(0.1)
            slow.sendall(b"x")
        code, answer, _ = received(slow)
        assert code == 408 and answer == {"error": "the body did not come within 0.5 s"}


def test_what_is_no_http_is_told_so_and_counted():
    with running() as address:
        code, answer, _ = sent(address, b"NONSENSE\r\n\r\n")
        assert code == 400 and answer == {"error": "the request is not HTTP/1.1, or it ends too early"}
        code, answer, _ = sent(address, head(GOOD, "/nowhere"), GOOD)
        assert code == 404 and "no such place" in answer["error"]
        text = metrics(address)
    assert 'route="head",status="400"} 1.0' in text and 'route="unknown",status="404"} 1.0' in text


def test_too_many_connections_get_our_503_and_health_is_answered(monkeypatch):
    """The connection that was silent for longest makes room; connections that wait for a late answer stay."""
    engine = Engine()
    engine.opens.clear()
    with running(engine) as address:
        busy = [socket.create_connection(address, timeout=20) for _ in range(3)]
        for connection in busy:
            connection.sendall(head(GOOD) + GOOD)
        until(lambda: "waiting_pictures 3.0" in metrics(address))
        monkeypatch.setattr(server, "_CONNECTIONS", 3)
        code, answer, line = post(address, GOOD)
        assert code == 503 and "too many connections" in answer["error"] and b"retry-after: 1" in line
        engine.opens.set()
        for connection in busy:
            assert received(connection)[0] == 200
        silent = [socket.create_connection(address, timeout=20) for _ in range(8)]
        assert "held_bytes 0.0" in metrics(address)
        assert silent[0].recv(10) == b""
        for connection in busy + silent:
            connection.close()


LISTS = b'{"inputs":[' + b"[]," * 2_000_000 + b"[]]}"
TENSOR = b'{"inputs":[{"name":"images","datatype":"FP32","shape":[1,3,16,16],"data":[%s]}]}'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (LISTS, "not JSON of at most 65,536 bytes beside its data"),
        (TENSOR % (b"[]," * 2_000_000 + b"[]"), "2000001 values for the shape"),
        (TENSOR % (b"[" * 2_000_000 + b"1" + b",1" * 767 + b"]" * 2_000_000), "data must be numbers"),
        (TENSOR % (b"1," * 3_000_000 + b"1"), "3000001 values for the shape"),
        (TENSOR % (b"1" * 6_000_000 + b",1" * 767), "data must be numbers"),
    ],
    ids=["lists", "lists in data", "deep", "numbers", "one number"],
)
def test_json_is_counted_before_it_is_read(body, says):
    """Python's reader takes 300 ms for the least of them, and nobody is answered meanwhile."""
    start = time.process_time()
    with pytest.raises(Refused, match=says):
        parse(body, {}, MODEL, PREPROCESS, 256)
    assert time.process_time() - start < 0.15


def test_a_long_list_is_read_and_written_as_pythons_own_would(tmp_path):
    """In many pieces, flat and nested, with spaces of all kinds."""
    values = np.random.default_rng(0).normal(size=(4, 3, 40, 50)).astype(np.float32)
    nested = values.tolist()
    for text in (json.dumps(values.ravel().tolist()), json.dumps(nested), json.dumps(nested, indent=1)):
        found = protocol.read_numbers(text.encode(), values.shape, np.dtype("<f4"))
        np.testing.assert_array_equal(found.reshape(values.shape), values)
    assert json.loads(protocol.written_numbers(values.ravel())) == values.ravel().tolist()


@pytest.mark.slow
def test_health_is_answered_while_long_lists_are_read():
    values = TENSOR.replace(b"[1,3,16,16]", b"[1000,3,16,16]") % (b"0.25, " * 767_999 + b"0.25")
    with running(max_queue=1000) as address:
        clients = [threading.Thread(target=post, args=(address, values, INFER)) for _ in range(2)]
        for client in clients:
            client.start()
        slowest = []
        while any(client.is_alive() for client in clients):
            start = time.monotonic()
            urlopen("http://{}:{}/v2/health/live".format(*address), timeout=20).read()
            slowest.append(time.monotonic() - start)
        assert len(slowest) > 5 and sorted(slowest)[len(slowest) // 2] < 0.1
