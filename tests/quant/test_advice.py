"""A calibration's advice, and no advice if nothing is wrong."""

from dataclasses import replace

import pytest
import torch

from swin_quant.models.registry import list_exchanges
from swin_quant.quant.advice import Findings, advise
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.equalize import outlier_channels
from swin_quant.quant.policy import Rule, apply_policy, load_policy
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.statistics import clipped_share
from tests.helpers.settings import change
from tests.outliers import plant
from tests.quant.test_ranges import statistics_of

SMALL = {"EMBED_DIM": 16, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4}


@pytest.fixture
def subject(tiny_model):
    """subject(images, method, bits, prepare, policy) -> findings of a calibrated tiny V1."""

    def make(images=None, method="percentile", bits=8, prepare=lambda model: None, policy="ft-mode1"):
        model = tiny_model(**SMALL)
        prepare(model)
        policy = load_policy(policy).and_then(Rule(nodes=("*",), bits=bits))
        apply_policy(model, policy)
        images = torch.randn(32, 3, 32, 32) if images is None else images
        how = Method(method)
        return model, Findings(named_nodes(model), calibrate(model, [images], how), how, policy.name)

    return make


def kinds(findings):
    return [advice.kind for advice in advise(findings)]


@pytest.mark.parametrize("policy", ["ft-mode1", "cpu"])
def test_a_good_calibration_is_left_in_peace(policy, subject):
    assert kinds(subject(policy=policy)[1]) == []


@pytest.mark.parametrize("bits", [0, 7, 11.99, 12.0])
def test_the_clipped_share_is_counted(bits):
    """Exact at the edges of bins, whatever is inside them."""
    values = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 3
    statistics = statistics_of(values)
    amax = round(bits * 300) * statistics.width
    share = (values.abs() >= amax).double().mean().item()
    assert clipped_share(statistics, amax) == pytest.approx(share if amax < statistics.largest else 0.0, abs=1e-12)
    assert clipped_share(statistics, amax + statistics.width / 2) == pytest.approx(share, abs=0.001)


def test_branches_that_do_nothing_and_values_beyond_float16(subject):
    def damage(model):
        model.layers[0].blocks[0].mlp.fc1.weight.data.zero_()
        model.layers[0].blocks[0].mlp.fc1.bias.data.zero_()
        model.layers[0].blocks[1].norm2.weight.data *= 1e5

    found = {advice.kind: advice for advice in advise(subject(prepare=damage)[1])}
    assert found["dead"].warns and any("fc1" in name or "fc2" in name for name in found["dead"].nodes)
    assert found["beyond-half"].warns and "float16" in found["beyond-half"].text


def test_four_bits_ask_for_a_recipe_once_and_not_where_it_would_be_refused(subject):
    findings = subject(bits=4, method="mse")[1]
    assert "passes" in kinds(findings)
    assert "passes" not in kinds(replace(findings, passes=["gptq"]))
    assert "passes" not in kinds(replace(findings, taken_back=["gptq"])), "it was tried, and was no better"
    for node in findings.nodes.values():
        change(node, block=16 if node.role is Role.GEMM_WEIGHT else None)
    assert "passes" not in kinds(findings)


def test_channels_that_stand_out_come_with_their_cure(subject):
    images = torch.randn(8, 3, 32, 32)
    model, findings = subject(images, prepare=lambda model: plant(model, "norms", 100))
    context = PassContext(model, [images], exchanges=list_exchanges(model))
    found = outlier_channels(context)
    cures = {one.place: one.cure for one in found}
    assert cures["layers.0.blocks.0.norm1"] == ("layers.0.blocks.0.norm1", "layers.0.blocks.0.attn.qkv")
    told = advise(Findings(findings.nodes, findings.calibration, findings.method, "x", outlier_channels=found))
    (advice,) = [one for one in told if one.kind == "outliers"]
    assert "norm" in advice.text and "equalize" in advice.text
    told = advise(replace(findings, outlier_channels=found, passes=["equalize"]))
    (advice,) = [one for one in told if one.kind == "outliers"]
    assert "gained nothing" in advice.text and "could reduce" not in advice.text
