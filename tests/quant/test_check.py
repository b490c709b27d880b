"""The cost of ranges is measured against the float model, and the nodes and methods at fault are named."""

import pytest
import torch
from nightly import share

from swin_quant.base.errors import UsageError
from swin_quant.quant.calibration import Method, observing, set_ranges
from swin_quant.quant.check import Check, check_ranges
from swin_quant.quant.policy import Rule, apply_policy, load_policy, quantize
from swin_quant.quant.quantizer import Role, State, named_nodes
from tests.helpers.settings import change

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])
FAULTY = "layers.0.blocks.0.mlp.fc2._input_quantizer"
SMALL = {"EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4}


@pytest.fixture
def subject(tiny_model):
    """subject(kind, bits, method) -> a tiny model calibrated under ft-mode1, its observations, and its batches."""

    def make(kind="swin", bits=8, method="percentile"):
        model = tiny_model(kind, **SMALL)
        apply_policy(model, load_policy("ft-mode1").and_then(Rule(nodes=("role:activation",), bits=bits)))
        images = torch.randn(12, 3, 32, 32).split(5)
        with observing(model, Method(method)) as observation:
            batches = [(x, observation.show(x)) for x in images]
        calibration = observation.calibration()
        set_ranges(model, calibration, Method(method))
        return model, calibration, batches

    return make


@KINDS
def test_good_ranges_are_measured_and_nothing_else_is_tried(kind, subject):
    model, calibration, batches = subject(kind)
    check = check_ranges(model, calibration, Method("percentile"), batches)
    quantize(model)
    with torch.inference_mode():
        found = torch.cat([model(images) for images, _ in batches]).double()
    expected = torch.cat([logits for _, logits in batches]).double()
    assert check.sqnr_db == pytest.approx(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))
    assert check.agreement == 100 * (found.argmax(1) == expected.argmax(1)).double().mean()
    assert (check.pictures, check.others, check.better, check.at_fault) == (12, {}, None, ())
    assert check.sqnr_db > 20


@pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
def test_a_node_that_clips_its_signal_away_is_found(kind, subject):
    model, calibration, batches = subject(kind)
    nodes = named_nodes(model)
    for name in nodes:
        if name.endswith("_residual_input_quantizer") or name == FAULTY:
            nodes[name].amax = nodes[name].amax / 60
    nodes[FAULTY].amax = nodes[FAULTY].amax / 10
    before = {name: node.amax.clone() for name, node in nodes.items()}
    check = check_ranges(model, calibration, Method("percentile"), batches)
    assert check.sqnr_db < 15 and check.better in ("mse", "max", "entropy") and set(check.others) == {
        "max", "mse", "entropy"}  # fmt: skip
    assert check.at_fault[0] == FAULTY
    for name, node in nodes.items():
        assert node.state is State.OFF and torch.equal(node.amax, before[name]), name


def test_histograms_are_observed_again_for_max_on_the_same_pictures(subject):
    model, calibration, batches = subject(bits=4, method="max")
    for node in named_nodes(model).values():
        if node.role is not Role.GEMM_WEIGHT:
            node.amax = 3 * node.amax  # as after other pictures with larger values
    check = check_ranges(model, calibration, Method("max"), batches)
    assert calibration.statistics == {} and set(check.others) == {"percentile", "mse", "entropy"}
    assert check.better and check.others[check.better] == max(check.others.values()) > check.sqnr_db + 1.5


def test_the_methods_of_mixed_bits_are_compared_with_each_alone(subject):
    model, calibration, batches = subject()
    for node in list(named_nodes(model).values())[::2]:
        change(node, bits=2)
    set_ranges(model, calibration, Method())
    check = check_ranges(model, calibration, Method(), batches)
    assert set(check.others) == {"max", "percentile", "mse", "entropy"}


def test_no_method_is_named_that_is_refused_for_float8(subject):
    """Entropy only takes equal steps: the advice could not be followed."""
    model, calibration, batches = subject()
    apply_policy(model, load_policy("cuda-fp8"))
    set_ranges(model, calibration, Method("percentile"))
    for node in named_nodes(model).values():
        if node.role is not Role.GEMM_WEIGHT:
            node.amax = node.amax / 60
    check = check_ranges(model, calibration, Method("percentile"), batches)
    assert check.sqnr_db < 15 and check.better in ("max", "mse") and set(check.others) == {"max", "mse"}
    for name in check.others:
        set_ranges(model, calibration, Method(name))
    with pytest.raises(UsageError, match="entropy"):
        set_ranges(model, calibration, Method("entropy"))


@pytest.mark.parametrize(("other", "better"), [(11.4, None), (11.6, "mse")])
def test_a_method_within_what_methods_of_equal_accuracy_differ_by_is_not_better(other, better):
    assert Check(8, 100.0, 10.0, {"max": 9.0, "mse": other}).better == better
