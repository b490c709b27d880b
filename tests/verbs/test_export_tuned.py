"""`--tune`: times the policies and operators of a target on this machine, and writes the fastest file."""

from dataclasses import replace
from math import prod

import pytest
from cards_of_results import TRAINING
from hypothesis import given
from hypothesis import strategies as st

import swin_quant as sq
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.quant.policy import Rule, load_policy
from swin_quant.verbs import export_here, quantize_steps, timing
from swin_quant.verbs.export_here import fastest

ROW = st.fixed_dictionaries(
    {"sqnr_db": st.floats(0, 60), "ms": st.fixed_dictionaries({"1": st.floats(0.1, 100), "8": st.floats(0.1, 1000)})}
)


@pytest.fixture
def quick(monkeypatch):
    """Two candidates, timed for a moment."""
    every = export_here.tuned_forms
    monkeypatch.setattr(export_here, "tuned_forms", lambda target: [every(target)[0], every(target)[-3]])
    monkeypatch.setattr(export_here, "BATCHES", (2,))
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SECONDS", 0.01)


@given(st.lists(ROW, min_size=1, max_size=8))
def test_the_fastest_of_the_most_accurate_files_is_chosen(rows):
    best = fastest(rows)
    most = max(row["sqnr_db"] for row in rows)
    assert best["sqnr_db"] >= most - 0.3
    assert all(row["sqnr_db"] < most - 0.3 or prod(row["ms"].values()) >= prod(best["ms"].values()) for row in rows)


@pytest.mark.slow
def test_the_fastest_file_is_written_and_its_card_has_the_comparison(run, calibrated, tmp_path, quick):
    done = run("export", calibrated, "--for", "openvino", "--tune", "--output", tmp_path).ok()
    artifact = open_artifact(done.out.strip())
    rows = artifact.record["tuned"]["files"]
    assert {row["policy"] for row in rows} == {"cpu", "cpu-operators"}
    assert all(row["ms"]["2"] > 0 and row["sqnr_db"] > 10 for row in rows)
    best = fastest(rows)
    assert artifact.card.policy["name"] == best["policy"] and artifact.record["options"]["plugin"] == best["plugins"]
    assert {file.suffix for file in tmp_path.iterdir()} == {".onnx", ".json"}  # no candidate is left


CHOSEN = "chooses policy and operators"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--for onnx", "--tune: means nothing to --for onnx"),
        ("--for openvino --policy qdq", CHOSEN),
        ("--for openvino --plain", CHOSEN),
        ("--for openvino --int4-weights", CHOSEN),
        ("--for openvino --precision float", CHOSEN),
    ],
)
def test_options_that_leave_nothing_to_tune_are_refused(run, calibrated, tmp_path, words, says):
    assert says in run("export", calibrated, *words.split(), "--tune", "--output", tmp_path).error(2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"training": TRAINING}, "policy qdq, and the model was trained under it"),
        ({"policy": load_policy("qdq").and_then(Rule(disable="*fc1*")).to_dict()}, "and it is your own"),
    ],
)
def test_a_policy_of_training_or_of_the_user_stays(changed, says, model, tmp_path):
    model.card = replace(model.card, **{"policy": load_policy("qdq").to_dict()} | changed)
    with pytest.raises(UsageError, match=says):
        sq.export(model, "openvino", tmp_path, tune=True)
    assert not list(tmp_path.iterdir())


def test_a_model_without_ranges_or_without_logits_is_refused(model, tmp_path):
    with pytest.raises(SwinQuantError, match="no range"):
        sq.export(model, "openvino", tmp_path, tune=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="about logits"):
        card = model.card
        features = card.config | {"MODEL": card.config["MODEL"] | {"OUTPUT_KIND": "features"}}
        model.card = type(card)(card.name, features, card.preprocess)
        sq.export(model, "openvino", tmp_path, tune=True)


def words_of_quantize(micro, pictures, folder):
    model = [micro / "swin.pth", "--cfg", micro / "swin.yaml", "--data-path", pictures, "--pictures", 8]
    return ["quantize", *model, "--for", "openvino", "--tune", "--half", "none", "--output", folder]


@pytest.mark.nightly
def test_quantize_tunes_once_and_again_on_another_cpu(run, micro, pictures, tmp_path, quick, monkeypatch):
    words = words_of_quantize(micro, pictures, tmp_path)
    assert run(*words).code == 0
    (card,) = tmp_path.glob("*_openvino.json")
    artifact = open_artifact(card.with_suffix(".onnx"))
    assert artifact.card.policy["name"] == fastest(artifact.record["tuned"]["files"])["policy"]
    assert run(*words, "--dry-run").out.count("# done") == 4
    untuned = [word for word in words if word != "--tune"]
    assert run(*untuned, "--dry-run").out.count("# done") == 1  # the calibration
    monkeypatch.setattr(quantize_steps, "cpu_kind", lambda: {"cores": 96, "features": []})
    assert run(*words, "--dry-run").out.count("# done") == 1
