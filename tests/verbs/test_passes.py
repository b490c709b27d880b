"""Passes as a user asks for them: recipes, messages and records, on any number of ranks."""

import pytest
import torch
from pass_contexts import CutOff
from PIL import Image

from swin_quant.checkpoint import load_float
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.passes import reconstruct
from tests.outliers import plant


@pytest.fixture
def planted(micro, tmp_path):
    """The micro V1 with outlier channels; its function is unchanged."""
    model = build_model(load_config(micro / "swin.yaml"))
    load_float(model, micro / "swin.pth")
    plant(model, "norms", 100)
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_amax")}
    path = tmp_path / "planted.pth"
    torch.save({"model": state}, path)
    return path


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("passes:\n  - {name: equalize, pictures: 8}\n  - ridge\n")
    return path


def weights_of(path):
    return {key: value for key, value in torch.load(path, weights_only=True).items() if not key.endswith("_amax")}


def without_seconds(card):
    return [{**one, "seconds": 0} for one in card["calibration"]["passes"]]


@pytest.mark.slow
def test_channels_that_stand_out_are_evened_out_unasked_and_said(run, float_flags, planted, card_of, tmp_path):
    flags = [*float_flags, "--checkpoint", planted, "--policy", "ft-mode1", "--output"]
    done = run("calibrate", *flags, tmp_path / "on")
    assert done.code == 0 and "channels stand out" in done.err and "--no-equalize" in done.err, done
    (one,) = card_of(tmp_path / "on" / "swin_micro_calib.pth")["calibration"]["passes"]
    assert one["name"] == "equalize" and one["kept"] and one["sqnr_db"][1] > one["sqnr_db"][0] + 5
    off = run("calibrate", *flags, tmp_path / "off", "--no-equalize")
    assert off.code == 0 and "passes" not in card_of(tmp_path / "off" / "swin_micro_calib.pth")["calibration"]
    before = torch.load(planted, weights_only=True)["model"]
    kept = weights_of(tmp_path / "off" / "swin_micro_calib.pth")
    assert all(torch.equal(kept[key], before[key]) for key in kept if key in before)


@pytest.mark.slow
def test_fasterTransformers_front_door_leaves_weights_alone_unless_asked(
    run, micro, planted, pictures, tmp_path, card_of
):
    flags = ["--cfg", micro / "swin.yaml", "--resume", planted, "--data-path", pictures, "--calib", "--no-eval",
             "--num-calib-batch", 1, "--calib-batchsz", 8, "--int8-mode", 1, "--device", "cpu",
             "--calib-output-path"]  # fmt: skip
    assert run("main.py", *flags, tmp_path / "plain").code == 0
    assert "passes" not in card_of(tmp_path / "plain" / "swin_micro_calib.pth")["calibration"]
    assert run("main.py", *flags, tmp_path / "asked", "--passes", "fast").code == 0
    assert len(card_of(tmp_path / "asked" / "swin_micro_calib.pth")["calibration"]["passes"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "passes",
    [
        "- {name: equalize, pictures: 8}\n- {name: ridge, pictures: 8}",
        "- {name: range_search, pictures: 6}\n- ridge\n- {name: reconstruct, iterations: 2, batch: 3}",
        "- {name: range_search, pictures: 6, together: true}",
        "- gptq\n- {name: distill, iterations: 2, batch: 3}",
    ],
)
def test_two_ranks_find_what_one_finds(run, forked, float_flags, passes, card_of, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"passes:\n{passes}\n")
    flags = [*float_flags, "--pictures", 9, "--batch", 3, "--policy", "ft-mode1", "--no-eval", "--passes", recipe]
    assert run("calibrate", *flags, "--output", tmp_path / "one").code == 0
    ends = forked(2, "calibrate", *flags, "--output", tmp_path / "two")
    assert [done.code for done in ends] == [0, 0], ends
    one, two = (tmp_path / folder / "swin_micro_calib.pth" for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert without_seconds(card_of(one)) == without_seconds(card_of(two))


@pytest.mark.slow
def test_figures_compare_with_the_float_file_that_the_user_had(run, float_flags, recipe, card_of, tmp_path):
    flags = [*float_flags, "--policy", "qdq", "--wprec", 4, "--aprec", 4]
    assert run("calibrate", *flags, "--output", tmp_path / "plain").code == 0
    done = run("calibrate", *flags, "--passes", recipe, "--output", tmp_path / "mine")
    assert done.code == 0, done
    plain, mine = (card_of(tmp_path / folder / "swin_micro_calib.pth") for folder in ("plain", "mine"))
    original = [result for result in mine["results"] if result["weights"] == "original"]
    assert original[0]["loss"] == plain["results"][0]["loss"] and original[0]["precision"] == "float32"
    quantized = next(result for result in mine["results"] if result["policy"])
    assert quantized["weights"] == "ptq" and quantized["agreement"] is not None
    assert "corrected" in done.out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--passes", "slow"], "fast"),
        (["--passes", "fast", "--no-equalize"], "leave one of them out"),
        (["--passes", "fast", "--policy", "float"], "quantizes nothing"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags, message, run, float_flags, tmp_path):
    done = run("calibrate", *float_flags, "--no-eval", "--output", tmp_path, *flags)
    assert message in done.error(2)


def test_the_pass_that_a_policy_forbids_is_named(run, float_flags, write_config, tmp_path):
    flags = ["--cfg", write_config(tmp_path, "swin", EMBED_DIM=32), "--random-weights", *float_flags[4:]]
    done = run("calibrate", *flags, "--policy", "w4a16-blocks", "--passes", "fast", "--no-eval", "--output", tmp_path)
    assert done.code == 2 and "error: gptq: takes no weights in blocks" in done.err.splitlines()[-1], done
    assert "equalize" not in done.err and [file.name for file in tmp_path.iterdir()] == ["swin.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, grey, says", [(1, False, "1 picture is too few"), (1, True, "too few"), (8, True, "are all alike")]
)
def test_of_one_picture_or_grey_ones_there_is_a_checkpoint_and_a_word(
    count, grey, says, run, float_flags, own_pictures, tmp_path, card_of
):
    if grey:
        for file in (own_pictures / "train").rglob("*.png"):
            Image.new("RGB", (32, 32), (128, 128, 128)).save(file)
    recipe = tmp_path / "some.yaml"
    recipe.write_text(
        "passes:\n  - {name: equalize, alpha: [0.5]}\n  - gptq\n  - range_search\n  - {name: distill, iterations: 2}\n"
    )
    flags = [*float_flags, "--data-path", own_pictures, "--pictures", count, "--batch", count, "--no-eval"]
    done = run("calibrate", *flags, "--policy", "cpu", "--passes", recipe, "--output", tmp_path)
    assert done.code == 0 and says in done.err, done
    passes = card_of(tmp_path / "swin_micro_calib.pth")["calibration"]["passes"]
    assert all(one["sqnr_db"][1] > one["sqnr_db"][0] - 0.5 for one in passes if one["kept"])
    judging = [one["note"] for one in passes if one["name"] in ("range_search", "distill")]
    assert (count > 1) or all("none is left to judge by" in note for note in judging)


@pytest.fixture
def long_recipe(tmp_path):
    path = tmp_path / "long.yaml"
    path.write_text("passes:\n  - equalize\n  - {name: reconstruct, iterations: 4, batch: 4}\n  - ridge\n")
    return path


@pytest.mark.slow
def test_a_reconstruction_that_was_cut_off_goes_on_and_gives_the_same_bytes(
    run, float_flags, long_recipe, card_of, tmp_path, monkeypatch
):
    flags = [*float_flags, "--pictures", 8, "--policy", "qdq", "--wprec", 4, "--aprec", 4, "--no-eval", "--passes",
             long_recipe, "--output"]  # fmt: skip
    assert run("calibrate", *flags, tmp_path / "whole").code == 0
    learn = CutOff(reconstruct.train_unit, 3)
    monkeypatch.setattr(reconstruct, "train_unit", learn)
    assert run("calibrate", *flags, tmp_path / "cut").code == 130
    assert len(list((tmp_path / "cut" / "swin_micro_calib.passes").iterdir())) == 3
    learn.after = None
    done = run("calibrate", *flags, tmp_path / "cut")
    assert done.code == 0 and "reconstruct: 3 of" in done.err, done
    whole, cut = (tmp_path / folder / "swin_micro_calib.pth" for folder in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    assert without_seconds(card_of(whole)) == without_seconds(card_of(cut))
    assert {path.name for path in cut.parent.iterdir()} == {path.name for path in whole.parent.iterdir()}


@pytest.mark.slow
def test_ranges_of_a_reconstruction_are_for_its_bits_and_come_from_pictures(
    run, micro, pictures, float_flags, long_recipe, tmp_path
):
    bits = ["--wprec", 4, "--aprec", 4]
    flags = [*float_flags, "--pictures", 8, "--policy", "qdq", *bits, "--no-eval", "--passes", long_recipe]
    assert run("calibrate", *flags, "--output", tmp_path).code == 0
    calibrated = tmp_path / "swin_micro_calib.pth"
    scored = ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu", "--half", "none"]
    assert "found by reconstruct for 4 bits" in run("evaluate", calibrated, *scored, "--policy", "qdq").error(2)
    again = run("calibrate", "--statistics", tmp_path / "swin_micro_calib.stats.npz", "--output", tmp_path / "b")
    assert "ranges were chosen by reconstruct" in again.error(2)
