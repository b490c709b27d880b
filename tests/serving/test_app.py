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
from swin_quant.serving.app import build_app
from swin_quant.serving.batcher import Batcher, Refused, ServiceLimits


def batched(engine, work, **options):
    """The result of `work(batcher)` while the batcher runs."""

    async def go():
        limits = ServiceLimits(delay_us=0, **options.pop("limits"))
        batcher = Batcher(engine, limits, options.pop("sizes"), lambda pictures, seconds: None)
        task = asyncio.create_task(batcher.serve())
        found = await work(batcher)
        task.cancel()
        return found

    return asyncio.run(go())


@pytest.fixture
def images():
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def test_health_metadata_and_unknown_places():
    places = ("/v2/health/live", "/v2/health/ready", "/v2/models/micro/ready", "/v2", "/v2/models/micro")

    async def work(client):
        found = [await client.get(place) for place in (*places, "/v2/models/other", INFER, "/")]
        return [answer.status_code for answer in found], [answer.json() for answer in found]

    codes, (live, _, ready, _, model, other, called_wrongly, _) = with_client(service(), work)
    assert codes == [200] * 5 + [404, 405, 404] and live == {"live": True} and ready == {"ready": True}
    assert model["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, SIDE, SIDE]}]
    assert model["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}]
    assert all(place in other["error"] for place in ("no such place", "/predict", "/v2/models/micro/infer"))
    assert called_wrongly == {"error": "this place takes the method POST"}


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


WRONG = [
    (b"{", 400, "the body is not JSON"),
    (b"[" * 50000, 400, "the body is not JSON"),
    (b"[[]" + b",[]" * 100000 + b"]", 400, "the JSON has more than 65,536 lists"),
    ({"inputs": [{**FLAT, "data": [["1" * 10000] * 768]}]}, 400, "data must be numbers"),
    ({"inputs": [{**FLAT, "data": [None] * 768}]}, 400, "holds NaN or infinity"),
    ({"inputs": [{**FLAT, "data": [10**400] * 768}]}, 400, "data must be numbers"),
    (b"\xff\xfe", 400, "the body is not JSON"),
    ({}, 400, "the body must be an object with inputs"),
    ([1], 400, "the body must be an object with inputs"),
    ({"inputs": []}, 400, "one input, called images"),
    ({"inputs": [FLAT, FLAT]}, 400, "one input, called images"),
    ({"inputs": [{**FLAT, "name": "x"}]}, 400, "one input, called images"),
    ({"inputs": [{**FLAT, "datatype": "INT64"}]}, 400, "datatype is 'INT64': must be FP32 [n, 3, 16, 16] or"),
    ({"inputs": [{**FLAT, "datatype": ["FP32"]}]}, 400, "datatype is ['FP32']: must be FP32 [n, 3, 16, 16] or"),
    ({"inputs": [{**FLAT, "shape": [1, 3, 8, 8]}]}, 400, "FP32 [1, 3, 8, 8] came: must be FP32 [n, 3, 16, 16] or"),
    ({"inputs": [{**FLAT, "shape": "large"}]}, 400, "FP32 'large' came: must be"),
    ({"inputs": [{**FLAT, "shape": [True, 3, SIDE, SIDE]}]}, 400, "came: must be FP32"),
    ({"inputs": [{**FLAT, "shape": [1, 3.0, SIDE, SIDE]}]}, 400, "came: must be FP32"),
    ({"inputs": [{**FLAT, "shape": []}]}, 400, "came: must be FP32"),
    ({"inputs": [{**FLAT, "shape": [0, 3, SIDE, SIDE], "data": []}]}, 400, "0 pictures: must be 1 to 4"),
    ({"inputs": [{**FLAT, "shape": [10**9, 3, SIDE, SIDE]}]}, 400, "pictures: must be 1 to 4"),
    ({"inputs": [{**FLAT, "data": [0.0] * 5}]}, 400, "5 values for the shape"),
    ({"inputs": [{**FLAT, "data": [[0.0], [1.0, 2.0]]}]}, 400, "data must be numbers"),
    ({"inputs": [{**FLAT, "data": [[0.0] * 700, [0.0] * 68]}]}, 400, "data must be numbers, flat or nested as"),
    ({"inputs": [{**FLAT, "data": ["x"] * 768}]}, 400, "data must be numbers"),
    ({"inputs": [{**FLAT, "data": [1e400] + [0.0] * 767}]}, 400, "holds NaN or infinity"),
    ({"inputs": [{**FLAT, "data": [255.0] * 768}]}, 400, "pixels that are not normalised"),
    ({"inputs": [{**FLAT, "data": None}]}, 400, "data must be a list"),
    ({"inputs": [{**FLAT, "datatype": "UINT8", "shape": [1, SIDE, SIDE, 3], "data": [256] * 768}]}, 400, "0 to 255"),
    ({"inputs": [{**FLAT, "parameters": {"binary_data_size": 12}}]}, 400, "binary_data_size is 12, but 0 bytes came"),
    ({"inputs": [FLAT], "id": 7}, 400, "id must be a text"),
    ({"inputs": [FLAT], "outputs": [{"name": "hidden"}]}, 400, "outputs must be some of logits"),
    ({"inputs": [FLAT], "outputs": [{"name": "logits"}] * 2}, 400, "outputs must be some of logits"),
    ({"inputs": [FLAT], "outputs": []}, 400, "outputs must be some of logits"),
    (
        {"inputs": [FLAT], "outputs": [{"name": "logits", "parameters": {"classification": -1}}]},
        400,
        "classification is not supported",
    ),
    ({"inputs": [{**FLAT, "data": [1e9] * 768}]}, 500, "the engine failed on this request"),
]


NO_PICTURES = (": it is empty", "", "", ": it is a PDF", ": it is JSON", ": it is HTML")


def test_requests_that_are_wrong_get_one_line_and_others_go_on():
    """A bad request is refused alone: good requests at the same time and after it are answered."""

    async def work(client):
        found = []
        for content, _, _ in WRONG:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            bad, good = await asyncio.gather(
                client.post(INFER, content=body), client.post(INFER, json={"inputs": [FLAT]})
            )
            found.append((bad, good))
        found.append((await client.post(INFER, content=b"{}", headers={protocol.LENGTH: "-1"}), good))
        for picture in (b"", b"\x89PNG broken", png()[:200], b"%PDF-1.7\n", b' {"inputs": []}', b"<!DOCTYPE html>"):
            found.append((await client.post("/predict", content=picture), good))
        found += [(await client.post("/predict?top=0", content=png()), good)]
        return found

    expected = [
        *WRONG,
        (0, 400, protocol.LENGTH),
        *[(0, 400, f"the body: not a picture that can be read{what}") for what in NO_PICTURES],
        (0, 400, "top must be"),
    ]
    for (bad, good), (_, status, says) in zip(with_client(service(max_queue=4), work), expected, strict=True):
        assert (bad.status_code, good.status_code) == (status, 200), (bad.text, good.text)
        line = bad.json()["error"]
        assert set(bad.json()) == {"error"} and says in line and "\n" not in line and len(line) <= 500
        assert "secret" not in line
        np.testing.assert_array_equal(good.json()["outputs"][0]["data"], [0, 0, 0])


def test_a_pdf_that_curl_calls_a_form_is_a_pdf():
    form = {"headers": {"content-type": "application/x-www-form-urlencoded"}}
    bad, drops = posted(service(), *[("/predict", {"content": body, **form}) for body in (b"%PDF-1.7", b"\x89PNG")])
    assert bad.json()["error"].endswith("it is a PDF") and "curl --data-binary" in drops.json()["error"]


def test_an_engine_that_overflows_is_an_error_that_is_json(images):
    overflows = service(lambda images: torch.full((len(images), 3), torch.inf))
    for answer in posted(overflows, (INFER, {"json": body_of(images)}), ("/predict", {"content": png()})):
        assert answer.status_code == 500 and "the engine gave NaN or infinity" in answer.json()["error"]


def test_requests_at_the_same_time_run_together_and_each_gets_its_own():
    engine, pictures = Means(0.02), torch.randn(40, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))

    async def work(client):
        answers = await asyncio.gather(*[client.post(INFER, json=body_of(one[None])) for one in pictures])
        return [answer.json()["outputs"][0]["data"] for answer in answers], (await client.get("/metrics")).text

    found, metrics = with_client(service(engine, max_batch=8, delay_us=20000), work)
    np.testing.assert_allclose(found, logits_of(pictures), rtol=1e-4, atol=1e-6)
    assert max(engine.batches) <= 8 and len(engine.batches) < 30 and sum(engine.batches) == 40
    assert 'swin_quant_requests_total{route="infer",status="200"} 40.0' in metrics
    assert f"swin_quant_batch_size_count {len(engine.batches)}.0" in metrics
    engine, requests = Means(0.02), [(INFER, {"json": body_of(one[None])}) for one in pictures]
    posted(service(engine, max_batch=8, delay_us=0), *requests, at_once=True)  # waiting requests need no delay
    assert sum(engine.batches) == 40 and len(engine.batches) < 20


def test_a_request_that_breaks_the_engine_takes_no_other_along():
    engine, pictures = Means(0.02), torch.randn(6, 3, SIDE, SIDE)
    pictures[3] = 1e9
    requests = [(INFER, {"json": body_of(one[None])}) for one in pictures]
    answers = posted(service(engine, delay_us=50000), *requests, at_once=True)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 500, 200, 200]
    for answer, one in zip(answers, pictures, strict=True):
        if answer.status_code == 200:
            np.testing.assert_allclose([answer.json()["outputs"][0]["data"]], logits_of(one[None]), rtol=1e-4)


def test_a_queue_that_is_full_and_a_limit_of_time():
    request = (INFER, {"json": {"inputs": [FLAT]}})
    answers = posted(service(Means(0.1), max_queue=2, max_batch=1), *[request] * 6, at_once=True)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503, 503, 503]
    (slow,) = posted(service(Means(0.4), timeout_s=0.1), request)
    assert slow.status_code == 504 and "not answered within 0.1 s" in slow.json()["error"]


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
        async with app.router.lifespan_context(app):
            hung, vanished, left, after = [], [], [], []
            await asyncio.gather(
                call(app, [part(whole[:50], True), None], hung),
                call(app, [part(whole[:50], True), {"type": "http.disconnect"}], vanished),
                call(app, [part(whole, False), {"type": "http.disconnect"}], left),
            )
            await call(app, [part(whole, False), None], after)
            return hung, vanished, left, after

    hung, vanished, left, after = asyncio.run(go())
    assert [messages[0]["status"] for messages in (hung, vanished, left, after)] == [408, 400, 200, 200]
    assert json.loads(hung[1]["body"]) == {"error": "the body did not come within 0.3 s"}
    assert sum(engine.batches) == 2  # the first two never reached it


def test_batches_are_filled_up_to_the_sizes_of_an_engine():
    engine, images = Means(), torch.randn(11, 3, SIDE, SIDE)

    async def work(batcher):
        return await batcher(images), await batcher(images[:3])

    eleven, three = batched(engine, work, limits={"max_batch": 8}, sizes=(1, 2, 4, 8))
    np.testing.assert_allclose(eleven, logits_of(images), rtol=1e-5)
    np.testing.assert_allclose(three, logits_of(images[:3]), rtol=1e-5)
    assert set(engine.batches) <= {1, 2, 4, 8}


@pytest.mark.parametrize("name", ["max_batch", "delay_us", "max_queue", "max_megabytes", "timeout_s"])
def test_limits_that_cannot_be(name):
    with pytest.raises(Exception, match=f"{name} -1: must be from"):
        ServiceLimits(**{name: -1})
    assert str(Refused(400, "two\nlines")) == "two lines"
