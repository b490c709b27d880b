"""`export --tune`: times the policies and operators of a target on this machine, and writes the fastest file."""

from dataclasses import replace
from math import prod

import pytest
from cards_of_results import TRAINING
from hypothesis import given
from hypothesis import strategies as st

import swin_quant as sq
from swin_quant.backends.artifact import open_artifact
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.quant.policy import Rule, load_policy
from swin_quant.verbs import export_tuned
from swin_quant.verbs.export_tuned import fastest

ROW = st.fixed_dictionaries(
    {
        "sqnr_db": st.floats(0, 60),
        "ms": st.fixed_dictionaries({"1": st.floats(0.1, 100), "8": st.floats(0.1, 1000)}),
    }
)


@given(st.lists(ROW, min_size=1, max_size=8))
def test_no_file_as_exact_is_faster(rows):
    best = fastest(rows)
    most = max(row["sqnr_db"] for row in rows)
    assert best["sqnr_db"] >= most - 0.3
    assert all(row["sqnr_db"] < most - 0.3 or prod(row["ms"].values()) >= prod(best["ms"].values()) for row in rows)


def test_without_a_file_that_ran_nothing_is_chosen():
    with pytest.raises(SwinQuantError, match="no file could be timed"):
        fastest([])


@pytest.mark.slow
def test_the_fastest_file_is_written_and_its_card_has_the_comparison(run, calibrated, tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setattr(export_tuned, "BATCHES", (2,))
    monkeypatch.setattr(export_tuned, "ROUNDS", 1)
    monkeypatch.setattr(export_tuned, "SECONDS", 0.01)
    every = export_tuned._candidates
    monkeypatch.setattr(export_tuned, "_candidates", lambda target: every(target)[:1] + every(target)[-3:])
    done = run("export", calibrated, "--for", "openvino", "--tune", "--output", tmp_path)
    assert done.code == 0, done.err
    artifact = open_artifact(done.out.strip())
    rows = artifact.record["tuned"]
    assert {row["policy"] for row in rows} == {"cpu", "cpu-operators"}
    assert all(row["ms"]["2"] > 0 and row["sqnr_db"] > 10 for row in rows)
    best = fastest(rows)
    assert artifact.card.policy["name"] == best["policy"] and artifact.record["options"]["plugin"] == best["plugins"]
    assert {file.suffix for file in tmp_path.iterdir()} == {".onnx", ".json"}  # no candidate is left


@pytest.mark.parametrize(
    "words, said",
    [
        (("--for", "onnx"), "‹tune›: means nothing to ‹backend› onnx"),
        (("--for", "openvino", "--policy", "qdq"), "chooses policy and operators"),
        (("--for", "openvino", "--plain"), "chooses policy and operators"),
        (("--for", "openvino", "--precision", "float"), "chooses policy and operators"),
    ],
)
def test_what_leaves_nothing_to_tune_is_refused(run, calibrated, tmp_path, words, said):
    done = run("export", calibrated, *words, "--tune", "--output", tmp_path)
    assert done.code == 2 and said.replace("‹", "--").replace("›", "").replace("--backend", "--for") in done.err
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
