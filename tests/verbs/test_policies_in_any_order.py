"""Ranges belong to the checkpoint: a score under one policy does not depend on the policies scored before."""

from dataclasses import replace

import pytest
import torch
from commands import command
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_quant.config import load_config
from swin_quant.loading import load_for_scoring
from swin_quant.quant.policy import Rule, load_policy
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.score.engine import torch_engines

CPU = torch.device("cpu")
NAMES = ("ft-mode1", "qdq", "cpu")
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
# for each checkpoint of learned ranges: its policy (one range a weight, or one a row) and bits
LEARNED = {"W8A8": ("ft-mode1", 8), "W4A4 rows": ("qdq", 4)}


def policies(bits):
    rules = (Rule(nodes=("role:gemm_weight", "role:activation"), bits=bits),)
    return [replace(load_policy(name).and_then(*rules), name=f"{name} {bits}") for name in NAMES]


@pytest.fixture(scope="module")
def checkpoints(scoring_flags, float_flags, tmp_path_factory):
    """Name -> (checkpoint, bits): one from PTQ, and those from QAT with learned ranges."""
    root = tmp_path_factory.mktemp("any_order")
    recipe = root / "recipe.yaml"
    recipe.write_text("epochs: 1\nbatch_size: 4\naugment: {crop: padded}\noptimizer: {lr: 1.0e-2, amax_lr: 0.1}\n")
    made = {}
    for bits in (8, 4):
        precision = ["--wprec", bits, "--aprec", bits, "--calibrator", "mse"]
        folder = root / f"ptq{bits}"
        command("calibrate", *float_flags, "--policy", "ft-mode1", *precision, "--output", folder)
        made[f"PTQ {bits}"] = folder / "swin_micro_calib.pth", bits
    for name, (policy, bits) in LEARNED.items():
        start = ["--checkpoint", root / f"ptq{bits}" / "swin_micro_calib.pth", "--policy", policy]
        how = ["--wprec", bits, "--aprec", bits, "--amax", "learned", "--recipe", recipe, "--no-eval"]
        command("finetune", *scoring_flags, *start, *how, "--output", root / name)
        made[name] = root / name / "swin_micro_qat.pth", bits
    return made


@pytest.fixture(scope="module")
def scored(checkpoints, micro):
    """Name -> the checkpoint's model, and each policy's logits on a model loaded for that policy alone."""
    cfg = load_config(micro / "swin.yaml")
    made = {}
    for name, (file, bits) in checkpoints.items():
        alone = {}
        for policy in policies(bits):
            (engine,) = quantized(load_for_scoring(cfg, str(file), [policy])[0].module, [policy]).values()
            alone[policy.name] = engine(IMAGES)
        made[name] = load_for_scoring(cfg, str(file), policies(bits)[:1])[0].module, bits, alone
    return made


def quantized(model, chosen):
    engines = torch_engines(model, CPU, None, chosen)
    return {engine.policy: engine for engine in engines.values() if engine.policy}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["PTQ 8", "PTQ 4", *LEARNED])
@settings(max_examples=8)
@given(order=st.data())
def test_any_list_in_any_order_scores_as_each_alone(scored, name, order):
    model, bits, alone = scored[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    chosen = order.draw(st.lists(st.sampled_from(policies(bits)), unique_by=lambda policy: policy.name, min_size=1))
    engines = quantized(model, chosen)
    for policy in order.draw(st.permutations(chosen)):
        assert torch.equal(engines[policy.name](IMAGES), alone[policy.name]), policy.name
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.slow
def test_policies_differ_and_learned_ranges_are_not_those_of_the_weights(scored):
    """Otherwise the test above would compare nothing."""
    for name, (model, _, alone) in scored.items():
        assert len({tuple(logits.flatten().tolist()) for logits in alone.values()}) >= 3, name
        if name in LEARNED:
            nodes = [(key, node) for key, node in named_nodes(model).items() if node.role is Role.GEMM_WEIGHT]
            weights = {key: model.get_submodule(key.rpartition(".")[0]).weight for key, _ in nodes}
            assert any(node.amax.max() != weights[key].abs().max() for key, node in nodes), name
            assert {node.amax.dim() for _, node in nodes} == ({2} if "rows" in name else {0}), name
