"""Bugs of FasterTransformer's Swin toolkit that must not happen here: docs/reference, section 2.7, by number.

1, 3, 15 and 16 concern training and are tested there; 8 in test_evaluate.py; 9 in tests/cli, by test_session.py and
test_launchers.py.
"""

import re
import shutil
import zipfile

import pytest
import torch

from swin_quant.base.files import configs_dir
from swin_quant.config import load_config
from swin_quant.models.layers import Swin
from swin_quant.quant.observers import ActivationObserver
from swin_quant.quant.quantizer import Quantizer


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


@pytest.mark.slow
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


def test_bug_7_no_two_configs_share_a_name():
    files = [file for folder in ("swin", "swinv2") for file in sorted((configs_dir() / folder).glob("[!_]*.yaml"))]
    names = [load_config(file).MODEL.NAME for file in files]
    assert len(files) == 27 and len(set(names)) == 27
    large = [name for file, name in zip(files, names, strict=True) if "swinv2_large" in file.name]
    assert large and all("large" in name for name in large)


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
