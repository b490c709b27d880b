"""swin-quant finetune, main.py --train: files written, runs refused, and runs continued after any end."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import is_said
from nightly import share
from pass_contexts import same
from PIL import Image

import swin_quant as sq
from swin_quant.base.files import compute_sha256
from swin_quant.checkpoint import read_state_dict
from swin_quant.config import load_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import load_for_scoring
from swin_quant.quant.policy import load_policy, quantize
from swin_quant.train.outdir import read_table

NAME = "swin_micro"


@pytest.fixture
def qat_flags(scoring_flags, calibrated, tmp_path):
    """A run of 2 epochs x 6 steps of the calibrated micro model under ft-mode1, its card's policy."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("epochs: 2\naugment: {crop: padded}\noptimizer: {lr: 1.0e-3}\n")
    flags = ["--checkpoint", calibrated, "--batch", 2, "--recipe", recipe, "--output", tmp_path / "out"]
    return [*scoring_flags, *flags]


OF_PTQ = [("float32", None, "original"), ("int8", "ft-mode1", "ptq")]
UNQUANTIZED = ("float32", None, "qat")


def rows(card):
    """Precision, policy and weights of a card's results, in their order."""
    return [(result["precision"], result["policy"], result["weights"]) for result in card["results"]]


def weights(file):
    return read_state_dict(file)[0]


@pytest.mark.parametrize("amax", share(["learned", "reestimated"], 2))
def test_qat_leaves_a_calibrated_checkpoint_its_card_and_logs(
    run, qat_flags, tmp_path, calibrated, micro, card_of, amax
):
    done = run("finetune", *qat_flags, "--amax", amax, "--distill", "--json", tmp_path / "told.json").ok()
    out = tmp_path / "out"
    (verdict,) = json.loads((tmp_path / "told.json").read_text())["verdicts"]
    assert verdict["delta_ptq_se"] is not None and f"deploy: {verdict['deploy']}" in done.out
    assert Path(verdict["deploy"]).is_file() and " ".join(verdict["summary"].split()) in " ".join(done.out.split())
    order = [verdict["summary"].index(word) for word in ("float32", "PTQ", "QAT", "QAT - PTQ")]
    assert order == sorted(order)
    before, after = weights(calibrated), weights(out / f"{NAME}_qat.pth")
    assert before.keys() == after.keys() and not same(before, after)
    for key, weight in after.items():
        if key.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight", "reduction.weight")):
            range_of = after.get(key.removesuffix("weight") + "_weight_quantizer._amax")
            assert range_of is None or weight.abs().max() <= range_of * 128 / 127 * (1 + 1e-6)
    card = card_of(out / f"{NAME}_qat.pth")
    training = card["training"]
    assert training["recipe"]["amax"]["mode"] == amax and training["steps"] == 12 == 2 * 6
    assert training["recipe"]["distill"]["weight"] == 1.0 and "teacher: " in done.err, "it is what was calibrated"
    assert training["teacher"]["sha256"] == card["source"]["sha256"] == compute_sha256(micro / "swin.pth")
    assert training["start"]["file"] == calibrated.name and len(training["pictures_sha256"]) == 64
    assert [row["epoch"] for row in training["epochs"]] == [1, 2]
    assert {"acc1", "train_loss"} <= training["epochs"][0].keys()
    assert rows(card) == [*OF_PTQ, ("int8", "ft-mode1", "qat"), UNQUANTIZED]
    assert card["policy"]["name"] == "ft-mode1" and card["calibration"] == card_of(calibrated)["calibration"]
    assert len([*read_table(out / "steps.csv")]) == 12 and len([*read_table(out / "epochs.csv")]) == 2


def test_results_of_the_calibrated_weights_are_not_copied_to_the_trained_ones(
    run, qat_flags, tmp_path, calibrated, card_of
):
    start = shutil.copy(calibrated, tmp_path)
    loss = {"sqnr_db": 30.0, "kl": 0.0, "agreement": 100.0, "drop": 0.0}
    costs = {"policy": "ft-mode1", "policy_sha256": "0" * 64, "pictures": 8, "pictures_sha256": None, "overall": loss,
             "groups": [], "profile": {}, "forwards": 1.0}  # fmt: skip
    searched = {"engine": "onnxruntime", "batch": 1, "budget": "", "met": True, "pictures": 8, "tried": []}
    measured = {"sensitivity": costs, "searches": [searched]}
    then = "2020-01-01T00:00:00+00:00"
    Path(start).with_suffix(".json").write_text(json.dumps({**card_of(calibrated), **measured, "created": then}))
    flags = [start if word == calibrated else word for word in qat_flags]
    done = run("finetune", *flags, "--epochs", 1, "--no-eval", "--set", "bits=W4A4").ok()
    said, other = done.err.partition("epochs: 1")[0], "give another --recipe (micro_w8a8, qat_base, "
    assert "training under policy ft-mode1 (W8A8) by recipe recipe" in said
    assert f"made for W4A4, but policy ft-mode1 has W8A8: {other}" in said
    card = card_of(tmp_path / "out" / f"{NAME}_qat.pth")
    assert (card["sensitivity"], card["searches"], card["results"]) == (None, [], [])
    assert card["created"] > then, "that of the training"


@pytest.mark.parametrize(("amax", "policy"), share([("learned", "qdq"), ("frozen", "qdq")], 2))
def test_the_written_file_scores_as_the_trained_model(run, qat_flags, tmp_path, card_of, policy, amax):
    """The file scores as the trained model did, also with ranges by channel and a weight decayed or driven out of its
    range."""
    flags = ["--amax", amax, "--policy", policy, "--wprec", 4, "--lr", 0.01, "--epochs", 1]
    assert run("finetune", *qat_flags, *flags).code == 0
    file = tmp_path / "out" / f"{NAME}_qat.pth"
    trained = card_of(file)["results"]
    assert run("evaluate", *qat_flags[:8], "--checkpoint", file, "--batch", 8).code == 0
    again = card_of(file)["results"]
    assert len(again) == len(trained) == 4
    for one, other in zip(trained, again, strict=True):
        assert {**one, "ms_per_picture": None} == {**other, "ms_per_picture": None}


def test_fastertransformers_command_calibrates_trains_and_scores(run, ft_flags, tmp_path, monkeypatch, micro, card_of):
    monkeypatch.chdir(tmp_path)
    teach = ["--distill", "--teacher", micro / "swin.pth", "--num-epochs", 1, "--qat-lr", 1e-4]
    teach += ["--batch-size", 4, "--amp-opt-level", "O0", "--calib-output-path", tmp_path / "calib"]
    done = run("main.py", "--calib", "--train", "--eval", *ft_flags, "--policy", "ft-mode2", *teach).ok()
    training = card_of(tmp_path / "output" / NAME / "default" / f"{NAME}_qat.pth")["training"]
    assert training["start"]["file"] == f"{NAME}_calib.pth" and training["recipe"]["optimizer"]["lr"] == 1e-4
    assert (training["recipe"]["distill"]["compat"], training["recipe"]["distill"]["weight"]) == ("ft", 10000.0)
    assert done.out.count("ft-mode2") >= 2


@pytest.mark.nightly
def test_without_distillation_qat_is_that_of_fastertransformer(
    run, scoring_flags, calibrated, tmp_path, monkeypatch, card_of, pictures
):
    """No teacher; a constant LR for 512 pictures a step; drop path as in the config, 0 (docs/reference, section 2.4).

    Each step takes all pictures unaugmented, so that the loss of the first is that of the calibrated model.
    """
    monkeypatch.chdir(tmp_path)
    plain = [f"augment.{key}=0" for key in ("flip", "erase", "mixup", "cutmix", "label_smoothing")]
    plain += ["augment.crop=none", "augment.auto_augment=none"]
    flags = [*scoring_flags, "--resume", calibrated, "--policy", "ft-mode1", "--opts", "MODEL.DROP_PATH_RATE", 0.0]
    flags += ["--num-epochs", 3, "--batch-size", 12, "--qat-lr", 1e-4, "--no-eval", "--set", *plain]
    theirs = ["--schedule", "constant", "--drop-path", "config"]
    rows = {}
    for tag, more in {"theirs": theirs, "ours": []}.items():
        assert run("main.py", "--train", *flags, *more, "--tag", tag).code == 0
        out = tmp_path / "output" / NAME / tag
        training = card_of(out / f"{NAME}_qat.pth")["training"]
        assert training["teacher"] is None and training["recipe"]["distill"]["weight"] == 0
        rows[tag] = [{key: float(row[key]) for key in ("lr", "loss")} for row in read_table(out / "steps.csv")]
    assert [row["lr"] for row in rows["theirs"]] == pytest.approx(3 * [1e-4 * 12 / 512], rel=1e-5)
    assert len({row["lr"] for row in rows["ours"]}) == 3  # cosine schedule
    cfg = load_config(scoring_flags[1])
    model, _ = load_for_scoring(cfg, str(calibrated), [load_policy("ft-mode1")])
    preprocess, files = Preprocess.from_config(cfg), sorted((pictures / "train").rglob("*.png"))
    images = torch.stack([preprocess(Image.open(file).convert("RGB")) for file in files])
    labels = torch.tensor([("cat", "dog", "fox").index(file.parent.name) for file in files])
    quantize(model.module)
    loss = torch.nn.functional.cross_entropy(model.module(images), labels).item()
    assert rows["theirs"][0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert rows["ours"][0]["loss"] != pytest.approx(loss, rel=1e-4)  # the recipe's drop path of 0.1


def test_qat_over_two_ranks(run, forked, qat_flags, tmp_path, card_of):
    flags = ["--amax", "reestimated", "--epochs", 1, "--set", "amax.batches=2"]
    run("finetune", *qat_flags, *flags, "--accumulation-steps", 2, "--output", tmp_path / "out" / "one").ok()
    forked(2, "finetune", *qat_flags, *flags, "--output", tmp_path / "out" / "two", code=0)
    one, two = (card_of(tmp_path / "out" / tag / f"{NAME}_qat.pth")["training"] for tag in ("one", "two"))
    for a, b in zip(one["epochs"], two["epochs"], strict=True):
        assert a["acc1"] == b["acc1"] and a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)
        assert a["clipped_share"] == pytest.approx(b["clipped_share"], rel=1e-3)


@pytest.mark.nightly
def test_a_sharded_rank_without_a_picture_does_not_hang_the_other(forked, qat_flags, own_pictures, tmp_path, card_of):
    """The second batch of the sample, and val, have one picture for two ranks, which gather shards in every pass."""
    for file in sorted((own_pictures / "train").rglob("*.png"))[9:] + sorted((own_pictures / "val").rglob("*.png"))[1:]:
        file.unlink()
    ranges = ["--amax", "reestimated", "--set", "amax.batches=2", "amax.until=1"]
    flags = ["--data-path", own_pictures, "--epochs", 1, "--fsdp", *ranges]
    forked(2, "finetune", *qat_flags, *flags, code=0)
    card = card_of(tmp_path / "out" / f"{NAME}_qat.pth")
    assert card["results"][0]["pictures"] == 1 and card["training"]["epochs"][0]["clipped_share"] > 0


def test_a_run_does_not_go_on_with_other_pictures_or_another_teacher(run, qat_flags, own_pictures, micro, tmp_path):
    teacher = Path(shutil.copy(micro / "swin.pth", tmp_path))
    words = ["finetune", *qat_flags, "--teacher", teacher, "--distill", "--no-eval", "--epochs", 1]
    assert run(*words, "--data-path", own_pictures).code == 0
    words += ["--data-path", own_pictures.rename(tmp_path / "moved"), "--continue"]
    assert run(*words).code == 0, "the same ones, elsewhere"
    assert "settings: preprocess.mean " in run(*words, "--opts", "DATA.MEAN", "[0.5,0.5,0.5]").error(2)
    state = torch.load(teacher)
    state["model"]["head.bias"] += 1
    torch.save(state, teacher)
    assert "cannot go on with other settings: teacher_sha256 " in run(*words).error(2)
    shutil.copy(micro / "swin.pth", teacher)
    next((tmp_path / "moved" / "train").rglob("*.png")).unlink()
    assert "cannot go on with other settings: pictures_sha256 " in run(*words).error(2)


def test_a_run_that_searched_its_ranges_goes_on(run, qat_flags, tmp_path):
    words = [*qat_flags, "--policy", "qdq", "--wprec", 4, "--aprec", 4, "--amax", "learned", "--no-eval"]
    words += ["--set", "amax.initial=reestimated", "amax.weights=true", "amax.activations=true"]
    run("finetune", *words).ok()
    before = weights(tmp_path / "out" / f"{NAME}_qat.pth")
    assert "going on after 2 of 2 epochs" in run("finetune", *words, "--continue").ok().err
    assert same(before, weights(tmp_path / "out" / f"{NAME}_qat.pth"))


def test_no_checkpoint_that_a_run_begins_with_is_written_over(run, float_run, qat_flags, micro, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    start = Path(shutil.copy(micro / "swin.pth", out / f"{NAME}.pth"))
    teacher = Path(shutil.copy(micro / "swin.pth", out / f"{NAME}_qat.pth"))
    before = start.read_bytes(), teacher.read_bytes()
    line = run(*float_run, "--checkpoint", start, "--output", out).error(2)
    assert f"--output {out}: the result would be written over {start}" in line
    line = run("finetune", *qat_flags, "--distill", "--teacher", teacher).error(2)
    assert f"--output {out}: the result would be written over {teacher}" in line
    start.rename(other := start.with_suffix(".bin"))
    other.with_suffix(".json").write_text("{}")
    line = run(*float_run, "--checkpoint", other, "--output", out).error(2)
    assert f"would be written over {other}" in line, "its run card, that is"
    other.rename(start)
    assert before == (start.read_bytes(), teacher.read_bytes()) and not (out / "steps.csv").exists()


BAD = {
    "uncalibrated": (["--checkpoint", "{micro}/swin.pth"], 2, "is not calibrated"),
    "uncalibrated with a policy": (["--checkpoint", "{micro}/swin.pth", "--policy", "ft-mode1"], 1, "never calibrated"),
    "no checkpoint": (["--checkpoint", ""], 2, "no checkpoint"),
    "nothing to quantize": (["--policy", "float"], 2, "quantizes nothing"),
    "unknown key": (["--set", "optimizer.speed=1"], 2, "unknown key 'optimizer.speed'"),
    "no value": (["--set", "optimizer.lr"], 2, "--set takes KEY=VALUE"),
    "LR 0": (["--lr", 0], 2, "optimizer.lr is 0"),
    "LR NaN": (["--lr", "nan"], 2, "optimizer.lr must be a number"),
    "LR below 0": (["--set", "optimizer.lr=-1"], 2, "optimizer.lr is -1"),
    "no such recipe": (["--recipe", "fastest"], 2, "no recipe 'fastest'"),
    "teacher of other classes": (["--teacher", "{tmp}/other.pth", "--teacher-cfg", "{tmp}/other.yaml"], 2, "5 classes"),
    "teacher that is not there": (["--teacher", "{tmp}/none.pth"], 1, "no such checkpoint"),
    "more than there is": (["--batch", 13], 2, "12 training pictures do not fill one step"),
    "no training pictures": (["--data-path", "{tmp}/empty"], 1, "train"),
    "fsdp alone": (["--fsdp"], 2, "torchrun"),
    "drop path": (["--drop-path", "some"], 2, "augment.drop_path"),
    "drop path beyond": (["--drop-path", "1.5"], 2, "augment.drop_path is 1.5"),
    "offload alone": (["--offload"], 2, "--fsdp"),
    "scored on nothing": (["--score-pictures", 0], 2, "must be at least 1"),
    "two policies": (["--policy", "ft-mode1", "ft-mode2"], 2, "--policy ft-mode1 ft-mode2: give one"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(run, qat_flags, case, tmp_path, micro, pictures):
    flags, code, says = BAD[case]
    config = yaml.safe_load((micro / "swin.yaml").read_text())
    config["MODEL"]["NUM_CLASSES"] = 5
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(config))
    shutil.copytree(pictures / "val", tmp_path / "empty" / "val")
    (tmp_path / "empty" / "train" / "cat").mkdir(parents=True)
    flags = [str(flag).format(micro=micro, tmp=tmp_path) for flag in flags]
    line = run("finetune", *qat_flags, *flags).error(code)
    assert says in line, line
    assert not list((tmp_path / "out").rglob("*_qat.pth"))


@pytest.mark.parametrize("in_memory", share([False, True], 2))
def test_finetune_is_the_command(model, train, pictures, tmp_path, in_memory):
    small = {"epochs": 1, "batch_size": 4}
    sq.calibrate(model, train, "ft-mode1")
    start = model if in_memory else model.save(tmp_path / "start" / "swin_micro_calib.pth")
    tuned = sq.finetune(start, pictures, tmp_path / "out", "qat_tiny", changes={"augment.crop": "padded"}, **small)
    assert is_said(tuned) and tuned.file == tmp_path / "out" / "swin_micro_qat.pth"
    assert tuned.verdict.delta_ptq_se is not None and "QAT - PTQ" in str(tuned).replace("\n        ", " ")
    assert tuned.load().card.is_qat and tuned.load().policy.name == "ft-mode1"
    with pytest.raises(sq.UsageError, match=r"resume goes on with it, overwrite replaces it, or another folder"):
        sq.finetune(start, pictures, tmp_path / "out", **small)
