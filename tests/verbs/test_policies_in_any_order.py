"""Ranges belong to the checkpoint: a score under one policy does not depend on the policies scored before."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from commands import command

from swin_quant.config import load_config
from swin_quant.loading import load_for_scoring
from swin_quant.quant.policy import Rule, load_policy
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.score.engine import torch_engines

CPU = torch.device("cpu")
NAMES = ("ft-mode1", "qdq", "cpu")
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def policies(bits):
    rules = (Rule(nodes=("role:gemm_weight", "role:activation"), bits=bits),)
    return [replace(load_policy(name).and_then(*rules), name=f"{name} {bits}") for name in NAMES]


@pytest.fixture(scope="module")
def checkpoints(scoring_flags, float_flags, tmp_path_factory):
    """Name -> (checkpoint, bits): one from PTQ, and those from QAT with learned ranges, one a weight or one a row."""
    root = tmp_path_factory.mktemp("any_order")
    recipe = root / "recipe.yaml"
    recipe.write_text("epochs: 1\nbatch_size: 4\naugment: {crop: padded}\noptimizer: {lr: 1.0e-2, amax_lr: 0.1}\n")
    made = {}
    for name, policy, bits in (("W8A8", "ft-mode1", 8), ("W4A4 rows", "qdq", 4)):
        precision = ["--wprec", bits, "--aprec", bits]
        start = root / f"ptq{bits}" / "swin_micro_calib.pth"
        words = [*precision, "--calibrator", "mse", "--output", start.parent]
        command("calibrate", *float_flags, "--policy", "ft-mode1", *words)
        how = [*precision, "--policy", policy, "--amax", "learned", "--recipe", recipe, "--no-eval"]
        command("finetune", *scoring_flags, "--checkpoint", start, *how, "--output", root / name)
        made |= {f"PTQ {bits}": (start, bits), name: (root / name / "swin_micro_qat.pth", bits)}
    return made


def quantized(model, chosen):
    engines = torch_engines(model, CPU, None, chosen)
    return {engine.policy: engine for engine in engines.values() if engine.policy}


@pytest.mark.slow
@torch.no_grad()
def test_any_list_in_any_order_scores_as_each_alone(checkpoints, micro):
    cfg = load_config(micro / "swin.yaml")
    for name, (file, bits) in checkpoints.items():
        alone, every = {}, policies(bits)
        for policy in every:  # each on a model that was loaded for it alone
            (engine,) = quantized(load_for_scoring(cfg, str(file), [policy])[0].module, [policy]).values()
            alone[policy.name] = engine(IMAGES)
        assert len({tuple(logits.flatten().tolist()) for logits in alone.values()}) == len(every), name
        model = load_for_scoring(cfg, str(file), every[:1])[0].module
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for chosen in [*permutations(every), *permutations(every, 2)]:
            engines = quantized(model, chosen)
            for policy in reversed(chosen):
                assert torch.equal(engines[policy.name](IMAGES), alone[policy.name]), (name, policy.name)
        after = model.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
        if not name.startswith("PTQ"):  # learned ranges are not those of the weights
            nodes = [(key, node) for key, node in named_nodes(model).items() if node.role is Role.GEMM_WEIGHT]
            weights = {key: model.get_submodule(key.rpartition(".")[0]).weight for key, _ in nodes}
            assert any(node.amax.max() != weights[key].abs().max() for key, node in nodes), name
            assert {node.amax.dim() for _, node in nodes} == ({2} if "rows" in name else {0}), name
