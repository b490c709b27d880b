"""One description of a model: tritonclient, made from a package's config.pbtxt, asks `serve` over a socket."""

import importlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from served import INFER, LOGITS, MODEL, NAMES, PREPROCESS, SIDE, Means, body_of, listening, logits_of, posted

from swin_quant.backends.description import ANY, GraphEnd, ModelDescription
from swin_quant.serving.app import Service, build_app, build_server
from swin_quant.ship import as_text

TOP = (GraphEnd("top_classes", "int64", (2,)), GraphEnd("top_probabilities", "float32", (2,)))
ENDS = (LOGITS, GraphEnd("probabilities", "float32", (3,)), *TOP)
KINDS = {
    "float32": (MODEL.input, ENDS),
    "float16": (GraphEnd("images", "float16", (3, SIDE, SIDE)), (GraphEnd("logits", "float16", (3,)),)),
    "uint8": (GraphEnd("pictures", "uint8", (SIDE, SIDE, 3)), (LOGITS, *TOP)),
    "embedding": (MODEL.input, (GraphEnd("embedding", "float32", (3,)),)),
}


MAPS = ModelDescription(
    "micro",
    GraphEnd("images", "float32", (3, ANY, ANY)),
    tuple(GraphEnd(f"features{stage}", "float32", (3, ANY, ANY)) for stage in range(2)),
)


def maps_of(images):
    """The maps of a backbone: the pictures at a quarter and an eighth of their sides."""
    return [torch.nn.functional.avg_pool2d(images, side) for side in (4, 8)]


def service_of(model):
    return Service(model, maps_of if model.takes_any_size else Means(), PREPROCESS, about={"engine": "means"})


@pytest.fixture(scope="module")
def client():
    """tritonclient's HTTP module, whose sockets are geventhttpclient's, and its message `ModelConfig`."""
    pytest.importorskip("geventhttpclient")
    client = pytest.importorskip("tritonclient.http")
    file = Path(client.__file__).parents[1] / "grpc" / "model_config_pb2.py"  # the package around it needs gRPC
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    schema = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(schema)
    client.utils = importlib.import_module("tritonclient.utils")
    client.ModelConfig = schema.ModelConfig
    return client


@contextmanager
def connected(client, service):
    """A client on a socket of the service."""
    pytest.importorskip("uvicorn")
    with listening(build_server(build_app(service))) as (host, port):
        connection = client.InferenceServerClient(f"{host}:{port}")
        try:
            yield connection
        finally:
            connection.close()


def described(client, model):
    """A package's configuration of `model`, parsed by Triton's messages."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    return text_format.Parse(as_text(model.triton("onnxruntime", 8, 2000, 1)), client.ModelConfig())


def asked(client, model, config, images, binary=True, outputs=None, **how):
    """Output -> array, from the answer to a request that the client writes by the configuration."""
    (taken,) = config.input
    sent = client.InferInput(taken.name, list(images.shape), client.utils.np_to_triton_dtype(images.dtype))
    sent.set_data_from_numpy(images, binary_data=binary or images.dtype == np.float16)
    wanted = outputs or [client.InferRequestedOutput(one.name, binary_data=binary) for one in config.output]
    with connected(client, service_of(model)) as connection:
        found = connection.infer(model.name, [sent], outputs=wanted, request_id="7", **how)
    assert found.get_response()["id"] == "7"
    return {one["name"]: found.as_numpy(one["name"]) for one in found.get_response()["outputs"]}


def taken_by(config):
    """Random pictures as the configuration says, and the logits that are due for them."""
    (taken,) = config.input
    pixels = torch.randint(0, 256, (2, SIDE, SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    images = PREPROCESS.normalised(pixels)
    kind = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16, "TYPE_UINT8": np.uint8}
    type_ = kind[type(taken).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[taken.data_type].name]
    given = pixels.numpy() if type_ is np.uint8 else images.numpy().astype(type_)
    assert list(taken.dims) == list(given.shape[1:])
    return given, logits_of(images)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_made_from_a_package_is_answered_by_serve(client, kind, binary):
    model = ModelDescription("micro", *KINDS[kind], NAMES if kind != "embedding" else ())
    config = described(client, model)
    images, logits = taken_by(config)
    found = asked(client, model, config, images, binary)
    assert list(found) == [one.name for one in model.outputs]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    best = np.argsort(-shares, axis=1)[:, :2]
    due = {"logits": logits, "embedding": logits, "probabilities": shares, "top_classes": best}
    due["top_probabilities"] = np.take_along_axis(shares, best, 1)
    for end in model.outputs:
        assert found[end.name].dtype == np.dtype(end.type) and found[end.name].shape == (2, *end.shape)
        np.testing.assert_allclose(found[end.name], due[end.name], rtol=3e-2 if kind == "float16" else 1e-3, atol=1e-3)


def test_the_rest_of_what_the_client_asks(client):
    """Health, descriptions; another model, version, shape, or part of the protocol: a line each."""
    config = described(client, MODEL)
    images, _ = taken_by(config)
    right, wrong = (client.InferInput("images", list(one.shape), "FP32") for one in (images, images[:, :, :5]))
    right.set_data_from_numpy(images)
    wrong.set_data_from_numpy(images[:, :, :5])
    words = [client.InferRequestedOutput("logits", class_count=2)]
    with connected(client, service_of(MODEL)) as server:
        assert server.is_server_live() and server.is_server_ready() and server.is_model_ready("micro", "1")
        assert not server.is_model_ready("other")
        assert server.get_model_metadata("micro")["inputs"] == [
            {"name": "images", "datatype": "FP32", "shape": [-1, 3, SIDE, SIDE]}
        ]
        for waiting in [server.async_infer("micro", [right]) for _ in range(3)]:
            waiting.get_result()
        for refused, why in (
            (
                lambda: server.infer("micro", [wrong]),
                f"FP32 [2, 3, 5, {SIDE}], came: the one input must be images, FP32 [1 to 256, 3, {SIDE}, {SIDE}]",
            ),
            (lambda: server.infer("other", [right]), "no model 'other': this server has micro"),
            (lambda: server.infer("micro", [right], model_version="2"), "Not Found"),
            (server.get_model_repository_index, "Not Found"),
            (lambda: server.infer("micro", [right], outputs=words), "classification is not supported"),
            (lambda: server.infer("micro", [right], request_compression_algorithm="gzip"), "the body is not JSON"),
        ):
            with pytest.raises(client.utils.InferenceServerException) as error:
                refused()
            assert why in error.value.message() and "\n" not in error.value.message()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("height, width", [(24, 16), (8, 40)])
def test_a_client_of_a_backbone_gets_every_map_for_pictures_of_any_size(client, binary, height, width):
    config = described(client, MAPS)
    assert list(config.input[0].dims) == [3, -1, -1] and config.max_batch_size == 8
    images = np.random.default_rng(height).standard_normal((2, 3, height, width)).astype(np.float32)
    found = asked(client, MAPS, config, images, binary)
    assert list(found) == ["features0", "features1"]
    for output, due in zip(found.values(), maps_of(torch.from_numpy(images)), strict=True):
        np.testing.assert_allclose(output, due, rtol=1e-5, atol=1e-6)


def test_pictures_of_two_sizes_that_wait_together_are_answered_each_with_its_maps():
    shapes = [(2, 3, 16, 24), (1, 3, 32, 8), (1, 3, 16, 24)]
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
    answers = posted(service_of(MAPS), *[(INFER, {"json": body_of(one)}) for one in given], at_once=True)
    for images, answer in zip(given, answers, strict=True):
        for output, due in zip(answer.json()["outputs"], maps_of(images), strict=True):
            assert output["shape"] == list(due.shape)
            np.testing.assert_allclose(output["data"], due.flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shape": [1, 3, 0, 8]}, "shape[2] is 0, but must be at least 1"),
        (
            {"shape": [1, 3, 8, 99999]},
            "[1, 3, 8, 99999], came: the one input must be images, FP32 [1 to 256, 3, 1 to 4096",
        ),
        ({"shape": [1, 1, 8, 8]}, "[1, 1, 8, 8], came"),
        ({"shape": [1, 3, 8]}, "shape must be 4 values"),
        ({"outputs": [{"name": "features0", "parameters": {"classification": 1}}]}, "classification is not supported"),
        ({"outputs": [{"name": "logits"}]}, "outputs must be some of features0, features1"),
    ],
)
def test_a_request_that_a_backbone_cannot_answer_is_refused_in_a_line(change, why):
    one = {"name": "images", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.0] * 192}
    body = {"inputs": [one | {key: change[key] for key in change if key == "shape"}]}
    body |= {key: change[key] for key in change if key == "outputs"}
    refused, picture = posted(service_of(MAPS), (INFER, {"json": body}), ("/predict", {"content": b""}))
    assert refused.status_code == 400 and why in refused.json()["error"]
    assert picture.status_code == 404
