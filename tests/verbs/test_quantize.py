"""swin-quant quantize: all steps in one go, none done twice, and none lost when a run is cut off."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import command

from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.files import sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CheckpointRecord
from swin_quant.cli.command import Command
from swin_quant.config import load_config
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import load_for_scoring
from swin_quant.models import build_model
from swin_quant.score.options import EngineOptions
from swin_quant.verbs import quantization
from swin_quant.verbs import quantize as quantizing
from swin_quant.verbs.search_costs import Timer


def words_for(micro, pictures, folder):
    model = [micro / "swin.pth", "--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu"]
    return [*model, "--pictures", 8, "--for", "onnxruntime", "--output", folder]


@pytest.fixture
def words(micro, pictures, tmp_path):
    return words_for(micro, pictures, tmp_path / "out")


@pytest.fixture
def quick(words):
    """The same for TorchScript, whose export takes no seconds."""
    return [word if word != "onnxruntime" else "torchscript" for word in words]


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


@pytest.mark.slow
def test_from_a_float_checkpoint_to_a_scored_artifact(made, tmp_path):
    card = json.loads(made.read_text())
    assert [record["passed"] for record in card["verification"]] == [True, None]
    assert [result["precision"] for result in card["results"]] == ["float32", "float32", "int8"]
    assert card["results"][-1]["delta_acc1"] is not None
    assert (tmp_path / "out" / "swin_micro_calib.pth").is_file()


@pytest.mark.slow
def test_what_is_done_is_not_done_again(run, words, made, tmp_path, snapshot):
    before = snapshot(tmp_path / "out")
    again = run("quantize", *words)
    assert again.code == 0 and again.err.count("done before") == 4 and "Δ acc@1" in again.out
    verdict = " ".join(again.out.partition("deploy: ")[2].split())
    assert "7 pictures" in verdict and "float32 on onnxruntime" in verdict and "next: swin-quant " in verdict
    assert snapshot(tmp_path / "out") == before


@pytest.mark.slow
def test_a_checkpoint_is_read_once_a_run_and_again_when_it_was_written(run, words, made, monkeypatch):
    read, calibrated = [], made.with_name("swin_micro_calib.pth")
    monkeypatch.setattr(quantization, "sha256_of", lambda file: read.append(Path(file).name) or sha256_of(file))
    assert run("quantize", *words, "--dry-run").out.count("# done") == 4
    assert read.count(calibrated.name) == 1
    calibrated.write_bytes(calibrated.read_bytes()[:-1] + b"x")
    assert run("quantize", *words, "--dry-run").out.count("# done") == 0


@pytest.mark.slow
def test_it_goes_on_where_it_was_cut_off(run, words, made, tmp_path):
    made.unlink()  # the card is written last
    again = run("quantize", *words)
    assert again.code == 0 and again.err.count("done before") == 1 and made.is_file()


def exported_otherwise(folder, *words):
    told = ["--for", "onnxruntime", "--output", folder, "--quiet", *words]
    command("export", folder / "swin_micro_calib.pth", *told)


@pytest.mark.slow
def test_what_was_exported_otherwise_is_not_taken_for_the_artifact(run, words, made):
    """A float file, or one of another policy, lies where this run's artifact would."""
    folder = made.parent
    for file in folder.glob("*_onnxruntime.*"):
        file.unlink()
    exported_otherwise(folder, "--precision", "float")
    assert run("quantize", *words, "--dry-run").out.count("# done") == 1
    exported_otherwise(folder, "--policy", "cpu")
    assert run("quantize", *words, "--dry-run").out.count("# done") == 1
    exported_otherwise(folder)
    assert run("quantize", *words, "--dry-run").out.count("# done") == 2


def planned(run, *words):
    """The commands of a dry run, each with its options."""
    done = run("quantize", *words, "--dry-run").ok()
    told = map(shlex.split, done.out.splitlines())
    return [(name, Command(name).parse(rest)) for _, name, *rest in told]


def test_a_dry_run_prints_commands_that_are_given_what_was_asked_for_and_writes_nothing(run, words, tmp_path):
    (tmp_path / "my own.yaml").write_text("name: mine\nrules:\n  - enable: ['role:gemm_input', 'role:gemm_weight']\n")
    asked = ["--calibrator", "mse", "--split", "val", "--seed", 3, "--half", "none", "--threads", 1, "--batch", 4]
    asked += ["--img-size", 32, "--window", 4, "--weights", "raw"]
    told = planned(run, *words, "--policy", tmp_path / "my own.yaml", *asked)
    assert [name for name, _ in told] == ["calibrate", "export", "verify", "evaluate"]
    calibrate, export, verify, evaluate = (options for _, options in told)
    assert not (tmp_path / "out").exists()
    assert calibrate["policy"] == export["policy"] == (str(tmp_path / "my own.yaml"),)
    assert calibrate["cfg"] and (calibrate["method"], calibrate["split"], calibrate["seed"]) == ("mse", "val", 3)
    assert (calibrate["img_size"], calibrate["window"], calibrate["weights"]) == ("32", 4, "raw")
    assert calibrate["batch"] == evaluate["batch"] == 4 and (evaluate["half"], verify["threads"]) == ("none", 1)


CHANGED = ["--policy", "qdq", "--wprec", 7, "--quant-per-tensor", "--narrow-range", "--off", "layers.0.*", "*.attn.*"]


def test_what_changes_a_policy_is_given_to_the_commands_that_take_one(run, words):
    told = planned(run, *words, *CHANGED)
    asked = Command("quantize").parse([*map(str, [*words, *CHANGED])])
    flags = ("policy", "wprec", "aprec", "quant_per_tensor", "narrow_range", "off")
    for _, given in told[:2]:
        assert [given.get(flag) for flag in flags] == [asked.get(flag) for flag in flags]
    assert not any(given.get("off") for _, given in told[2:])


@pytest.mark.slow
def test_a_changed_policy_is_that_of_both_files_and_knows_what_is_done(run, quick, tmp_path):
    assert run("quantize", *quick, *CHANGED).code == 0
    rules = [
        RunCard.read(tmp_path / "out" / name).policy["rules"]
        for name in ("swin_micro_calib.json", "swin_micro_w7a8.torchscript.json")
    ]
    assert rules[0] == rules[1] and rules[0][-1] == {"disable": ["layers.0.*", "*.attn.*"]}
    assert run("quantize", *quick, *CHANGED, "--dry-run").out.count("# done") == 4
    assert run("quantize", *quick, *CHANGED[:-1], "--dry-run").out.count("# done") == 0


def test_a_policy_that_is_searched_for_has_nothing_to_change_yet(run, words):
    refused = run("quantize", *words, "--policy", "auto", "--off", "layers.0.*").error(2)
    assert "--policy auto: --off 'layers.0.*' is for a policy with a name" in refused


def test_printed_commands_have_what_is_zero_what_has_blanks_and_all_digits(run, words, tmp_path):
    recipe = tmp_path / "my fast.yaml"
    recipe.write_text("name: mine\npasses: [equalize]\n")
    asked = ["--max-unreadable", 0, "--workers", 0, "--passes", recipe, "--policy", "auto", "--max-ms", 12.34567]
    told = dict(planned(run, *words, *asked))
    calibrate, search = told["calibrate"], told["search"]
    assert calibrate["passes"] == str(recipe) and calibrate["workers"] == calibrate["max_unreadable"] == 0
    assert search["max_ms"] == 12.34567


@pytest.mark.parametrize("change", [["--pictures", 12], ["--calibrator", "max"], ["--policy", "cpu"], ["--seed", 1],
                                    ["--percentile", 99], ["--opts", "TEST.CROP", "True"],
                                    ["--opts", "MODEL.SWIN.APE", "True"]])  # fmt: skip
def test_another_wish_is_another_calibration(run, words, made, change):
    planned = run("quantize", *words, *change, "--dry-run")
    assert planned.code == 0 and "# done" not in planned.out


def test_calibrator_auto_knows_which_percentile_it_tried(run, write_config, pictures, tmp_path):
    """The card records it even if no node got it. An older card does not have it and is accepted."""
    config = write_config(tmp_path, "swin", DEPTHS=[1], NUM_HEADS=[2])
    torch.save({"model": build_model(load_config(config)).state_dict()}, tmp_path / "swin.pth")
    (tmp_path / "one.yaml").write_text("name: one\nrules:\n  - enable: ['*.qkv._input_quantizer']\n")
    words = words_for(tmp_path, pictures, tmp_path / "out")
    told = [*words, "--policy", tmp_path / "one.yaml", "--calibrator", "auto", "--percentile"]
    calibrate = run("quantize", *told, 99.9, "--dry-run").out.splitlines()[0]
    assert run(*shlex.split(calibrate)[1:]).code == 0
    file = tmp_path / "out" / "swin_micro_calib.json"
    card = json.loads(file.read_text())
    for own in (card["calibration"]["percentile"], None):
        card["calibration"]["percentile"] = own
        file.write_text(json.dumps(card))
        done = [run("quantize", *told, other, "--dry-run").out.count("# done") for other in (99.9, 99)]
        assert done == [1, 0]
    del card["calibration"]["tried_percentile"]
    file.write_text(json.dumps(card))
    assert run("quantize", *told, 99.9, "--dry-run").out.count("# done") == 1


@pytest.mark.slow
def test_the_floats_beside_int8_are_those_asked_for_at_every_step(run, words, made, monkeypatch):
    """A verification in float32 does not count for bfloat16; the calibration and the file for OpenVINO are shared."""
    openvino = pytest.importorskip("swin_quant.backends.openvino.engine")
    monkeypatch.setattr(openvino, "float_types", lambda: ["float32", "bfloat16"])
    told = ["--for", "openvino", "--policy", "onnxruntime"]
    exported_otherwise(made.parent, *told)
    file = made.parent / "swin_micro_int8_openvino.onnx"
    data = words[words.index("--data-path") : words.index("--device")]
    assert run("verify", file, "--engine", "openvino", *data).code == 0
    dry = ["quantize", *words, *told, "--dry-run"]
    planned = run(*dry).out.splitlines()
    assert ["# done" in line for line in planned] == [True, True, True, False]
    planned = run(*dry, "--float-type", "bfloat16").out.splitlines()
    assert ["# done" in line for line in planned] == [True, True, False, False]
    assert ["--float-type bfloat16" in line for line in planned] == [False, False, True, True]
    found = ["--for", "openvino", "--policy", "auto", "--float-type", "bfloat16"]
    search = run("quantize", *words, *found, "--dry-run").out.splitlines()[1]
    assert "--float-type bfloat16" in search


def test_floats_that_an_engine_takes_from_its_file_are_given_to_the_exporter(run, words, tmp_path):
    words[words.index("onnxruntime")] = "cuda"
    export, *rest = run("quantize", *words, "--float-type", "bfloat16", "--dry-run").out.splitlines()[1:]
    assert all("--float-type bfloat16" in line for line in (export, *rest))
    refused = run("quantize", *words, "--float-type", "float32")
    assert "--float-type float32: the CUDA engine has float16 and bfloat16" in refused.error(2)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def in_bfloat16(write_config, randomise, pictures, tmp_path_factory):
    """The arguments of a finished run for the CUDA engine in bfloat16."""
    folder = tmp_path_factory.mktemp("cuda")
    config = write_config(folder, "swin", EMBED_DIM=32, DEPTHS=[1, 1])
    torch.save({"model": randomise(build_model(load_config(config))).state_dict()}, folder / "swin.pth")
    words = words_for(folder, pictures, folder / "out")
    words[words.index("onnxruntime")] = "cuda"
    command("quantize", *words, "--float-type", "bfloat16", "--quiet")
    return [*words, "--float-type", "bfloat16"]


def test_floats_that_an_engine_takes_from_its_file_are_those_of_the_export(run, in_bfloat16):
    again = run("quantize", *in_bfloat16)
    assert again.code == 0 and again.err.count("done before") == 4
    planned = run("quantize", *in_bfloat16[:-2], "--dry-run").out.splitlines()
    assert ["# done" in line for line in planned] == [True, False, False, False]


@pytest.mark.parametrize("float_type", [None, "bfloat16"])
def test_what_a_search_times_is_exported_in_the_floats_that_are_asked_for(in_bfloat16, tmp_path, float_type):
    folder = Path(in_bfloat16[0]).parent
    model, _ = load_for_scoring(load_config(folder / "swin.yaml"), folder / "out" / "swin_micro_calib.pth")
    timer = Timer(model, "cuda", None, 1, EngineOptions(device="cuda", float_type=float_type))
    assert open_artifact(timer.export(timer.base, tmp_path)).record["options"]["float_type"] == (
        float_type or "float16"
    )


@pytest.mark.parametrize("engine, float_type", [("onnxruntime", "bfloat16"), ("torchscript", "float16"),
                                                ("fastertransformer", "bfloat16")])  # fmt: skip
def test_floats_that_nothing_has_are_refused_before_any_work(run, words, tmp_path, engine, float_type):
    words[words.index("onnxruntime")] = engine
    refused = run("quantize", *words, "--float-type", float_type).error(2)
    assert f"--float-type {float_type}: {engine} runs what is not int8 in float" in refused
    assert not (tmp_path / "out").exists()


def test_torch_computes_on_the_device_that_is_asked_for(run, words, monkeypatch):
    """The printed commands name it, and where it is missing no step begins."""
    for looks in ("torch.cuda.is_available", "torch.cuda.device_count"):
        monkeypatch.setattr(looks, lambda: 0)
    for line in run("quantize", *words, "--dry-run").out.splitlines():
        assert ("--device cpu" in line) == (line.split()[1] != "export")
    on_gpu = [word if word != "cpu" else "cuda" for word in words]
    assert "device cuda" in run("quantize", *on_gpu).error(2)


@pytest.mark.parametrize("split, done", [("train", 0), ("val", 3)])
def test_other_pictures_at_the_same_place_are_calibrated_and_scored_on(run, words, made, pictures, split, done):
    """There are as many, in a folder of the same name: only their own names differ."""
    other = shutil.copytree(pictures, made.parent.parent / "other" / pictures.name)
    for file in (other / split).rglob("*.*"):
        file.rename(file.with_stem(f"new_{file.stem}"))
    words[words.index(pictures)] = other
    assert run("quantize", *words, "--dry-run").out.count("# done") == done


@pytest.mark.slow
def test_it_is_said_why_a_calibration_is_done_again(run, words, made):
    again = run("quantize", *words, "--percentile", 99, "--opts", "DATA.INTERPOLATION", "bilinear")
    assert again.code == 0 and again.err.count("done before") == 0
    assert "done again, changed: the preprocessing, the percentile" in again.err


@pytest.mark.slow
def test_a_calibrated_checkpoint_is_quantized_like_a_float_one(run, words, made, tmp_path):
    words[0], words[-1] = made.with_name("swin_micro_calib.pth"), tmp_path / "again"
    assert run("quantize", *words).code == 0
    assert run("quantize", *words, "--dry-run").out.count("# done") == 4


@pytest.mark.slow
def test_a_calibrated_checkpoint_is_not_calibrated_over_itself(run, words, made, snapshot):
    words[0] = made.with_name("swin_micro_calib.pth")
    assert run("quantize", *words, "--dry-run").out.count("# done") == 4
    before = snapshot(made.parent)
    done = run("quantize", *words, "--passes", "fast")
    assert "differ (the passes), and the result would be written over it" in done.err and done.code == 2
    assert snapshot(made.parent) == before


@pytest.mark.slow
def test_passes_round_for_the_seven_bits_that_are_exported(run, words, tmp_path):
    (tmp_path / "mine.yaml").write_text("passes: [gptq]\n")
    words += ["--saturation-safe", "--passes", tmp_path / "mine.yaml"]
    assert run("quantize", *words).code == 0
    printed = run("quantize", *words, "--dry-run").out.splitlines()
    assert all(line.endswith("# done") for line in printed)
    assert all("--policy onnxruntime --saturation-safe" in line for line in printed[:2])


@pytest.mark.slow
def test_without_an_engine_here_it_ends_with_the_export(run, words, tmp_path):
    done = run("quantize", *words, "--for", "tensorrt")
    assert done.code == 0 and "neither verified nor scored" in done.out and "tensorrt-cu" in done.out
    deploy, *_, last = done.out.replace("\\\n", "").strip().splitlines()
    assert deploy.split()[-1].endswith("swin_micro_int8_tensorrt.onnx") and "build-engine" in last


@pytest.mark.slow
def test_an_artifact_that_computes_something_else_is_not_scored(run, words, monkeypatch, tmp_path):
    monkeypatch.setattr("swin_quant.verbs.verify.tolerance_of", lambda *_: 0.0)
    assert "verification failed" in run("quantize", *words).err
    card = json.loads((tmp_path / "out" / "swin_micro_int8_onnxruntime.json").read_text())
    assert card["results"] == []


@pytest.mark.slow
def test_of_several_each_has_its_folder_and_one_table_shows_all(run, micro, pictures, tmp_path):
    family = ["quantize", *(named(micro, kind, tmp_path) for kind in ("swin", "swinv2"))]
    common = ["--data-path", pictures, "--device", "cpu", "--pictures", 8, "--for", "torchscript"]
    common += ["--half", "none", "--output", tmp_path / "family"]
    done = run(*family, *common)
    assert done.code == 0 and "2 of 2: swinv2_micro" in done.err
    for name in ("swin_micro", "swinv2_micro"):
        assert (tmp_path / "family" / name / f"{name}_int8.torchscript.json").is_file()
        assert f"{name}: " in done.out
    (tmp_path / "family" / "swin_micro" / "swin_micro_int8.torchscript.json").unlink()
    again = run(*family, *common)
    assert again.code == 0 and again.err.count("done before") == 1 + 4


@pytest.mark.slow
def test_one_that_fails_does_not_stop_the_others(run, micro, pictures, tmp_path):
    good, bad = named(micro, "swin", tmp_path), named(micro, "swinv2", tmp_path, fill=float("nan"))
    common = ["--data-path", pictures, "--device", "cpu", "--pictures", 8, "--for", "torchscript", "--half", "none"]
    done = run("quantize", bad, good, *common, "--output", tmp_path / "family")
    assert done.code == 1 and "going on with the next" in done.err
    assert done.err.splitlines()[-1].startswith("error: 1 of 2 checkpoints failed: swinv2_micro: ")
    assert "swin_micro: " in done.out


def test_an_engine_that_gives_up_on_one_does_not_stop_the_others(run, micro, pictures, tmp_path, monkeypatch):
    one, two = (named(micro, kind, tmp_path) for kind in ("swin", "swinv2"))
    finish = quantizing.finish

    def some(job):
        if job.cfg.MODEL.TYPE == "swinv2":
            raise RuntimeError("no such kernel")
        return finish(job)

    monkeypatch.setattr(quantizing, "finish", some)
    words = ["--data-path", pictures, "--device", "cpu", "--pictures", 8, "--for", "torchscript", "--half", "none"]
    done = run("quantize", two, one, *words, "--output", tmp_path / "family")
    assert "error: 1 of 2 checkpoints failed: swinv2_micro: RuntimeError: no such kernel" in done.err
    assert done.code == 1 and "swin_micro: " in done.out


@pytest.mark.slow
def test_fewer_pictures_that_can_be_read_than_asked_for_are_all_there_are(run, quick, pictures, tmp_path):
    data = shutil.copytree(pictures, tmp_path / "data")
    count = len(train := sorted((data / "train").glob("*/*")))
    train[0].write_bytes(b"no picture")
    words = [data if word == pictures else word for word in quick]
    words[words.index("--pictures") + 1] = count
    assert run("quantize", *words, "--max-unreadable", 0.5).code == 0
    assert run("quantize", *words, "--max-unreadable", 0.5, "--dry-run").out.count("# done") == 4


def test_one_policy_is_deployed(run, words):
    assert "--policy qdq cpu: give one" in run("quantize", *words, "--policy", "qdq", "cpu").error(2)


def test_a_policy_of_other_targets_is_refused_before_any_work(run, words, tmp_path):
    words[words.index("onnxruntime")] = "fastertransformer"
    refused = run("quantize", *words, "--policy", "cpu").error(2)
    assert "--policy cpu: fastertransformer runs ft-mode1 and ft-mode2 alone" in refused
    assert not (tmp_path / "out").exists()


def test_two_of_one_name_would_share_a_folder(run, words):
    refused = run("quantize", words[0], *words)
    assert "two checkpoints have one name" in refused.error(2)


def named(micro, kind, folder, fill=None):
    """A copy of a micro checkpoint that names its own model; its head's weights are `fill`."""
    file, state = folder / f"{kind}.pth", torch.load(micro / f"{kind}.pth")
    if fill is not None:
        state["model"]["head.weight"][:] = fill
    torch.save(state, file)
    cfg = load_config(micro / f"{kind}.yaml")
    card = RunCard(cfg.MODEL.NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict())
    replace(card, checkpoint=CheckpointRecord(file=file.name, sha256=sha256_of(file))).write(file.with_suffix(".json"))
    return file


def test_policies_are_listed_with_who_takes_them(run):
    done = run("show", "policies")
    assert done.code == 0 and re.search(r"^qdq  \(for .*onnxruntime", done.out, re.MULTILINE)
    listed = json.loads(run("show", "policies", "--json").out)
    assert {"ft-mode1", "ft-mode2", "qdq", "cpu", "float"} <= {policy["name"] for policy in listed}
    assert all(policy["rules"] and policy["description"] for policy in listed)
