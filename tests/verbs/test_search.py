"""search: the policy is held against brute force on a small model; in Python, as a command, and by quantize."""

import itertools
import json
import math
import shutil

import pytest
import torch
import yaml
from commands import command
from hypothesis import given
from hypothesis import strategies as st

import swin_quant as sq
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.distance import Loss
from swin_quant.quant.policy import Rule, apply_policy, dequantize, load_policy, quantize
from swin_quant.quant.sensitivity import group_by_layer
from swin_quant.verbs import search, search_costs, timing
from swin_quant.verbs.search_costs import Layer, Losses, in_order, measure_layers
from swin_quant.verbs.sensitivity import read_sample
from swin_quant.verbs.timing import Timer

AUTO = "swin_micro_auto_onnxruntime"
OFF = ["*.qkv.*", "*.proj.*", "*.fc1.*"]  # each remaining group of layers is exported and timed


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, write_config, randomise, pictures):
    """The folder of a float and a calibrated model of one block."""
    folder = tmp_path_factory.mktemp("search")
    config = write_config(folder, "swin", DEPTHS=[1], NUM_HEADS=[2])
    torch.save({"model": randomise(build_model(load_config(config))).state_dict()}, folder / "x.pth")
    words = ["--cfg", config, "--data-path", pictures, "--device", "cpu", "--output", folder]
    command("calibrate", folder / "x.pth", "--pictures", 8, *words)
    return folder


@pytest.fixture
def words(calibrated, pictures, tmp_path):
    """The arguments that search it."""
    file = shutil.copytree(calibrated, tmp_path / "in") / "swin_micro_calib.pth"
    found = ["search", file, "--data-path", pictures, "--engine", "onnxruntime", "--pictures", 12, "--threads", 1]
    return [*found, "--device", "cpu", "--output", tmp_path, "--json", tmp_path / "x.json"]


@pytest.fixture
def model(calibrated):
    return sq.load(calibrated / "swin_micro_calib.pth")


@pytest.fixture
def some(pictures):
    return sq.pictures(pictures, "train", 12)


def logits(module, batches):
    with torch.inference_mode():
        return torch.cat([module(images) for images in batches]).double()


def sqnr(module, policy, batches):
    """Of whole forward passes under a policy, in dB."""
    dequantize(module)
    expected = logits(module, batches)
    apply_policy(module, policy)
    quantize(module)
    error = (logits(module, batches) - expected).square().sum()
    dequantize(module)
    return 10 * math.log10(expected.square().sum() / error) if error else math.inf


def test_the_search_keeps_the_budget_and_is_about_as_fast_as_the_best_subset(clock, model, some, tmp_path):
    """A greedy knapsack loses at most its largest item against the best of all subsets (Dantzig, 1957)."""
    base = load_policy("qdq")
    batches = 4 * read_sample(model, some, 12).batches  # what chooses is what confirms
    losses = Losses(model, base, "cpu", read_sample(model, batches, 0))
    images = [images for images, _ in losses.choosing]
    assert len(images[0]) == 12
    layers = group_by_layer(losses.nodes(base))
    best = {}  # nodes of a subset of layers in float -> dB on either part of the pictures
    for size in range(len(layers) + 1):
        for names in itertools.combinations(layers, size):
            off = tuple(node for name in names for node in layers[name])
            policy = base.and_then(Rule(disable=off)) if off else base
            best[off] = sqnr(losses.module, policy, images)
    for more in (0.5, 3.0, 8.0):
        limit = best[()] + more
        budget = sq.Budget(min_sqnr=limit)
        found = sq.search(sq.load(model.file), batches, "onnxruntime", tmp_path, base, budget=budget)
        assert found and sqnr(losses.module, found.policy, images) >= limit
        fewest = min(len(off) for off, decibels in best.items() if decibels >= limit)
        left = sum(len(layers[one["layer"]]) for one in found.record["left_float"])
        assert fewest <= left <= fewest + max(map(len, layers.values())), (left, fewest)


def test_the_order_of_layers_is_that_of_what_each_measures_alone(clock, model, some):
    base = load_policy("qdq")
    timer = Timer(model, "onnxruntime", base, 1, search.EngineOptions())
    losses = Losses(model, base, "cpu", read_sample(model, some, 12))
    images = [images for images, _ in losses.choosing]
    found = in_order(measure_layers(timer, losses))
    whole = timer.rounds(None)[0][0]
    costs = []
    for layer in found:
        alone = sqnr(losses.module, search_costs.without(base, [one for one in found if one != layer]), images)
        saved = timer.rounds(search_costs.without(base, [layer]))[0][1] - whole
        assert (layer.sqnr_db, layer.saved_ms) == (pytest.approx(alone, abs=1e-6), pytest.approx(saved))
        costs.append(10 ** (-alone / 10) / saved)
    assert costs == sorted(costs, reverse=True) and len({layer.name for layer in found}) == len(found) == 5


@given(st.lists(st.tuples(st.floats(0, 80), st.floats(-0.1, 1)), min_size=1, max_size=9))
def test_layers_that_int8_makes_slower_stay_float_first(pairs):
    ordered = in_order([Layer(str(number), (), *pair) for number, pair in enumerate(pairs)])
    slower = sum(one.saved_ms < 0 for one in ordered)
    assert all(one.saved_ms < 0 for one in ordered[:slower]) and len(ordered) == len(pairs)


@pytest.mark.parametrize(
    "rounds, beyond, best",
    [((1.1, 1.3, 1.2), 1.1, 1.1), ((0.9, 0.8, 0.95), 0.8, 0.8), ((1.1, 0.9, 1.3), 1.0, 0.9), ((1.0, 1.0), 1.0, 1.0)],
)
def test_rounds_that_do_not_agree_tell_nothing(monkeypatch, rounds, beyond, best):
    monkeypatch.setattr(Timer, "rounds", lambda *_: [(1.0, ms) for ms in rounds])
    timer = object.__new__(Timer)
    assert (timer.ratio(None, beyond_chance=True), timer.ratio(None)) == (beyond, best)


def test_on_the_engine_itself(words, run, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.01)
    done = run(*words, "--policy", "qdq", "--off", *OFF, "--min-sqnr", 0).ok()
    result = json.loads((tmp_path / "x.json").read_text())
    (card,) = RunCard.read(words[1].with_suffix(".json")).searches
    assert [one["ms"] for one in card["tried"]] == sorted(row["ms"] for row in result["candidates"])
    assert result["met"] and "expected" in done.out


def test_command_python_file_and_card_agree(clock, words, run, model, some, tmp_path):
    done = run(*words, "--policy", "qdq", "--min-sqnr", 50).ok()
    result, text = json.loads((tmp_path / "x.json").read_text()), (tmp_path / f"{AUTO}.yaml").read_text()
    found = sq.search(model, some, "onnxruntime", tmp_path / "py", "qdq", budget=sq.Budget(min_sqnr=50), threads=1)
    assert found and found.file.read_text() == text
    assert model.card.searches == RunCard.read(words[1].with_suffix(".json")).searches == [found.record]
    assert model.policy.sha256 == found.policy.sha256 == load_policy(str(found.file)).sha256
    left = {one["layer"] for one in result["left_float"]}
    disabled = yaml.safe_load(text)["rules"][-1]["disable"]
    assert left == {node.rpartition(".")[0] for node in disabled} and text.count("dB alone; int8 saves") == len(left)
    assert "SQNR at least 50 dB. It is qdq less" in found.policy.description
    assert "budget: SQNR at least 50 dB: met" in " ".join(str(found).split()) and "<table>" in found._repr_html_()
    said = " ".join(done.out.split())
    assert "swin-quant export" in said and f"float: {result['left_float'][0]['layer']}" in said


def test_a_choice_that_the_other_pictures_refute_is_made_again(clock, model, some, tmp_path, monkeypatch):
    """On the pictures that choose nothing is lost; on the others a point for each 1e-3 nats."""
    choose, confirm = Losses.choose, Losses.confirm
    flatter = lambda self, policy: Loss(60.0, choose(self, policy).kl, 100.0, 0.0)  # noqa: E731
    strict = lambda self, policy: Loss(60.0, 0.0, 100.0, 1000 * confirm(self, policy).kl)  # noqa: E731
    monkeypatch.setattr(Losses, "choose", flatter)
    monkeypatch.setattr(Losses, "confirm", strict)
    qdq = load_policy("qdq")
    whole = 1000 * confirm(Losses(model, qdq, "cpu", read_sample(model, some, 12)), qdq).kl
    found = sq.search(model, some, "onnxruntime", tmp_path, "qdq", budget=sq.Budget(max_drop=whole / 3))
    (chosen,) = (one for one in found.record["tried"] if one["found"])
    assert found and chosen["loss"]["drop"] <= whole / 3 and found.record["left_float"]


def test_confirming_pictures_are_not_choosing_pictures(model, some):
    sample = read_sample(model, some, 12)
    losses = Losses(model, load_policy("qdq"), "cpu", sample)
    chosen, others = (torch.cat([images for images, _ in one]) for one in (losses.choosing, losses.confirming))
    assert torch.equal(torch.cat([chosen, others]), torch.cat(sample.batches)) and (len(chosen), len(others)) == (3, 9)


def test_a_drop_on_training_pictures_counts_twice(model, pictures):
    drops, qdq = [], load_policy("qdq")
    for split in ("train", "val"):
        sample = read_sample(model, sq.pictures(pictures, "val", 7), 7)._replace(split=split)
        drops.append(Losses(model, qdq, "cpu", sample).confirm(qdq.bits("role:activation", 3)))
    assert drops[0].drop == pytest.approx(2 * drops[1].drop) and drops[1].drop_error > 0


def test_a_budget_that_cannot_be_met_leaves_the_model_as_it_was(clock, model, some, tmp_path, caplog):
    before = model.policy
    found = sq.search(model, some, "onnxruntime", tmp_path, "qdq", budget=sq.Budget(min_sqnr=1, max_ms=1e-6))
    assert not found and "the budget cannot be met (SQNR at least 1 dB, at most 1e-06 ms)" in caplog.text
    assert model.policy == before and "NOT met" in str(found) and found.file.is_file()


@pytest.mark.parametrize("limit, met", [(0.39, False), (0.41, True)])
def test_a_budget_counts_the_drop_with_two_errors(limit, met):
    loss = Loss(16.2, 2e-2, 98.0, 0.2, drop_error=0.1)
    assert sq.Budget(min_agreement=98, min_sqnr=16, max_drop=limit).allows(loss) is met


def test_wrong_input_is_one_line(words, run, calibrated):
    for flags, says in (
        ("--max-drop 1 --float-type bfloat16", "bfloat16: onnxruntime runs what is not int8 in float32 here"),
        ("--max-drop nan", "--max-drop nan: must be a number from 0"),
        ("--max-drop -1", "--max-drop -1: must be a number from 0"),
        ("--min-agreement 101", "--min-agreement 101: must be a number from 0"),
        ("--min-sqnr inf", "--min-sqnr inf: must be a number from 0"),
        ("--max-ms -0.5", "--max-ms -0.5: must be a number from 0"),
        ("--engine cuda", "--engine cuda: latency is measured on"),
        ("--engine fastertransformer", "--engine fastertransformer: latency is measured on"),
        ("--min-sqnr 1 --policy float", "quantizes nothing"),
        ("--policy qdq float", "--policy qdq float: give one"),
        ("--batch 0", "--batch 0: must be at least 1"),
        ("--min-sqnr 1 --pictures 1", "--pictures: a search needs 2 at least"),
    ):
        assert says in run(*words, *flags.split()).error(2)
    assert "no checkpoint: name one" in run("search", "--engine", "onnxruntime").error(2)
    float_model = run("search", calibrated / "x.pth", "--cfg", calibrated / "swin.yaml", *words[2:]).error(2)
    assert "calibrate it first" in float_model


@pytest.fixture
def run_quantize(calibrated, run, pictures, tmp_path, clock):
    """run_quantize(flag, ...) -> the end of `quantize` for ONNX Runtime."""
    words = [calibrated / "x.pth", "--cfg", calibrated / "swin.yaml", "--data-path", pictures, "--output", tmp_path]
    words += ["--for", "onnxruntime", "--pictures", 8, "--device", "cpu", "--half", "none", "--threads", 1]
    return lambda *flags: run("quantize", *words, *flags)


def test_quantize_searches_on_the_way(run_quantize):
    auto = ["--policy", "auto"]
    assert "--max-drop 0.1" in run_quantize(*auto, "--dry-run").out
    for words, says in (
        (["--max-drop", 1], "a budget needs --policy auto"),
        ([*auto, "--saturation-safe"], "--saturation-safe is for a policy with a name"),
        ([*auto, "--for", "fastertransformer"], "fastertransformer: latency is measured on"),
    ):
        assert says in run_quantize(*words).error(2)


@pytest.mark.nightly
def test_quantize_with_a_budget_ends_with_a_scored_artifact_or_one_line(run_quantize):
    auto = ["--policy", "auto"]
    for _ in range(2):  # the second run must not take it for done
        done = run_quantize(*auto, "--min-sqnr", 1000)
        assert done.code == 1 and "every layer stays float: loosen it" in done.err.splitlines()[-1], done
    assert "acc@1" in run_quantize(*auto, "--min-agreement", 0).ok().out
    assert run_quantize(*auto, "--min-agreement", 0).err.count("done before") == 5
