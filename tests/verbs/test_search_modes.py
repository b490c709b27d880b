"""search for FasterTransformer, whose kernels do not run here: which of its modes keeps the budget."""

import json
import re
import shutil

import pytest
import torch
from torch.nn.functional import gelu

from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.policy import load_policy


@pytest.fixture
def offset(write_config, randomise, run, pictures, tmp_path):
    """offset(kind) -> the arguments that search a model in which one channel of fc2's product is far from 0.

    Half of the hidden units are constant and feed that channel; its bias subtracts the offset. The product's int8 grid
    is one for the tensor, so that few levels are left for other channels; mode 2 has no such grid.
    """

    def make(kind):
        config = write_config(tmp_path, kind, EMBED_DIM=32, DEPTHS=[1, 1], NUM_HEADS=[1, 2])
        model = randomise(build_model(load_config(config)))
        for mlp in (block.mlp for stage in model.layers for block in stage.blocks):
            half = mlp.fc1.out_features // 2
            with torch.no_grad():
                mlp.fc1.weight[:half], mlp.fc1.bias[:half], mlp.fc2.weight[:, :half] = 0.0, 4.0, 0.0
                mlp.fc2.weight[0, :half] = mlp.fc2.weight.abs().max()
                mlp.fc2.bias[0] -= mlp.fc2.weight[0, :half] @ gelu(mlp.fc1.bias[:half])
        torch.save({"model": model.state_dict()}, tmp_path / "x.pth")
        words = ["--cfg", config, "--data-path", pictures, "--no-eval", "--device", "cpu", "--output", tmp_path]
        words += ["--pictures", 8, "--policy", "ft-mode1", "--no-equalize", "--calibrator", "max"]
        assert run("calibrate", tmp_path / "x.pth", *words).code == 0
        (calibrated,) = tmp_path.glob("*_calib.pth")
        found = ["search", calibrated, "--data-path", pictures, "--pictures", 8, "--device", "cpu"]
        return [*found, "--engine", "fastertransformer", "--output", tmp_path, "--json", tmp_path / "x.json"]

    return make


@pytest.mark.slow
def test_without_latency_the_mode_that_keeps_the_budget_is_found(offset, run, tmp_path):
    words, limit = offset("swin"), 0.0
    for mode in (1, 2):
        done = run(*words, "--min-sqnr", limit)
        result = json.loads((tmp_path / "x.json").read_text())
        policy = load_policy(str(tmp_path / "swin_micro_auto_fastertransformer.yaml"))
        assert done.code == 0 and policy.rules == load_policy(f"ft-mode{mode}").rules, (done, result)
        assert "so no latency is measured" in done.err and "no latency was measured" in policy.description
        assert "no latency was measured" in done.out and not re.search(r"\d ms\b", done.out + policy.description)
        rows = {row["policy"]: row for row in result["candidates"]}
        assert rows.keys() == {"ft-mode1", "ft-mode2", "float"} and {row["ms"] for row in rows.values()} == {None}
        limit = rows["ft-mode1"]["sqnr_db"] + 6
    assert "cost_ms" not in RunCard.read(tmp_path / "swin_micro_calib.json").searches[-1]


def test_pictures_that_cannot_be_read_are_limited_and_others_are_taken(offset, pictures, run, tmp_path):
    words, own = offset("swin"), shutil.copytree(pictures, tmp_path / "own")
    words[words.index("--data-path") + 1] = own
    for file in sorted((own / "train").rglob("*.png"))[:4]:
        file.write_bytes(b"")
    failed = run(*words, "--min-sqnr", 0)
    assert failed.code == 1 and "of 12 pictures are unreadable: " in failed.err
    assert "--max-unreadable (now 0.01)" in failed.err.splitlines()[-1]
    assert not list(tmp_path.glob("*_auto_*"))
    done = run(*words, "--min-sqnr", 0, "--max-unreadable", 0.5)
    assert done.code == 0 and "pictures are unreadable, others are taken" in done.err
    assert "Measured on 8 pictures" in (tmp_path / "swin_micro_auto_fastertransformer.yaml").read_text()


@pytest.mark.slow
def test_a_mode_that_the_kernels_do_not_have_is_no_candidate(offset, run, tmp_path):
    """V2 has no mode 2."""
    done = run(*offset("swinv2"), "--min-sqnr", 60)
    assert done.code == 1 and "cannot be met (SQNR at least 60 dB)" in done.err.splitlines()[-1]
    rows = json.loads((tmp_path / "x.json").read_text())["candidates"]
    assert {row["policy"] for row in rows} == {"ft-mode1", "float"}
