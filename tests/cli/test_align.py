"""swin-quant align: checkpoints and dumps; what it prints, and what it refuses in one line."""

import json

import numpy as np
import pytest
import torch


@pytest.fixture
def words(micro, pictures):
    return ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--pictures", 2, "--quiet"]


def test_the_layer_that_was_broken_is_named(run, micro, words, tmp_path):
    state = torch.load(micro / "swin.pth", weights_only=True)
    state["model"]["layers.0.blocks.1.mlp.fc1.bias"] += 1.0
    torch.save(state, tmp_path / "other.pth")
    done = run("align", micro / "swin.pth", tmp_path / "other.pth", *words)
    assert done.code == 0 and "first divergence: forward/layers.0.blocks.1.mlp.fc1 (" in done.out.replace("\n  ", " ")
    only = run("align", micro / "swin.pth", tmp_path / "other.pth", *words, "--only", "*.fc1", "--json")
    found = json.loads(only.out)
    assert found["first"] == "forward/layers.0.blocks.1.mlp.fc1" and found["pictures"] == 2
    assert found["tensors"][0]["sqnr_db"] is None and found["tensors"][0]["max"] == 0


def test_a_dump_and_a_step_are_written_and_compared(run, micro, words, tmp_path):
    assert run("align", micro / "swin.pth", "--to", tmp_path / "x.npz", *words).code == 0
    same = run("align", micro / "swin.pth", tmp_path / "x.npz", "--cfg", micro / "swin.yaml")
    assert same.code == 0 and "below 60 dB" in same.out and "first divergence" not in same.out
    assert run("align", micro / "swin.pth", "--step", "--to", tmp_path / "step.npz", *words).code == 0
    with np.load(tmp_path / "step.npz", allow_pickle=False) as file:
        arrays = dict(file)
    assert arrays["input/labels"].tolist() == [0, 1] and "gradients/head.weight" in arrays
    theirs = ("--step", "--to", tmp_path / "ms.npz", "--names", "mindspore")
    assert run("align", micro / "swin.pth", *theirs, *words).code == 0
    with np.load(tmp_path / "ms.npz", allow_pickle=False) as file:
        assert "gradients/classifier.weight" in file and "update/layers.0.blocks.0.attn.k.weight" in file
        assert np.array_equal(file["weights/norm.gamma"], arrays["weights/norm.weight"])
    arrays["gradients/head.weight"] *= 1.1
    np.savez(tmp_path / "theirs.npz", **arrays)
    done = run("align", micro / "swin.pth", tmp_path / "theirs.npz", "--step", "--cfg", micro / "swin.yaml")
    assert done.code == 0 and "first divergence: gradients/head.weight" in done.out


def test_what_cannot_be_compared_is_one_line(run, micro, words, tmp_path):
    checkpoint = micro / "swin.pth"
    assert "give B, or --to" in run("align", checkpoint, *words).error(2)
    assert "--opts: sets keys of --cfg" in run("align", checkpoint, checkpoint, "--opts", "SEED", "1").error(2)
    assert "must end in .npz" in run("align", checkpoint, *words, "--to", tmp_path / "x.txt").error(2)
    assert "give one of both sides" in run("align", checkpoint, checkpoint, *words, "--policy", "a", "b", "c").error(2)
    assert "no pictures: give --data-path" in run("align", checkpoint, checkpoint, *words[:2]).error(2)
    assert "no such checkpoint" in run("align", checkpoint, tmp_path / "no.pth", *words).error(1)
    (tmp_path / "x.npz").write_bytes(b"PK")
    assert "x.npz: is no .npz of arrays" in run("align", checkpoint, tmp_path / "x.npz", *words).error(1)
    np.savez(tmp_path / "y.npz", images=np.zeros((1, 3, 32, 32), np.float32), other=np.ones(3))
    assert "they name no tensor alike" in run("align", checkpoint, tmp_path / "y.npz", *words).error(1)
    assert not (tmp_path / "x.txt").exists()
