"""swin-quant report: which cards it takes, where it writes the table, and the input that it refuses."""

import csv
import dataclasses
import json

import pytest

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result

DATASET = {"name": "cifar10", "split": "val", "pictures": 5000, "sha256": "1" * 64}
FLOAT = Result("torch", "float32", None, DATASET, 5000, 70.8, 98.12, None, 32, "cpu")
INT8 = dataclasses.replace(FLOAT, engine="torch fake-quant", precision="int8", policy="ft-mode1", acc1=70.34)


@pytest.fixture
def report(run):
    """report(arguments ...) -> what it printed, and its messages."""
    return lambda *words: run("report", *words).ok()


@pytest.fixture
def refused(run):
    """refused(arguments ..., code=1) -> the line of the failure."""
    return lambda *words, code=1: run("report", *words).error(code)


def write(path, *results, name="swin_micro"):
    card = RunCard(name, {}, {"size": 32})
    for result in results:
        card = card.with_result(result)
    card.write(path)
    return path


def test_a_folder_gets_the_table_in_every_form(report, tmp_path):
    card, folder = write(tmp_path / "card.json", FLOAT, INT8), tmp_path / "table"
    printed = report(card, "--output", folder, "--json", "-").out
    assert sorted(file.name for file in folder.iterdir()) == ["accuracy.csv", "accuracy.json", "accuracy.md"]
    assert (folder / "accuracy.json").read_text() == printed  # --json prints that instead of the table
    assert (folder / "accuracy.md").read_text().startswith("**swin_micro: ")
    with open(folder / "accuracy.csv", newline="") as file:
        assert next(csv.DictReader(file))["quantized_acc1"] == "70.34"


def test_a_directory_gives_its_cards_and_nothing_else(report, tmp_path):
    write(tmp_path / "a.json", FLOAT, INT8)
    (tmp_path / "other.json").write_text('{"schema": "somebody/else"}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper" / "b.json", FLOAT, INT8, name="deeper")
    assert [row["name"] for row in json.loads(report(tmp_path, "--json", "-").out)["rows"]] == ["swin_micro"]


def test_cards_without_results_are_left_out_and_named(report, refused, tmp_path):
    empty = [write(tmp_path / name) for name in ("empty.json", "void.json")]
    for arguments in (empty, [tmp_path]):
        message = refused(*arguments)
        assert "empty.json" in message and "void.json" in message and "no result: run `swin-quant evaluate`" in message
    full = write(tmp_path / "a.json", FLOAT, INT8)
    for arguments in ([full, *empty], [tmp_path]):
        done = report(*arguments)
        (warning,) = done.err.splitlines()
        assert "70.34" in done.out
        assert warning.startswith("warning: left out: ") and "empty.json" in warning and "void.json" in warning


def test_a_checkpoint_whose_artifact_was_scored_is_left_out_without_a_word(report, tmp_path):
    """`swin-quant report out/*.json` after `quantize`."""
    made = {"file": "swin_micro_calib.pth", "sha256": "0" * 64}
    for file in (write(tmp_path / "swin_micro_calib.json"), write(tmp_path / "swin_micro_int8.json", FLOAT, INT8)):
        file.write_text(json.dumps({**json.loads(file.read_text()), "checkpoint": made}))
    assert report(*sorted(tmp_path.glob("*.json"))).err == ""


def test_json_of_another_kind_beside_a_card_is_left_out_and_named(report, refused, tmp_path):
    """`swin-quant report out/*.json`, where a search left its journal."""
    card, journal = write(tmp_path / "a.json", FLOAT, INT8), tmp_path / "a.journal.json"
    journal.write_text('{"subject": {}, "entries": {}}')
    done = report(card, journal)
    assert "ft-mode1" in done.out and str(journal) in done.err
    assert "schema" in refused(journal)
    journal.write_text("{")
    assert str(journal) in refused(card, journal), "a damaged file may be a card"


def test_a_checkpoint_in_the_place_of_its_card_is_answered_with_the_card(run, tmp_path):
    card, file = write(tmp_path / "a.json", FLOAT, INT8), tmp_path / "a.pth"
    file.write_bytes(b"PK")
    assert f"{file}: is no run card: give {card}, or its folder" in run("report", file).error(2)


def test_bad_cards_are_refused_by_file_and_key(refused, tmp_path):
    card = write(tmp_path / "a.json", FLOAT, INT8)
    good = json.loads(card.read_text())
    good["results"][0]["acc1"] = "high"
    for text, says in (
        (json.dumps(good), "results[0].acc1"),
        ("not JSON", "its JSON cannot be read"),
        ('{"schema": "swin-quant/run-card/9"}', "run card"),
    ):
        card.write_text(text)
        message = refused(card)
        assert "a.json" in message and says in message
    write(tmp_path / "b.json", FLOAT, INT8)
    assert "a.json" in refused(tmp_path), "a card of another version is not left out of a folder"
    assert "missing.json" in refused(tmp_path / "missing.json")


def test_a_table_never_replaces_a_run_card(refused, tmp_path, snapshot):
    card, bystander = write(tmp_path / "a.json", FLOAT, INT8), write(tmp_path / "b.json", FLOAT)
    (tmp_path / "out").mkdir()
    write(tmp_path / "out" / "accuracy.json", FLOAT)
    before = snapshot(tmp_path)
    for words in (["--json", card], ["--json", bystander], ["--output", tmp_path / "out"]):
        assert "would overwrite" in refused(card, *words, code=2)
    assert "cannot be the output directory" in refused(card, "--output", card)
    assert "does not exist" in refused(card, "--json", tmp_path / "nowhere" / "t.json")
    assert snapshot(tmp_path) == before
