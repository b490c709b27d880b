"""MindSpore's names as in mindcv's own classes, and .ckpt files written by protobuf itself."""

import pytest
import torch

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.mindspore import encode_ckpt, read_ckpt
from swin_quant.checkpoint.names import from_mindspore, is_mindspore, to_mindspore

# Names in mindcv's Swin, for a stage of one block with its merging and the parts around -> our names.
SWIN = {
    "patch_embed.proj.weight": "patch_embed.proj.weight",
    "patch_embed.norm.gamma": "patch_embed.norm.weight",
    "layers.0.blocks.0.norm1.beta": "layers.0.blocks.0.norm1.bias",
    "layers.0.blocks.0.attn.relative_bias.relative_position_bias_table": (
        "layers.0.blocks.0.attn.relative_position_bias_table"
    ),
    "layers.0.blocks.0.attn.proj.weight": "layers.0.blocks.0.attn.proj.weight",
    "layers.0.downsample.norm.gamma": "layers.0.downsample.norm.weight",
    "norm.gamma": "norm.weight",
    "classifier.weight": "head.weight",
}
RESNET = {
    "conv1.weight": "conv1.weight",
    "bn1.gamma": "bn1.weight",
    "bn1.beta": "bn1.bias",
    "bn1.moving_mean": "bn1.running_mean",
    "bn1.moving_variance": "bn1.running_var",
    "layer1.0.bn3.moving_variance": "layer1.0.bn3.running_var",
    "layer1.0.down_sample.0.weight": "layer1.0.downsample.0.weight",
    "layer1.0.down_sample.1.gamma": "layer1.0.downsample.1.weight",
    "layer1.0.down_sample.1.moving_mean": "layer1.0.downsample.1.running_mean",
    "classifier.bias": "fc.bias",
}


def numbered(names):
    return {name: torch.full((2,), float(number)) for number, name in enumerate(names)}


@pytest.mark.parametrize("names", [SWIN, RESNET], ids=["swin", "resnet"])
def test_names_go_both_ways(names):
    theirs = numbered(names)
    ours = from_mindspore(theirs)
    assert {names[key]: value.tolist() for key, value in theirs.items()} == {k: v.tolist() for k, v in ours.items()}
    back = to_mindspore(ours)
    assert {key: value.tolist() for key, value in back.items()} == {k: v.tolist() for k, v in theirs.items()}
    assert is_mindspore(theirs) and not is_mindspore(ours)


def test_names_of_the_model_zoo_are_known_too():
    theirs = numbered(["layer1.0.down_sample_layer.1.gamma", "end_point.weight", "layer2.0.bn1d.moving_mean"])
    ours = ["layer1.0.downsample.1.weight", "fc.weight", "layer2.0.bn1d.running_mean"]
    assert list(from_mindspore(theirs)) == ours


def checkpoint(entries):
    """A Checkpoint message of MindSpore's checkpoint.proto, by protobuf's own library."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="checkpoint.proto", package="m", syntax="proto2")
    kinds = {
        "TensorProto": [("dims", 1, 3, 3, None), ("tensor_type", 2, 2, 9, None), ("tensor_content", 3, 2, 12, None)],
        "Value": [("tag", 1, 2, 9, None), ("tensor", 2, 2, 11, ".m.TensorProto")],
        "Checkpoint": [("value", 1, 3, 11, ".m.Value")],
    }
    for name, fields in kinds.items():
        message = file.message_type.add(name=name)
        for title, number, label, kind, of in fields:
            message.field.add(name=title, number=number, label=label, type=kind, type_name=of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("m.Checkpoint"))()
    for tag, dims, kind, content in entries:
        value = made.value.add(tag=tag)
        value.tensor.dims.extend(dims)
        value.tensor.tensor_type, value.tensor.tensor_content = kind, content
    return made.SerializeToString()


def entry(name, tensor, kind="Float32"):
    return name, list(tensor.shape), kind, tensor.numpy().tobytes()


def test_a_ckpt_is_read_without_mindspore(tmp_path, tiny_model):
    model = tiny_model()
    own = {key: value for key, value in model.named_parameters() if not key.endswith("_amax")}
    theirs = to_mindspore({key: value.detach() for key, value in own.items()})
    assert theirs["layers.0.blocks.0.attn.k.weight"].shape == (32, 32)
    derived = ("layers.0.blocks.0.attn.relative_bias.index", "layers.0.blocks.1.attn_mask")
    theirs |= dict.fromkeys(derived, torch.ones(4))
    file = tmp_path / "swin.ckpt"
    file.write_bytes(checkpoint([entry(name, tensor.contiguous()) for name, tensor in theirs.items()]))
    other = tiny_model(seed=1)
    source = load_float(other, file)
    assert source.format == "ckpt, MindSpore names"
    assert all(torch.equal(value, own[key]) for key, value in other.named_parameters())


def test_a_ckpt_that_is_written_is_what_protobuf_writes(tmp_path, tiny_model):
    state = to_mindspore(tiny_model("swin").state_dict())
    state |= {"scale": torch.tensor(2.0), "half": torch.randn(3, 200).half(), "step": torch.tensor([1, 300])}
    (tmp_path / "ours.ckpt").write_bytes(encode_ckpt(state))
    found = read_ckpt(tmp_path / "ours.ckpt")
    assert list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)
    kinds = {torch.float32: "Float32", torch.float16: "Float16", torch.int64: "Int64"}
    some = {name: x for name, x in state.items() if x.dtype in kinds and x.dim()}
    assert encode_ckpt(some) == checkpoint([entry(name, x, kinds[x.dtype]) for name, x in some.items()])


BAD = {
    "cut off": (lambda data: data[:-3], "it ends inside"),
    "another size": (
        lambda data: checkpoint([("a", [3], "Float32", bytes(8))]),
        r"a: 8 bytes are not \[3\] of Float32",
    ),
    "no values in a vast shape": (
        lambda data: checkpoint([("a", [2**62, 2**62, 0], "Float32", b"")]),
        r"a: 0 bytes are not \[4611686018427387904, 4611686018427387904, 0\] of Float32",
    ),
    "a number of 64 bits": (
        lambda data: b"\x0a\x1b\x0a\x01a\x12\x16\x08\x00\x08" + b"\x80" * 9 + b"\x01\x12\x07Float32",
        r"a: 0 bytes are not \[0, 9223372036854775808\] of Float32",
    ),
    "another type": (lambda data: checkpoint([("a", [1], "String", bytes(8))]), "a is of type String"),
    "no tensor": (lambda data: b"\x0a\x03\x0a\x01a", "an entry without a name or a tensor"),
    "an endless number": (lambda data: b"\x0a" + b"\xff" * 20, "more than 64 bits"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_ckpt_is_refused(tmp_path, case):
    damage, reason = BAD[case]
    (tmp_path / "x.ckpt").write_bytes(damage(checkpoint([entry("a", torch.ones(4))])))
    with pytest.raises(
        SwinQuantError, match=f"x.ckpt: is cut short, damaged or not a checkpoint of MindSpore .*{reason}"
    ):
        read_ckpt(tmp_path / "x.ckpt")
