"""The service in process: the protocol, batches, limits, and clients that send nonsense, hang or go away."""

import asyncio
import json
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from served import FLAT, INFER, NAMES, PREPROCESS, SIDE, Means, body_of, logits_of, png, posted, service, with_client

from swin_quant.serving import protocol
from swin_quant.serving.app import Batcher, ServiceLimits, build_app


@pytest.fixture
def images():
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def test_health_metadata_and_unknown_places():
    places = ("/v2/health/live", "/v2/health/ready", "/v2/models/micro/ready", "/v2", "/v2/models/micro")

    async def work(client):
        found = [await client.get(place) for place in (*places, "/v2/models/other", INFER, "/")]
        counted = (await client.get("/metrics")).text
        return [answer.status_code for answer in found], [answer.json() for answer in found], counted

    codes, (live, _, ready, _, model, other, called_wrongly, root), counted = with_client(service(), work)
    assert all(f'swin_quant_requests_total{{route="none",status="{one}"}}' in counted for one in ("404", "405"))
    assert codes == [200] * 5 + [404, 405, 404] and live == {"live": True} and ready == {"ready": True}
    assert model["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, SIDE, SIDE]}]
    assert model["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}]
    assert other == {"error": "no model 'other': this server has micro"}
    assert root["error"].startswith("Not Found: this server has /metrics, /predict, /v2/models/micro/infer, ")
    assert called_wrongly == {"error": "Method Not Allowed: use POST"}


def test_tensors_in_json_and_as_binary_data(images):
    """Flat, nested, by version; FP32 and UINT8; and with the binary data extension, as Triton's client sends it."""
    raw = images.numpy().tobytes()
    about = {"name": "images", "datatype": "FP32", "shape": [2, 3, SIDE, SIDE]}
    about["parameters"] = {"binary_data_size": len(raw)}
    wanted = [{"name": "logits", "parameters": {"binary_data": True}}]
    head = json.dumps({"id": "seven", "inputs": [about], "outputs": wanted}).encode()
    pixels = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3)).astype(np.uint8)
    nested = {"inputs": [{**body_of(images)["inputs"][0], "data": images.tolist()}]}

    flat, deep, bytes_, binary = posted(
        service(),
        (INFER, {"json": body_of(images, id="a")}),
        ("/v2/models/micro/versions/1/infer", {"json": nested}),
        (INFER, {"json": body_of(pixels)}),
        (INFER, {"content": head + raw, "headers": {protocol.LENGTH: str(len(head))}}),
    )
    expected = logits_of(images)
    answer = flat.json()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("micro", "1", "a")
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [2, 3])
    np.testing.assert_allclose(np.reshape(output["data"], (2, 3)), expected, rtol=1e-5)
    np.testing.assert_allclose(np.reshape(deep.json()["outputs"][0]["data"], (2, 3)), expected, rtol=1e-5)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (PREPROCESS.mean, PREPROCESS.std))
    prepared = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std
    np.testing.assert_allclose([bytes_.json()["outputs"][0]["data"]], logits_of(prepared), rtol=1e-4)
    size = int(binary.headers[protocol.LENGTH])
    about = json.loads(binary.content[:size])
    assert about["id"] == "seven" and about["outputs"][0]["parameters"]["binary_data_size"] == 24
    np.testing.assert_array_equal(np.frombuffer(binary.content[size:], "<f4").reshape(2, 3), np.float32(expected))


def test_a_picture_as_it_is(images):
    picture = png()
    (answer,) = posted(service(), ("/predict?top=2", {"content": picture}))
    answer = answer.json()
    x = PREPROCESS(Image.open(BytesIO(picture)).convert("RGB"))[None]
    shares = torch.from_numpy(logits_of(x)).double().softmax(1)[0]
    best = shares.argsort(descending=True)[:2].tolist()
    assert [(one["index"], one["name"]) for one in answer["classes"]] == [(i, NAMES[i]) for i in best]
    np.testing.assert_allclose([one["probability"] for one in answer["classes"]], shares[best], rtol=1e-4)


JSON, FEW, INPUT = (
    "the body is not JSON",
    "data must be 768 numbers",
    "the one input must be images, FP32 [1 to 4, 3, 16",
)
WRONG = [
    (b"{", JSON),
    (b"[" * 50000, JSON),
    (b"\xff\xfe", JSON),
    (b"[[]" + b",[]" * 100000 + b"]", "the JSON has more than 65,536 lists"),
    ({}, "the body: lacks inputs"),
    ([1], "the content must be a mapping"),
    ({"inputs": []}, "inputs must be a list of 1 value"),
    ({"inputs": [FLAT, FLAT]}, "inputs must be a list of 1 value"),
    ({"inputs": [{**FLAT, "name": "x"}]}, INPUT),
    ({"inputs": [{**FLAT, "datatype": "INT64"}]}, "datatype is 'INT64', but must be one of FP32, FP16, UINT8"),
    ({"inputs": [{**FLAT, "datatype": ["FP32"]}]}, "datatype must be text"),
    ({"inputs": [{**FLAT, "shape": [1, 3, 8, 8]}]}, f"images, FP32 [1, 3, 8, 8], came: {INPUT}"),
    ({"inputs": [{**FLAT, "shape": [10**9, 3, SIDE, SIDE]}]}, INPUT),
    ({"inputs": [{**FLAT, "shape": "large"}]}, "shape must be 4 values"),
    ({"inputs": [{**FLAT, "shape": [0] * 10**6}]}, "shape must be 4 values"),
    ({"inputs": [{**FLAT, "shape": [True, 3, SIDE, SIDE]}]}, "shape[0] must be a whole number"),
    ({"inputs": [{**FLAT, "shape": [1, 3.0, SIDE, SIDE]}]}, "shape[1] must be a whole number"),
    ({"inputs": [{**FLAT, "shape": [0, 3, SIDE, SIDE], "data": []}]}, "shape[0] is 0, but must be at least 1"),
    ({"inputs": [{**FLAT, "data": [0.0] * 5}]}, FEW),
    ({"inputs": [{**FLAT, "data": [["1" * 10000] * 768]}]}, FEW),
    ({"inputs": [{**FLAT, "data": [10**400] * 768}]}, FEW),
    ({"inputs": [{**FLAT, "data": [[0.0], [1.0, 2.0]]}]}, FEW),
    ({"inputs": [{**FLAT, "data": [[0.0] * 700, [0.0] * 68]}]}, FEW),
    ({"inputs": [{**FLAT, "data": ["x"] * 768}]}, FEW),
    ({"inputs": [{**FLAT, "data": None}]}, FEW),
    ({"inputs": [{**FLAT, "data": [None] * 768}]}, "holds NaN or infinity"),
    ({"inputs": [{**FLAT, "data": [1e400] + [0.0] * 767}]}, "holds NaN or infinity"),
    ({"inputs": [{**FLAT, "data": [255.0] * 768}]}, "pixels that are not normalised"),
    ({"inputs": [{**FLAT, "datatype": "UINT8", "shape": [1, SIDE, SIDE, 3], "data": [256] * 768}]}, "0 to 255"),
    ({"inputs": [{**FLAT, "parameters": {"binary_data_size": 12}}]}, "binary_data_size is 12, but 0 bytes came"),
    ({"inputs": [FLAT], "id": 7}, "id must be text"),
    ({"inputs": [FLAT], "outputs": [{"name": "hidden"}]}, "outputs must be some of logits"),
    (
        {"inputs": [FLAT], "outputs": [{"name": "logits", "parameters": {"classification": -1}}]},
        "classification is not supported",
    ),
]


def test_requests_that_are_wrong_get_one_line_and_others_go_on():
    """A bad request is refused alone: good requests at the same time and after it are answered."""
    bad = [(INFER, body if isinstance(body, bytes) else json.dumps(body).encode(), {}) for body, _ in WRONG]
    bad.append((INFER, b"{}", {protocol.LENGTH: "-1"}))
    pictures = (b"", b"\x89PNG broken", png()[:200], b"%PDF-1.7\n", b' {"inputs": []}')
    bad += [("/predict", picture, {}) for picture in pictures] + [("/predict?top=0", png(), {})]
    lines = [line for _, line in WRONG] + [protocol.LENGTH]
    lines += ["the body: is empty", *["not a picture that can be read"] * 4, "top must be"]

    async def work(client):
        return [
            await asyncio.gather(
                client.post(place, content=body, headers=headers), client.post(INFER, json={"inputs": [FLAT]})
            )
            for place, body, headers in bad
        ]

    for (refused, good), line in zip(with_client(service(max_queue=4), work), lines, strict=True):
        assert (refused.status_code, good.status_code) == (400, 200), (refused.text, good.text)
        said = refused.json()["error"]
        assert set(refused.json()) == {"error"} and line in said and "\n" not in said and len(said) <= 500, said
        np.testing.assert_array_equal(good.json()["outputs"][0]["data"], [0, 0, 0])


def test_an_engine_that_overflows_or_fails_is_an_error_that_is_json(images):
    overflows = service(lambda images: torch.full((len(images), 3), torch.inf))
    for answer in posted(overflows, (INFER, {"json": body_of(images)}), ("/predict", {"content": png()})):
        assert answer.status_code == 500 and answer.json() == {"error": "internal error"}
    breaks, after = [(INFER, {"json": {"inputs": [{**FLAT, "data": [value] * 768}]}}) for value in (1e9, 0)]
    broken, fine = posted(service(), breaks, after)
    assert broken.status_code == 500 and "the engine failed" in broken.json()["error"] and fine.status_code == 200
    assert "secret" not in broken.text


def test_requests_at_the_same_time_run_together_and_each_gets_its_own():
    engine, pictures = Means(0.02), torch.randn(40, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))

    async def work(client):
        answers = await asyncio.gather(*[client.post(INFER, json=body_of(one[None])) for one in pictures])
        return [answer.json()["outputs"][0]["data"] for answer in answers], (await client.get("/metrics")).text

    found, metrics = with_client(service(engine, max_batch=8), work)
    np.testing.assert_allclose(found, logits_of(pictures), rtol=1e-4, atol=1e-6)
    assert max(engine.batches) <= 8 and len(engine.batches) < 20 and sum(engine.batches) == 40
    assert 'swin_quant_requests_total{route="infer",status="200"} 40.0' in metrics
    assert f"swin_quant_batch_size_count {len(engine.batches)}.0" in metrics


def test_a_queue_that_is_full_and_a_limit_of_time():
    request = (INFER, {"json": {"inputs": [FLAT]}})
    answers = posted(service(Means(0.1), max_queue=2, max_batch=1), *[request] * 6, at_once=True)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503, 503, 503]
    (slow,) = posted(service(Means(0.4), timeout_s=0.1), request)
    assert slow.status_code == 504 and "not received and answered within 0.1 s" in slow.json()["error"]


def test_a_body_that_is_too_large():
    async def endless():
        for _ in range(100):
            yield b"x" * 10000

    large = [("/predict", {"content": content}) for content in (b"x" * 200000, endless())]
    for answer in posted(service(max_megabytes=0.1), *large):
        assert answer.status_code == 413 and answer.json() == {"error": "the body is larger than 0.1 MB"}


def call(app, events, sent):
    """One request by hand: `events` are what the server tells the application, None being a client that hangs."""
    scope = {"type": "http", "method": "POST", "path": INFER, "raw_path": INFER.encode(), "query_string": b""}
    scope |= {"headers": [], "http_version": "1.1", "scheme": "http", "client": ("1.2.3.4", 5), "server": ("s", 80)}
    coming = iter(events)

    async def receive():
        event = next(coming, None)
        if event is None:
            await asyncio.sleep(3600)
        return event

    async def send(message):
        sent.append(message)

    return app(scope, receive, send)


def part(body, more):
    return {"type": "http.request", "body": body, "more_body": more}


def test_clients_that_hang_or_vanish_cost_nobody_anything():
    """One client sends half a body and waits; one leaves in the middle of its body, one before its answer is there."""
    engine = Means(0.05)
    whole = json.dumps({"inputs": [FLAT]}).encode()
    app = build_app(service(engine, timeout_s=0.3, max_batch=1))

    async def go():
        hung, vanished, left, after = [], [], [], []
        await asyncio.gather(
            call(app, [part(whole[:50], True), None], hung),
            call(app, [part(whole[:50], True), {"type": "http.disconnect"}], vanished),
            call(app, [part(whole, False), {"type": "http.disconnect"}], left),
        )
        await call(app, [part(whole, False), None], after)
        return hung, vanished, left, after

    hung, vanished, left, after = asyncio.run(go())
    assert [messages[0]["status"] for messages in (hung, vanished, left, after)] == [504, 504, 200, 200]
    assert json.loads(hung[1]["body"]) == {"error": "not received and answered within 0.3 s"}
    assert sum(engine.batches) == 2  # the first two never reached it


def test_batches_are_filled_up_to_the_sizes_of_an_engine():
    engine, images, seen = Means(), torch.randn(11, 3, SIDE, SIDE), []
    batcher = Batcher(engine, 8, (1, 2, 4, 8), seen.append)

    async def work():
        return await batcher(images), await batcher(images[:3])

    eleven, three = asyncio.run(work())
    np.testing.assert_allclose(eleven, logits_of(images), rtol=1e-5)
    np.testing.assert_allclose(three, logits_of(images[:3]), rtol=1e-5)
    assert engine.batches == [8, 4, 4] and seen == [8, 3, 3]


@pytest.mark.parametrize("name", ["max_batch", "max_queue", "max_megabytes", "timeout_s"])
def test_limits_that_cannot_be(name):
    with pytest.raises(Exception, match=f"{name} -1: must be from"):
        ServiceLimits(**{name: -1})
