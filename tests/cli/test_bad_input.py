"""Wrong input ends in one line that names it, with exit code 1 or 2, and writes nothing."""

import shutil
import signal
from pathlib import Path

import pytest
import torch


@pytest.fixture
def refused(run, snapshot, tmp_path):
    """refused(code, command, ...) -> the line of the failure, after checking that the output folder is unchanged."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "swin_micro_calib.pth").write_bytes(b"an older checkpoint")
    (out / "swin_micro_calib.json").write_bytes(b"its run card")
    before = snapshot(out)

    def go(code, command, *flags):
        line = run(command, *flags, "--output", out).error(code)
        assert snapshot(out) == before
        return line

    return go


def has(line, *parts):
    assert [str(part) for part in parts if str(part) not in line] == [], line


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path, good: None, "no such"),
        (lambda path, good: path.write_bytes(good.read_bytes()[:-2000]), "cut short or damaged"),
        (lambda path, good: torch.save({"conv1.weight": torch.ones(3)}, path), "no Swin classifier"),
    ],
)
def test_a_bad_checkpoint(refused, float_flags, micro, tmp_path, damage, says):
    """tests/checkpoint has every other damage."""
    path = tmp_path / "bad.pth"
    damage(path, micro / "swin.pth")
    has(refused(1, "calibrate", *float_flags, "--checkpoint", path), path, says)


def test_a_model_of_other_than_coloured_pictures(refused, float_flags, write_config, tmp_path):
    flags = ["--cfg", write_config(tmp_path, "swin", IN_CHANS=1), "--random-weights"]
    has(refused(2, "calibrate", *float_flags[4:], *flags), "IN_CHANS is 1", "must be 3")


def test_a_head_of_another_size_needs_the_flag(refused, float_flags):
    line = refused(1, "calibrate", *float_flags, "--opts", "MODEL.NUM_CLASSES", 5)
    has(line, "swin.pth", "3 classes", "MODEL.NUM_CLASSES is 5: give --opts MODEL.NUM_CLASSES 3", "pass --replace-head")


def test_a_float_checkpoint_is_never_written_over(run, float_flags, micro, tmp_path):
    path = Path(shutil.copy(micro / "swin.pth", tmp_path / "swin_micro_calib.pth"))
    before = path.read_bytes()
    flags = [*float_flags, "--checkpoint", path, "--output", tmp_path]
    has(run("calibrate", *flags).error(2), path, "written over", "--output", "another folder")
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == [path.name]


def emptied(folder):
    for file in folder.rglob("*.png"):
        file.unlink()


def owl(folder):
    shutil.copytree(folder / "val" / "cat", folder / "val" / "owl")


BAD_DATA = {
    "no such folder": (lambda own: shutil.rmtree(own), "own", "--data-path"),
    "no folder of the split": (lambda own: shutil.rmtree(own / "train"), "own", "it holds val: give --split val"),
    "an empty split": (lambda own: emptied(own / "train"), "train", "no pictures"),
}
BAD_VAL = {
    "an empty val": (lambda own: emptied(own / "val"), "val", "no pictures"),
    "too many classes": (owl, "val has other classes than train", "owl there alone"),
}


@pytest.mark.parametrize("what", BAD_DATA)
def test_bad_folders(refused, float_flags, own_pictures, what):
    damage, *says = BAD_DATA[what]
    damage(own_pictures)
    has(refused(1, "calibrate", *float_flags, "--data-path", own_pictures), *says)


@pytest.mark.parametrize("what", BAD_VAL)
def test_bad_folders_to_score(refused, scoring_flags, micro, own_pictures, what):
    damage, *says = BAD_VAL[what]
    damage(own_pictures)
    words = [*scoring_flags, "--data-path", own_pictures, "--checkpoint", micro / "swin.pth"]
    has(refused(1, "evaluate", *words), *says)


def test_a_flag_with_an_impossible_value(refused, float_flags):
    for flags, says in (
        (["--pictures", 0], "--pictures 0"),
        (["--pictures", -1], "--pictures -1"),
        (["--pictures", 16], "16 pictures, the data holds 12"),
        (["--pictures", "ten"], "ten"),
        (["--percentile", 0], "--percentile 0"),
        (["--percentile", "nan"], "--percentile nan"),
        (["--calibrator", "best"], "best"),
        (["--calibrator", "max", "--percentile", 99], "--percentile 99.0: is for --calibrator percentile, not max"),
        (["--wprec", 9], "--wprec 9"),
        (["--aprec", 1], "--aprec 1"),
        (["--batch", 0], "--batch 0: must be at least 1"),
        (["--max-unreadable", 2], "--max-unreadable 2"),
        (["--policy", "ft-mode3"], "ft-mode3"),
        (["--policy", "qdq", "qdq"], "qdq"),
        (["--policy", "ft-mode1", "--off", "*qvk*"], "qvk"),
        (["--wprec", 4], "--policy"),
        (["--policy", "cpu", "--wprec", 7, "--saturation-safe"], "--wprec and --saturation-safe"),
        (["--seed", 10**30], "--seed"),
        (["--ouput", "x"], "--ouput"),
        (["--split", "../.."], "../.."),
        (["--data-path", ""], "--data-path"),
        (["--zip"], "drop --zip"),
    ):
        has(refused(1 if flags[0] == "--split" else 2, "calibrate", *float_flags, *flags), says)


def test_no_checkpoint_and_no_command(run, float_flags, tmp_path):
    assert "no checkpoint: name one" in run("calibrate", *float_flags[:2], "--data-path", tmp_path).error(2)
    assert "name a checkpoint or an artifact" in run("evaluate", *float_flags[:2], "--data-path", tmp_path).error(2)
    assert "calibrat'" in run("calibrat").error(2)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_output_folder_that_cannot_be(run, float_flags, scoring_flags, micro, tmp_path, below):
    file, weights = tmp_path / "a file", micro / "swin.pth"
    file.write_text("precious")
    for words in (
        ["calibrate", *float_flags],
        ["evaluate", *scoring_flags, weights],
        ["main.py", "--eval", *scoring_flags, "--resume", weights],
        ["demo"],
    ):
        line = run(*words, "--output", file / below).error(1)
        has(line, file / below, "cannot be the output directory")
    assert file.read_text() == "precious"


def test_a_run_card_that_cannot_be_written_is_found_before_scoring(
    run, scoring_flags, calibrated, tmp_path, monkeypatch
):
    """A calibrated checkpoint may lie in a read-only folder. Root may write there all the same, which is hidden
    here."""
    shutil.copy(calibrated, tmp_path)
    shutil.copy(calibrated.with_suffix(".json"), tmp_path)

    def no_pictures(*_, **__):
        raise AssertionError("scored before the output folder was checked")

    def read_only(path):
        from swin_quant.base.errors import SwinQuantError

        raise SwinQuantError(f"{path}: cannot be the output directory: permission denied")

    monkeypatch.setattr("swin_quant.verbs.evaluate.score_model", no_pictures)
    monkeypatch.setattr("swin_quant.verbs.evaluate.check_writable", read_only)
    line = run("evaluate", *scoring_flags, "--checkpoint", tmp_path / calibrated.name).error(1)
    has(line, tmp_path, "permission denied")


def test_tracebacks_are_for_verbose(run, float_flags):
    flags = [*float_flags, "--checkpoint", "nowhere.pth"]
    assert "Traceback" not in run("calibrate", *flags).err
    err = run("calibrate", *flags, "--verbose").err
    assert "Traceback (most recent call last)" in err
    due = "give a checkpoint file, a folder of Hugging Face, or timm:NAME"
    assert err.splitlines()[-1] == f"error: nowhere.pth: no such checkpoint: {due}"


def test_a_bug_of_ours_is_one_line_that_asks_for_verbose(run, float_flags, monkeypatch):
    monkeypatch.setattr("swin_quant.verbs.calibrate.draw", lambda *_, **__: 1 / 0)
    done = run("calibrate", *float_flags)
    assert done.code == 1 and done.err.count("\n") == 1
    has(done.err, "ZeroDivisionError", "bug of swin-quant", "--verbose")


@pytest.mark.parametrize("limit", [500, 40_000])
def test_a_full_disk_leaves_what_was_there(forked, float_flags, calibrated, snapshot, tmp_path, limit):
    """500 bytes are too few for the run card; 40,000 hold the run card, but not the checkpoint."""
    out = tmp_path / "out"
    shutil.copytree(calibrated.parent, out)
    before = snapshot(out)

    def small_disk(rank):
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    (done,) = forked(1, "calibrate", *float_flags, "--output", out, "--quiet", before=small_disk)
    has(done.error(1), out / "swin_micro_calib.pth", "cannot be written", "limit on the size of a file")
    assert snapshot(out) == before


def test_a_typo_gets_a_hint_though_something_else_is_missing(run, micro):
    for words, meant in (
        (["calibrate", "x.pth", "--data-pth=y"], "--data-path"),
        (["calibrate", "x.pth", "--polcy", "cpu"], "--policy"),
        (["quantize", "x.pth", "--for", "openvin"], "openvino"),
        (["main.py", "--cailb"], "--calib"),
        (["evalute", "x.pth"], "evaluate"),
        (["calibrate", "--halp"], "--help"),
        (["show", "polices"], "policies"),
        (["show", "--cfg", "EXAMPLE", "--policy", "onnxruntme"], "onnxruntime"),
    ):
        line = run(*(micro / "swin.yaml" if word == "EXAMPLE" else word for word in words)).error(2)
        has(line, f"did you mean {meant}?")


def test_a_missing_file_gets_the_near_name_in_its_folder(run, micro, tmp_path, monkeypatch):
    for name in ("swin.pth", "swin.yaml"):
        shutil.copy(micro / name, tmp_path)
    for name in ("swin.onnx", "seven.png"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, meant in (
        (["show", "swin.pht"], "swin.pth"),
        (["evaluate", "swim.pth", "--cfg", "swin.yaml", "--data-path", "train"], "swin.pth"),
        (["show", "swin.pth", "--cfg", "swin.pth", "--policy", "./swn.yaml"], "swin.yaml"),
        (["evaluate", "swin.pth", "--cfg", "swin.yml", "--data-path", "train"], "swin.yaml"),
        (["show", "swin.onx"], "swin.onnx"),
        (["predict", "swin.pth", "--cfg", "swin.yaml", "seven.pn"], "seven.png"),
        (["predict", "swin.pth", "--cfg", "swin.yaml", "--data-path", "pictues"], "pictures"),
    ):
        done = run(*words)
        assert done.code in (1, 2)
        has(done.err.splitlines()[-1], f"did you mean {meant}?")


def test_a_word_in_the_wrong_place_is_told_first(run, micro, monkeypatch):
    monkeypatch.chdir(micro)
    for words, code, says in (
        (["serve", "swin.pth"], 2, "swin.pth: is a model, and `serve` takes an artifact: export it first"),
        (["package", "swin.pth"], 2, "swin.pth: is a model, and `package` takes an artifact: export it first"),
        (["evaluate", "swin.pth", "--engine", "cudaa"], 2, "no engine 'cudaa'; did you mean cuda?"),
        (["predict", "swin.pth", "a.png", "--engine", "cudaa"], 2, "no engine 'cudaa'; did you mean cuda?"),
    ):
        has(run(*words).error(code), says)


def test_a_name_that_only_holds_the_word_is_not_suggested(run, micro, monkeypatch):
    monkeypatch.chdir(micro)
    for words, says in (
        (["evaluate", "swin.pth", "--engine", "torch"], "no engine 'torch': there are "),
        (["evaluate", "swin.pth", "--engine", "runtime"], "no engine 'runtime': there are "),
        (["eval"], "no command 'eval'; did you mean evaluate?"),
    ):
        has(run(*words).error(2), says)


def test_help_is_a_command_too(run):
    assert run("help").ok().out == run("--help").ok().out
    assert run("help", "show").ok().out == run("show", "--help").ok().out
    has(run("help", "shw").error(2), "no command 'shw'; did you mean show?")


def test_a_file_of_the_same_kind_alone_is_not_suggested(run, tmp_path, monkeypatch):
    (tmp_path / "bomb.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert "did you mean" not in run("show", "x.pth", "--policy", "nosuch.yaml").error(2)


def test_a_missing_argument_is_named_with_what_it_is(run):
    for words, says in (
        (["quantize", "x.pth"], "--for is missing: backend that will run it"),
        (["quantize", "x.pth", "--for"], "--for requires an argument"),
        (["verify"], "ARTIFACT is missing: an exported file"),
        (["report"], "CARDS is missing: run cards"),
    ):
        has(run(*words).error(2), says, f"see swin-quant {words[0]} --help")


def test_a_picture_in_the_place_of_the_model_is_told_so(run, pictures, tmp_path):
    for words, what in (
        (["predict", "swin.pth"], "checkpoint or artifact"),
        (["evaluate", "--data-path", "pictures"], "checkpoint or artifact"),
        (["quantize", "--for", "openvino", "--data-path", "pictures"], "checkpoint"),
        (["export", "--for", "openvino", "--output", "out"], "checkpoint"),
        (["finetune", "--data-path", "pictures"], "checkpoint"),
        (["verify", "--data-path", "pictures"], "checkpoint or artifact"),
        (["serve"], "artifact"),
        (["package", "--output", "out"], "artifact"),
    ):
        for picture in (next((pictures / "val").rglob("*.png")), tmp_path / "seven.png"):
            line = run(words[0], picture, *words[1:]).error(2)
            has(line, f"{picture}: is a picture: name the {what} first")


def test_a_folder_of_pictures_in_the_place_of_the_model_is_told_so(run, pictures):
    for verb, other in (("calibrate", "swin.pth"), ("verify", "swin.onnx")):
        line = run(verb, pictures, "--data-path", other).error(2)
        has(line, f"{pictures}: is a folder of pictures: give the checkpoint file in its place")


def test_words_that_nothing_takes_are_told_with_the_flag_of_a_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my pictures").mkdir()
    too_many = "too many words: quantize takes CHECKPOINT alone; pictures are given by --data-path 'my pictures'"
    for words in (["my pictures", "swin.pth"], ["swin.pth", "my pictures"]):
        line = run("quantize", *words, "--for", "openvino").error(2)
        has(line, words[1], too_many)
    line = run("quantize", "swin.pth", "more", "--for", "openvino", "--data-path", "my pictures").error(2)
    assert "more: too many words: quantize takes CHECKPOINT alone; see" in line


def test_missing_pictures_are_asked_for_by_flags_that_the_command_has(run, micro):
    model = [micro / "swin.pth", "--cfg", micro / "swin.yaml"]
    assert "give --data-path DIR\n" in run("quantize", *model, "--for", "onnxruntime").err
    assert "give --data-path DIR or --images PLACE ...\n" in run("calibrate", *model).err


def test_a_home_folder_behind_an_equals_sign_is_found(run, micro, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    line = run("evaluate", micro / "swin.pth", "--cfg", micro / "swin.yaml", "--data-path=~/pictures").error(1)
    has(line, f"{tmp_path}/pictures: no such folder")


def test_other_files_in_the_place_of_run_cards_and_artifacts(run, micro, pictures, tmp_path):
    weights, picture = shutil.copy(micro / "swin.pth", tmp_path), next((pictures / "val").rglob("*.png"))
    for file in (weights, picture):
        has(run("report", file).error(2), f"{file}: is no run card: give one (*.json), or a folder of them")
    has(run("serve", weights).error(2), f"{weights}: is a model, and `serve` takes an artifact: export it first")
