"""swin-quant report --html: one file with all that was measured, for a calibrated checkpoint and for cards that lie."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch

from swin_quant.cards.card import RunCard


def facts_of(text):
    """The data that the script of a page reads, parsed as a browser would."""
    (found,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


@pytest.fixture
def page(run, tmp_path):
    """page(arguments ...) -> the text of the page that a report writes."""

    def written(*words):
        run("report", *words, "--html", tmp_path / "page.html").ok()
        return (tmp_path / "page.html").read_text()

    return written


@pytest.mark.slow
def test_every_node_with_the_figures_of_its_file(page, own):
    text = page(own.with_suffix(".json"))
    facts = facts_of(text)
    stored = torch.load(own, weights_only=True)
    stored = stored.get("model", stored)
    amax = {key.removesuffix("._amax"): value.max().item() for key, value in stored.items() if key.endswith("_amax")}
    assert {node["name"]: node["amax"] for node in facts["nodes"]} == pytest.approx(amax)
    with np.load(own.with_suffix(".stats.npz")) as counted:
        names = json.loads(counted["names"].tobytes())
        counts = dict(zip(names, counted["counts"].reshape(len(names), -1).sum(1), strict=True))
    drawn = {name: sum(bins["counts"]) for name, bins in facts["bins"].items() if name in counts}
    # Each bin's count is rounded down
    assert drawn == {name: pytest.approx(count, abs=48) for name, count in counts.items()}
    card = RunCard.read(own.with_suffix(".json"))
    assert f">{card.results[-1]['acc1']:.2f}</td>" in text and "ft-mode1" in text


@pytest.mark.slow
def test_a_folder_of_pictures_is_spoken_of_where_a_command_needs_one(page, own):
    text = page(own.with_suffix(".json"))
    shown = re.findall(r'<td data-title="next"[^>]*>(.*?)</td>', text)
    assert ("DIR is your folder" in text) == any("DIR" in cell for cell in shown)


@pytest.mark.slow
def test_nothing_is_fetched_and_nothing_but_its_own_scripts_runs(page, own, tmp_path):
    card = json.loads(own.with_suffix(".json").read_text())
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    card["calibration"]["advice"] = [{"kind": "dead", "text": evil, "nodes": []}]
    card["results"][-1]["note"] = evil
    own.with_suffix(".json").write_text(json.dumps(card))
    text = page(own.with_suffix(".json"))
    assert len(re.findall(r"<script", text)) == 3 and "<img src=x" not in text and "&lt;img src=x" in text
    assert "default-src 'none'" in text and str(tmp_path) not in text
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r'<(?:link|img|script|iframe)[^>]*(?:src|href)="(?!data:)', markup)


@pytest.mark.slow
def test_pictures_that_the_quantized_model_sees_otherwise(page, own, pictures, tmp_path):
    """The page shows as many as the agreement in the card's result implies."""
    text = page(own.with_suffix(".json"), "--data-path", pictures)
    result = json.loads(own.with_suffix(".json").read_text())["results"][-1]
    otherwise = round(result["pictures"] * (1 - result["agreement"] / 100))
    text = (tmp_path / "page.html").read_text()
    assert f"classifies {otherwise} of {result['pictures']} pictures differently from float" in text
    assert text.count("data:image/jpeg") == otherwise


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_and_two_runs_that_differ(page, own, tmp_path):
    card = json.loads(own.with_suffix(".json").read_text())
    card["calibration"]["seed"] = 77
    card["checkpoint"]["sha256"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(card))
    own.unlink()
    text = page(own.with_suffix(".json"), tmp_path / "other.json")
    assert "the checkpoint is not beside the card" in text and facts_of(text)["nodes"] == []
    assert re.search(r"calibration\.seed</td><td[^>]*>0</td><td[^>]*>77</td>", text)


def test_contradicting_options_and_a_card_as_the_page_are_refused(run, own, snapshot):
    card, before = own.with_suffix(".json"), snapshot(own.parent)
    for words, says in (
        (["--data-path", "there"], "add --html FILE"),
        (["--html", "page.html", "--pictures", "0"], "must be at least 1"),
        (["--html", card], "is a run card"),
    ):
        assert says in run("report", card, *words).error(2)
    assert snapshot(own.parent) == before


def test_a_missing_library_is_named_with_its_extra(run, own, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = run("report", own.with_suffix(".json"), "--html", tmp_path / "page.html")
    assert "[report]" in done.error(2) and not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_a_search_is_drawn_once_for_each_engine(page, own, tmp_path):
    """The card of an artifact repeats that of its checkpoint."""
    card = RunCard.read(own.with_suffix(".json"))
    loss = {"sqnr_db": 30.0, "kl": 0.01, "agreement": 99.0, "drop": 0.1}
    exact = {"sqnr_db": None, "kl": 0.0, "agreement": 100.0, "drop": 0.0}
    tried = [
        {"policy": "qdq", "nodes": 8, "loss": loss, "ms": 1.0, "found": True, "front": True},
        {"policy": "float", "nodes": 0, "loss": exact, "ms": 3.0, "found": False, "front": True},
    ]
    record = {"engine": "onnxruntime", "budget": "any", "met": True, "pictures": 8, "tried": tried}
    card = card.with_search({**record, "batch": 8, "met": False}).with_search({**record, "batch": 8})
    card.with_search({**record, "batch": 1}).write(own.with_suffix(".json"))
    shutil.copy(own.with_suffix(".json"), tmp_path / "again.json")
    facts = facts_of(page(own.with_suffix(".json"), tmp_path / "again.json"))
    drawn = {place: spec for place, spec in facts["charts"].items() if place.startswith("search-chart")}
    assert [spec["title"]["text"] for spec in drawn.values()] == [
        "Policies tried for onnxruntime, batch 8, 8 pictures", "Policies tried for onnxruntime, batch 1, 8 pictures"
    ]  # fmt: skip
    points = {point["policy"]: (point["ms"], point["is"]) for point in drawn["search-chart-0"]["data"]["values"]}
    assert points == {"qdq": (1.0, "found"), "float": (3.0, "front")}
