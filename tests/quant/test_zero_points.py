"""Grids with a zero point: the op against ONNX's own operators, its gradients, its graph, and range searches."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from swin_quant.quant import CALIBRATORS
from swin_quant.quant.fake_quant import grid_between
from swin_quant.quant.observers import ActivationObserver
from swin_quant.quant.quantizer import Quantizer, Role, State
from swin_quant.quant.ranges import search, search_bounds
from tests.helpers.settings import change
from tests.quant.test_ranges import sample, statistics_of

ENDS = st.tuples(st.floats(-1e4, 0, width=32), st.floats(0, 1e4, width=32)).filter(
    lambda ends: ends[1] - ends[0] > 1e-3
)
VALUES = st.lists(st.floats(-3e4, 3e4, width=32), min_size=1, max_size=40)


def node_between(low, high, bits=8):
    node = Quantizer(Role.GEMM_INPUT)
    node.state = State.QUANTIZE
    change(node, symmetric=False, bits=bits)
    node.bounds = (low, high)
    return node


@pytest.fixture(scope="module")
def onnxruntimes():
    """y = DequantizeLinear(QuantizeLinear(x)) by ONNX Runtime, uint8."""
    kinds = {"x": onnx.TensorProto.FLOAT, "scale": onnx.TensorProto.FLOAT, "zero": onnx.TensorProto.UINT8}
    shapes = {"x": ["n"], "scale": [], "zero": []}
    inputs = [onnx.helper.make_tensor_value_info(name, kind, shapes[name]) for name, kind in kinds.items()]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "pair", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda x, scale, zero: session.run(None, {"x": x, "scale": scale, "zero": zero})[0]


@given(VALUES, ENDS)
@example([-0.1, 0.0, 3.0], (-0.17, 2.5))
@example([-9.0, 0.0, 1.0, 2.0], (0.0, 1.0))
@example([-9.0, -0.5, 0.0, 2.0], (-1.0, 0.0))
def test_is_onnx_runtimes_quantize_and_dequantize_to_the_bit(onnxruntimes, values, ends):
    node, x = node_between(*ends), torch.tensor(values)
    scale = (node.range_for() / node.grid[1]).numpy()
    theirs = onnxruntimes(x.numpy(), scale, np.asarray(-node.grid[0], np.uint8))
    assert np.array_equal(node(x).numpy(), theirs)


@given(VALUES, ENDS, st.integers(2, 8))
def test_is_the_closed_form(values, ends, bits):
    """scale = (high - low) / steps, zero point = round(-low / scale): each level by numpy, in double."""
    low, high = ends
    x, steps = np.array(values, np.float64), 2**bits - 1
    scale = (high - low) / steps
    zero = min(np.rint(-low / scale), steps - 1)
    y = (np.clip(np.rint(x / scale) + zero, 0, steps) - zero) * scale
    near_tie = abs(abs(x / scale % 1) - 0.5) < 1e-4 * np.maximum(1, abs(x / scale))
    found = node_between(low, high, bits)(torch.tensor(values)).numpy()
    np.testing.assert_allclose(found[~near_tie], y[~near_tie], rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_at_both_ends_and_lsqs_for_the_range():
    """Esser et al., equation 3, on the unsigned grid: level - x / s inside, the saturated level outside."""
    node = node_between(-0.5, 3.25, bits=4)  # a step of 0.25, zero point 2
    assert node.grid == (-2, 13)
    x = torch.tensor([-0.6, -0.5, -0.3, 0.1, 3.2, 3.3], requires_grad=True)
    node.learn_range()
    node(x).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0]
    slope = -2 + 0 + (-1 + 1.2) + (0 - 0.4) + (13 - 12.8) + 13
    of_width = slope / 15 / (6 * 13) ** 0.5
    assert node.bounds.grad.tolist() == pytest.approx([-of_width, of_width], rel=0.01)


def test_learning_moves_the_width_and_keeps_the_zero_point():
    node = node_between(-0.17, 3.0)
    grid = node.grid
    node.learn_range()
    with torch.no_grad():
        node.bounds.add_(torch.tensor([-0.4, 0.9]))
    node.hold_range()
    assert node.grid == grid and (node.bounds[1] - node.bounds[0]).item() == pytest.approx(3.17 + 1.3)
    node.freeze_range()
    assert node.grid == grid and not isinstance(node.bounds, torch.nn.Parameter)
    node.learn_range()
    with torch.no_grad():
        node.bounds.zero_()
    node.hold_range()
    assert (node.bounds[1] - node.bounds[0]).item() == pytest.approx(1e-3 * (3.17 + 1.3)) and node.grid == grid


def test_compiles_into_one_graph_and_exports():
    node, x = node_between(-0.17, 3.0), torch.randn(50)
    expected = node(x)
    assert torch.equal(torch.compile(node, backend="aot_eager", fullgraph=True)(x), expected)
    program = torch.export.export(node, (x,))
    assert sum("fake_quant" in str(found.target) for found in program.graph.nodes) == 1
    assert torch.equal(program.module()(x), expected)
    other = node_between(-1.0, 3.0)
    assert torch.equal(torch.compile(other, backend="aot_eager", fullgraph=True)(x), other(x))


def test_a_policy_changes_no_range():
    node = node_between(-0.17, 3.0)
    node.amax = 2.5
    change(node, symmetric=True)
    assert node.range_for().item() == 2.5 and node.grid == (-128, 127)
    change(node, symmetric=False)
    assert node.bounds.tolist() == pytest.approx([-0.17, 3.0]) and node.grid == (-14, 241)


SAMPLES = ("normal", "gelu", "one-sided", "negative", "skewed", "outlier", "constant")


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("method", CALIBRATORS)
def test_no_range_is_wider_than_what_was_seen(name, method):
    values = sample(name)
    low, high = search_bounds(method, statistics_of(values))
    assert min(values.min(), 0) <= low <= 0 <= high <= max(values.max(), 0) and low < high


@pytest.mark.parametrize("percentile", [100.0, 99.99, 99.0, 80.0])
@pytest.mark.parametrize("name", SAMPLES)
def test_percentile_leaves_half_of_the_share_beyond_either_end(name, percentile):
    values, statistics = sample(name), statistics_of(sample(name))
    low, high = search_bounds("percentile", statistics, percentile=percentile)
    allowed = (100 - percentile) / 200 * len(values)
    for beyond, one_bin_less in (
        ((values > high).sum(), (values > high - statistics.sides[1].width).sum()),
        ((values < low).sum(), (values < low + statistics.sides[0].width).sum()),
    ):
        assert beyond <= allowed
        assert one_bin_less >= allowed - 1 or one_bin_less == 0 or low == 0 or high == 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", SAMPLES)
def test_mse_is_as_good_as_brute_force_on_the_values(name, bits):
    values, steps = sample(name)[:20_000], 2**bits - 1

    def error(low, high):
        qmin, qmax = grid_between(low, high, steps)
        scale = (high - low) / steps
        return ((np.clip(np.rint(values / scale), qmin, qmax) * scale - values).astype(np.float64) ** 2).mean()

    shares = np.geomspace(0.02, 1, 40)
    lows = [0.0] if values.min() >= 0 else values.min() * shares
    highs = [0.0] if values.max() <= 0 else values.max() * shares
    best = min(error(low, high) for low in lows for high in highs)
    found = search("mse", statistics_of(values), node_between(-1.0, 1.0, bits), 99.9)
    assert error(*found.bounds) <= 1.05 * best + 1e-12


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30), st.data())
def test_signed_histograms_do_not_depend_on_batches(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    whole, parts = (ActivationObserver("node", torch.device("cpu"), True, None) for _ in range(2))
    whole(torch.tensor(values))
    for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
        parts(torch.tensor(values[start:end]))
    one, other = whole.statistics(), parts.statistics()
    for ours, theirs in zip((one, *one.sides), (other, *other.sides), strict=True):
        assert ours.width == theirs.width and ours.largest == theirs.largest
        assert np.array_equal(ours.counts, theirs.counts)
    below, above = one.sides
    assert below.counts.sum() == sum(value < 0 for value in values)
    assert above.counts.sum() == sum(value >= 0 for value in values)
    assert (whole.lowest, whole.highest) == (min(0, *values), max(0, *values))
