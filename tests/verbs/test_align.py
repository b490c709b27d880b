"""`align` names the broken tensor as the first that differs, in memory, in dumps and in a training step."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import swin_quant as sq
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint.names import to_mindspore
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from swin_quant.loading import ModelFile
from swin_quant.score.options import EngineOptions
from swin_quant.verbs import align_sides
from swin_quant.verbs.align_sides import Side, agree_on_preprocessing, compare, model_side, take_step

BLOCK = "layers.0.blocks.1."


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32)


def side(model, name="x"):
    return model_side(model, [], World(), name)


def open_side(file):
    return align_sides.open_side(ModelFile(str(file)), None, None, EngineOptions(), World())


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_model_is_aligned_with_itself(tiny_model, images, kind):
    found = compare(side(tiny_model(kind)), side(tiny_model(kind)), images.split(2))
    assert found.first is None and found.pictures == 3 and all(row.sqnr_db == math.inf for row in found.rows)
    names = [row.name for row in found.rows]
    assert names.index("patch_embed") < names.index(f"{BLOCK}attn.qkv") < names.index(BLOCK[:-1]) < names.index("head")
    assert names[-1] == "logits" and not any("quantizer" in name for name in names)


def test_dumps_of_other_names_other_pictures_or_another_model_are_refused(tiny_model, images, tmp_path):
    own = side(tiny_model())

    def of(**arrays):
        np.savez(tmp_path / "x.npz", **arrays)
        return open_side(tmp_path / "x.npz")

    with pytest.raises(SwinQuantError, match="they name no tensor alike: .* - forward/conv1"):
        compare(own, of(images=images.numpy(), conv1=np.ones((3, 4), np.float32)))
    says = r"forward/head: \[3, 10\] against \[3, 99\]\): other pictures, or weights"
    with pytest.raises(SwinQuantError, match=says):
        compare(own, of(images=images.numpy(), head=np.ones((3, 99), np.float32)))
    norm = own.trace(images)["forward/norm"]
    found = compare(own, of(images=images.numpy(), head=np.full((3, 10), np.nan), norm=norm))
    assert found.first.name == "head" and found.first.problem == "NaN or infinity in B"
    with pytest.raises(SwinQuantError, match=r"^x: does not take images of \[2, 3, 30, 34\]"):
        compare(own, of(images=np.zeros((2, 3, 30, 34), np.float32), head=np.ones((2, 10), np.float32)))


def test_sides_that_prepare_pictures_differently_say_in_what(tiny_model):
    mine = Preprocess(32, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
    both = {"a": mine, "b": replace(mine, size=40)}
    model = tiny_model()
    sides = [model_side(model, [], World(), name, one) for name, one in both.items()]
    says = r"^a \(float32\) and b \(float32\) take pictures differently: size is 32 and 40$"
    with pytest.raises(UsageError, match=says):
        agree_on_preprocessing(sides)


# One training step

LR = 0.1


@pytest.fixture
def labels():
    return torch.tensor([1, 9, 4])


def test_the_tensors_of_a_step_are_those_of_autograd(tiny_model, images, labels):
    taken = take_step(side(tiny_model()), LR, (images, labels)).dumped
    model = tiny_model()  # uses no random numbers
    loss = torch.nn.CrossEntropyLoss()(model(images), labels)
    gradients = torch.autograd.grad(loss, [value for _, value in model.named_parameters()])
    assert torch.allclose(taken["loss/loss"], loss)
    for (name, value), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert torch.equal(taken[f"weights/{name}"], value)
        assert torch.allclose(taken[f"gradients/{name}"], gradient, atol=1e-6)
        assert torch.allclose(taken[f"update/{name}"], value - LR * gradient, atol=1e-6)
    assert torch.equal(taken["input/labels"], labels)


def test_the_first_group_that_differs_is_named(tiny_model, images, labels):
    """The step is repeated on the images of the other dump, which differ as a group of their own."""
    own = take_step(side(tiny_model()), LR, (images, labels))
    for group, name, by in (
        ("input", "images", 0.1),
        ("weights", "head.bias", 1.0),
        ("forward", "norm", 1.0),
        ("loss", "loss", 0.5),
        ("gradients", "head.weight", 1.0),
        ("update", "head.weight", 1.0),
    ):
        theirs = Side("theirs", dumped={**own.dumped, f"{group}/{name}": own.dumped[f"{group}/{name}"] + by})
        again = take_step(side(tiny_model()), LR, (images, labels), theirs) if group == "input" else own
        found = compare(again, theirs, is_step=True)
        assert (found.first.group, found.first.name) == (group, name)


def test_a_step_dumped_under_mindspores_names_meets_ours(tiny_model, images, labels, tmp_path):
    own = take_step(side(tiny_model()), LR, (images, labels))
    groups = ("weights", "gradients", "update")
    theirs = {key: value for key, value in own.dumped.items() if key.partition("/")[0] not in groups}
    for group in groups:
        start = f"{group}/"
        mine = {key.removeprefix(start): value for key, value in own.dumped.items() if key.startswith(start)}
        theirs |= {f"{group}/{key}": value for key, value in to_mindspore(mine).items()}
    assert "weights/layers.0.blocks.0.norm1.gamma" in theirs and "weights/layers.0.blocks.0.attn.q.weight" in theirs
    np.savez(tmp_path / "ms.npz", **{key: value.numpy() for key, value in theirs.items()})
    found = compare(own, open_side(tmp_path / "ms.npz"), is_step=True)
    assert found.first is None and found.only == (0, 0)


def test_a_step_needs_images_labels_and_a_float_model(tiny_model, images, labels, tmp_path):
    own = side(tiny_model())
    with pytest.raises(UsageError, match="needs images and labels"):
        take_step(own, LR, None)
    with pytest.raises(UsageError, match="is of a float checkpoint: choose policy float"):
        take_step(replace(own, quantized=True), LR, (images, labels))
    np.savez(tmp_path / "x.npz", images=images.numpy(), labels=np.int64([1, 2, 10]))
    with pytest.raises(SwinQuantError, match=r"x.npz: .* are not \[B, 3, H, W\] and \[B\] of 10 classes"):
        take_step(own, LR, None, open_side(tmp_path / "x.npz"))
    large = torch.zeros(3, 3, 40, 40)
    with pytest.raises(SwinQuantError, match=r"^x \(float32\): does not take images of \[3, 3, 40, 40\]"):
        take_step(own, LR, (large, labels))


# In Python


def test_models_are_sides(model, micro, pictures):
    other = sq.load(micro / "swin.pth", config=micro / "swin.yaml")
    other.module.head.weight.data *= 1.5
    found = sq.align(model, other, [torch.randn(2, 3, 32, 32)])
    assert isinstance(found, sq.Alignment) and found.first.name == "head" and found.pictures == 2
    assert "first divergence: forward/head" in str(found) and "<table>" in found._repr_html_()
    sq.calibrate(other, [torch.randn(4, 3, 32, 32)], "qdq")
    quantized = sq.align(model, other, sq.pictures(pictures, "val", count=3), below=-100.0)
    assert quantized.first is None and quantized.rows[-1].sqnr_db < 60 and quantized.pictures == 3


# The command


@pytest.fixture
def words(micro, pictures):
    return ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--pictures", 2, "--quiet"]


def test_the_layer_that_was_broken_is_named(run, micro, words, tmp_path):
    state = torch.load(micro / "swin.pth", weights_only=True)
    state["model"]["layers.0.blocks.1.mlp.fc1.bias"] += 1.0
    torch.save(state, tmp_path / "other.pth")
    done = run("align", micro / "swin.pth", tmp_path / "other.pth", *words, "--json", tmp_path / "x.json")
    assert done.code == 0 and "first divergence: forward/layers.0.blocks.1.mlp.fc1 (" in done.out.replace("\n  ", " ")
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["first"] == "forward/layers.0.blocks.1.mlp.fc1" and found["pictures"] == 2
    assert found["tensors"][0]["sqnr_db"] is None and found["tensors"][0]["max"] == 0
    only = run("align", micro / "swin.pth", tmp_path / "other.pth", *words, "--only", "*.fc1")
    assert "mlp.fc1" in only.out and "mlp.fc2 " not in only.out


def test_a_dump_and_a_step_are_written_and_compared(run, micro, words, tmp_path):
    same = run("align", micro / "swin.pth", micro / "swin.pth", "--to", tmp_path / "x.npz", *words)
    assert same.code == 0 and "below 60 dB" in same.out and "first divergence" not in same.out
    same = run("align", micro / "swin.pth", tmp_path / "x.npz", "--cfg", micro / "swin.yaml", "--below", 99)
    assert same.code == 0 and "below 99 dB" in same.out and "first divergence" not in same.out
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


def test_invalid_comparisons_are_refused_in_one_line(run, micro, words, tmp_path):
    checkpoint = micro / "swin.pth"
    assert "give B, or --to" in run("align", checkpoint, *words).error(2)
    assert "--pictures 0: must be at least 1" in run("align", checkpoint, checkpoint, "--pictures", 0).error(2)
    assert "must end in .npz" in run("align", checkpoint, *words, "--to", tmp_path / "x.txt").error(2)
    three = ["--policy", "qdq", "cpu", "float"]
    assert "give one of both sides" in run("align", checkpoint, checkpoint, *words, *three).error(2)
    assert "no pictures: give --data-path" in run("align", checkpoint, checkpoint, *words[:2]).error(2)
    assert "no such checkpoint" in run("align", checkpoint, tmp_path / "no.pth", *words).error(1)
    (tmp_path / "x.npz").write_bytes(b"PK")
    assert "x.npz: is no .npz of arrays" in run("align", checkpoint, tmp_path / "x.npz", *words).error(1)
    np.savez(tmp_path / "y.npz", images=np.zeros((1, 3, 32, 32), np.float32), other=np.ones(3))
    assert "they name no tensor alike" in run("align", checkpoint, tmp_path / "y.npz", *words).error(1)
    two = "two dumps need no pictures"
    assert two in run("align", tmp_path / "y.npz", "--to", tmp_path / "z.npz", *words).error(2)
    assert not (tmp_path / "x.txt").exists() and not (tmp_path / "z.npz").exists()
