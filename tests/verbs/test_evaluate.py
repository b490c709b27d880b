"""`evaluate`: the engines and policies that it scores, against arithmetic on logits, and the results that it
records."""

import functools
import json
import shutil
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from commands import command
from nightly import share
from PIL import Image
from torch import nn

import swin_quant as sq
from swin_quant.base.cpu import features
from swin_quant.base.errors import UsageError
from swin_quant.checkpoint import load_float
from swin_quant.config import load_config
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from swin_quant.loading import load_for_scoring
from swin_quant.models import build_model
from swin_quant.quant.policy import Rule, load_policy
from swin_quant.quant.quantizer import Role, State, named_nodes
from swin_quant.score import engine
from swin_quant.score.engine import Engine, half_type, torch_engines
from swin_quant.verbs import evaluation, timing
from tests.helpers.refusals import refused


@pytest.fixture
def evaluate(run, scoring_flags, card_of, own):
    """evaluate(flags ...) -> the card of `own` after an evaluation with these flags."""

    def go(*flags):
        run("evaluate", *scoring_flags, "--checkpoint", own, *flags).ok()
        return card_of(own)

    return go


def by_engine(card):
    return {(result["precision"], result["policy"]): result for result in card["results"]}


def without_time(result):
    return {key: value for key, value in result.items() if key != "ms_per_picture"}


def test_a_float_checkpoint_against_arithmetic(run, scoring_flags, micro, pictures, tmp_path):
    flags = [*scoring_flags, "--checkpoint", micro / "swin.pth", "--half", "bfloat16", "--batch", 2]
    done = run("evaluate", *flags, "--output", tmp_path)
    assert done.code == 0 and "float32" in done.out and "bfloat16" in done.out
    card = json.loads((tmp_path / "swin_micro_eval.json").read_text())
    float32, half = card["results"]
    files = sorted((pictures / "val").rglob("*.png"))
    labels = np.array([("cat", "dog", "fox").index(file.parent.name) for file in files])
    images = np.stack([(np.asarray(Image.open(file)) / 255 - IMAGENET_MEAN) / IMAGENET_STD for file in files])
    model = build_model(load_config(micro / "swin.yaml"))
    load_float(model, micro / "swin.pth")
    with torch.no_grad():
        logits = model(torch.as_tensor(images.transpose(0, 3, 1, 2), dtype=torch.float32)).double().numpy()
    loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(7), labels]
    assert float32["acc1"] == pytest.approx(100 * (logits.argmax(1) == labels).mean())
    assert float32["acc5"] == 100 and float32["pictures"] == 7 and float32["batch_size"] == 2
    assert float32["loss"] == pytest.approx(loss.mean(), rel=1e-5)
    assert float32["agreement"] is None is float32["delta_acc1"]  # it is the baseline
    assert half["precision"] == "bfloat16" and 20 < half["sqnr_db"] < 70 and half["agreement"] > 50
    assert float32["ms_per_picture"] > 0


def test_policy_and_preprocessing_are_those_of_the_card(evaluate, own, card_of):
    before = card_of(own)
    after = evaluate("--batch", 4, "--opts", "DATA.INTERPOLATION", "nearest")  # preprocessing is the card's, too
    assert all(r["ms_per_picture"] > 0 for r in after["results"]) and 0 <= after["results"][1]["delta_acc1_se"] < 100
    assert [without_time(r) for r in after["results"]] == [without_time(r) for r in before["results"]]
    assert {**after, "results": None} == {**before, "results": None}


def test_a_new_result_replaces_the_one_of_its_identity_and_no_other(evaluate):
    first = evaluate("--policy", "ft-mode2")
    assert [r["policy"] for r in first["results"]] == [None, "ft-mode1", "ft-mode2"]
    second = evaluate("--policy", "ft-mode1", "--batch", 3)
    assert [r["policy"] for r in second["results"]] == [None, "ft-mode1", "ft-mode2"]
    assert [r["batch_size"] for r in second["results"]] == [3, 3, 8]
    third = evaluate("--split", "train")
    others = [(r["dataset"]["split"], r["policy"]) for r in third["results"]][3:]
    assert others == [("train", None), ("train", "ft-mode1")]


def test_results_written_by_another_process_are_kept(evaluate, own, card_of, monkeypatch):
    path, before = own.with_suffix(".json"), card_of(own)
    theirs = {**before["results"][0], "engine": "openvino"}
    score = evaluation.score_engines

    def scored(*args):
        path.write_text(json.dumps({**before, "results": [*before["results"], theirs]}))
        return score(*args)

    monkeypatch.setattr(evaluation, "score_engines", scored)
    found = evaluate("--policy", "qdq")["results"]
    assert theirs in found and [r["policy"] for r in found] == [None, "ft-mode1", None, "qdq"]


def test_a_float_result_of_another_run_is_kept(run, scoring_flags, micro, tmp_path):
    """A second evaluation of the same weights adds to NAME_eval.json; one of other weights replaces it."""
    card = tmp_path / "swin_micro_eval.json"
    flags = [*scoring_flags, "--output", tmp_path, "--checkpoint"]
    assert run("evaluate", *flags, micro / "swin.pth").code == 0
    assert run("evaluate", *flags, micro / "swin.pth", "--split", "train").code == 0
    assert [r["dataset"]["split"] for r in json.loads(card.read_text())["results"]] == ["val", "train"]
    state = torch.load(micro / "swin.pth", weights_only=True)
    state["model"]["head.bias"] += 1
    torch.save(state, tmp_path / "other.pth")
    assert run("evaluate", *flags, tmp_path / "other.pth").code == 0
    content = json.loads(card.read_text())
    assert content["source"]["file"] == "other.pth" and len(content["results"]) == 1


@pytest.mark.parametrize(
    ("flags", "precision", "policy"),
    [
        (["--wprec", 4], "W4A8", "ft-mode1 W4"),
        (["--saturation-safe"], "W7A8", "ft-mode1 saturation-safe"),
        (["--off", "*attn*"], "int8", "ft-mode1 -*attn*"),
    ],
)
def test_a_changed_policy_is_another_result(evaluate, flags, precision, policy):
    """Recorded as ft-mode1, it would replace the results of ft-mode1."""
    results = by_engine(evaluate("--policy", "ft-mode1", *flags))
    assert list(results) == [("float32", None), ("int8", "ft-mode1"), (precision, policy)]
    changed, base = results[precision, policy], results["int8", "ft-mode1"]
    if "prec" in flags[0]:
        assert changed["sqnr_db"] < base["sqnr_db"] - 5
    elif "attn" in policy:
        assert changed["sqnr_db"] > base["sqnr_db"]


def test_two_policies_of_one_name_are_both_scored_and_told_apart(run, scoring_flags, own, card_of, tmp_path):
    """A file called `cpu` beside ours: in the pass, the card and the table, and when either is scored again."""
    path = tmp_path / "theirs.yaml"
    path.write_text("name: cpu\nrules:\n  - enable: ['role:gemm_weight', 'role:gemm_input']\n  - disable: '*.mlp.*'\n")
    mine = load_policy(str(path)).sha256
    go = ["evaluate", *scoring_flags, "--checkpoint", own, "--policy"]
    done = run(*go, "cpu", path)
    assert done.code == 0 and f"cpu (mine {mine[:6]})" in done.out
    both = [r for r in card_of(own)["results"] if r["policy"] == "cpu"]
    assert [r["policy_sha256"] for r in both] == [load_policy("cpu").sha256, mine]
    assert both[0]["sqnr_db"] != both[1]["sqnr_db"]
    for again in (path, "cpu"):
        assert run(*go, again).code == 0
        found = [r for r in card_of(own)["results"] if r["policy"] == "cpu"]
        assert [without_time(r) for r in found] == [without_time(r) for r in both]
    assert f"cpu (mine {mine[:6]})" in run("report", own.with_suffix(".json")).out
    shutil.copy(path, tmp_path / "copy.yaml")
    assert "is given twice, by its rules" in run(*go, path, tmp_path / "copy.yaml").error(2)


CPU = torch.device("cpu")
MODE1, MODE2, FLOAT = (load_policy(name) for name in ("ft-mode1", "ft-mode2", "float"))


def test_the_float_policy_needs_no_range(micro, calibrated, tmp_path):
    cfg, weights, alone = load_config(micro / "swin.yaml"), str(micro / "swin.pth"), str(tmp_path / "alone.pth")
    shutil.copy(calibrated, alone)
    for file in (weights, alone):
        assert load_for_scoring(cfg, file, [FLOAT])[1] == [FLOAT]
    refused(lambda: load_for_scoring(cfg, alone), "alone.pth: is calibrated but has no run card", kind=UsageError)
    refused(lambda: load_for_scoring(cfg, weights, [FLOAT, MODE1]), "never calibrated")


@pytest.fixture
def module(calibrated):
    return sq.load(calibrated).module


def test_engines_are_float_then_half_then_each_policy_that_enables_a_node(module):
    engines = torch_engines(module, CPU, "bfloat16", [MODE1, FLOAT, MODE2])
    assert list(engines) == ["float32", "bfloat16", "int8 ft-mode1", "int8 ft-mode2"]
    images = torch.randn(2, 3, 32, 32)
    first = {label: engine(images).float() for label, engine in engines.items()}
    assert {node.state for node in named_nodes(module).values()} == {State.OFF}
    for label in reversed(engines):  # in any order: no engine leaves anything behind in the model they share
        assert torch.equal(engines[label](images).float(), first[label])
    assert len({tuple(logits.flatten().tolist()) for logits in first.values()}) == 4


@pytest.mark.parametrize(("flags", "auto"), [("sse2 avx512_bf16", "bfloat16"), ("bf16", "bfloat16"), ("avx2", None)])
def test_half_types(monkeypatch, flags, auto):
    monkeypatch.setattr(engine, "features", functools.partial(features, text=f"flags : {flags}"))
    assert half_type("auto", CPU) == auto and half_type("auto", torch.device("cuda")) == "float16"
    assert half_type("none", CPU) is None and half_type("float16", CPU) == "float16"
    refused(lambda: half_type("int4", CPU), "half int4", kind=UsageError)


def test_labelled_tensors_score_as_their_pictures_do(model, train, val, tensors):
    sq.calibrate(model, train, "qdq")
    one, other = sq.evaluate(model, val, half="none"), sq.evaluate(model, tensors("val"), half="none")
    assert [(r.acc1, r.pictures) for r in one.results] == [(r.acc1, r.pictures) for r in other.results]
    again, fewer = (sq.evaluate(model, tensors(split, 2), half="none") for split in ("val", "train"))
    first = other.quantized.dataset
    assert (first["name"], first["pictures"]) == ("tensors", 7) and again.quantized.dataset == first
    assert fewer.quantized.dataset["sha256"] != first["sha256"]  # so the two are not compared


def test_a_network_in_training_mode_scores_as_it_does_out_of_it_and_stays_in_it():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.9), nn.Flatten(), nn.LazyLinear(4))
    images, labels = torch.randn(32, 3, 8, 8), torch.arange(32) % 4
    network(images)  # gives norms running statistics
    state = {name: value.clone() for name, value in network.eval().state_dict().items()}
    expected = int((network(images).argmax(1) == labels).sum())
    network.train()
    scored = sq.evaluate(sq.Model(network), [(images, labels)], half="none")
    assert scored.float32.acc1 == pytest.approx(100 * expected / 32)
    sq.analyze(network, images, check_replacements=True)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    network.eval()[2].train()
    assert sq.evaluate(sq.Model(network), [(images, labels)], half="none").float32.acc1 == scored.float32.acc1
    assert network[2].training and not network.training


def test_a_sample_is_seeded_and_is_not_taken_for_all_pictures(run, scoring_flags, micro, tmp_path):
    flags = [*scoring_flags, "--checkpoint", micro / "swin.pth", "--half", "none", "--output", tmp_path]

    def scored(*more):
        assert run("evaluate", *flags, *more).code == 0
        (result,) = json.loads((tmp_path / "swin_micro_eval.json").read_text())["results"]
        (tmp_path / "swin_micro_eval.json").unlink()
        return result["dataset"]

    five = scored("--pictures", 5)
    assert five["pictures"] == 5 and scored("--pictures", 5) == five
    other = scored("--pictures", 5, "--seed", 2)
    assert other["pictures"] == 5 and other["sha256"] != five["sha256"]
    assert scored("--pictures", 7) == scored()
    for count in (0, 8):
        has = run("evaluate", *flags, "--pictures", count).error(2)
        assert f"--pictures {count}" in has or f"--pictures asks for {count}" in has


def test_without_accuracy_the_engines_are_timed_in_turns_without_pictures(run, calibrated, snapshot):
    before = snapshot(calibrated.parent)
    words = ["--no-accuracy", "--batch", 2, "--half", "none", "--device", "cpu"]
    rows = json.loads(run("evaluate", calibrated, *words, "--json").ok().out)
    assert len(rows) == 2 and rows[0]["speedup"] == 1.0 and rows[0]["batch"] == rows[1]["batch"] == 2
    assert all(row["ms"] > 0 for row in rows) and rows[0]["subject"] == "float32 on torch"
    first, second = run("evaluate", calibrated, *words).ok().out.splitlines()
    assert first.endswith("images/s") and second.endswith("times as fast as float32 on torch")
    assert snapshot(calibrated.parent) == before, "latencies of noise are no results"


def test_a_latency_is_held_against_the_float_of_its_own_engine(monkeypatch):
    monkeypatch.setattr(timing, "timed_in_turns", lambda *_: [(4.0, 2.0, 1.0, 8.0, 2.0)])
    names = {"float32": "torch", "float32 on openvino": "openvino", "int8": "openvino"}
    names |= {"int8 cpu": "onnxruntime", "int8 qdq": "onnxruntime"}  # whose float was not timed
    policies = {key: key if key.startswith("int8") else None for key in names}
    engines = {key: Engine(name, "any", policies[key], lambda images: images) for key, name in names.items()}
    found = timing.compare_latency(engines, 1, (3, 8, 8))
    assert [one.speedup for one in found] == [1, 2, 2, 0.5, 2]
    first, own = "float32 on torch", "float32 on openvino"
    assert [one.beside for one in found] == ["", first, own, first, first]


NAMES = ("ft-mode1", "qdq", "cpu")
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def policies(bits):
    rules = (Rule(nodes=("role:gemm_weight", "role:activation"), bits=bits),)
    return [replace(load_policy(name).and_then(*rules), name=f"{name} {bits}") for name in NAMES]


@pytest.fixture
def checkpoints(scoring_flags, float_flags, tmp_path):
    """checkpoints(name, policy, bits) -> name -> checkpoint: one from PTQ, and one from QAT with learned ranges."""

    def make(name, policy, bits):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("epochs: 1\nbatch_size: 4\naugment: {crop: padded}\noptimizer: {lr: 1.0e-2, amax_lr: 0.1}\n")
        precision = ["--wprec", bits, "--aprec", bits]
        start = tmp_path / f"ptq{bits}" / "swin_micro_calib.pth"
        words = [*precision, "--calibrator", "mse", "--output", start.parent]
        command("calibrate", *float_flags, "--policy", "ft-mode1", *words)
        how = [*precision, "--policy", policy, "--amax", "learned", "--recipe", recipe, "--no-eval"]
        command("finetune", *scoring_flags, "--checkpoint", start, *how, "--output", tmp_path / name)
        return {f"PTQ {bits}": start, name: tmp_path / name / "swin_micro_qat.pth"}

    return make


def quantized(model, chosen):
    engines = torch_engines(model, CPU, None, chosen)
    return {engine.policy: engine for engine in engines.values() if engine.policy}


@torch.no_grad()
@pytest.mark.parametrize(
    ("trained", "policy", "bits"), share([("W4A4 rows", "qdq", 4), ("W8A8", "ft-mode1", 8)], 2)
)  # a learned range for each row of a weight, and one for all of it
def test_any_list_in_any_order_scores_as_each_alone(checkpoints, micro, trained, policy, bits):
    cfg = load_config(micro / "swin.yaml")
    with torch.enable_grad():
        made = checkpoints(trained, policy, bits)
    for name, file in made.items():
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
