"""`report`: which cards it takes, the table and the page that it writes, and the input that it refuses."""

import csv
import dataclasses
import functools
import json
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cards_of_results import ARTIFACT

import swin_quant as sq
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.models import build_model
from swin_quant.report.page.data import PageData, accuracy_and_latency, training
from tests.helpers.encoded import zipped
from tests.helpers.settings import small_config

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


def test_a_directory_gives_the_cards_in_it_and_below_and_nothing_else(report, tmp_path):
    """A card that is found twice, or copied, counts once."""
    card, deeper, hidden = tmp_path / "a.json", tmp_path / "deeper" / "still", tmp_path / ".cache"
    write(card, FLOAT, INT8)
    (tmp_path / "other.json").write_text('{"schema": "somebody/else"}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    deeper.mkdir(parents=True)
    hidden.mkdir()
    write(deeper / "b.json", FLOAT, INT8, name="deeper")
    write(hidden / "c.json", FLOAT, INT8, name="hidden")
    shutil.copy(card, deeper)
    for places in ([tmp_path], [tmp_path, deeper, card]):
        done = report(*places, "--json", "-")
        assert [row["name"] for row in json.loads(done.out)["rows"]] == ["swin_micro", "deeper"]
    assert f"left out: {tmp_path / 'broken.json'}: its JSON cannot be read" in done.err and "other.json" not in done.err


def test_a_directory_without_a_card_or_with_too_many_files_is_refused(refused, tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    assert "no run card (*.json) in this directory or below" in refused(tmp_path)
    monkeypatch.setattr("swin_quant.verbs.report._MOST_FILES", 1)
    for folder in (tmp_path, tmp_path / "below"):
        write(folder / "a.json", FLOAT, INT8)
    assert "more than 1 JSON files" in refused(tmp_path)


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


def test_what_to_deploy_is_said_of_each_artifact_or_of_float_in_its_place(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = dataclasses.replace(FLOAT, engine="openvino", ms_per_picture=1.0)
    for name, ms in (("fast", 0.5), ("slow", 2.0)):
        int8 = dataclasses.replace(own, precision="int8", policy="cpu", ms_per_picture=ms)
        card = functools.reduce(RunCard.with_result, (FLOAT, own, int8), RunCard("swin_micro", {}, {"size": 32}))
        artifact = ARTIFACT | {"file": f"{name}.onnx", "sha256": name[0].replace("s", "e") * 64}
        dataclasses.replace(card, artifact=artifact).write(tmp_path / f"{name}.json")
    fast, slow = report(tmp_path).err.splitlines()
    assert fast.startswith("deploy fast.onnx: ") and "2.0 times as fast as float32" in fast
    assert slow.startswith("deploy the float model, not slow.onnx: ") and "slower than float32" in slow


def test_the_card_in_a_package_counts_only_for_what_the_artifact_s_own_has_not(report, tmp_path):
    own, package = tmp_path / "own.json", tmp_path / "package.json"
    newer, other = dataclasses.replace(INT8, acc1=69.0), dataclasses.replace(INT8, dataset=DATASET | {"name": "mine"})
    for results, rows in (((FLOAT, INT8), 1), ((other,), 2)):
        for file, some in ((own, (FLOAT, newer)), (package, results)):
            card = functools.reduce(RunCard.with_result, some, RunCard("swin_micro", {}, {"size": 32}))
            dataclasses.replace(card, artifact=ARTIFACT).write(file)
        for order in ((own, package), (package, own)):
            assert len(json.loads(report(*order, "--json", "-").out)["rows"]) == rows


def test_a_line_of_the_chart_joins_only_results_on_the_same_pictures(tmp_path):
    other = DATASET | {"name": "mine"}
    own = dataclasses.replace(FLOAT, engine="openvino", ms_per_picture=1.0)
    both = [dataclasses.replace(own, dataset=one) for one in (DATASET, other)]
    both += [dataclasses.replace(one, precision="int8", policy="cpu", ms_per_picture=0.5) for one in both]
    card = functools.reduce(RunCard.with_result, both, RunCard("swin_micro", {}, {"size": 32}))
    spec = accuracy_and_latency([PageData("swin_micro", {"x": card})])
    lines = spec["layer"][0]["encoding"]["detail"]
    joined = {tuple(row[one["field"]] for one in lines) for row in spec["data"]["values"]}
    assert spec["layer"][0]["mark"]["type"] == "line" and len(joined) == 2 == len(spec["data"]["values"]) / 2


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


def test_every_node_with_the_figures_of_its_file(page, own):
    text = page(own.with_suffix(".json"))
    facts = facts_of(text)
    stored = torch.load(own, weights_only=True)
    stored = stored.get("model", stored)
    amax = {key.removesuffix("._amax"): value.max().item() for key, value in stored.items() if key.endswith("_amax")}
    assert {node["name"]: node["amax"] for node in facts["nodes"]} == pytest.approx(amax)
    assert {(node["kind"], node["grid"]) for node in facts["nodes"]} == {("int8", "symmetric")}
    with np.load(own.with_suffix(".stats.npz")) as counted:
        names = json.loads(counted["names"].tobytes())
        counts = dict(zip(names, counted["counts"].reshape(len(names), -1).sum(1), strict=True))
    drawn = {name: sum(bins["counts"]) for name, bins in facts["bins"].items() if name in counts}
    # Each bin's count is rounded down
    assert drawn == {name: pytest.approx(count, abs=48) for name, count in counts.items()}
    card = RunCard.read(own.with_suffix(".json"))
    assert f">{card.results[-1]['acc1']:.2f}</td>" in text and "ft-mode1" in text


def test_a_folder_of_pictures_is_spoken_of_where_a_command_needs_one(page, own):
    text = page(own.with_suffix(".json"))
    shown = re.findall(r'<td data-title="next"[^>]*>(.*?)</td>', text)
    assert ("DIR is your folder" in text) == any("DIR" in cell for cell in shown)


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


def test_pictures_that_the_quantized_model_sees_otherwise(page, own, pictures, tmp_path):
    """The page shows as many as the agreement in the card's result implies."""
    text = page(own.with_suffix(".json"), "--data-path", pictures)
    result = json.loads(own.with_suffix(".json").read_text())["results"][-1]
    otherwise = round(result["pictures"] * (1 - result["agreement"] / 100))
    text = (tmp_path / "page.html").read_text()
    shown = f"swin_micro ({own.name}), ft-mode1: the quantized model classifies {otherwise} of {result['pictures']} "
    assert f"{shown}pictures differently from float" in text
    assert text.count("data:image/jpeg") == otherwise


def test_pictures_are_left_out_for_a_model_of_another_data_set(run, page, own, pictures, tmp_path):
    """The page shows the nodes of one, and names the other."""
    torch.manual_seed(0)
    torch.save(build_model(small_config(classes=2)).state_dict(), tmp_path / "two.pth")
    calibrated = sq.calibrate(sq.load(tmp_path / "two.pth", small_config(classes=2)), [torch.randn(4, 3, 32, 32)])
    sq.evaluate(calibrated, [(torch.randn(4, 3, 32, 32), torch.arange(4) % 2)])
    calibrated.save(tmp_path / "two_calib.pth")
    files = {f"{number}.png": file.read_bytes() for number, file in enumerate(pictures.glob("val/*/*.png"))}
    zipped(tmp_path, files, "".join(f"{name}\t{number % 3}\n" for number, name in enumerate(files)))
    cards, shown = [own.with_suffix(".json"), tmp_path / "two_calib.json"], ["--html", tmp_path / "page.html"]
    done = run("report", *cards, *shown, "--data-path", tmp_path).ok()
    (warning,) = (line for line in done.err.splitlines() if line.startswith("warning"))
    assert "two_calib.json: no pictures on the page: " in warning and "label 2 is outside 0 to 1" in warning
    text = (tmp_path / "page.html").read_text()
    assert "pictures differently from float" in text and "two_calib.pth): <code>swin-quant report " in text
    assert "label 2 is outside 0 to 1" in run("report", cards[1], *shown, "--data-path", tmp_path).error(1)


def test_pictures_with_named_classes_are_none_of_a_model_whose_classes_are_numbers(run, own, pictures, tmp_path):
    """The ten digits and the ten classes of CIFAR-10; pictures without classes may be anything."""
    file, page = own.with_suffix(".json"), ["--html", tmp_path / "page.html"]
    card = json.loads(file.read_text())
    file.write_text(json.dumps(card | {"class_names": [str(i) for i in range(card["config"]["MODEL"]["NUM_CLASSES"])]}))
    said = run("report", file, *page, "--data-path", pictures).error(1)
    assert "has classes such as cat, the model such as 0" in said and not page[1].exists()
    (tmp_path / "flat").mkdir()
    for number, picture in enumerate(pictures.glob("val/*/*.png")):
        shutil.copy(picture, tmp_path / "flat" / f"{number}.png")
    run("report", file, *page, "--data-path", tmp_path / "flat").ok()
    assert "of 7 pictures differently" in page[1].read_text()


def test_cards_of_the_same_name_are_told_apart_by_their_folders(page, tmp_path):
    for place in ("a.json", "int8/x.json", "int4/x.json", "int4/deep/y.json"):
        (tmp_path / "out" / place).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "out" / place, FLOAT, INT8, name=place.replace("/", "_"))
    shown = re.findall("<summary>(.*?)</summary>", page(tmp_path / "out"))
    assert shown == ["a.json", "int4/x.json", "y.json", "int8/x.json"]


def test_a_checkpoint_that_is_gone(page, own, tmp_path):
    card = json.loads(own.with_suffix(".json").read_text())
    card["checkpoint"]["sha256"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(card))
    own.unlink()
    text = page(own.with_suffix(".json"), tmp_path / "other.json")
    assert "the checkpoint is not beside the card" in text and facts_of(text)["nodes"] == []


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
    titles = [f"Policies tried for onnxruntime, batch {batch}, 8 pictures" for batch in (8, 1)]
    assert [spec["title"]["text"] for spec in drawn.values()] == titles
    points = {point["policy"]: (point["ms"], point["is"]) for point in drawn["search-chart-0"]["data"]["values"]}
    assert points == {"qdq": (1.0, "found"), "float": (3.0, "front")}


def test_a_training_is_drawn_once_though_the_card_of_an_artifact_repeats_it():
    epochs = [{"epoch": 1, "train_loss": 0.5}, {"epoch": 2, "train_loss": 0.25}]

    def card(seed, created):
        file = {"file": "x_qat.pth"}
        return SimpleNamespace(name="x", checkpoint=file, created=created, training={"seed": seed, "epochs": epochs})

    spec = training([card(0, "Monday"), card(0, "Tuesday")])
    assert spec["title"]["text"] == "Training of x" and [row["value"] for row in spec["data"]["values"]] == [0.5, 0.25]
    runs = {row["run"] for row in training([card(0, "Monday"), card(1, "Tuesday")])["data"]["values"]}
    assert runs == {"x, x_qat.pth, Monday", "x, x_qat.pth, Tuesday"}


def test_each_curve_of_a_training_has_its_axis_and_no_axis_is_empty():
    what = ("train_loss", "val_loss", "acc1", "amax_drift", "clipped_share")
    epochs = [{"epoch": number, **dict.fromkeys(what, number / 4)} for number in (1, 2)]
    card = SimpleNamespace(name="x", checkpoint=None, created="Monday", training={"epochs": epochs})
    drawn = pytest.importorskip("vl_convert").vegalite_to_svg(training([card]))
    assert drawn.count(">epoch<") == len(what)
