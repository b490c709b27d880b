"""Pictures, forms and hostile bodies over a real socket of uvicorn."""

import http.client
import json
import socket
import struct
import threading
import time
import zlib
from contextlib import contextmanager
from io import BytesIO

import pytest
from encoded import encoded
from PIL import Image
from served import FLAT, INFER, PREPROCESS, Means, listening, logits_of, png, service

from swin_quant.serving.app import build_app, build_server


@contextmanager
def running(engine=None, **limits):
    """post(place, body, **headers) -> status, JSON of the answer; its attribute `address`."""
    served = service(engine, **limits)
    with listening(build_server(build_app(served))) as address:

        def post(place, body, **headers):
            connection = http.client.HTTPConnection(*address, timeout=20)
            connection.request("POST", place, body, {name.replace("_", "-"): one for name, one in headers.items()})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

        post.address = address
        yield post


def repeated_scans(scans, side=1024):
    """A progressive JPEG whose last scan comes again and again."""
    data = encoded(Image.new("RGB", (side, side), (90, 60, 30)), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:last] + data[last:end] * (scans + 1 - data.count(b"\xff\xda")) + data[end:]


def form(*fields, end=b"--\r\n"):
    """A body of multipart/form-data, as curl writes it; `fields` are (head, content)."""
    parts = [b"--cut\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + one + b"\r\n" for head, one in fields]
    return b"".join(parts) + b"--cut" + end


FILE, NOTE = b'name="file"; filename="../../cat.jpg"\r\nContent-Type: image/png', (b'name="note"', b"hello")


def test_a_form_is_read_as_its_picture_alone():
    picture = png()
    best = logits_of(PREPROCESS(Image.open(BytesIO(picture)).convert("RGB"))[None])[0].argmax()
    bodies = [form((FILE, picture)), form(NOTE, (FILE, picture))]
    with running() as post:
        answers = [post("/predict", body, Content_Type="multipart/form-data; boundary=cut") for body in bodies]
        assert answers == [post("/predict", picture)] * 2
        assert answers[0][0] == 200 and answers[0][1]["classes"][0]["index"] == best


@pytest.mark.parametrize(
    "body",
    [
        b"",
        form(),
        form(NOTE),
        form((FILE, b"1"), (FILE, b"2")),
        form((FILE, b"1"), end=b""),
        form(*[NOTE] * 9, (FILE, b"1")),
        b"----cut" * 100_000,
    ],
)
def test_a_form_without_one_whole_file_is_refused(body):
    with running() as post:
        status, answer = post("/predict", body, Content_Type="multipart/form-data; boundary=cut")
    assert status == 400 and "the form must be whole, with one file and at most 8 fields" in answer["error"]


def png_of(width, height):
    """A small PNG whose header states a size that its data do not have."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png()[:8] + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + png()[33:]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (repeated_scans(31), 413, "33 megapixels, multiplied by scans: more than 16; max_megapixels is 16"),
        (repeated_scans(2200), 413, "2200 scans of 1024 x 1024 pixels: make it smaller"),
        (encoded(Image.new("L", (4500, 4500)), "PNG"), 413, "20 megapixels, multiplied by scans: more"),
        (png_of(10000, 10000), 413, "100 megapixels"),
        (png_of(200000, 200000), 413, "more than 67,108,864 pixels: make it smaller; max_megapixels"),
        (encoded(Image.new("L", (1, 4500)), "PNG"), 400, "not a picture that can be read"),
        (b"\xff\xd8" + b"\xff" * 1000000, 400, "not a picture that can be read"),
        (b"GIF89a\1\0\1\0\0\0\0" + b"!\xfe\1a\0" * 100000, 400, "not a picture that can be read"),
        (png()[:-30], 400, "not a picture that can be read"),
    ],
    ids=["scans", "many scans", "pixels", "header", "huge header", "strip", "JPEG", "GIF", "cut"],
)
def test_a_picture_that_is_too_large_or_damaged_is_refused(body, status, says):
    with running(max_megapixels=16) as post:
        code, answer = post("/predict", body)
        assert code == status and says in answer["error"] and set(answer) == {"error"}
        assert post("/predict", png())[0] == 200


def test_bodies_in_memory_are_bounded_together(monkeypatch):
    """Forty clients hold the end of their body back: the sum of what came stays below the bound."""
    monkeypatch.setattr("swin_quant.serving.app._BODIES", 4)
    part, found = bytes(100_000), []
    with running(max_megabytes=0.1, timeout_s=1) as post:

        def hang():
            with socket.create_connection(post.address, timeout=20) as connection:
                connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 104000\r\n\r\n" + part)
                found.append(int(connection.recv(4096).split()[1]))

        clients = [threading.Thread(target=hang) for _ in range(40)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert set(found) == {503, 504} and 1 <= found.count(504) <= 4
        assert post("/predict", png())[0] == 200


def test_a_large_body_is_refused_while_it_comes_and_the_connection_serves_on():
    with running(max_megabytes=0.1) as post:
        connection = http.client.HTTPConnection(*post.address, timeout=20)
        for body, status in ((bytes(4 << 20), 413), (png(), 200)):
            connection.request("POST", "/predict", body)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)


def test_health_is_answered_while_the_engine_and_large_json_are_at_work():
    body = json.dumps({"inputs": [{**FLAT, "shape": [64, 3, 16, 16], "data": [0.25] * (64 * 768)}]})
    with running(Means(0.1), max_batch=8) as post:
        clients = [threading.Thread(target=post, args=(INFER, body)) for _ in range(3)]
        for client in clients:
            client.start()
        start = time.monotonic()
        connection = http.client.HTTPConnection(*post.address, timeout=20)
        connection.request("GET", "/v2/health/live")
        assert json.loads(connection.getresponse().read()) == {"live": True} and time.monotonic() - start < 1
        for client in clients:
            client.join()


def test_bytes_that_are_not_http_and_a_head_that_is_too_long_are_refused():
    with running() as post:
        for head in (b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 4000):
            with socket.create_connection(post.address, timeout=20) as connection:
                connection.sendall(head)
                assert connection.recv(4096).startswith(b"HTTP/1.1 400")
        assert post("/predict", png())[0] == 200
