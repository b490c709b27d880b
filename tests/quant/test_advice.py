"""A calibration's advice, and no advice if nothing is wrong."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from swin_quant.models.registry import list_exchanges
from swin_quant.quant.advice import Findings, advise, clipped_share
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.check import Check
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.observers import ActivationObserver
from swin_quant.quant.outlier_channels import outlier_channels
from swin_quant.quant.passes import PassContext
from swin_quant.quant.policy import Rule, apply_policy, load_policy
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.statistics import Statistics
from tests.helpers.settings import change
from tests.outliers import plant

SMALL = {"EMBED_DIM": 16, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4}
FC2 = "layers.0.blocks.0.mlp.fc2._input_quantizer"


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
    observer = ActivationObserver("x", torch.device("cpu"), True, None)
    values = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 3
    observer(values)
    statistics = observer.statistics()
    amax = round(bits * 300) * statistics.width
    share = (values.abs() >= amax).double().mean().item()
    assert clipped_share(statistics, amax) == pytest.approx(share if amax < statistics.largest else 0.0, abs=1e-12)
    assert clipped_share(statistics, amax + statistics.width / 2) == pytest.approx(share, abs=0.001)


def test_ranges_that_clip_too_much_are_named_with_the_method_that_does_not(subject):
    model, findings = subject()
    node = named_nodes(model)[FC2]
    node.amax = node.amax / 4
    (advice,) = [one for one in advise(findings) if one.kind == "clipped"]
    assert advice.nodes == (FC2,) and FC2 in advice.text and "‹calibrator›" in advice.text and not advice.warns
    share = clipped_share(findings.calibration.statistics[FC2], node.amax.item())
    assert f"clipping in 1 range: up to {100 * share:.1f} %" in advice.text and share > 0.001
    for tried, says in ((1.0, False), (50.0, True)):
        others = dict.fromkeys(("max", "percentile", "mse", "entropy"), tried)
        assert ("clipped" in kinds(replace(findings, check=Check(8, 90.0, 30.0, others)))) is says
    for name, says in {"gptq": True, "range_search": False, "reconstruct": False, "distill": False}.items():
        assert ("clipped" in kinds(replace(findings, passes=[name]))) is says, name


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "says"), [("cuda-fp8", True), ("ft-mode1", False)])
def test_a_few_values_that_hold_the_signal_are_missed_in_float8(policy, says, subject):
    """Clipping does not refine its steps; for an int8 node the same values are outliers that 127 steps cannot span."""
    model, findings = subject(policy=policy)
    assert "clipped" not in kinds(findings)
    counts = np.zeros(2048, dtype=np.int64)
    counts[:2], counts[-1] = 50_000, 8  # below percentile 99.99, and 0.008 % of them a thousand times as large
    findings.calibration.statistics[FC2] = Statistics(counts, 1.0, 2048.0)
    named_nodes(model)[FC2].amax = torch.tensor(2.0)
    clipped = [one for one in advise(findings) if one.kind == "clipped"]
    assert [one.nodes for one in clipped] == [(FC2,)] * says
    for advice in clipped:
        assert "up to 0.008 % of their nodes" in advice.text and re.search(r"‹calibrator› (max|mse) ", advice.text)


@pytest.mark.parametrize("end", [0, 1])
def test_a_range_with_a_zero_point_that_clips_too_much_at_one_end_is_named(end, subject):
    model, findings = subject(policy="cpu")
    node = named_nodes(model)[FC2]
    node.bounds = [each / 4 if number == end else each for number, each in enumerate(node.bounds.tolist())]
    (advice,) = [one for one in advise(findings) if one.kind == "clipped"]
    side = findings.calibration.statistics[FC2].sides[end]
    share = clipped_share(side, abs(node.bounds[end].item())) * side.counts.sum()
    share /= findings.calibration.statistics[FC2].counts.sum()
    said = float(re.search(r"up to (.*?) % of their nodes", advice.text)[1])  # the other end clips almost nothing
    assert advice.nodes == (FC2,) and said == pytest.approx(100 * share, abs=0.2)


def test_pictures_all_alike(subject):
    """One picture many times tells nothing about other pictures."""
    (advice,) = advise(subject(torch.randn(1, 3, 32, 32).expand(8, -1, -1, -1))[1])
    assert advice.kind == "alike" and advice.warns


def test_branches_that_do_nothing_and_values_beyond_float16(subject):
    def damage(model):
        model.layers[0].blocks[0].mlp.fc1.weight.data.zero_()
        model.layers[0].blocks[0].mlp.fc1.bias.data.zero_()
        model.layers[0].blocks[1].norm2.weight.data *= 1e5

    found = {advice.kind: advice for advice in advise(subject(prepare=damage)[1])}
    assert found["dead"].warns and any("fc1" in name or "fc2" in name for name in found["dead"].nodes)
    assert found["beyond-half"].warns and "float16" in found["beyond-half"].text


@pytest.mark.slow
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
    found = outlier_channels(context, exchanged=False)
    cures = {one.place: one.cure for one in found if one.cure}
    assert cures["layers.0.blocks.0.norm1"] == ("layers.0.blocks.0.norm1", "layers.0.blocks.0.attn.qkv")
    told = advise(Findings(findings.nodes, findings.calibration, findings.method, "x", outlier_channels=found))
    (advice,) = [one for one in told if one.kind == "outliers"]
    assert "norm" in advice.text and "equalize" in advice.text
    assert not [one for one in outlier_channels(context, exchanged=True) if one.cure]
    told = advise(replace(findings, outlier_channels=outlier_channels(context, exchanged=False, tried=True)))
    (advice,) = [one for one in told if one.kind == "outliers"]
    assert "gained nothing" in advice.text and "could reduce" not in advice.text


@pytest.mark.parametrize(
    "policy, lost",
    [("ft-mode1", ["attn.proj._aftergemm", "mlp.fc2._aftergemm", "mlp.fc2._weight"]),
     ("ft-mode2", ["attn.proj._aftergemm", "attn.proj._weight"]), ("cpu", [])],
)  # fmt: skip
def test_a_massive_channel_of_the_stream_is_warned_of_by_name(policy, lost, subject):
    def massive(model):
        for block in model.layers[0].blocks:
            for producer in (block.attn.proj, block.mlp.fc2):
                producer.weight.data[3] *= 20

    images = torch.randn(8, 3, 32, 32)
    model, findings = subject(images, prepare=massive, policy=policy)
    found = outlier_channels(PassContext(model, [images], exchanges=list_exchanges(model)), exchanged=True)
    told = [one for one in advise(replace(findings, outlier_channels=found)) if one.kind == "outliers-uncured"]
    assert [one.warns for one in told] == [True] * bool(lost)
    for advice in told:
        assert {f"layers.0.blocks.{at}.{node}_quantizer" for at in (0, 1) for node in lost} <= set(advice.nodes)
        assert f"channel 3 of {advice.nodes[0]} (" in advice.text and "others keep" in advice.text
        assert "‹policy› qdq or cpu" in advice.text and ("ft-mode2 rounds" in advice.text) == (policy == "ft-mode1")


def test_a_stream_that_a_policy_leaves_uneven_is_warned_of(tiny_model):
    """V2's last stream takes a multiplication to even out, which FasterTransformer's kernels lack."""
    named = {}
    for policy in ("ft-mode1", "qdq"):
        model = tiny_model("swinv2", DEPTHS=[1, 1], NUM_HEADS=[1, 2])
        model.layers[0].downsample.norm.weight.data[3] *= 100
        apply_policy(model, load_policy(policy))
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        calibration = calibrate(model, [images], Method("max"))
        found = outlier_channels(PassContext(model, [images], exchanges=list_exchanges(model)), exchanged=False)
        named[policy] = {one.place: one.channels for one in found if not one.cure and one.rest_db < 25}
        told = advise(Findings(named_nodes(model), calibration, Method("max"), policy, outlier_channels=found))
        warned = [one.text for one in told if one.kind == "outliers-uncured" and one.warns]
        assert len(warned) == (policy == "ft-mode1")
        assert all("channel 3 of layers.1" in text and "‹policy› qdq or cpu" in text for text in warned)
    assert named["ft-mode1"]["layers.1.blocks.0.attn.qkv._input_quantizer"] == (3,) and not named["qdq"]


@pytest.mark.parametrize("times", [10, 40])
def test_the_sqnr_of_other_channels_is_that_of_rounding(times):
    """A step of times / 127 makes errors of its square / 12; values are uniform in one."""
    layer = QuantLinear(16, 4, bias=False)
    named_nodes(model := torch.nn.Sequential(layer))
    node = layer._input_quantizer
    node.amax = torch.tensor(float(times))
    change(node, enabled=True)
    x = torch.rand(8, 512, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[..., 5] *= times
    (found,) = outlier_channels(PassContext(model, [x]), exchanged=True)
    assert found.channels == (5,) and found.times == pytest.approx(times, rel=0.01)
    assert found.rest_db == pytest.approx(10 * math.log10((1 / 3) * 12 / (times / 127) ** 2), abs=0.3)
