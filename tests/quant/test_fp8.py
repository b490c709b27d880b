"""Float8 E4M3 as the format of a node, against torch's own type: rounding, gradients, policies."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from swin_quant.quant import straight_through
from swin_quant.quant.fake_quant import E4M3, fake_quant, round_to_grid_
from swin_quant.quant.passes.gptq import gptq
from swin_quant.quant.passes.reconstruct import Rounding
from swin_quant.quant.policy import (
    Rule,
    apply_policy,
    builtin_policies,
    enabled_nodes,
    load_policy,
    quantize,
)
from swin_quant.quant.quantizer import Quantizer, Role, State, named_nodes
from swin_quant.quant.straight_through import simulate
from swin_quant.score.engine import get_precision
from tests.helpers.settings import change

LEVELS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
LEVELS = LEVELS[LEVELS.isfinite()]


def bits(x):
    return x.view(torch.int32)


def cast(x):
    """torch's conversion, which does not saturate."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
@example([0.0, -0.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), 2.0**-126, 1e-45, 464.0, 480.0, 1e38, float("inf")])
def test_rounding_is_torchs_cast_bit_for_bit(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(bits(round_to_grid_(x.clone(), *E4M3)), bits(cast(x)))


def test_rounding_between_any_two_levels_is_torchs_cast():
    levels = LEVELS.unique()
    steps = torch.linspace(0, 1, 65)[:-1]
    x = (levels[:-1, None] + steps * levels.diff()[:, None]).flatten()
    assert torch.equal(round_to_grid_(x.clone(), *E4M3), cast(x))
    ties = (levels[:-1] + levels[1:]) / 2
    assert torch.equal(round_to_grid_(ties.clone(), *E4M3), cast(ties))
    assert round_to_grid_(torch.tensor([torch.nan]), *E4M3).isnan()


@given(st.floats(2.0**-18, 2.0**18, width=32), st.integers(0, 99))
def test_a_node_is_divided_by_its_scale_cast_and_multiplied(amax, seed):
    x = amax * torch.randn(200, generator=torch.Generator().manual_seed(seed))
    scale = torch.tensor(amax) / 448
    node = Quantizer(Role.GEMM_INPUT)
    node.amax, node.state = amax, State.QUANTIZE
    change(node, format="fp8")
    assert torch.equal(node(x), cast(x / scale) * scale)
    assert torch.equal(node(x.half()).float(), (cast(x.half().float() / scale) * scale).half().float())


def test_a_row_has_its_own_scale_and_a_dead_range_gives_zeros():
    x, amax = torch.randn(3, 50), torch.tensor([[0.5], [2.0], [0.0]])
    y = fake_quant(x, amax, *E4M3)
    assert torch.equal(y[1], cast(x[1] / (amax[1] / 448)) * (amax[1] / 448)) and not y[2].any()


@pytest.mark.parametrize("way", [simulate, straight_through._traced])
def test_gradients_pass_inside_the_range_and_move_it_as_lsq_does(way):
    x = (3 * torch.randn(400)).requires_grad_()
    amax = torch.tensor(4.0, requires_grad=True)
    weights = torch.randn(400)
    (way(x, amax, *E4M3) * weights).sum().backward()
    assert torch.equal(x.grad, weights * (x.abs() <= 4))
    position = x.detach() * 448 / 4
    slope = torch.where(x.detach().abs() <= 4, cast(position) - position, position.clamp(-448, 448))
    expected = (weights * slope).sum() / (448 * (400 * 448) ** 0.5)
    assert amax.grad.item() == pytest.approx(expected.item(), rel=0.02)


def test_passes_round_weights_to_levels_that_there_are():
    weight = 100 * torch.randn(6, 8)
    soft = Rounding.from_weight(weight, torch.tensor(300.0), *E4M3)
    assert torch.allclose(soft.soft(), weight.clamp(-300, 300), atol=1e-3)
    hard = soft.hard() / (torch.tensor(300.0) / 448)
    assert torch.isin(hard.round(decimals=3), LEVELS.round(decimals=3)).all()
    x = torch.randn(8, 64).double()
    levels = gptq(weight.double(), x @ x.T, torch.ones(6, 1).double(), *E4M3)
    assert torch.isin(levels.float(), LEVELS).all() and levels.dtype == torch.float64


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_fixed_range_takes_the_calibrated_ones_place_and_leaves_it(kind, tiny_model):
    model = tiny_model(kind)
    for node in named_nodes(model).values():
        node.amax = 0.25
    apply_policy(model, load_policy("tensorrt-fp8"))
    node = model.layers[0].blocks[0].attn.matmul_a_input_quantizer
    quantize(model)
    probabilities = torch.rand(1000)
    assert torch.equal(node(probabilities), cast(probabilities * 448) * (torch.ones(()) / 448))
    assert node.amax == 0.25
    apply_policy(model, load_policy("tensorrt"))
    assert node.range == 0.25


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_the_fp8_policies(kind, tiny_model):
    model = tiny_model(kind)
    on = {}
    for name in ("tensorrt", "tensorrt-fp8", "cuda-fp8"):
        assert name in builtin_policies()
        apply_policy(model, load_policy(name))
        on[name] = enabled_nodes(model)
        assert get_precision(model) == ("int8" if name == "tensorrt" else "fp8")
        assert all(n.setting.per_channel for n in on[name].values() if n.role is Role.GEMM_WEIGHT)
    assert on["tensorrt-fp8"].keys() == on["tensorrt"].keys()
    left = on["tensorrt-fp8"].keys() - on["cuda-fp8"].keys()
    assert {name.rpartition(".")[2] for name in left} == {"matmul_a_input_quantizer"}
    apply_policy(model, load_policy("tensorrt-fp8").and_then(Rule(nodes=("*.fc1.*",), format="int8")))
    assert get_precision(model) == "mixed"


@pytest.mark.kernels
def test_it_compiles_to_one_graph():
    compiled = torch.compile(simulate, fullgraph=True, backend="aot_eager")
    x = torch.randn(50, requires_grad=True)
    y = compiled(x, torch.tensor(1.5), *E4M3)
    y.sum().backward()
    assert torch.equal(y, simulate(x, torch.tensor(1.5), *E4M3)) and torch.equal(x.grad, (x.abs() <= 1.5).float())
