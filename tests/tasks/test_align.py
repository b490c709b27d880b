"""Two sides layer by layer: what was broken is found where it was broken, from memory and from dumps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint.mindspore import to_mindspore
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from swin_quant.tasks.align import align, align_step, dump, of_model, preprocessing_of, side_of, step_of

BLOCK = "layers.0.blocks.1."


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32)


def side(model, name="x"):
    return of_model(model, [], World(), name)


def parameters(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_model_is_aligned_with_itself(tiny_model, images, kind):
    found = align(side(tiny_model(kind)), side(tiny_model(kind)), images.split(2))
    assert found.first is None and found.pictures == 3 and all(row.sqnr_db == math.inf for row in found.rows)
    names = [row.name for row in found.rows]
    assert names.index("patch_embed") < names.index(f"{BLOCK}attn.qkv") < names.index(BLOCK[:-1]) < names.index("head")
    assert names[-1] == "logits" and not any("quantizer" in name for name in names)


@pytest.mark.parametrize("broken", ["patch_embed.norm", f"{BLOCK}attn.proj", f"{BLOCK}mlp.fc2", "head"])
def test_the_layer_whose_weights_differ_is_the_first_that_diverges(tiny_model, images, broken):
    other = tiny_model()
    other.get_submodule(broken).bias.data[0] += 0.5
    found = align(side(tiny_model()), side(other), [images])
    assert found.first.name == broken and found.first.group == "forward"
    assert found.drop is None or found.drop[1].max > 0


def test_a_dump_brings_its_images_and_is_read_back(tiny_model, images, tmp_path):
    own = side(tiny_model())
    count = dump(own, tmp_path / "x.npz", images)
    theirs = side_of(tmp_path / "x.npz")
    assert count == len(theirs.dumped) and "input/images" in theirs.dumped
    found = align(own, theirs)
    assert found.first is None and found.pictures == 3
    np.savez(tmp_path / "bare.npz", images=images.numpy(), logits=own.of(images)["output/logits"].numpy() + 1.0)
    found = align(own, side_of(tmp_path / "bare.npz"))
    assert [row.name for row in found.rows] == ["logits"] and found.rows[0].mean == pytest.approx(1.0, abs=1e-6)
    assert found.only[0] > 20


def test_dumps_of_other_names_other_pictures_or_another_model_are_refused(tiny_model, images, tmp_path):
    own = side(tiny_model())
    np.savez(tmp_path / "names.npz", images=images.numpy(), conv1=np.ones((3, 4), np.float32))
    with pytest.raises(SwinQuantError, match="they name no tensor alike: .* - forward/conv1"):
        align(own, side_of(tmp_path / "names.npz"))
    np.savez(tmp_path / "shape.npz", images=images.numpy(), head=np.ones((3, 99), np.float32))
    with pytest.raises(
        SwinQuantError, match=r"forward/head: \[3, 10\] against \[3, 99\]\): other pictures, or weights"
    ):
        align(own, side_of(tmp_path / "shape.npz"))
    np.savez(
        tmp_path / "nan.npz", images=images.numpy(), head=np.full((3, 10), np.nan), norm=own.of(images)["forward/norm"]
    )
    found = align(own, side_of(tmp_path / "nan.npz"))
    assert found.first.name == "head" and found.first.problem == "NaN or infinity in B"
    np.savez(tmp_path / "size.npz", images=np.zeros((2, 3, 30, 34), np.float32), head=np.ones((2, 10), np.float32))
    with pytest.raises(SwinQuantError, match=r"^x: does not take images of \[2, 3, 30, 34\]"):
        align(own, side_of(tmp_path / "size.npz"))
    with pytest.raises(UsageError, match="is a dump of tensors"):
        side_of(tmp_path / "nan.npz", engine="onnxruntime")


def test_sides_that_prepare_pictures_differently_say_in_what(tiny_model):
    mine = Preprocess(32, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
    both = {"a": mine, "b": replace(mine, size=40)}
    a, b = (of_model(tiny_model(), [], World(), name, one) for name, one in both.items())
    with pytest.raises(
        UsageError, match=r"^a \(float32\) and b \(float32\) take pictures differently: size is 32 and 40$"
    ):
        preprocessing_of(a, b)


# One training step

LR = 0.1


@pytest.fixture
def labels():
    return torch.tensor([1, 9, 4])


def test_the_tensors_of_a_step_are_those_of_autograd(tiny_model, images, labels):
    taken = step_of(side(tiny_model()), LR, (images, labels)).dumped
    model = tiny_model()  # nothing is drawn at random
    loss = torch.nn.CrossEntropyLoss()(model(images), labels)
    gradients = torch.autograd.grad(loss, [value for _, value in model.named_parameters()])
    assert torch.allclose(taken["loss/loss"], loss)
    for (name, value), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert torch.equal(taken[f"weights/{name}"], value)
        assert torch.allclose(taken[f"gradients/{name}"], gradient, atol=1e-6)
        assert torch.allclose(taken[f"update/{name}"], value - LR * gradient, atol=1e-6)
    assert torch.equal(taken["input/labels"], labels)


def faulty(trace, group, name, by):
    return {**trace, f"{group}/{name}": trace[f"{group}/{name}"] + by}


FAULTS = {
    "input": ("images", 0.1), "weights": ("head.bias", 1.0), "forward": ("norm", 1.0), "loss": ("loss", 0.5),
    "gradients": ("head.weight", 1.0), "update": ("head.weight", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("group", FAULTS)
def test_the_first_group_that_differs_is_named(tiny_model, images, labels, group, tmp_path):
    own = side(tiny_model())
    taken = step_of(own, LR, (images, labels))
    name, by = FAULTS[group]
    arrays = {key: value.numpy() for key, value in faulty(taken.dumped, group, name, by).items()}
    np.savez(tmp_path / "theirs.npz", **arrays)
    theirs = side_of(tmp_path / "theirs.npz")
    again = step_of(side(tiny_model()), LR, (images, labels) if group == "input" else None, theirs)
    found = align_step(again, theirs)
    assert (found.first.group, found.first.name) == (group, name)


def test_a_step_dumped_under_mindspores_names_meets_ours(tiny_model, images, labels, tmp_path):
    taken = step_of(side(tiny_model()), LR, (images, labels)).dumped
    groups = ("weights", "gradients", "update")
    theirs = {key: value for key, value in taken.items() if key.partition("/")[0] not in groups}
    for group in groups:
        own = {key.removeprefix(f"{group}/"): value for key, value in taken.items() if key.startswith(f"{group}/")}
        theirs |= {f"{group}/{key}": value for key, value in to_mindspore(own).items()}
    assert "weights/layers.0.blocks.0.norm1.gamma" in theirs and "weights/layers.0.blocks.0.attn.q.weight" in theirs
    np.savez(tmp_path / "ms.npz", **{key: value.numpy() for key, value in theirs.items()})
    found = align_step(step_of(side(tiny_model()), LR, (images, labels)), side_of(tmp_path / "ms.npz"))
    assert found.first is None and found.only == (0, 0)


def test_a_step_needs_images_labels_and_a_float_model(tiny_model, images, labels, tmp_path):
    with pytest.raises(UsageError, match="needs images and labels"):
        step_of(side(tiny_model()), LR, None)
    np.savez(tmp_path / "x.npz", images=images.numpy(), labels=np.int64([1, 2, 10]))
    with pytest.raises(SwinQuantError, match=r"x.npz: .* are not \[B, 3, H, W\] and \[B\] of 10 classes"):
        step_of(side(tiny_model()), LR, None, side_of(tmp_path / "x.npz"))
    large = torch.zeros(3, 3, 40, 40)
    with pytest.raises(SwinQuantError, match=r"^x \(float32\): does not take images of \[3, 3, 40, 40\]"):
        step_of(side(tiny_model()), LR, (large, labels))
