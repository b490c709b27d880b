import pytest
import torch

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import enabled_nodes, quantize
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.watch import watching
from swin_quant.train.amax import RangeKeeper, clipped_shares
from swin_quant.train.recipe import Ranges
from tests.helpers.settings import change

IMAGES = [torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]


@pytest.fixture
def made(tiny_model, use_policy):
    """make(recipe, policy, kind) -> a calibrated model with its nodes on, and its keeper."""

    def make(policy="ft-mode1", kind="swin", bits=None, percentile=99.0, **recipe):
        model = tiny_model(kind)
        calibrate(model, IMAGES, Method("percentile", percentile))
        use_policy(model, policy)
        for node in enabled_nodes(model).values():
            change(node, bits=bits or node.setting.bits)
        quantize(model)
        return model, RangeKeeper(model, Ranges(**recipe), 4, lambda: IMAGES)

    return make


def move_weights(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=generator))


def ranges(model, on=True):
    return {name: node.amax.clone() for name, node in named_nodes(model).items() if node.setting.enabled is on}


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("policy", ["ft-mode1", "qdq"])
def test_frozen_ranges_stay(made, policy):
    """Also those of rows, which a policy derives from the weights until training starts."""
    model, keeper = made(policy)
    before = ranges(model)
    move_weights(model)
    keeper.after_step()
    row = keeper.after_epoch(1)
    assert not moved(before, ranges(model)) and row["amax_drift"] == 0 and row["clipped_share"] > 0
    assert not [name for name, _ in model.named_parameters() if "_amax" in name]
    for name, node in enabled_nodes(model).items():
        if node.role is Role.GEMM_WEIGHT:
            assert node.range_for(model.get_submodule(name.rpartition(".")[0]).weight) is node.amax


@pytest.mark.parametrize(("which", "roles"), [("weights", "W"), ("activations", "A"), ("both", "WA")])
def test_learned_ranges_are_parameters_of_the_chosen_nodes_only(made, which, roles):
    model, keeper = made(mode="learned", weights="W" in roles, activations="A" in roles)
    kinds = {name: "W" if node.role is Role.GEMM_WEIGHT else "A" for name, node in enabled_nodes(model).items()}
    expected = {f"{name}._amax" for name, kind in kinds.items() if kind in roles}
    assert {name for name, _ in model.named_parameters() if name.endswith("_amax")} == expected
    model.train()(IMAGES[0]).square().sum().backward()
    parameters = dict(model.named_parameters())
    assert all(parameters[name].grad.isfinite().all() for name in expected)
    assert sum(bool(parameters[name].grad.abs().max() > 0) for name in expected) > 0.9 * len(expected)
    for name in expected:
        parameters[name].data.sub_(1e9)
    keeper.after_step()
    assert all((node.amax > 0).all() for node in enabled_nodes(model).values())
    assert keeper.after_epoch(1)["amax_drift"] > 0.1


def with_zero_points(model):
    for name, node in enabled_nodes(model).items():
        change(node, symmetric=not name.endswith("mlp.fc2._input_quantizer"))
    return {name: node for name, node in enabled_nodes(model).items() if not node.setting.symmetric}


def test_ranges_with_a_zero_point_are_learned_at_both_ends_and_reestimated_ones_clip_at_both(made):
    model, _ = made()
    nodes = with_zero_points(model)
    grids, amax = {name: node.grid for name, node in nodes.items()}, ranges(model)
    keeper = RangeKeeper(model, Ranges(mode="learned", weights=False), 4, lambda: IMAGES)
    learned = {name for name, parameter in model.named_parameters() if name.endswith(("_amax", "_bounds"))}
    assert learned >= {f"{name}._bounds" for name in nodes} and not learned & {f"{name}._amax" for name in nodes}
    model.train()(IMAGES[0]).square().sum().backward()
    torch.optim.Adam([node.bounds for node in nodes.values()], 0.05).step()
    keeper.after_step()
    assert {name: node.grid for name, node in nodes.items()} == grids, "zero points stay"
    row = keeper.after_epoch(1)
    assert row["amax_drift"] > 0 and 0 < row["clipped_share"] < 0.1
    with torch.no_grad():
        before = model.eval()(IMAGES[0])
        keeper.settle(model)
        assert torch.equal(model(IMAGES[0]), before)
    assert all(torch.equal(node.amax, amax[name]) for name, node in nodes.items()), "what was calibrated stays"
    assert {name: node.grid for name, node in nodes.items()} == grids
    keeper = RangeKeeper(model, Ranges(mode="reestimated", every_epochs=1, until=1.0), 4, lambda: IMAGES)
    before = {name: node.bounds.clone() for name, node in nodes.items()}
    move_weights(model)
    keeper.after_epoch(1)
    assert all(not torch.equal(node.bounds, before[name]) for name, node in nodes.items())
    for node in nodes.values():
        node.bounds = (-0.05, 1e3)
    shares = clipped_shares(model, IMAGES)
    assert all(0.1 < shares[name] < 0.9 for name in nodes), "GELU's values below -0.05"


def test_reestimated_ranges_follow_on_schedule(made):
    model, keeper = made(mode="reestimated", every_epochs=2, until=0.5, activations=False)
    before = ranges(model)
    changes = []
    for epoch in (1, 2, 3, 4):
        move_weights(model)
        keeper.after_epoch(epoch)
        changes.append(moved(before, ranges(model)))
        before = ranges(model)
    weights = {name for name, node in enabled_nodes(model).items() if node.role is Role.GEMM_WEIGHT}
    assert changes == [set(), weights, set(), set()]


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("policy", ["ft-mode1", "qdq"])
@pytest.mark.parametrize("mode", ["frozen", "learned", "reestimated"])
def test_settled_weights_lie_in_their_ranges_and_say_what_they_said(made, mode, policy, kind):
    model, keeper = made(policy, kind, mode=mode)
    move_weights(model)
    with torch.no_grad():
        before = model(IMAGES[0])
        stale = ranges(model, on=False)
        keeper.settle(model)
        assert torch.equal(model(IMAGES[0]), before)
    assert not [name for name, _ in model.named_parameters() if name.endswith("_amax")]
    for name, node in enabled_nodes(model).items():
        if node.role is Role.GEMM_WEIGHT:
            weight = model.get_submodule(name.rpartition(".")[0]).weight
            assert (weight.abs() <= node.amax * (1 + 1 / 127) * (1 + 1e-6)).all()
            assert node.amax.dim() == (2 if policy == "qdq" else 0)
    assert moved(stale, ranges(model, on=False)), "nodes that were off belong to the trained weights now"


def test_clipped_shares_are_exact(made):
    model, _ = made()
    nodes = {name: node for name, node in enabled_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}
    seen = {name: [] for name in nodes}
    with watching(nodes, lambda name, node, inputs, output: seen[name].append(inputs[0].detach().clone())):
        shares = clipped_shares(model, IMAGES)
    assert shares.keys() == nodes.keys() and not any(node._forward_pre_hooks for node in nodes.values())
    for name, node in nodes.items():
        values = torch.cat([x.flatten() for x in seen[name]])
        assert shares[name] == pytest.approx((values.abs() > node.amax).double().mean().item())
    assert 0 < sum(shares.values()) / len(shares) < 0.1


def test_learned_ranges_of_float8_and_those_that_are_fixed(made):
    model, keeper = made("tensorrt-fp8", mode="learned")
    learned = {name for name, _ in model.named_parameters() if name.endswith("_amax")}
    fixed = {name for name, node in enabled_nodes(model).items() if node.setting.amax is not None}
    assert fixed and learned == {f"{name}._amax" for name in enabled_nodes(model).keys() - fixed}
    model(IMAGES[0]).square().sum().backward()
    for name, node in enabled_nodes(model).items():
        assert (node.amax.grad is None) == (name in fixed)
    before = ranges(model)
    keeper.settle(model)
    assert not moved(before, ranges(model))
    for name in (name for name in before if name.endswith("weight_quantizer")):
        weight = model.get_submodule(name.rpartition(".")[0]).weight
        assert (weight.abs() <= before[name] * (1 + 1e-6)).all()
