"""One node: its states, its range in a state_dict, and in a compiled or exported graph."""

import copy

import pytest
import torch
from torch import nn

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.quantizer import Quantizer, Role, Setting, State, named_nodes


def node(amax=None, state=State.QUANTIZE, observer=None, **setting):
    made = Quantizer(Role.GEMM_INPUT)
    made.amax, made.state, made.observer, made.setting = amax, state, observer, Setting(**setting)
    return made


def test_quantizing_without_a_range_raises_with_the_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(node()))
    named_nodes(model)
    with pytest.raises(SwinQuantError, match=r"node 1\.0 has no range"):
        model(torch.randn(1, 2))


@pytest.mark.parametrize("given", [2.5, torch.tensor(2.5, dtype=torch.float64), torch.tensor(2.5).half()])
def test_a_range_is_a_float32_copy(given):
    made = node(given)
    assert made.amax.dtype == torch.float32 and made.amax.shape == () and made.amax == 2.5
    if isinstance(given, torch.Tensor):
        given += 1
        assert made.amax == 2.5


CASTS = [
    ("half", lambda m: m.half()),
    ("bfloat16", lambda m: m.bfloat16()),
    ("double", lambda m: m.double()),
    ("to dtype", lambda m: m.to(torch.float16)),
    ("to both", lambda m: m.to("cpu", torch.bfloat16)),
    ("deepcopy", lambda m: copy.deepcopy(m)),
    ("there and back", lambda m: m.half().float()),
]


@pytest.mark.parametrize(("name", "cast"), CASTS, ids=[name for name, _ in CASTS])
@pytest.mark.parametrize("amax", [1 / 3, torch.tensor([[1 / 3], [1e-5]])], ids=["tensor", "channels"])
def test_a_range_stays_float32_to_the_bit_whatever_the_model_is_cast_to(name, cast, amax):
    made = node(amax)
    exact = made.amax.clone()
    cast_node = cast(nn.Sequential(nn.Linear(2, 2), made))[1]
    assert cast_node.amax.dtype == torch.float32 and torch.equal(cast_node.amax, exact)
    assert torch.equal(cast_node.state_dict()["_amax"], exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_neither_range_nor_arithmetic(dtype):
    x, made = torch.randn(100), node(1 / 3)
    expected = made(x)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(made(x), expected)
        assert torch.equal(made(x.to(dtype)), made(x.to(dtype).float()).to(dtype))
    assert made.amax.dtype == torch.float32


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.tensor([0.25]), torch.tensor(0.25)),
        (torch.tensor([[0.25]]), torch.tensor(0.25)),
        (torch.tensor([[0.25], [0.5]]), torch.tensor([[0.25], [0.5]])),
        (torch.tensor(0.25).half(), torch.tensor(0.25)),
    ],
)
@pytest.mark.parametrize("before", [None, 7.0, torch.ones(3, 1)])
def test_loading_replaces_whatever_range_was_there(saved, loaded, before):
    model = nn.Sequential(node(before))
    model.load_state_dict({"0._amax": saved})
    assert torch.equal(model[0].amax, loaded) and model[0].amax.dtype == torch.float32


def test_loading_a_state_without_the_range_of_a_node_that_has_one_is_refused():
    with pytest.raises(RuntimeError, match="0._amax"):
        nn.Sequential(node(1.0)).load_state_dict({})
    nn.Sequential(node()).load_state_dict({})
