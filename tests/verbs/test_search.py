"""search: a measured policy within the budget, with its reasons; in Python, as a command, and by quantize."""

import json
import math
import re
import shutil

import pytest
import torch
import yaml
from commands import command

import swin_quant as sq
from swin_quant.base.files import read_journal
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.policy import load_policy
from swin_quant.quant.search import Budget
from swin_quant.verbs import policy_costs, policy_search, search
from swin_quant.verbs.policy_costs import PolicyCosts, PolicyTimer
from tests.helpers.known_times import with_known_times

BUILT_IN = {"onnxruntime", "qdq"}  # those that suit ONNX Runtime
OFF = ["*.qkv.*", "*.proj.*", "*.fc1.*"]  # each remaining kind of layer is exported and timed
TWO_KINDS = ["--policy", "qdq", "--off", *OFF]
WHOLE = f"qdq -{' -'.join(OFF)}"  # the name of that policy
QUICK = {"threads": 1, "rounds": 1, "seconds": 0.01}
AUTO = "swin_micro_auto_onnxruntime"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, write_config, randomise, pictures):
    """calibrated(kind) -> the folder of a calibrated model of one block, and the arguments that search it."""
    pytest.importorskip("onnxruntime")
    made = {}

    def make(kind):
        folder = tmp_path_factory.mktemp("search")
        pretrained = {"PRETRAINED_WINDOW_SIZES": [0]} if kind == "swinv2" else {}
        config = write_config(folder, kind, DEPTHS=[1], NUM_HEADS=[2], **pretrained)
        torch.save({"model": randomise(build_model(load_config(config))).state_dict()}, folder / "x.pth")
        words = ["--cfg", config, "--data-path", pictures, "--no-eval", "--device", "cpu", "--output", folder]
        command("calibrate", folder / "x.pth", "--pictures", 8, *words)
        found = ["search", folder / f"{kind}_micro_calib.pth", "--data-path", pictures, "--engine", "onnxruntime"]
        fast = ["--rounds", 1, "--seconds", 0.01, "--pictures", 8, "--device", "cpu", "--threads", 1]
        return folder, [*found, *fast]

    return lambda kind: made[kind] if kind in made else made.setdefault(kind, make(kind))


@pytest.fixture(scope="module")
def small(calibrated):
    """The folder of a V1 model of one block, and the arguments that search it."""
    return calibrated("swin")


def searching(run, folder, words, out, kind="swin"):
    """go(flags ...) -> how it ended, its JSON, and the policy's text; all runs share the journal in `out`."""

    def go(*flags):
        done = run(*words, *TWO_KINDS, *flags, "--output", out, "--json", out / "x.json")
        place = out / f"{kind}_micro_auto_onnxruntime.yaml"
        return done, *(
            (json.loads((out / "x.json").read_text()), place.read_text()) if place.exists() else (None, None)
        )

    return go


@pytest.fixture
def find(small, run, tmp_path):
    """find(flags ...) on `small`."""
    return searching(run, *small, tmp_path)


def found_in(result):
    return next(row for row in result["candidates"] if row["front"] == "found")


@pytest.fixture
def model(small):
    return sq.load(small[0] / "swin_micro_calib.pth")


@pytest.fixture
def some(pictures):
    return sq.pictures(pictures, "train", 8)


@pytest.fixture
def base():
    return sq.policy("qdq").off(*OFF)


@pytest.mark.slow
def test_what_is_found_keeps_the_budget_and_is_the_fastest_on_the_engine(
    find, run, small, tmp_path, monkeypatch, engines_here
):
    """Timed on the engine itself, without built-in policies; the base policy is exported once."""
    monkeypatch.setattr(policy_search, "builtin_policies", list)
    export, exported = PolicyTimer.export, []
    monkeypatch.setattr(PolicyTimer, "export", lambda timer, *how: exported.append(how[0]) or export(timer, *how))
    (tmp_path / "known").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        with_known_times(patch)
        rows = searching(run, *small, tmp_path / "known")("--min-sqnr", 0)[1]["candidates"]
    whole = next(row for row in rows if row["policy"] == WHOLE)
    limit = whole["sqnr_db"] + 1.0
    done, result, text = find("--min-sqnr", limit)
    assert done.code == 0 and result["met"] and exported.count(exported[0]) == 1, done
    found = found_in(result)
    assert (found["sqnr_db"] or math.inf) >= limit and found["nodes"] < whole["nodes"]
    fit = [row for row in result["candidates"] if (row["sqnr_db"] or math.inf) >= limit and row["policy"] != "float"]
    assert found["ms"] == min(row["ms"] for row in fit)
    policy = load_policy(str(tmp_path / f"{AUTO}.yaml"))
    disabled = yaml.safe_load(text)["rules"][-1]["disable"]
    kept = read_journal(tmp_path / f"{AUTO}.journal.json").entries.values()  # it has every policy that was timed
    assert (policy.sha256 in kept) == (found["nodes"] > 0)  # float may be fastest for so small a network
    assert policy.rules[-1].disable == tuple(disabled) and text.count("dB alone; int8 saves") >= 1
    assert "SQNR at least" in policy.description and "onnxruntime" in policy.description
    assert f"It is {found['policy']}. Measured on 8 pictures" in policy.description
    left = {layer["layer"]: layer["saved_ms"] for layer in result["left_float"]}
    assert left and all(any(node.startswith(f"{layer}.") for node in disabled) for layer in left)
    every = next(row for row in result["candidates"] if row["policy"] == WHOLE)
    assert result["cost_ms"] == pytest.approx(found["ms"] - every["ms"])
    said = " ".join(done.out.split())
    assert f"float: {next(iter(left))} (" in said and "that costs" in said
    (kept,) = RunCard.read(small[0] / "swin_micro_calib.json").searches
    assert {layer["layer"]: layer["saved_ms"] for layer in kept["left_float"]} == pytest.approx(left)
    assert {one["policy"]: one["ms"] for one in kept["tried"]} == {
        row["policy"]: pytest.approx(row["ms"]) for row in result["candidates"]
    }
    again = find("--min-sqnr", limit)  # the journal has it all
    assert again[1:] == (result, text) and "results of an earlier search" in again[0].err


@pytest.mark.slow
def test_python_finds_what_the_command_finds_and_it_goes_where_the_model_goes(
    clock, find, small, model, some, base, pictures, tmp_path
):
    done, result, text = find("--min-sqnr", 40)
    found = sq.search(model, some, "onnxruntime", tmp_path / "python", base, min_sqnr=40, **QUICK)
    assert done.code == 0 and found and found.file.read_text() == text
    assert [(one.policy, one.ms, one.loss.kl) for one in found.tried] == [
        (row["policy"], pytest.approx(row["ms"]), pytest.approx(row["kl"])) for row in result["candidates"]
    ]
    (chosen,) = (one for one in found.tried if one.is_found)  # the table marks it found, on the front or not
    on_front = {one.policy for one in found.front} - {chosen.policy}
    assert on_front == {row["policy"] for row in result["candidates"] if row["front"] == "front"}
    assert model.card.searches == RunCard.read(small[0] / "swin_micro_calib.json").searches
    assert model.policy.sha256 == found.policy.sha256 == sq.load(model.save(tmp_path / "y.pth")).policy.sha256
    assert sq.export(model, "onnxruntime", tmp_path).card.policy["rules"] == found.policy.to_dict()["rules"]
    assert sq.evaluate(model, sq.pictures(pictures, "val"), half="none").card.policy["name"] == AUTO
    assert "budget: SQNR at least 40 dB: met" in " ".join(str(found).split()) and "<table>" in found._repr_html_()


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_at_equal_cost_it_is_never_worse_than_what_is_built_in(kind, clock, calibrated, run, tmp_path):
    """At a built-in policy's milliseconds, it finds the policy nearest to float; at its loss, one that is no slower."""
    find = searching(run, *calibrated(kind), tmp_path, kind)
    built_in = [row for row in find("--min-sqnr", 0)[1]["candidates"] if row["policy"] in BUILT_IN]
    assert {row["policy"] for row in built_in} == BUILT_IN
    for row in built_in:
        for budget in (["--max-ms", row["ms"]], ["--min-agreement", row["agreement"], "--min-sqnr", row["sqnr_db"]]):
            done, result, _ = find(*budget)
            found = found_in(result)
            assert done.code == 0 and found["ms"] <= row["ms"], (budget, result)
            assert found["kl"] <= row["kl"] or budget[0] != "--max-ms", (budget, result)


def test_a_budget_that_cannot_be_met_still_gives_the_best(clock, find, tmp_path):
    done, result, text = find("--max-ms", 1e-6)
    assert "cannot be met (at most 1e-06 ms)" in done.err and done.code == 1
    assert not result["met"] and "enable" in text
    assert found_in(result)["ms"] == min(row["ms"] for row in result["candidates"] if row["policy"] != "float")
    journal = json.loads((tmp_path / f"{AUTO}.journal.json").read_text())
    assert not any(key.startswith("found") for key in journal["entries"])


def test_a_budget_that_cannot_be_met_leaves_the_model_as_it_was(clock, model, base, tmp_path, caplog):
    before = model.policy
    batches = [torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))]
    found = sq.search(model, batches, "onnxruntime", tmp_path, base, max_ms=1e-6, **QUICK)
    assert not found and "the budget cannot be met (at most 1e-06 ms)" in caplog.text and str(found.file) in caplog.text
    assert model.policy == before and "NOT met" in str(found)
    assert "Measured on 3 pictures: SQNR" in found.policy.description


def test_where_every_layer_stays_float_it_is_said(clock, find):
    done, result, _ = find("--min-sqnr", 1000)
    assert done.code == 0 and "every layer stays float: this policy quantizes nothing" in done.err, done
    assert found_in(result)["nodes"] == 0


@pytest.mark.parametrize("float_ms, said", [(1e-6, True), (1e6, False)])
def test_where_float_is_as_fast_it_is_said(float_ms, said, clock, find, monkeypatch):
    monkeypatch.setattr(PolicyCosts, "float_cost", float_ms)
    done, result, _ = find("--min-sqnr", 0)
    assert done.code == 0 and found_in(result)["nodes"]
    assert ("float is as fast: 0.000 ms on onnxruntime" in done.err) is said, done


def test_a_search_that_was_cut_off_goes_on_and_finds_the_same(clock, find, tmp_path, monkeypatch):
    done, result, text = find("--min-sqnr", 30)
    place = tmp_path / f"{AUTO}.journal.json"
    journal = json.loads(place.read_text())
    journal["entries"] = {key: one for key, one in journal["entries"].items() if not key.startswith("losses")}
    place.write_text(json.dumps(journal))
    loss, measured = PolicyCosts._loss, []

    def cut_off(self, policy, *shown):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(policy)
        return loss(self, policy, *shown)

    monkeypatch.setattr(PolicyCosts, "_loss", cut_off)
    assert find("--min-sqnr", 30)[0].code == 130
    assert sum(key.startswith("losses") for key in json.loads(place.read_text())["entries"]) == 2
    monkeypatch.setattr(PolicyCosts, "_loss", loss)
    assert find("--min-sqnr", 30)[1:] == (result, text)


def test_a_search_that_was_cut_off_while_timing_keeps_what_was_timed(clock, find, tmp_path, monkeypatch):
    monkeypatch.setattr(policy_costs, "_AT_ONCE", 2)
    timed, done, asked = PolicyTimer._interleaved, [], []

    def cut_off(timer, policies):
        asked.append(set(policies))
        if len(done) == 2:  # all, none, then a kind of layer
            raise KeyboardInterrupt
        done.append(policies)
        return timed(timer, policies)

    monkeypatch.setattr(PolicyTimer, "_interleaved", cut_off)
    assert find("--min-sqnr", 30)[0].code == 130
    journal = json.loads((tmp_path / f"{AUTO}.journal.json").read_text())
    (kept,) = (key.removeprefix("kind ") for key in journal["entries"] if key.startswith("kind "))
    assert find("--min-sqnr", 30)[0].code == 130
    _, first, second, again = asked
    assert kept in first and kept not in second | again and again == second


def test_losses_are_to_the_model_that_the_user_had(clock, small, run, pictures, tmp_path):
    """After passes that change what weights compute, the checkpoint without quantization is no float model."""
    folder, words = small
    told = ["--cfg", folder / "swin.yaml", "--data-path", pictures, "--no-eval", "--device", "cpu", "--policy", "qdq"]
    told += ["--wprec", 2, "--passes", "fast", "--pictures", 8, "--output", tmp_path]
    assert run("calibrate", folder / "x.pth", *told).code == 0
    weights_alone = [*TWO_KINDS, "role:activation", "--wprec", 2]
    words = ["search", tmp_path / "swin_micro_calib.pth", *words[2:], *weights_alone, "--min-sqnr", 60]
    done = run(*words, "--output", tmp_path, "--json", tmp_path / "x.json")
    result = json.loads((tmp_path / "x.json").read_text())
    rows = [row for row in result["candidates"] if row["policy"] != "float"]
    assert done.code == 1 and all(row["sqnr_db"] < 40 for row in rows), result
    assert min(row["nodes"] for row in rows) == 0


def test_few_pictures_tell_little_of_a_drop_and_it_is_said(clock, find):
    done, result, _ = find("--max-drop", 5)
    assert "8 pictures hardly tell a drop of 5 points: give 20 or more (--pictures)" in done.err, done
    found = found_in(result)
    assert result["met"] is (found["drop"] + 2 * found["drop_error"] <= 5)


def test_a_policy_of_one_s_own_does_not_hide_the_built_in_one_of_its_name(clock, small, run, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"name": "qdq", "rules": [{"enable": ["*.fc1._input_quantizer"]}]}))
    done = run(*small[1], "--policy", own, "--min-sqnr", 0, "--output", tmp_path, "--json", tmp_path / "x.json")
    nodes = {row["policy"]: row["nodes"] for row in json.loads((tmp_path / "x.json").read_text())["candidates"]}
    assert done.code == 0 and nodes["qdq"] > 1 == next(n for name, n in nodes.items() if name.startswith("qdq (mine"))


def test_flags_are_settings(small, run, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(search, "costs_of", lambda settings, _: told.append(settings) or 1 / 0)
    words = ["--max-drop", 1, "--min-agreement", 2, "--min-sqnr", 3, "--max-ms", 4, "--batch", 5, "--pictures", 6]
    words += ["--split", "val", "--seed", 7, "--max-unreadable", 0.5, "--threads", 2, "--float-type", "float32"]
    run(*small[1], *words, *TWO_KINDS, "--rounds", 8, "--seconds", 9, "--output", tmp_path)
    run(*small[1][:6], "--min-sqnr", 3)
    given, plain = told
    assert given.budget == Budget(1, 2, 3) and (given.max_ms, given.batch, given.folder) == (4, 5, tmp_path)
    assert (given.sampling.count, given.sampling.split, given.sampling.seed) == (6, "val", 8)
    assert (given.sampling.max_unreadable, given.rounds, given.seconds) == (0.5, 8, 9)
    assert (given.options.threads, given.options.float_type, given.options.device) == (2, "float32", "cpu")
    assert given.base.name == WHOLE and given.network.cfg.DATA.BATCH_SIZE == plain.network.cfg.DATA.BATCH_SIZE
    assert (plain.base, plain.max_ms, plain.batch, plain.rounds, plain.seconds) == (None, None, 1, 5, 0.5)
    assert (plain.sampling.count, plain.sampling.split, plain.folder.name) == (1024, "train", "swin_micro")


def test_wrong_input_is_one_line(small, run):
    other = run(*small[1], "--max-drop", 1, "--float-type", "bfloat16").error(2)
    assert "--float-type bfloat16: onnxruntime runs what is not int8 in float32 here" in other
    assert "no budget" in run(*small[1]).error(2)
    for flag, value in (("--max-drop", "nan"), ("--max-drop", -1), ("--min-agreement", 101), ("--min-sqnr", "inf"),
                        ("--max-ms", -0.5)):  # fmt: skip
        assert f"{flag} {value}: must be a number from 0" in run(*small[1], flag, value).error(2)
    words = [word for word in small[1] if word != "onnxruntime"]
    words.insert(words.index("--engine") + 1, "cuda")
    assert "latency is measured on" in run(*words, "--max-drop", 1).error(2)
    words[words.index("cuda")] = "fastertransformer"
    assert "--max-ms: latency of fastertransformer is not measured here" in run(*words, "--max-ms", 1).error(2)
    only = run(*words, "--max-drop", 1, "--policy", "qdq").error(2)
    assert "--policy: fastertransformer runs ft-mode1, ft-mode2 only" in only
    assert "float" in run(*small[1], "--min-sqnr", 1, "--policy", "float").error(2)
    assert "--policy qdq float: give one" in run(*small[1], "--max-drop", 1, "--policy", "qdq", "float").error(2)
    assert "name a calibrated checkpoint" in run("search", "--engine", "onnxruntime").error(2)
    assert "`quantize` has it" in run("nodes", small[0] / "swin_micro_calib.pth", "--policy", "auto").error(2)


def test_wrong_input_in_python_is_one_sentence(small, model, some, tmp_path):
    def wrong(match, model=model, some=some, engine="onnxruntime", **given):
        with pytest.raises(sq.UsageError, match=match):
            sq.search(model, some, engine, tmp_path, **given)

    wrong("no budget: give max_drop, min_agreement, min_sqnr or max_ms")
    wrong("max_drop -1: must be a number from 0", max_drop=-1)
    wrong("engine cuda: latency is measured on", engine="cuda", max_drop=1)
    wrong("batch 0: must be at least 1", max_drop=1, batch=0)
    wrong("rounds 0: must be at least 1", max_drop=1, rounds=0)
    for seconds in (math.inf, math.nan, 0.0):
        wrong(f"seconds {seconds:g}: must be above 0", max_drop=1, seconds=seconds)
    wrong("swin_micro: is a float model: sq.calibrate it first", sq.load(small[0] / "x.pth", small[0] / "swin.yaml"))
    wrong("there is no batch to measure with", some=[], max_drop=1)
    wrong("a batch is images", some=[torch.zeros(3, 32, 32)], max_drop=1)
    wrong("quantizes nothing", policy="float", max_drop=1)
    assert not list(tmp_path.glob("*.yaml"))


def test_losses_are_measured_on_the_device_that_is_asked_for(model, some, tmp_path, monkeypatch):
    """A missing device is reported before any work, also for an engine that is only emulated."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(sq.UsageError, match="device cuda: .* has no GPU"):
        sq.search(model, some, "fastertransformer", tmp_path, max_drop=1, device="cuda")


@pytest.fixture
def quantizing(small, pictures, tmp_path):
    """The arguments that quantize the float model of `small`."""
    words = ["quantize", small[0] / "x.pth", "--cfg", small[0] / "swin.yaml", "--data-path", pictures]
    return [*words, "--output", tmp_path, "--for", "onnxruntime", "--pictures", 8, "--device", "cpu", "--half", "none"]


def test_quantize_searches_on_the_way(quantizing, run):
    assert "--max-drop 0.1" in run(*quantizing, "--policy", "auto", "--dry-run").out
    assert "a budget needs --policy auto" in run(*quantizing, "--max-drop", 1).error(2)
    assert "leave it out" in run(*quantizing, "--policy", "auto", "--saturation-safe").error(2)
    assert "--rounds is for --policy auto" in run(*quantizing, "--rounds", 1).error(2)
    assert "--rounds 0: must be at least 1" in run(*quantizing, "--policy", "auto", "--rounds", 0).error(2)
    assert "--seconds inf: must be above 0" in run(*quantizing, "--policy", "auto", "--seconds", "inf").error(2)


@pytest.mark.slow
def test_quantize_with_a_budget_ends_with_a_scored_artifact_or_one_line(
    clock, small, quantizing, run, pictures, tmp_path
):
    before = (small[0] / "x.pth").read_bytes()
    words = [*quantizing, "--policy", "auto", "--threads", 1, "--rounds", 1, "--seconds", 0.01]
    for budget in (["--min-sqnr", 1000], ["--min-sqnr", 1000]):  # the second run must not take it for done
        done = run(*words, *budget)
        assert done.code == 1 and "every layer stays float: loosen it" in done.err.splitlines()[-1], done
    done = run(*words, "--max-ms", 1e-6)
    line = done.err.splitlines()[-1]
    assert done.code == 1 and "cannot be met (at most 1e-06 ms)" in line, done
    assert re.search(r"\(SQNR \S+ dB, agreement \d+\.\d\d %, expected drop .+ points, \d+\.\d{3} ms\)", line), line
    done = run(*words, "--min-agreement", 0)
    assert done.code == 0 and "acc@1" in done.out, done
    assert run(*words, "--min-agreement", 0).err.count("done before") == 5
    used = RunCard.read(tmp_path / "swin_micro_calib.json").calibration["files"]
    other = shutil.copytree(pictures, tmp_path / "other" / pictures.name)
    for file in (other / "train").rglob("*.*"):  # all of them were used for losses
        if file.relative_to(other / "train").as_posix() not in used:
            file.rename(file.with_stem(f"{file.stem}_new"))
    words[words.index(pictures)] = other
    planned = run(*words, "--min-agreement", 0, "--dry-run").out.splitlines()
    assert ["# done" in line for line in planned] == [True] + 4 * [False]
    again = run(*words, "--threads", 2, "--min-agreement", 0)
    assert again.code == 0 and "is of another run; begun anew" in again.err, again
    assert (small[0] / "x.pth").read_bytes() == before
