"""main.py: each of its flags works or is refused in a sentence, none is ignored (docs/reference, section 2.1); and bugs
of FasterTransformer's toolkit that must not happen here (section 2.7): the others are tested where their part is.
"""

import json
import re
import shutil
import zipfile

import pytest
import torch
import yaml

from swin_quant.base.cpu import BFLOAT16_FEATURES, features
from swin_quant.base.errors import UsageError
from swin_quant.cli.front_door import REFUSED
from swin_quant.cli.front_door_flags import FrontDoorParser
from swin_quant.config import from_dict
from swin_quant.models import build_model
from swin_quant.models.layers import Swin
from swin_quant.quant.observers import ActivationObserver
from swin_quant.quant.policy import load_policy, policy_from_dict, settings_for
from swin_quant.quant.quantizer import Quantizer

FLAGS = {
    **{"--cfg": "x.yaml", "--opts": "SEED", "--batch-size": 8, "--data-path": "x", "--zip": None, "--cache-mode": "no"},
    **{"--pretrained": "x", "--resume": "x", "--accumulation-steps": 2, "--use-checkpoint": None},
    **{"--disable_amp": None, "--amp-opt-level": "O1", "--output": "x", "--tag": "x", "--eval": None},
    **{"--throughput": None, "--engine": "x", "--calib": None, "--train": None, "--int8-mode": 1},
    **{"--num-calib-batch": 2, "--calib-batchsz": 2, "--calib-output-path": "x", "--local_rank": 0, "--local-rank": 0},
    **{"--num-epochs": 1, "--qat-lr": 1e-5, "--distill": None, "--teacher": "x", "--distillation_loss_scale": 1.0},
    **{"--fused_window_process": None, "--wprec": 8, "--aprec": 8, "--quant-per-tensor": None, "--quant-disable": None},
    **{"--quant-disable-keyword": "x", "--calibrator": "max", "--percentile": 99.0, "--fuse-qkv": None},
    **{"--narrow-range": None, "--quant-mode": "ft2", "--version": 1},
}


@pytest.fixture
def main_py(run, tmp_path, monkeypatch):
    """main_py(flags ...) in its own folder, since FasterTransformer's default output is ./output."""
    monkeypatch.chdir(tmp_path)
    return lambda *flags: run("main.py", *flags)


@pytest.fixture
def flags(ft_flags, tmp_path):
    return [*ft_flags, "--int8-mode", 1, "--calib-output-path", tmp_path / "calib"]


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_of_fastertransformer_is_known(main_py, flag):
    value = [] if FLAGS[flag] is None else [FLAGS[flag]]
    line = main_py("--cfg", "no_such_config", flag, *value).error(2)
    assert "unrecognized" not in line and "expected" not in line and "invalid" not in line


def test_a_flag_that_is_given_twice_has_its_last_value_and_words_add_up():
    """Scripts append flags to those that they have."""
    words = "--cfg a --cfg b --batch-size 8 --batch-size 4 --opts SEED 1 --opts TAG x --quant-disable-keyword a b"
    args = FrontDoorParser().parse(f"{words} --quant-disable-keyword c --calib --calib --local-rank=1".split())
    assert (args.cfg, args.batch_size, args.opts, args.local_rank) == ("b", 4, ["SEED", "1", "TAG", "x"], 1)
    assert args.quant_disable_keyword == ["a", "b", "c"] and args.calib is True and not args.train


@pytest.mark.parametrize("words", ["--batch-size 1.5", "--num-epochs 1e3", "--int8-mode 3", "--seed 99999999999"])
def test_a_number_of_another_kind_is_refused(words):
    with pytest.raises(UsageError, match=words.split()[0]):
        FrontDoorParser().parse(["--cfg", "a", *words.split()])


@pytest.mark.parametrize("flag", REFUSED)
def test_unsupported_flags_are_refused_with_a_reason(main_py, flags, flag, tmp_path):
    value = [] if FLAGS[flag] is None else [FLAGS[flag]]
    line = main_py("--calib", *flags, flag, *value).error(2)
    assert re.match(rf"error: {flag}: \w+ .+", line)
    assert list(tmp_path.iterdir()) == []


FOR_TRAINING = "--schedule=constant --drop-path=0.1 --qat-lr=1e-5 --num-epochs=3 --distill --accumulation-steps=2"
MODE = "--calib --int8-mode 1"
CONTRADICTIONS = [
    *((f"{MODE} {flag} 1", flag) for flag in ("--versions", "--num-calib-batchs", "--num-calib", "--calibsz", "-x")),
    *((f"{MODE} {flag}", flag.partition("=")[0]) for flag in [*FOR_TRAINING.split(), "--use-checkpoint"]),
    (f"{MODE} --quant-mode ft1", "--quant-mode ft1: the default ft2 is what --int8-mode 1 or 2 "),
    ("--calib --policy qdq --quant-mode ft2", "--quant-mode ft2: the default ft2 is what --int8-mode"),
    ("--calib --version 2", "--version 2: the config says so itself, and MODEL.TYPE is swin\n"),
    (f"{MODE} --throughput", "run it after --calib"),
    ("--train --int8-mode 1 --throughput", "run it after --train"),
    ("--eval --int8-mode 1 --no-eval", "contradict"),
]


@pytest.mark.parametrize(("words", "says"), CONTRADICTIONS)
def test_unknown_and_contradicting_flags_are_refused_not_ignored(main_py, ft_flags, words, says, tmp_path):
    assert says in main_py(*words.split(), *ft_flags).error(2)
    assert list(tmp_path.iterdir()) == []


def test_fastertransformer_s_own_keywords_and_mode_are_int8_mode(main_py, flags, tmp_path):
    """The keywords are those that `ft2` sets, final_input included (a node of BERT), and the guide's --version."""
    own = ["final_input", "layernorm_input", "softmax_input", "local_input", "residual_input"]
    said = main_py("--calib", *flags, "--quant-mode", "ft2", "--version", 1, "--quant-disable-keyword", *own).ok()
    (line,) = [line for line in said.err.splitlines() if "final_input" in line]
    assert line.startswith("--quant-disable-keyword final_input: left out, for no node of Swin is called so")
    one, two = (load_policy("ft-mode1"), policy_from_dict(_card(tmp_path)["policy"], "card"))
    model = build_model(from_dict(_card(tmp_path)["config"], "card"))
    assert settings_for(model, one) == settings_for(model, two)


def test_a_keyword_of_no_node_is_told_with_its_flag(main_py, ft_flags):
    line = main_py(*MODE.split(), *ft_flags, "--quant-disable-keyword", "qvk").error(2)
    assert "--off or --quant-disable-keyword: selector '*qvk*' names no node" in line


def _card(tmp_path):
    return json.loads((tmp_path / "calib" / "swin_micro_calib.json").read_text())


@pytest.mark.parametrize("given", [["--int8-mode", 1], ["--int8-mode", 2], ["--quant-disable"]])
def test_its_lines_of_accuracy(main_py, scoring_flags, own, tmp_path, given):
    """`validate` logs the results of this run alone to the console and log_rank0.txt, whatever else the card holds."""
    done = main_py("--eval", *scoring_flags, "--resume", own, "--batch-size", 4, "--quiet", *given)
    policy = {"--int8-mode": f"ft-mode{given[-1]}"}.get(given[0])
    results = json.loads(own.with_suffix(".json").read_text())["results"]
    (result,) = [r for r in results if r["policy"] == policy and r["batch_size"] == 4]
    lines = [f" * Acc@1 {result['acc1']:.3f} Acc@5 {result['acc5']:.3f}"]
    lines += [f"Accuracy of the network on the 7 test images: {result['acc1']:.1f}%"]
    assert done.out.splitlines()[-2:] == lines
    log = (tmp_path / "output/swin_micro/default/log_rank0.txt").read_text().splitlines()
    assert [line.partition(" INFO ")[2] for line in log[-2:]] == lines


def test_calib_writes_fastertransformer_s_files(main_py, flags, card_of, tmp_path):
    main_py("--calib", *flags, "--tag", "t1", "--output", tmp_path / "o", "--seed", 3).ok()
    assert card_of(tmp_path / "calib" / "swin_micro_calib.pth")["calibration"]["seed"] == 3
    place = tmp_path / "o" / "swin_micro" / "t1"
    assert sorted(file.name for file in place.iterdir()) == ["config.yaml", "log_rank0.txt"]
    assert "calibrated checkpoint:" in (place / "log_rank0.txt").read_text()
    config = yaml.safe_load((place / "config.yaml").read_text())
    assert config["SEED"] == 3 and config["TAG"] == "t1" and config["MODEL"]["NAME"] == "swin_micro"


def test_defaults_are_fastertransformer_s(main_py, micro, pictures, card_of, tmp_path):
    """Its 4 batches of 8 are more than the 12 pictures here."""
    base = ["--cfg", micro / "swin.yaml", "--resume", micro / "swin.pth", "--data-path", pictures, "--device", "cpu"]
    assert "32 pictures, the data holds 12" in main_py("--calib", *base, "--int8-mode", 1).error(2)
    asked = "--calib", *base, "--int8-mode", 1, "--num-calib-batch", 1
    assert main_py(*asked, "--calibrator", "max", "--percentile", 99.99).code == 0, "its scripts give both"
    assert main_py(*asked).code == 0
    card = card_of(tmp_path / "output/swin_micro/default/swin_micro_calib.pth")
    assert card["calibration"]["batch_size"] == 8 and card["calibration"]["percentile"] == 99.99
    half = ["bfloat16"] if features(BFLOAT16_FEATURES) else []
    assert [r["precision"] for r in card["results"]] == ["float32", *half, "int8"]


@pytest.mark.parametrize("flag", [["--disable_amp"], ["--amp-opt-level", "O0"], ["--amp-opt-level", "O1"]])
def test_amp_flags_choose_the_half_precision_baseline(main_py, scoring_flags, calibrated, tmp_path, flag):
    path = shutil.copy(calibrated, tmp_path / "x_calib.pth")
    flags = [*scoring_flags, "--half", "bfloat16", "--resume", path, "--int8-mode", 1, "--output", tmp_path]
    assert main_py("--eval", *flags, *flag).code == 0
    card = json.loads((tmp_path / "swin_micro/default/swin_micro_eval.json").read_text())
    assert ("bfloat16" in [r["precision"] for r in card["results"]]) is (flag[-1] == "O1")
    assert "--amp-opt-level O2" in main_py("--eval", *flags, "--amp-opt-level", "O2").error(2)


def test_pretrained_is_loaded_and_not_only_stored(main_py, flags, micro, tmp_path):
    place = flags.index("--resume")
    without = flags[:place] + flags[place + 2 :]
    assert main_py("--calib", *without, "--pretrained", micro / "swin.pth").code == 0
    state = torch.load(tmp_path / "calib" / "swin_micro_calib.pth", weights_only=True)
    weights = torch.load(micro / "swin.pth", weights_only=True)["model"]
    assert torch.equal(state["head.weight"], weights["head.weight"])
    assert "--pretrained and --resume" in main_py("--calib", *flags, "--pretrained", "x.pth").error(2)


def test_throughput_times_what_would_be_scored_and_stops(main_py, scoring_flags, calibrated, monkeypatch):
    """FasterTransformer timed every node quantized; here the policy holds (docs/reference, section 2.5)."""
    calls = []

    def timed(engine, images):
        calls.append((engine.label, tuple(images.shape)))
        return 123.0

    monkeypatch.setattr("swin_quant.cli.front_door.throughput", timed)
    flags = [*scoring_flags, "--resume", calibrated, "--int8-mode", 1, "--batch-size", 4]
    done = main_py("--throughput", "--eval", *flags)
    assert done.code == 0 and calls == [("float32", (4, 3, 32, 32)), ("int8 ft-mode1", (4, 3, 32, 32))]
    assert done.out.splitlines()[1] == "batch_size 4 torch fake-quant int8 ft-mode1 throughput 123.0 images/s"


@pytest.fixture
def forwards(monkeypatch):
    """A list of (pictures, gradients recorded, twice, the first node's observer), one for each forward of a model."""
    seen, original = [], Swin.forward

    def forward(model, images, *rest):
        result = original(model, images, *rest)
        observer = next(module.observer for module in model.modules() if isinstance(module, Quantizer))
        seen.append((len(images), torch.is_grad_enabled(), result.requires_grad, observer))
        return result

    monkeypatch.setattr(Swin, "forward", forward)
    return seen


def test_bugs_2_and_13_n_batches_are_n_by_the_evaluation_transform_without_a_graph(
    run, float_flags, card_of, forwards, tmp_path, monkeypatch
):
    augmented = "swin_quant.verbs.calibrate.augmented"
    monkeypatch.setattr(augmented, lambda *_: pytest.fail("augmented crops without --augment"))
    run("calibrate", *float_flags, "--pictures", 12, "--output", tmp_path).ok()
    card = card_of(tmp_path / "swin_micro_calib.pth")["calibration"]
    assert card["batches"] == 3 and card["pictures"] == len(card["files"]) == 12 and card["augment"] is False
    assert sum(pictures for pictures, *_, observer in forwards if isinstance(observer, ActivationObserver)) == 12
    assert {(recording, recorded) for _, recording, recorded, _ in forwards} == {(False, False)}


def test_bug_6_flags_of_quantization_are_no_decoration(run, ft_flags, card_of, tmp_path):
    """FasterTransformer parsed and overwrote them; here each is in the policy that was scored (test_evaluate.py has the
    effect)."""
    flags = "--policy ft-mode1 --wprec 6 --aprec 7 --narrow-range --quant-disable-keyword attn.proj".split()
    run("main.py", "--calib", *ft_flags, *flags, "--output", tmp_path).ok()
    card = card_of(tmp_path / "swin_micro/default/swin_micro_calib.pth")
    assert card["results"][1]["precision"] == "W6A7"
    assert card["results"][1]["policy"] == card["policy"]["name"] == "ft-mode1 W6 A7 narrow-range -*attn.proj*"
    assert card["policy"]["rules"][2:] == [
        {"nodes": ["role:gemm_weight"], "bits": 6, "narrow_range": True},
        {"nodes": ["role:activation"], "bits": 7},
        {"disable": ["*attn.proj*"]},
    ]


def test_bug_11_a_zip_of_fewer_than_ten_pictures(run, float_flags, scoring_flags, card_of, pictures, tmp_path):
    """Also without a process group."""
    for split in ("train", "val"):
        files = sorted((pictures / split).rglob("*.png"))[:9]
        with zipfile.ZipFile(tmp_path / f"{split}.zip", "w") as archive:
            for file in files:
                archive.write(file, file.name)
        (tmp_path / f"{split}_map.txt").write_text("".join(f"{file.name}\t{i % 3}\n" for i, file in enumerate(files)))
    flags, file = ["--zip", "--cache-mode", "part", "--data-path", tmp_path], tmp_path / "out/swin_micro_calib.pth"
    run("calibrate", *float_flags, *flags, "--output", file.parent).ok()
    run("evaluate", file, *scoring_flags, *flags).ok()
    assert card_of(file)["results"][0]["pictures"] == 7


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_bug_17_a_model_without_qkv_bias(run, write_config, pictures, card_of, tmp_path, kind):
    config = write_config(tmp_path, kind, QKV_BIAS=False)
    flags = ["--data-path", pictures, "--pictures", 4, "--batch", 4, "--device", "cpu"]
    run("calibrate", "--cfg", config, "--random-weights", *flags, "--policy", "ft-mode2", "--output", tmp_path).ok()
    path = tmp_path / f"{kind}_micro_calib.pth"
    run("evaluate", path, "--data-path", pictures, "--device", "cpu").ok()
    assert not [key for key in torch.load(path, weights_only=True) if re.search(r"qkv\.bias|q_bias|v_bias", key)]
    assert card_of(path)["results"][-1]["policy"] == "ft-mode2"


def test_section_2_2_evaluation_needs_no_train_split(run, scoring_flags, micro, own_pictures, tmp_path):
    shutil.rmtree(own_pictures / "train")
    flags = [*scoring_flags, "--data-path", own_pictures, "--output", tmp_path / "out"]
    run("evaluate", micro / "swin.pth", *flags).ok()
