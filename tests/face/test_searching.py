"""`sq.search` finds what the command finds, and the model is then under that policy, wherever it goes."""

import json
import math

import pytest
import torch

import swin_quant as sq
from swin_quant.cards.card import RunCard

QUICK = {"threads": 1, "rounds": 1, "seconds": 0.01}
TWO_KINDS = ["*.qkv.*", "*.proj.*", "*.fc1.*"]  # off: each kind of layer that is left is exported and timed
AUTO = "swin_micro_auto_onnxruntime"


@pytest.fixture(scope="module")
def float_file(tmp_path_factory, write_config, randomise):
    """A float checkpoint of one block, and its config."""
    from swin_quant.config import load_config
    from swin_quant.models import build_model

    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("searching")
    config = write_config(folder, "swin", DEPTHS=[1], NUM_HEADS=[2])
    model = randomise(build_model(load_config(config)))
    torch.save({"model": model.state_dict()}, folder / "x.pth")
    return folder / "x.pth", config


@pytest.fixture
def base():
    return sq.policy("qdq").off(*TWO_KINDS)


@pytest.fixture
def model(float_file, pictures):
    return sq.calibrate(sq.load(*float_file), sq.pictures(pictures, "train", 8), "qdq")


@pytest.fixture
def some(pictures):
    return sq.pictures(pictures, "train", 8)


@pytest.mark.slow
def test_it_finds_what_the_command_finds_and_applies_it(model, some, base, pictures, tmp_path, run):
    """Milliseconds are those of the command's journal, so that both choose alike; losses are computed anew."""
    file = model.save(tmp_path / "x.pth")
    words = ["search", file, "--data-path", pictures, "--engine", "onnxruntime", "--pictures", 8, "--device", "cpu"]
    words += ["--threads", 1, "--rounds", 1, "--seconds", 0.01, "--policy", "qdq", "--off", *TWO_KINDS]
    done = run(*words, "--min-sqnr", 40, "--output", tmp_path, "--json", tmp_path / "found.json")
    theirs = (tmp_path / f"{AUTO}.yaml").read_bytes()
    place = tmp_path / f"{AUTO}.journal.json"
    journal = json.loads(place.read_text())
    timed = {key: one for key, one in journal["entries"].items() if "ms" in key or key.startswith("kind")}
    place.write_text(json.dumps({**journal, "entries": timed}))
    found = sq.search(model, some, "onnxruntime", tmp_path, base, min_sqnr=40, **QUICK)
    assert done.code == 0 and found and found.file.read_bytes() == theirs
    rows = json.loads((tmp_path / "found.json").read_text())["candidates"]
    assert [(one.policy, one.ms, one.loss.kl) for one in found.tried] == [
        (row["policy"], pytest.approx(row["ms"]), pytest.approx(row["kl"])) for row in rows
    ]
    named = {one.policy for one in found.tried if one.is_found}  # the table marks it found, on the front or not
    assert {one.policy for one in found.front} - named == {row["policy"] for row in rows if row["front"] == "front"}
    entries = json.loads(place.read_text())["entries"]
    assert {key: entries[key] for key in timed} == timed and any(key.startswith("losses") for key in entries)
    assert (
        model.policy.sha256 == found.policy.sha256 and model.card.searches == RunCard.read(tmp_path / "x.json").searches
    )


@pytest.mark.slow
def test_what_is_found_goes_where_the_model_goes(model, some, base, pictures, tmp_path):
    found = sq.search(model, some, "onnxruntime", tmp_path, base, min_agreement=0, **QUICK)
    built_in = [one for one in found.tried if one.policy in {"qdq", "onnxruntime"}]
    (chosen,) = (one for one in found.tried if one.is_found)
    assert found and len(built_in) == 2 and all(chosen.ms <= one.ms for one in built_in)
    assert sq.export(model, "onnxruntime", tmp_path).card.policy["rules"] == found.policy.to_dict()["rules"]
    assert sq.evaluate(model, sq.pictures(pictures, "val"), half="none").card.policy["name"] == AUTO
    assert sq.load(model.save(tmp_path / "y.pth")).policy.sha256 == found.policy.sha256
    assert "budget: agreement at least 0 %: met" in " ".join(str(found).split()) and "<table>" in found._repr_html_()


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_leaves_the_model_as_it_was(model, base, tmp_path, caplog):
    batches = [torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))]
    found = sq.search(model, batches, "onnxruntime", tmp_path, base, max_ms=1e-6, **QUICK)
    assert not found and "the budget cannot be met (at most 1e-06 ms)" in caplog.text and str(found.file) in caplog.text
    (best,) = (one for one in found.tried if one.is_found)
    assert best.ms == min(one.ms for one in found.tried if one.policy != "float") and not math.isinf(best.ms)
    assert model.policy.name == "qdq" and "NOT met" in str(found)
    assert "Measured on 3 pictures: SQNR" in found.policy.description


def test_wrong_input_is_one_sentence(model, some, float_file, tmp_path):
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
    wrong("swin_micro: is a float model: calibrate it first", model=sq.load(*float_file), max_drop=1)
    wrong("there is no batch to measure with", some=[], max_drop=1)
    wrong("a batch is images", some=[torch.zeros(3, 32, 32)], max_drop=1)
    wrong("quantizes nothing", policy="float", max_drop=1)
    assert not list(tmp_path.glob("*.yaml"))


def test_losses_are_measured_on_the_device_that_is_asked_for(model, some, tmp_path, monkeypatch):
    """Where there is none, that is said before any work, also for an engine that only runs emulated."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(sq.UsageError, match="device cuda: .* has no GPU"):
        sq.search(model, some, "fastertransformer", tmp_path, max_drop=1, device="cuda")
