"""ONNX Runtime and OpenVINO run a file as written, in the types that they report, or that were asked for."""

import gc
import signal
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from swin_quant.backends import engine_loader
from swin_quant.backends.openvino import engine as openvino
from swin_quant.backends.openvino import operators
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.score.options import EngineOptions

LIMITS = {"onnxruntime": 1e-4, "openvino": 1e-3}  # the largest difference of a logit
ONE_THREAD = EngineOptions(threads=1)


@pytest.fixture(params=LIMITS)
def name(request):
    return request.param


@pytest.fixture
def load(name):
    return engine_loader(name)


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 8)


@pytest.mark.parametrize(
    "name, options",
    [("onnxruntime", ONE_THREAD), ("onnxruntime", EngineOptions(threads=1, optimize=False)), ("openvino", ONE_THREAD)],
    indirect=["name"],
)
@pytest.mark.parametrize("int8", [True, False])
def test_the_result_is_that_of_the_formulas(load, name, options, small_net, artifact_of, images, int8):
    net = small_net(int8=int8)
    logits = load(artifact_of(net, "int8" if int8 else "float32"), options)(images)
    assert logits.dtype == torch.float32 and logits.shape == (3, 5)
    assert np.abs(logits.numpy() - net(images)).max() < LIMITS[name]


@pytest.mark.parametrize("batch", ["batch", 4], ids=["any batch", "fixed batch"])
def test_it_reports_which_products_run_in_int8(load, name, small_net, artifact_of, images, batch):
    engine = load(artifact_of(small_net(batch=batch)), ONE_THREAD)
    engine(images)
    details = dict(engine.details)
    assert (details["int8_gemms"], details["all_gemms"]) == (3, 5)
    eight = {product for product, kind in details["gemms"].items() if kind == "int8"}
    assert eight == {"fc1", "fc2", "attn.qk"}
    assert details["library"].startswith(f"{name} ") and details["opset"] == 20
    assert (details["threads"], details["float_type"]) == (1, "float32")
    if name == "onnxruntime":
        assert details["device"] == "cpu"
        assert {product: kind for product, kind in details["gemms"].items() if product not in eight} == {
            "attn.av": "float32",
            "head": "float32",
        }


def test_a_fixed_batch_takes_fewer_pictures_and_not_more(load, name, small_net, artifact_of, images):
    net = small_net(batch=4)
    engine = load(artifact_of(net), EngineOptions())
    assert np.abs(engine(images).numpy() - net(images)).max() < LIMITS[name]
    with pytest.raises(UsageError, match="a batch of 6 is above its limit of 4 pictures"):
        engine(torch.cat([images, images]))


@pytest.mark.parametrize(
    "name, options, text",
    [
        ("onnxruntime", {"float_type": "bfloat16"}, "float32 on a CPU, not in bfloat16"),
        ("onnxruntime", {"device": "cuda"}, "not on cuda"),
        ("openvino", {"optimize": False}, "always rewrites"),
        ("openvino", {"device": "cuda"}, "not on cuda"),
    ],
    indirect=["name"],
)
def test_what_it_has_not_is_refused(load, small_net, artifact_of, options, text):
    with pytest.raises(UsageError, match=text):
        load(artifact_of(small_net()), EngineOptions(**options))


def test_what_the_library_refuses_is_one_line(load, name, small_net, artifact_of):
    artifact = artifact_of(small_net(int8=False), "float32")
    model = onnx.load(artifact.file)
    if name == "onnxruntime":
        model.graph.node[0].op_type = lacked = "FutureOperator"
    else:
        lacked = "Det"
        model.graph.node[-1].output[0] = "before"
        model.graph.initializer.append(onnx.helper.make_tensor("square", onnx.TensorProto.FLOAT, [1, 1], [1.0]))
        model.graph.node.append(onnx.helper.make_node(lacked, ["square"], ["one"]))
        model.graph.node.append(onnx.helper.make_node("Add", ["before", "one"], ["logits"]))
    artifact.file.write_bytes(model.SerializeToString())
    with pytest.raises(SwinQuantError, match=f"{name} cannot load it: ") as caught:
        load(artifact, EngineOptions())
    assert "\n" not in str(caught.value) and lacked in str(caught.value)


def test_precision_and_policy_are_those_of_the_export(small_net, artifact_of):
    load = engine_loader("onnxruntime")
    engine = load(artifact_of(small_net()), EngineOptions())
    assert (engine.name, engine.precision, engine.policy, engine.max_batch) == ("onnxruntime", "int8", "qdq", None)
    engine = load(artifact_of(small_net(int8=False), "float32"), EngineOptions())
    assert (engine.precision, engine.policy) == ("float32", None)
    engine = load(artifact_of(small_net()), EngineOptions(optimize=False))
    assert engine.details["int8_gemms"] == 0


def test_a_float16_file_is_given_float16(small_net, artifact_of, images):
    net = small_net(int8=False, dtype=np.float16)
    engine = engine_loader("onnxruntime")(artifact_of(net, "float16"), EngineOptions())
    assert np.abs(engine(images).numpy() - net(images)).max() < 0.05
    with pytest.raises(UsageError, match="takes pictures of 3x8x8, not 3x9x9"):
        engine(torch.zeros(1, 3, 9, 9))


def test_a_signal_after_the_last_engine_has_gone_is_heard(small_net, artifact_of, images):
    """On CPUs with AMX the library makes signals arrive on its own stack, which it used to free with the last
    engine."""
    engine = openvino.load(artifact_of(small_net()))
    engine(images)
    del engine
    gc.collect()
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert heard == [1]


def test_results_do_not_change_under_the_caller(small_net, artifact_of, images):
    engine = openvino.load(artifact_of(small_net()), ONE_THREAD)
    first = engine(images)
    kept = first.clone()
    engine(images.flip(0))
    assert torch.equal(first, kept)


def test_bfloat16_is_said_and_is_coarser(small_net, artifact_of, images):
    if "bfloat16" not in openvino.float_types():
        pytest.skip("this CPU has no bfloat16, or oneDNN must not use it")
    net = small_net(int8=False)
    artifact = artifact_of(net, "float32")
    engine = openvino.load(artifact, EngineOptions(float_type="bfloat16"))
    assert engine.precision == "bfloat16" and set(engine.details["gemms"].values()) == {"bfloat16"}
    assert 1e-4 < np.abs(engine(images).numpy() - net(images)).max() < 0.5
    assert openvino.load(artifact_of(small_net()), EngineOptions(float_type="bfloat16")).precision == "int8+bfloat16"


def test_compiled_graphs_are_kept_for_the_latest_sizes_of_batch_only(small_net, artifact_of, images):
    net = small_net()
    engine = openvino.load(artifact_of(net), ONE_THREAD)
    graphs = engine.run.__self__
    for batch in (3, 1, 2, 1):
        assert np.abs(engine(images[:batch]).numpy() - net(images[:batch])).max() < 1e-3
    assert list(graphs.compiled) == [(2, 3, 8, 8), (1, 3, 8, 8)]


def test_a_type_that_the_cpu_has_not_is_refused(small_net, artifact_of, monkeypatch):
    monkeypatch.setattr(openvino, "float_types", lambda: ["float32"])
    with pytest.raises(UsageError, match="this CPU does not run bfloat16: choose float32"):
        openvino.load(artifact_of(small_net()), EngineOptions(float_type="bfloat16"))


def network(text):
    """A graph for `artifact_of`, from ONNX's text."""
    return SimpleNamespace(proto=lambda: onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}'))


# The softmax of the means of pictures, with a 5 in the column that the largest value names
MARKED = network("""
marked (float[batch, 3, 8, 8] images) => (float[batch, 3] logits)
<int64[2] one = {1, 1}, int64[2] axes = {2, 3}, float[1, 1] five = {5}>
{
    most = ReduceMax<keepdims = 0>(images)
    column = Cast<to = 7>(most)
    place = Reshape(column, one)
    means = ReduceMean<keepdims = 0>(images, axes)
    marked = ScatterElements<axis = 1>(means, place, five)
    logits = Softmax<axis = -1>(marked)
}""")
# The first pixel of each picture
COPIED = network("""
copied (float[batch, 3, 8, 8] images) => (float[batch, 3] logits)
<int64 first = {0}> { rows = Gather<axis = 2>(images, first)  logits = Gather<axis = 2>(rows, first) }""")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_node_that_fails_is_heard_with_any_number_of_threads(artifact_of, threads):
    """With one thread OpenVINO 2026.4 drops the exception, and the outputs are those of the batch before."""
    engine = openvino.load(artifact_of(MARKED, "float32"), EngineOptions(threads=threads))
    images = torch.rand(2, 3, 8, 8)
    images[0, 0, 0, 0] = 2.5
    wanted = images.mean((2, 3))
    wanted[0, 2] = 5
    torch.testing.assert_close(engine(images), wanted.softmax(-1))
    images[0, 0, 0, 0] = 700.5
    with pytest.raises(
        SwinQuantError, match="openvino cannot run it: .*(indices|node failed, its output logits)"
    ) as caught:
        engine(images)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0xA5, 0x5A])
def test_an_output_that_looks_unwritten_is_not_taken_for_it(artifact_of, value):
    same = np.full(4, value, np.uint8).view(np.float32)[0]
    engine = openvino.load(artifact_of(COPIED, "float32"), ONE_THREAD)
    images = torch.full((2, 3, 8, 8), float(same))
    assert torch.equal(engine(images), images[:, :, 0, 0])


@pytest.mark.parametrize(
    ("levels", "product", "is_exact"),
    [((-64, 63), "x, w", True), ((-65, 63), "x, w", False), ((-64, 64), "x, w", False), ((-64, 63), "x, x", False)],
)
def test_products_are_exact_beside_the_operators_if_their_weights_have_7_bits(
    artifact_of, monkeypatch, levels, product, is_exact
):
    text = f"""<ir_version: 8, opset_import: ["": 17]> net (float[N, 2, 2] images) => (float[N, 2, 2] logits)
        <int8[2, 2] v = {{{levels[0]}, 0, 0, {levels[1]}}}, float s = {{0.5}}, int8 z = {{0}}>
        {{ q = QuantizeLinear(images, s, z) x = DequantizeLinear(q, s, z) w = DequantizeLinear(v, s, z)
           logits = MatMul({product}) }}"""
    artifact = artifact_of(SimpleNamespace(proto=lambda: onnx.parser.parse_model(text)))
    assert not operators.run_exact_products(artifact), "it has no operator"
    monkeypatch.setattr(operators, "find_libraries", lambda artifact: ("there.so",))
    assert operators.run_exact_products(artifact) == is_exact
