"""`calibrate`: the files it writes and where, the pictures it takes, what flags and bits change, and in memory."""

import hashlib
import re
import shutil

import numpy as np
import pytest
import torch
from commands import command
from pass_contexts import same
from PIL import Image

import swin_quant as sq
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.files import compute_sha256
from swin_quant.checkpoint import load_float
from swin_quant.config import load_config
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from swin_quant.loading import ModelFile
from swin_quant.models import build_model
from swin_quant.quant.passes import reconstruct
from swin_quant.quant.policy import enabled_nodes


def test_a_checkpoint_and_a_card(run, float_flags, card_of, micro, pictures, tmp_path):
    done = run("calibrate", *float_flags, "--policy", "ft-mode1", "--output", tmp_path).ok()
    written = ["swin_micro_calib.json", "swin_micro_calib.pth", "swin_micro_calib.stats.npz"]
    assert sorted(file.name for file in tmp_path.iterdir()) == written
    assert done.out == f"{tmp_path / 'swin_micro_calib.pth'}\n" and "swin_micro_calib.json" in done.err
    assert re.findall("calibration takes about [0-9]+ s in all$", done.err, re.MULTILINE)
    card = card_of(tmp_path / "swin_micro_calib.pth")
    assert card["source"]["file"] == "swin.pth" and card["policy"]["name"] == "ft-mode1"
    check = card["calibration"].pop("check")
    assert check["policy"] == "ft-mode1" and check["pictures"] == 8 and check["sqnr_db"] > 20
    kept = tmp_path / "swin_micro_calib.stats.npz"
    statistics = {"file": kept.name, "sha256": hashlib.sha256(kept.read_bytes()).hexdigest()}
    assert card["calibration"] | {"files": 0, "pictures_sha256": 0} == {
        **{"method": "percentile", "percentile": 99.99, "exact": False, "batches": 2, "batch_size": 4, "seed": 0},
        **{"split": "train", "augment": False, "pictures": 8, "pictures_sha256": 0, "files": 0, "unreadable": []},
        **{"dead_nodes": [], "beyond_half": [], "advice": [], "place": pictures.name},
        **{"bits": 8, "other_bits": {}, "methods": {"8": "percentile"}, "statistics": statistics},
    }
    assert card["results"] == []
    assert str(micro) not in str(card) and str(tmp_path) not in str(card)  # cards travel between machines


def test_passes_that_are_asked_for_are_not_in_the_estimate(run, float_flags, tmp_path):
    (tmp_path / "one.yaml").write_text("passes: [bias_correction]\n")
    done = run("calibrate", *float_flags, "--passes", tmp_path / "one.yaml", "--output", tmp_path).ok()
    assert " s in all, then come the passes\n" in done.err


def test_the_file_is_a_bare_state_dict_in_fastertransformer_s_layout(calibrate, micro):
    state, _ = calibrate("--policy", "ft-mode1")
    ranges = {key: value for key, value in state.items() if key.endswith("_amax")}
    assert len(ranges) == 72  # all nodes, under any policy
    assert all(value.dtype == torch.float32 and value.ndim == 0 and value > 0 for value in ranges.values())
    weights = torch.load(micro / "swin.pth", weights_only=True)["model"]
    # FasterTransformer does not know these, but its loaders are not strict
    ends = {key for key in state if key.endswith("_bounds")}
    assert ends == {key.replace("_amax", "_bounds") for key in ranges if "_weight_quantizer" not in key}
    assert state.keys() - ranges.keys() - ends == weights.keys()
    assert all(torch.equal(state[key], value) for key, value in weights.items())


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_ranges_of_max_are_those_of_the_float_model_on_the_evaluation_transform(calibrate, micro, pictures, kind):
    """Computed again by hand: the pictures that the card names, resized and normalised here, hooks on a float model."""
    flags = ["--cfg", micro / f"{kind}.yaml", "--checkpoint", micro / f"{kind}.pth", "--calibrator", "max"]
    state, card = calibrate(*flags, name=f"{kind}_micro")
    files = card["calibration"]["files"]
    assert len(files) == len(set(files)) == 8
    images = np.stack([np.asarray(Image.open(pictures / "train" / name), dtype=np.float32) / 255 for name in files])
    images = ((images - IMAGENET_MEAN) / IMAGENET_STD).astype(np.float32).transpose(0, 3, 1, 2)
    model = build_model(load_config(micro / f"{kind}.yaml"))
    load_float(model, micro / f"{kind}.pth")
    largest = {}
    for name, module in model.named_modules():
        # It precedes the bias, which a float layer adds in the same operation
        if name.endswith("_aftergemm_quantizer"):
            layer = model.get_submodule(name.rpartition(".")[0])
            layer.register_forward_hook(
                lambda m, i, o, name=name: largest.update({name: (i[0] @ m.weight.T).abs().max().item()})
            )
        elif name.endswith("_quantizer") and not name.endswith("_weight_quantizer"):
            module.register_forward_hook(lambda m, i, o, name=name: largest.update({name: i[0].abs().max().item()}))
    with torch.no_grad():
        model(torch.as_tensor(images))
    for name, value in largest.items():
        assert state[f"{name}._amax"].item() == pytest.approx(value, rel=1e-5), name
    for name, _ in model.named_modules():
        if name.endswith("_weight_quantizer"):
            weight = model.get_submodule(name.rpartition(".")[0]).weight
            assert state[f"{name}._amax"].item() == weight.abs().max().item()


def test_ranges_that_clip_the_signal_away_are_warned_of_with_the_calibrator_that_does_better(
    run, float_flags, tmp_path
):
    flags = [*float_flags, "--policy", "ft-mode1", "--output", tmp_path]
    good = run("calibrate", *flags, "--quiet")
    assert good.code == 0 and good.err == ""
    bad = run("calibrate", *flags, "--quiet", "--percentile", 50)
    first, second = bad.err.splitlines()
    assert first.startswith("warning: calibrator percentile loses the signal under ft-mode1: SQNR of the logits")
    assert "on 8 of the pictures; at fault: layers." in first and "_quantizer" in first
    assert re.match(r"warning: --calibrator (max|mse|entropy) does better there, \d+\.\d dB \(", second)


def test_a_head_can_be_replaced(calibrate, pictures, tmp_path):
    four = tmp_path / "four"
    shutil.copytree(pictures, four)
    for split in ("train", "val"):
        shutil.copytree(four / split / "cat", four / split / "owl")
    state, card = calibrate("--opts", "MODEL.NUM_CLASSES", 4, "--replace-head", "--data-path", four)
    assert state["head.weight"].shape == (4, 32)


def test_the_policy_changes_no_byte_of_the_checkpoint(micro, train, tmp_path):
    """docs/reference, section 1.5: the saved file is the same for modes 1 and 2."""
    for name in (names := ["ft-mode1", "ft-mode2", "qdq", "float"]):
        model = sq.load(micro / "swin.pth", config=micro / "swin.yaml")
        sq.calibrate(model, train, name, passes=[]).save(tmp_path / f"{name}.pth")
    assert len({(tmp_path / f"{name}.pth").read_bytes() for name in names}) == 1


def test_the_original_stays_the_float_file_through_another_calibration(micro, train, tmp_path):
    """Even if it overwrites the calibrated file, whose hash would then match no file."""

    def calibrated(file, name, **how):
        given = ModelFile(file and str(file), str(micro / "swin.yaml"), **how)
        model = sq.calibrate(given, train, "ft-mode1")
        return model.card.source, model.save(tmp_path / name)

    _, first = calibrated(micro / "swin.pth", "first.pth")
    assert calibrated(first, "again.pth")[0]["sha256"] == compute_sha256(micro / "swin.pth")
    _, unknown = calibrated(None, "random.pth", random_weights=True)
    assert calibrated(unknown, "other.pth")[0]["sha256"] == compute_sha256(unknown)


def test_refusals_come_before_the_first_forward(run, float_flags, tmp_path, monkeypatch):
    monkeypatch.setattr("swin_quant.verbs.calibration.observing", lambda *_: pytest.fail("a forward"))
    (tmp_path / "file").write_text("x")
    words = ["calibrate", *float_flags, "--policy", "ft-mode1", "--output", tmp_path]
    assert "--pictures -1: must be at least 1" in run(*words, "--pictures", -1).error(2)
    assert "it is a file" in run(*words, "--output", tmp_path / "file").error(1)
    assert "no such checkpoint" in run(*words, "--checkpoint", tmp_path / "none.pth").error(1)
    assert "test" in run(*words, "--split", "test").error(1)


def test_a_long_pass_that_was_cut_off_leaves_the_model_as_it_was(micro, train, monkeypatch):
    one = sq.load(micro / "swin.pth", config=micro / "swin.yaml")
    passes = ["equalize", {"name": "reconstruct", "iterations": 2, "batch": 4}]
    before, card = {name: value.clone() for name, value in one.module.state_dict().items()}, one.card
    learn, calls = reconstruct.train_unit, iter(range(2))

    def cut_off(*given):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return learn(*given)

    monkeypatch.setattr(reconstruct, "train_unit", cut_off)
    with pytest.raises(KeyboardInterrupt):
        sq.calibrate(one, train, "qdq", passes=passes)
    assert one.card is card and not one.is_calibrated and not enabled_nodes(one.module)
    assert same(one.module.state_dict(), before)


def test_recalibration_keeps_the_passes_that_changed_the_weights(model, train):
    """Passes that only chose ranges are not listed, since their ranges are gone."""
    few = {"name": "range_search", "pictures": 8, "rounds": 2}
    for passes, known in ((["equalize", few], ["equalize", "range_search"]), ([], ["equalize"])):
        sq.calibrate(model, train, "qdq", passes=passes)
        assert [one["name"] for one in model.card.calibration["passes"] if one["kept"]] == known


def test_a_model_that_was_changed_and_calibrated_is_not_compared_with_the_file_it_came_from(model, train):
    with torch.no_grad():
        next(model.module.parameters()).mul_(2)
    assert sq.calibrate(model, train, "qdq").card.source is None


def test_one_picture_is_too_few(run, float_flags, card_of, tmp_path):
    flags = [*float_flags, "--policy", "qdq", "--output", tmp_path]
    done = run("calibrate", *flags, "--pictures", 1)
    assert done.code == 0 and "advice: 1 picture is too few" in done.err and "--pictures" in done.err, done
    card = card_of(tmp_path / "swin_micro_calib.pth")
    assert "sample" in [one["kind"] for one in card["calibration"]["advice"]]


def test_the_sample_is_seeded_and_batches_only_cut_it(calibrate):
    def ranges(*flags):
        state, card = calibrate(*flags)
        return {key: value.item() for key, value in state.items() if key.endswith("_amax")}, card["calibration"]

    base, record = ranges()
    assert (base, record) == ranges()
    again, cut = ranges("--pictures", 8, "--batch", 1)
    assert again == base and cut["files"] == record["files"]
    other, reseeded = ranges("--seed", 1)
    assert other != base and set(reseeded["files"]) != set(record["files"]) and reseeded["seed"] == 1


def test_broken_pictures_are_counted_and_named(run, float_flags, card_of, own_pictures, tmp_path):
    for split in ("train", "val"):
        (own_pictures / split / "cat" / "nothing.png").write_bytes(b"")
    flags = ["--data-path", own_pictures, "--max-unreadable", 0.2]
    done = run("calibrate", *float_flags, *flags, "--pictures", 12, "--output", tmp_path / "out").ok()
    calibrated = tmp_path / "out" / "swin_micro_calib.pth"
    record = card_of(calibrated)["calibration"]
    assert len(set(record["files"])) == 12 and record["unreadable"] == ["cat/nothing.png"]
    assert "1 of 13 pictures are unreadable: cat/" in done.err
    assert "1 of 8 pictures are unreadable: cat/" in run("evaluate", calibrated, *flags).ok().err
    for result in card_of(calibrated)["results"]:
        assert result["pictures"] == 7 and result["unreadable"] == 1 and "cat/nothing.png" in result["note"]
    assert "unreadable" in run("report", calibrated.with_suffix(".json")).out


@pytest.mark.parametrize("split", ["train", "val"])
def test_too_many_broken_pictures_are_one_error(run, float_flags, calibrated, own_pictures, tmp_path, split):
    for file in sorted((own_pictures / split).rglob("*.png"))[:2]:
        file.write_bytes(b"")
    flags = ["--data-path", own_pictures, "--quiet", "--output", tmp_path / "out"]
    calibrating = ["calibrate", *float_flags, "--pictures", 12]
    line = run(*(calibrating if split == "train" else ["evaluate", calibrated]), *flags).error(1)
    total = {"train": 12, "val": 7}[split]
    assert f"of {total} pictures are unreadable: cat/" in line and "--max-unreadable (now 0.01)" in line
    assert not list((tmp_path / "out").glob("*"))


NAME = "swin_micro_calib"
TRAIN = ["--epochs", 1, "--batch", 4, "--no-eval"]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("epochs: 1\naugment: {crop: padded}\n")
    return ["--recipe", tmp_path / "recipe.yaml"]


@pytest.fixture(scope="module")
def of_8_bits(float_flags, tmp_path_factory):
    """The folder of a calibration by least error at 8 bits."""
    folder = tmp_path_factory.mktemp("mse8")
    command("calibrate", *float_flags, "--calibrator", "mse", "--policy", "ft-mode1", "--output", folder)
    return folder


def test_other_bits_are_refused_until_they_are_calibrated(run, scoring_flags, of_8_bits, float_flags, tmp_path):
    four = ["--policy", "ft-mode1", "--aprec", 4]
    line = run("evaluate", *scoring_flags, "--checkpoint", of_8_bits / f"{NAME}.pth", *four).error(2)
    for said in ("found by mse for 8 bits", "ft-mode1 A4 has 4", "calibrate the float checkpoint"):
        assert said in line
    direct = [*float_flags, "--calibrator", "mse", *four, "--output", tmp_path / "direct"]
    assert run("calibrate", *direct).code == 0
    file = tmp_path / "direct" / f"{NAME}.pth"
    assert run("evaluate", *scoring_flags, "--checkpoint", file, *four).code == 0
    assert "for 4 bits" in run("evaluate", *scoring_flags, "--checkpoint", file, "--policy", "ft-mode1").error(2)


def test_export_and_training_refuse_them_unless_that_finds_new_ones(run, scoring_flags, of_8_bits, tmp_path, recipe):
    four = tmp_path / "four.yaml"
    four.write_text("name: four\nrules:\n- {enable: ['role:gemm_input', 'role:gemm_weight'], bits: 4}\n")
    file = of_8_bits / f"{NAME}.pth"
    where = ["--checkpoint", file, "--for", "torchscript", "--output", tmp_path / "out", "--policy", four]
    assert "found by mse for 8 bits" in run("export", *where).error(2)
    train = [*scoring_flags, "--checkpoint", file, "--policy", "ft-mode1", "--aprec", 4, *TRAIN, *recipe]
    assert "found by mse for 8 bits" in run("finetune", *train, "--output", tmp_path / "qat").error(2)
    anew = ["--set", "amax.initial=reestimated", "amax.batches=1"]
    assert run("finetune", *train, "--output", tmp_path / "qat", *anew).code == 0


FOR = ("--for", "torchscript")


@pytest.fixture
def calibrate_here(run, float_flags, tmp_path):
    """calibrate_here(flags ...) -> the checkpoint written in the folder, and the messages."""

    def go(*flags):
        done = run("calibrate", *float_flags, "--output", tmp_path, *flags).ok()
        line = next(line for line in done.err.splitlines() if line.startswith("calibrated checkpoint: "))
        return line.removeprefix("calibrated checkpoint: "), done.err

    return go


def test_another_calibration_does_not_replace_what_an_artifact_was_made_of(run, calibrate_here, tmp_path):
    otherwise = ("--policy", "qdq", "--calibrator", "max")
    first, _ = calibrate_here("--policy", "qdq")
    exported = run("export", first, *FOR, "--output", tmp_path)
    artifact = open_artifact(exported.out.strip())
    again, said = calibrate_here("--policy", "qdq")
    assert again == first and "stays" not in said  # the same result
    second, said = calibrate_here(*otherwise)
    assert second == str(tmp_path / f"swin_micro_calib_{otherwise[1]}.pth")
    assert f"{first} stays, because " in said
    assert f"{artifact.file.name} was made from it: this calibration is written" in said
    assert compute_sha256(first) == artifact.card.checkpoint["sha256"] != compute_sha256(second)
    assert calibrate_here(*otherwise)[0] == second  # replaced: nothing was made from it, and it is the same
    other = run("export", second, *FOR, "--output", tmp_path / "other")
    third, _ = calibrate_here(*otherwise, "--pictures", 2)
    assert other.code == 0 and third == str(tmp_path / f"swin_micro_calib_{otherwise[1]}_2.pth")
    assert calibrate_here(*otherwise)[0] == second


@pytest.mark.nightly
def test_a_file_that_qat_started_from_stays_too(run, calibrate_here, float_flags, scoring_flags, tmp_path):
    first, _ = calibrate_here("--policy", "qdq")
    recipe = tmp_path / "one.yaml"
    recipe.write_text("epochs: 1\nbatch_size: 4\naugment: {crop: padded}\n")
    told = ("--recipe", recipe, "--no-eval", "--output", tmp_path)
    assert run("finetune", *scoring_flags, "--checkpoint", first, *told).code == 0
    second, said = calibrate_here("--policy", "qdq", "--calibrator", "max")
    assert second == str(tmp_path / "swin_micro_calib_qdq.pth") and "swin_micro_qat.pth was made from it" in said
    qat = tmp_path / "swin_micro_qat.pth"
    assert run("export", qat, *FOR, "--output", tmp_path).code == 0
    refused = run("finetune", *scoring_flags, "--checkpoint", first, *told, "--overwrite").error(2)
    assert "swin_micro_qat.pth: " in refused and "was made of what lies there" in refused
    with pytest.raises(sq.UsageError, match="was made of what lies there"):
        sq.load(float_flags[3], float_flags[1]).save(qat)
