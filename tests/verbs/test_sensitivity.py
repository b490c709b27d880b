"""sensitivity: tables, CSV, JSON, and the record in the run card."""

import json

import pytest
import torch

import swin_quant as sq
from swin_quant.cards.card import RunCard
from swin_quant.data.sampling import digest
from swin_quant.verbs.sensitivity import Costs


@pytest.fixture
def words(own, pictures):
    return ["sensitivity", own, "--data-path", pictures, "--pictures", 6, "--device", "cpu"]


def test_table_json_and_card_agree(run, words, own, tmp_path):
    done = run(*words, "--top", 3, "--json", tmp_path / "x.json").ok()
    record = json.loads((tmp_path / "x.json").read_text())
    card = RunCard.read(own.with_suffix(".json"))
    assert card.sensitivity == record and record["pictures"] == 6 and record["policy"] == "ft-mode1"
    assert record["pictures_sha256"] != digest(card.calibration["files"][:6]), "other pictures than calibrated"
    nodes = [group for group in record["groups"] if group["kind"] == "node"]
    assert len(nodes) == 3 * 16 + 3  # counted from docs/reference, as in test_show.py
    worst = max(nodes, key=lambda group: group["without"]["sqnr_db"])
    assert worst["name"] in done.out.replace("\n", "") and "layers.1.blocks.0" in done.out


def test_the_error_through_the_depth_as_table_and_in_python(run, words, own):
    table = run(*words, "--kind", "profile").out
    record = RunCard.read(own.with_suffix(".json")).sensitivity
    assert list(record["profile"]) == ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"]
    assert all(name in table and f"{sqnr:.1f}" in table for name, sqnr in record["profile"].items())
    assert "role:" not in table and all(name in str(Costs(record)) for name in record["profile"])


def test_python_measures_what_the_command_measures(run, words, own, model, train, pictures):
    with pytest.raises(sq.UsageError, match="no policy"):
        sq.sensitivity(model, train)
    model, some = sq.load(own), sq.pictures(pictures, "train", 6)
    costs = sq.sensitivity(model, some)
    assert costs.record == model.card.sensitivity == json.loads(run(*words, "--json").out)
    assert costs.rows("stage")[0].name in str(costs) and "<table>" in costs._repr_html_()
    tensors = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))]
    found = sq.sensitivity(model, tensors, "qdq").record
    assert (found["policy"], found["pictures"], found["pictures_sha256"]) == ("qdq", 2, None)
    again = sq.calibrate(model, train, "cpu")
    assert again.card.sensitivity is None and again.card.searches == []


def test_wrong_input_is_one_line(run, words, micro, pictures):
    rest = ["--data-path", pictures]
    assert "calibrate it first" in run("sensitivity", micro / "swin.pth", "--cfg", micro / "swin.yaml", *rest).error(2)
    assert "--policy qdq float: give one" in run(*words, "--policy", "qdq", "float").error(2)
    assert "no node is on" in run(*words, "--off", "*", "--policy", "qdq").error(1)
    assert "--pictures 0" in run(*words[:-3], 0).error(2)
    assert "no checkpoint: name one" in run("sensitivity", *rest).error(2)
    assert "400" in run(*words[:-3], 400).error(2)
