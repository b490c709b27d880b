"""`quantize`: all steps in one go, none done twice, obstacles named before the first, and the same in Python."""

import functools
import inspect
import json
import shlex
import shutil
import sys

import pytest
import torch
from commands import command, is_said
from nightly import share
from torch import nn

import swin_quant as sq
from swin_quant.backends.backend import Exports
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.cli.command import Command
from swin_quant.data.picture_set import PictureSet
from swin_quant.policies import PolicyChoice
from swin_quant.verbs import quantize as verb
from swin_quant.verbs.search_costs import Losses


def words_for(micro, pictures, folder):
    model = [micro / "swin.pth", "--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu"]
    return [*model, "--pictures", 8, "--for", "onnxruntime", "--output", folder]


@pytest.fixture
def words(micro, pictures, tmp_path):
    return words_for(micro, pictures, tmp_path / "out")


@pytest.fixture
def quick(words):
    """The same for TorchScript, whose export takes no seconds."""
    return [*words, "--for", "torchscript"]


@pytest.fixture(scope="module")
def finished(micro, pictures, tmp_path_factory):
    """The folder of a run that finished."""
    folder = tmp_path_factory.mktemp("quantize") / "out"
    command("quantize", *words_for(micro, pictures, folder), "--quiet")
    return folder


@pytest.fixture
def made(finished, tmp_path):
    """The card of its artifact, in a copy of the folder."""
    return shutil.copytree(finished, tmp_path / "out") / "swin_micro_int8_onnxruntime.json"


def test_a_scored_artifact_whose_finished_steps_are_not_repeated(run, words, made, tmp_path, snapshot):
    before = snapshot(tmp_path / "out")
    again = run("quantize", *words)
    assert again.code == 0 and again.err.count("done before") == 4 and "Δ acc@1" in again.out
    verdict = " ".join(again.out.partition("deploy: ")[2].split())
    assert "7 pictures" in verdict and "float32 on onnxruntime" in verdict and "next: swin-quant " in verdict
    assert snapshot(tmp_path / "out") == before
    card = json.loads(made.read_text())
    assert [record["passed"] for record in card["verification"]] == [True, None]
    assert [result["precision"] for result in card["results"]] == ["float32", "float32", "int8"]
    assert card["results"][-1]["delta_acc1"] is not None
    made.unlink()  # the card is written last: it goes on where it was cut off
    again = run("quantize", *words)
    assert again.code == 0 and again.err.count("done before") == 1 and made.is_file()


@pytest.mark.nightly
def test_exports_with_other_options_are_not_reused(run, words, made):
    """A float file, or one of another policy, lies where this run's artifact would."""
    for file in made.parent.glob("*_onnxruntime.*"):
        file.unlink()
    exporting = ["export", made.with_name("swin_micro_calib.pth"), "--for", "onnxruntime", "--output", made.parent]
    for options, done in ((["--precision", "float"], 1), (["--policy", "cpu"], 1)):
        run(*exporting, *options).ok()
        assert run("quantize", *words, "--dry-run").out.count("# done") == done


def test_a_dry_run_prints_commands_that_are_given_what_was_asked_for_and_writes_nothing(run, words, tmp_path):
    (tmp_path / "my own.yaml").write_text("name: mine\nrules:\n  - enable: ['role:gemm_input', 'role:gemm_weight']\n")
    asked = ["--calibrator", "mse", "--split", "val", "--seed", 3, "--half", "none", "--threads", 1, "--batch", 4]
    asked += ["--score-pictures", 5]
    asked += ["--img-size", 32, "--window", 4, "--weights", "raw"]
    done = run("quantize", *words, "--policy", tmp_path / "my own.yaml", *asked, "--dry-run").ok()
    told = [(name, Command(name).parse(rest)) for _, name, *rest in map(shlex.split, done.out.splitlines())]
    assert [name for name, _ in told] == ["calibrate", "export", "verify", "evaluate"]
    calibrate, export, verify, evaluate = (options for _, options in told)
    assert not (tmp_path / "out").exists()
    assert calibrate["policy"] == export["policy"] == (str(tmp_path / "my own.yaml"),)
    assert calibrate["cfg"] and (calibrate["method"], calibrate["split"], calibrate["seed"]) == ("mse", "val", 3)
    assert (calibrate["img_size"], calibrate["window"], calibrate["weights"]) == ("32", 4, "raw")
    assert (calibrate["count"], evaluate["count"]) == (8, 5)
    assert calibrate["batch"] == evaluate["batch"] == 4 and (evaluate["half"], verify["threads"]) == ("none", 1)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("onnx", {"policy": "qdq"}, marks=pytest.mark.nightly),
        pytest.param("onnxruntime", {"policy": "w4a16", "int4_weights": True}, marks=pytest.mark.nightly),
        pytest.param("torchscript", {"policy": "qdq", "wprec": 7}, marks=pytest.mark.nightly),
        ("fastertransformer", {"policy": "ft-mode2"}),
        ("cuda", {"policy": "cuda"}),
    ],
)
def test_a_dry_run_names_the_file_that_the_export_writes(run, calibrated_32, pictures, tmp_path, backend, options):
    words = [calibrated_32, "--data-path", pictures, "--device", "cpu", "--pictures", 8, "--for", backend]
    flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in options.items()]
    told = run("quantize", *words, *flags, "--output", tmp_path, "--dry-run").ok().out.splitlines()
    choice = PolicyChoice(policy=(options["policy"],), wprec=options.get("wprec"))
    model = sq.load(calibrated_32.with_name("micro.pth"), config=calibrated_32.with_name("micro.yaml"))
    sq.calibrate(model, [torch.zeros(1, 3, 32, 32)], choice, passes=[])
    made = sq.export(model, backend, tmp_path, choice, int4_weights=options.get("int4_weights", False))
    assert all(str(made.file) in line for line in told if "verify" in line or "evaluate" in line), told


def test_a_calibrated_file_is_said_to_get_another_policy(run, calibrated, pictures, tmp_path):
    words = [calibrated, "--data-path", pictures, "--for", "onnxruntime", "--output", tmp_path / "out", "--dry-run"]
    told = "is calibrated under policy ft-mode1: it is calibrated anew under onnxruntime, the backend's best; --policy"
    assert told in run("quantize", *words).ok().err
    assert "calibrated anew" not in run("quantize", *words, "--policy", "cpu").ok().err


def test_pictures_are_opened_once_a_step(run, words, made, heard):
    """Names are enough to see whether a step is done, however the bytes of pictures are to be held."""
    opened = heard(PictureSet, "open")
    run("quantize", *words, "--cache-mode", "full").ok()
    assert [one["self"].cache_mode for one in opened] == ["no", "no"], "of train and of val"


def test_a_dry_run_of_pictures_that_are_turned_and_a_seed_of_zero_says_both(micro, pictures, tmp_path, capsys):
    how = sq.pictures(pictures, upright=True, seed=0)
    sq.quantize(micro / "swin.pth", how, "onnxruntime", tmp_path / "out", config=micro / "swin.yaml", dry_run=True)
    told = map(shlex.split, capsys.readouterr().out.splitlines())
    options = {name: Command(name).parse(rest) for _, name, *rest in told}
    assert options["calibrate"]["seed"] == 0
    assert all(" ".join(one["opts"]) == "DATA.UPRIGHT True" for name, one in options.items() if "opts" in one)
    assert "opts" in options["calibrate"] and not (tmp_path / "out").exists()


CHANGED = ["--policy", "qdq", "--wprec", 7, "--quant-per-tensor", "--narrow-range", "--off", "layers.0.*", "*.attn.*"]


def test_a_changed_policy_is_that_of_both_files_and_knows_what_is_done(run, quick, tmp_path):
    assert run("quantize", *quick, *CHANGED).code == 0
    files = ("swin_micro_calib.json", "swin_micro_w7a8.torchscript.json")
    rules = [RunCard.read(tmp_path / "out" / name).policy["rules"] for name in files]
    assert rules[0] == rules[1] and rules[0][-1] == {"disable": ["layers.0.*", "*.attn.*"]}
    assert run("quantize", *quick, *CHANGED, "--dry-run").out.count("# done") == 4
    assert run("quantize", *quick, *CHANGED[:-1], "--dry-run").out.count("# done") == 0


@pytest.mark.parametrize("has_train", share([False, True], 2), ids=["flat", "train alone"])
def test_a_folder_without_a_split_to_score_ends_with_a_verified_file(run, quick, pictures, tmp_path, has_train):
    """Pictures that lie in the folder itself, without classes; and training pictures alone."""
    place = tmp_path / "photos"
    if has_train:
        shutil.copytree(pictures / "train", place / "train")
    else:
        place.mkdir()
        for number, picture in enumerate((pictures / "train").rglob("*.png")):
            shutil.copy(picture, place / f"{number}.png")
    quick[quick.index(pictures)] = place
    for done in (0, 3):
        ended = run("quantize", *quick).ok()
        assert ended.err.count("done before") == done
        said = f"verified; not scored: {place} has no val split"  # a line may break at a hyphen of the path
        assert "".join(said.split()) in "".join(ended.out.split())


CHANGES = ["--pictures 12", "--calibrator max", "--policy cpu", "--seed 1", "--percentile 99"]
CHANGES += ["--opts TEST.CROP True", "--opts MODEL.SWIN.APE True"]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_options_need_a_new_calibration(run, words, made, change):
    planned = run("quantize", *words, *change.split(), "--dry-run")
    assert planned.code == 0 and "# done" not in planned.out


def test_what_decides_the_file_is_given_to_the_exporter(run, words):
    """The CUDA engine takes the type of floats from its file."""
    for more, flag, on in (("--for cuda", "--float-type bfloat16", True), ("--policy w4a16", "--int4-weights", False)):
        lines = run("quantize", *words, *more.split(), *flag.split(), "--dry-run").out.splitlines()
        assert [flag in line for line in lines] == [False, True, on, on]


@pytest.mark.parametrize("split, done", [("train", 0), ("val", 3)])
def test_other_pictures_at_the_same_place_are_calibrated_and_scored_on(run, words, made, pictures, split, done):
    """There are as many, in a folder of the same name: only their own names differ."""
    other = shutil.copytree(pictures, made.parent.parent / "other" / pictures.name)
    for file in (other / split).rglob("*.*"):
        file.rename(file.with_stem(f"new_{file.stem}"))
    words[words.index(pictures)] = other
    assert run("quantize", *words, "--dry-run").out.count("# done") == done


def test_a_calibrated_checkpoint_is_not_calibrated_over_itself(run, words, made, snapshot):
    words[0] = made.with_name("swin_micro_calib.pth")
    before = snapshot(made.parent)
    line = run("quantize", *words, "--passes", "fast").error(2)
    assert "swin_micro_calib.pth: the result would be written over it: give another --output" in line
    assert snapshot(made.parent) == before


def test_without_an_engine_here_it_ends_with_the_export(run, words):
    done = run("quantize", *words, "--for", "tensorrt")
    assert done.code == 0 and "neither verified nor scored" in done.out and "tensorrt-cu" in done.out
    deploy, *_, last = done.out.replace("\\\n", "").strip().splitlines()
    assert deploy.split()[-1].endswith("swin_micro_int8_tensorrt.onnx") and "export" in last


def test_an_artifact_that_computes_something_else_is_not_scored(run, words, monkeypatch, tmp_path):
    monkeypatch.setattr("swin_quant.verbs.verify.get_tolerance", lambda *_: 0.0)
    assert "verification failed" in run("quantize", *words).err
    card = json.loads((tmp_path / "out" / "swin_micro_int8_onnxruntime.json").read_text())
    assert card["results"] == []


REFUSED = [
    ("--policy qdq cpu", "--policy qdq cpu: give one"),
    ("--policy auto --wprec 4", "--policy auto: --wprec is for a policy with a name"),
    ("--for fastertransformer --policy cpu", "--policy cpu: fastertransformer runs ft-mode1 and ft-mode2 alone"),
    ("--policy w4a4", "no policy 'w4a4': give --policy qdq --wprec 4 --aprec 4"),
    ("--policy qdq --aprec 4", "--policy qdq A4: give --aprec 8, or --for torchscript: its activations have 4 bits"),
    ("--policy four.yaml", "choose another --policy, or --for torchscript: its activations have 4 bits"),
    ("--for cuda --float-type float32", "--float-type float32: the CUDA engine has float16 and bfloat16"),
    ("--int4-weights", "policy onnxruntime has no weights of 4 bits"),
    ("--for tensorrt --int4-weights", "means nothing to --for tensorrt"),
    ("--passes fst", "no recipe of passes 'fst'; did you mean fast?"),
    ("--max-unreadable 5", "--max-unreadable 5.0: a share from 0 to 1"),
    ("--policy qdq --off no.such.layer", "--off: selector 'no.such.layer' names no node of this model, whose nodes"),
    ("--policy qdq --off layer.0.*", "--off: selector 'layer.0.*' names no node of this model; did you mean layers.0"),
    ("--score-pictures 0", "--score-pictures 0: must be at least 1"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED)
def test_what_cannot_be_made_is_refused_before_any_work(run, words, tmp_path, monkeypatch, flags, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.yaml").write_text("name: four\nrules:\n  - {nodes: ['role:activation'], bits: 4}\n")
    assert says in run("quantize", *words, *flags.split()).error(2)
    assert not (tmp_path / "out").exists()


def computes(*_, **__):
    raise SwinQuantError("it computes already")


@pytest.fixture
def quantize(run, micro, pictures, tmp_path, monkeypatch):
    """quantize(flag, ...) -> how it ended; a calibration would be a failure of its own."""
    monkeypatch.setattr(verb, "calibrate", functools.wraps(verb.calibrate)(computes))
    model = [micro / "swin.pth", "--cfg", micro / "swin.yaml", "--device", "cpu", "--pictures", 8]
    return lambda *words: run("quantize", *model, "--data-path", pictures, "--output", tmp_path / "out", *words)


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_package_that_the_export_imports(quantize, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    line = quantize("--for", "onnxruntime").error(2)
    assert f"{package} cannot be imported" in line and "[onnx]" in line


def test_a_folder_of_pictures_that_is_not_there(quantize, tmp_path, monkeypatch):
    """The choice of a policy may compile operators, which takes a while."""
    monkeypatch.setattr(Exports, "policies_for", lambda *_: pytest.fail("it chooses a policy already"))
    assert "no pictures: give --data-path DIR" in quantize("--for", "openvino", "--data-path", "").error(2)
    line = quantize("--for", "openvino", "--data-path", tmp_path / "nowhere").error(1)
    assert f"{tmp_path / 'nowhere'}: no such folder" in line and "--data-path" in line
    (tmp_path / "empty").mkdir()
    assert "neither folders nor archives" in quantize("--for", "openvino", "--data-path", tmp_path / "empty").error(1)
    (tmp_path / "own" / "val").mkdir(parents=True)
    told = f"{tmp_path / 'own'}: has no folder train, nor train.zip with its map; it holds val: give --split val, or "
    assert told in quantize("--for", "openvino", "--data-path", tmp_path / "own").error(1)


@pytest.mark.parametrize("flag", ["--output", "--json"])
def test_a_place_that_cannot_be_written(quantize, tmp_path, flag):
    (tmp_path / "file").touch()
    line = quantize("--for", "onnxruntime", flag, tmp_path / "file" / "x").error(1)
    assert str(tmp_path / "file" / "x") in line and "cannot be" in line


def test_labels_that_do_not_fit(quantize, pictures, tmp_path):
    """The calibration needs none, the score behind it does."""
    data = shutil.copytree(pictures, tmp_path / "data")
    for number in range(3):
        shutil.copytree(data / "val" / "cat", data / "val" / f"more{number}")
    line = quantize("--for", "onnxruntime", "--data-path", data).error(1)
    assert "val" in line and "classes" in line


def test_another_number_of_classes_than_the_head_has(quantize):
    """Before the labels of the pictures are compared with that number."""
    line = quantize("--for", "onnxruntime", "--opts", "MODEL.NUM_CLASSES", 2).error(1)
    assert "swin.pth: its head has 3 classes, MODEL.NUM_CLASSES is 2: give --opts MODEL.NUM_CLASSES 3, or" in line


def test_too_few_pictures_for_the_budget(quantize, run, calibrated, pictures, tmp_path, monkeypatch):
    """Before a calibration, and in a search of its own before the first forward."""
    done = quantize("--for", "onnxruntime", "--policy", "auto", "--max-drop", 0.05)
    assert "1024 pictures hardly tell a drop of 0.05 points: give 2000 or more" in done.err, done
    assert done.err.index("hardly tell") < done.err.index("it computes already")
    assert not (tmp_path / "out").exists(), "a step that fails leaves no empty folder"
    monkeypatch.setattr(Losses, "__init__", computes)
    copy = shutil.copytree(calibrated.parent, tmp_path / "copy") / calibrated.name
    words = ["--data-path", pictures, "--engine", "onnxruntime", "--max-drop", 5, "--pictures", 8, "--device", "cpu"]
    done = run("search", copy, *words, "--output", tmp_path / "found")
    assert done.err.index("8 pictures hardly tell") < done.err.index("it computes already")


VAL = 7  # pictures


@pytest.fixture
def file(micro):
    return micro / "swin.pth", micro / "swin.yaml"


def test_quantize_is_the_command(file, pictures, tmp_path, finished):
    checkpoint, config = file
    place, out = sq.pictures(pictures, "train", 8), tmp_path / "python"
    made = sq.quantize(checkpoint, place, "onnxruntime", out, config=config)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert str(sq.quantize(checkpoint, place, "onnxruntime", out, config=config)) == str(made), "done before"
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert compute_sha256(made.artifact.file) == compute_sha256(finished / made.artifact.file.name)
    assert is_said(made) and made.verdict.pictures == VAL and made.evaluation.quantized.delta_acc1_se is not None


def test_quantize_in_memory_does_all_that_it_is_asked_for(model, pictures, tmp_path, heard):
    """Each argument reaches the step that it is for; a new one has to be named here."""
    calibrate, _, verify, evaluate = (heard(verb, name) for name in ("calibrate", "export", "verify", "evaluate"))
    asked = {"method": "percentile", "percentile": 99.5, "exact": True, "passes": ["bias_correction"]}
    timing = {"threads": 1, "float_type": "float32"}
    place = sq.pictures(pictures, "train", 8, seed=3, upright=False)
    made = sq.quantize(model, place, "onnxruntime", tmp_path, sq.policy("qdq"), half="none", **asked, **timing)
    assert asked.items() <= calibrate[0].items() and timing.items() <= verify[0].items()
    assert (timing | {"half": "none"}).items() <= evaluate[0].items()
    assert is_said(made) and made.verdict.pictures == VAL
    record = made.artifact.card.calibration
    assert (record["percentile"], record["exact"], record["seed"], record["split"]) == (99.5, True, 3, "train")
    assert {result.precision for result in made.evaluation.results} == {"float32", "int8"}
    known = {"model", "pictures", "backend", "folder", "policy", "scored_on", "half", *asked, *timing}
    elsewhere = {"config", "dry_run", "budget", "int4_weights", "score_pictures", "tune"}  # above, and test_search.py
    assert {*inspect.signature(sq.quantize).parameters} == known | elsewhere


def test_invalid_arguments_are_refused_before_any_work(model, file, train, tensors, tmp_path):
    checkpoint, config = file
    own, place, batches = sq.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), 2), train.path, tensors("train")
    changed, budget = {"changes": {"optimizer.rl": 1}, "config": config}, sq.Budget(max_drop=0.1)
    for says, call in (
        ("a budget needs .*auto", lambda: sq.quantize(model, batches, "onnxruntime", tmp_path, budget=budget)),
        ("dry_run prints commands", lambda: sq.quantize(model, train, "onnxruntime", tmp_path, dry_run=True)),
        ("config is for a checkpoint", lambda: sq.quantize(model, train, "onnxruntime", tmp_path, config=config)),
        ("^threads 0: must", lambda: sq.quantize(model, train, "onnxruntime", tmp_path, threads=0)),
        ("^percentile 150: must", lambda: sq.quantize(model, train, "onnxruntime", tmp_path, percentile=150)),
        ("onnxruntim.*onnxruntime", lambda: sq.quantize(model, train, "onnxruntim", tmp_path)),
        ("is a float model: calibrate it first", lambda: sq.finetune(model, place, tmp_path)),
        ("train and val of a place on disk", lambda: sq.finetune(model, train, tmp_path)),
        ("your own loop", lambda: sq.finetune(own, place, tmp_path)),
        ("changes: .*optimizer.rl.*optimizer.lr", lambda: sq.finetune(checkpoint, place, tmp_path, **changed)),
    ):
        with pytest.raises(sq.UsageError, match=says):
            call()
    assert not list(tmp_path.iterdir())
