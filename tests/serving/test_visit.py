"""Bodies that come compressed or as forms: read within the limits of every other body, or refused in a line."""

import asyncio
import gzip
import json
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from served import FLAT, INFER, PREPROCESS, logits_of, png, posted, service

from swin_quant.serving.limits import Refused
from swin_quant.serving.visit import expanded, file_in

REQUEST = json.dumps({"inputs": [FLAT]}).encode()


def form(*fields, boundary=b"------cut", end=b"--\r\n"):
    """A body of multipart/form-data, as curl writes it; `fields` are (head, content)."""
    parts = [b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n" for head, content in fields]
    return b"".join(parts) + b"--" + boundary + end


def a_file(content, name=b"file", file=b'; filename="cat.jpg"'):
    return b'Content-Disposition: form-data; name="' + name + b'"' + file + b"\r\nContent-Type: image/jpeg", content


FORM = {"content-type": "multipart/form-data; boundary=------cut"}


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_a_compressed_body_is_read_as_it_was(encoding, pack):
    (answer, picture) = posted(
        service(),
        (INFER, {"content": pack(REQUEST), "headers": {"content-encoding": encoding}}),
        ("/predict", {"content": pack(png()), "headers": {"content-encoding": encoding}}),
    )
    assert answer.status_code == picture.status_code == 200 and answer.json()["outputs"][0]["data"] == [0, 0, 0]


@pytest.mark.parametrize("step", [1000, 65536, 65600, 10**7])
@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_body_is_expanded_whole_however_it_is_cut(encoding, pack, step):
    """Random bytes, which grow when they are packed, and zeros: pieces end before, at and after the input's."""
    content = np.random.default_rng(0).bytes(200_000) + bytes(200_000)
    packed = pack(content)

    async def parts():
        for start in range(0, len(packed), step):
            yield packed[start : start + step]

    async def whole():
        return b"".join([piece async for piece in expanded(parts(), encoding)])

    assert asyncio.run(whole()) == content


def test_what_cannot_be_expanded_is_refused_and_a_bomb_costs_its_limit_alone():
    bomb = gzip.compress(bytes(50 << 20))
    cases = [
        ("gzip", bomb, 413, "larger than 1 MB"),
        ("deflate", zlib.compress(bytes(50 << 20)), 413, "larger than 1 MB"),
        ("br", REQUEST, 415, "Content-Encoding br: bodies are read as they are, or from gzip or deflate"),
        ("gzip, gzip", REQUEST, 415, "Content-Encoding gzip, gzip"),
        ("gzip", REQUEST, 400, "the body is not gzip, as its Content-Encoding says"),
        ("gzip", gzip.compress(REQUEST)[:-9], 400, "the body ends within its gzip"),
        ("gzip", b"", 400, "the body ends within its gzip"),
        ("gzip", gzip.compress(REQUEST) + b"more", 400, "the body goes on behind its gzip"),
    ]
    assert len(bomb) < 100_000
    requests = [(INFER, {"content": body, "headers": {"content-encoding": kind}}) for kind, body, _, _ in cases]
    for answer, (_, _, status, says) in zip(posted(service(max_megabytes=1), *requests), cases, strict=True):
        assert answer.status_code == status and says in answer.json()["error"], answer.text


def test_a_form_with_a_picture_is_read_as_the_picture_alone():
    picture = png()
    also = (b'Content-Disposition: form-data; name="note"', b"hello")
    bodies = [form(a_file(picture)), form(also, a_file(picture, b"x")), form(a_file(picture, file=b"")), picture]
    heads = [FORM, FORM, {"content-type": 'multipart/form-data; boundary="------cut"'}, {}]
    requests = [("/predict", {"content": body, "headers": head}) for body, head in zip(bodies, heads, strict=True)]
    answers = [answer.json() for answer in posted(service(), *requests)]
    assert answers == [answers[-1]] * 4
    x = PREPROCESS(Image.open(BytesIO(picture)).convert("RGB"))[None]
    assert answers[0]["classes"][0]["index"] == logits_of(x)[0].argmax()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        form(),
        form((b'Content-Disposition: form-data; name="note"', b"hello")),
        form(a_file(b"1"), a_file(b"2")),
        form(a_file(b"1"), end=b""),
        form(*[(b'Content-Disposition: form-data; name="note"', b"")] * 9, a_file(b"1")),
        b"--------cut" * 100_000,
    ],
)
def test_a_form_without_one_whole_file_is_refused(body):
    with pytest.raises(Refused, match="the form must be whole, with one file and at most 8 fields") as refused:
        file_in(body, b"------cut")
    assert refused.value.status == 400


def test_the_bytes_of_a_file_stay_as_they_are():
    content = b"\r\n--other\r\n\r\n" + bytes(range(256))
    assert file_in(form(a_file(content)), b"------cut") == content


def test_who_sends_a_picture_by_curl_d_is_told_the_right_call():
    typed = {"content-type": "application/x-www-form-urlencoded"}
    without_lines = png().replace(b"\n", b"").replace(b"\r", b"")
    requests = [("/predict", {"content": body, "headers": typed}) for body in (without_lines, b"cat.jpg", png())]
    *wrong, right = posted(service(), *requests)
    for answer in wrong:
        assert (
            answer.status_code == 400 and "curl --data-binary @cat.jpg, or by curl -F file=@" in answer.json()["error"]
        )
    assert right.status_code == 200  # --data-binary says the same type
