"""Patterns in files that OpenVINO refused or computed wrongly: the result is that of fake-quant."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from decibels import sqnr
from nightly import share
from PIL import Image
from torch import nn
from vnni import exact_int8

import swin_quant as sq
from swin_quant.base.compat import import_timm
from swin_quant.quant.quantizer import Role, named_nodes

pytestmark = pytest.mark.slow


class Fire(nn.Module):
    """Branches with different ranges, joined twice, as in a SqueezeNet."""

    def __init__(self, joined):
        super().__init__()
        self.stem, self.joined = nn.Conv2d(3, 8, 3, padding=1), joined
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.last, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 5)
        self.norm, self.gain = nn.BatchNorm2d(16), nn.Parameter(torch.rand(16, 1, 1) + 0.5)
        nn.init.uniform_(self.norm.weight, 0.5, 2)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = torch.cat([F.relu(self.a(x)), 3 * F.relu(self.b(x))], 1)
        if self.joined == "twice":
            x = torch.cat([self.c(x), 5 * self.d(x)], 1)
        if self.joined == "pooled":
            x = F.max_pool2d(F.relu(x), 3, 2, ceil_mode=True)
        if self.joined == "normed":  # as the maps of a backbone in a detector's neck
            x = self.norm(x)
        if self.joined == "scaled":
            x = 0.1 + self.gain * x
        return self.head(F.relu(self.last(x)).mean((2, 3)))


class Wide(nn.Sequential):
    """An average with a window larger than the map, as in the EfficientNet of transformers."""

    def __init__(self):
        pool = nn.AvgPool2d(64, ceil_mode=True)
        super().__init__(nn.Conv2d(3, 8, 3), nn.SiLU(), pool, nn.Flatten(), nn.Linear(8, 5))


class Scaled(nn.Module):
    """A scale of each channel before the average over places, or between it and the classifier.

    `normed` is as in the LeViT of transformers, `map` as in its SwiftFormer.
    """

    def __init__(self, place):
        super().__init__()
        self.embed, self.place, self.head = nn.Conv2d(3, 32, 1), place, nn.Linear(32, 5)
        self.gain, self.rms = nn.Parameter(torch.rand(32) + 0.5), nn.LayerNorm(32, bias=False)
        self.norm = nn.BatchNorm2d(32) if place == "map" else nn.BatchNorm1d(32)
        for weight in (self.norm.weight, self.rms.weight):
            nn.init.uniform_(weight, 0.5, 2)

    def forward(self, x):
        x = self.embed(x).tanh()
        if self.place == "map":
            return self.head(self.norm(x).flatten(2).mean(-1))
        x = x.permute(0, 2, 3, 1)  # channels last
        if self.place == "normed":
            return self.head(self.norm(x.flatten(1, 2).mean(1)))
        if self.place == "shiftless":
            return self.head(self.rms(x.flatten(1, 2)).mean(1))
        return self.head((x * self.gain).mean((1, 2)))


class Overlapping(nn.Module):
    """Windows that overlap, cut out of a convolution's padded output, as in HaloNet."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, bias=False), nn.Linear(128, 5)

    def forward(self, x):
        x = F.pad(self.b(self.a(x)), (1, 1, 1, 1)).unfold(2, 6, 4).unfold(3, 6, 4)
        return self.head(x.mean((4, 5)).flatten(1))


class Padded(nn.Module):
    """Zeros around a map on two sides, as a convolution of TensorFlow with a stride has them."""

    def __init__(self):
        super().__init__()
        self.stem, self.pad = nn.Conv2d(3, 8, 1), nn.ZeroPad2d((1, 0, 1, 0))
        self.a, self.b, self.head = nn.Conv2d(8, 8, 3, 2), nn.Conv2d(8, 8, 3, 2), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.a(F.pad(F.relu(self.stem(x)), (0, 1, 0, 1))))
        return self.head(F.relu(self.b(self.pad(x))).mean((2, 3)))


class Upsampled(nn.Sequential):
    """Maps made larger by transposed convolutions, with a norm that is folded into one, as in a segmenter's neck."""

    def __init__(self):
        up = nn.ConvTranspose2d(8, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 8, 3, 2, 1)
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), *up, nn.Conv2d(8, 5, 3), nn.Flatten())


class Normed(nn.Sequential):
    """A group norm between convolutions, as in a PoolFormer (one group) or a BiT, of values far from zero."""

    def __init__(self, groups, affine=True, bias=True):
        norm = nn.GroupNorm(groups, 8, affine=affine)
        norm.bias = norm.bias if bias else None
        super().__init__(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        nn.init.normal_(self[0].bias, 50)
        for one in norm.parameters():
            nn.init.uniform_(one, 0.5, 2)


class Stacked(nn.Module):
    """Branches that are stacked and weighed, as in an SKNet. `how`: the stack is only summed, also read as it is, or
    weighed by one weight for both branches."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1), how
        self.select, self.head = nn.Linear(8, 16), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        x = torch.stack([F.relu(self.a(x)), F.relu(self.b(x))], 1)
        weights = self.select(x.sum(1).mean((2, 3))).view(-1, 2, 8, 1, 1).softmax(1)
        found = (x * (weights[:, :1] if self.how == "one weight" else weights)).sum(1)
        return self.head(found).mean((2, 3)) + (x.mean((1, 2, 3, 4))[:, None] if self.how == "read" else 0)


NETWORKS = {
    "transposed": Upsampled,
    "summed stack": lambda: Stacked("summed"),
    "read stack": lambda: Stacked("read"),
    "stack with one weight": lambda: Stacked("one weight"),
    "group norm of one group": lambda: Normed(1),
    "group norm of two groups": lambda: Normed(2),
    "group norm without weights": lambda: Normed(2, affine=False),
    "group norm without a bias": lambda: Normed(1, bias=False),
    "joined once": lambda: Fire("once"),
    "joined twice": lambda: Fire("twice"),
    "joined and pooled": lambda: Fire("pooled"),
    "joined and normed": lambda: Fire("normed"),
    "joined and scaled": lambda: Fire("scaled"),
    "wide average": Wide,
    "average, then scaled": lambda: Scaled("normed"),
    "scaled map, then average": lambda: Scaled("map"),
    "norm without a shift, then average": lambda: Scaled("shiftless"),
    "scaled channels last, then average": lambda: Scaled("last"),
    "zeros around": Padded,
    "overlapping windows": Overlapping,
}


def calibrated(network, policy):
    """The network of that name, calibrated, and the pictures."""
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    return sq.calibrate(sq.wrap(NETWORKS[network](), 16, name="network"), [x], policy, passes=[]), x


@pytest.mark.parametrize("network", share(NETWORKS, 2))
@exact_int8
def test_openvino_computes_what_fake_quant_does(network, tmp_path):
    pytest.importorskip("openvino")
    model, x = calibrated(network, "qdq")
    wanted = model(x)
    found = sq.export(model, "openvino", tmp_path).load()(x)
    assert sqnr(wanted, found) > 40, "it was 6 to 31 dB"


@pytest.mark.parametrize(
    ("network", "stacks"), share([("summed stack", False), ("read stack", True), ("stack with one weight", True)], 2)
)
def test_a_stack_that_is_only_summed_is_not_made(network, stacks, tmp_path):
    model, _ = calibrated(network, "qdq")
    for opset in (17, 18):
        kinds = {node.op_type for node in onnx.load(sq.export(model, "onnx", tmp_path, opset=opset).file).graph.node}
        assert ({"Concat", "Unsqueeze", "ReduceSum"} <= kinds, "Concat" in kinds) == (stacks, stacks)


@pytest.mark.parametrize(
    ("network", "target", "kept"),
    share(
        [(f"group norm {which}", "openvino", True) for which in ("of one group", "of two groups", "without a bias")]
        + [("group norm without weights", "openvino", True), ("group norm of one group", "onnxruntime", False)],
        4,
    ),
)
def test_openvino_reshapes_no_map_for_a_group_norm(network, target, kept, tmp_path):
    """Older releases of ONNX Runtime take no layer norm whose scale is a channel's."""
    model, _ = calibrated(network, "qdq")
    nodes = onnx.load(sq.export(model, target, tmp_path).file).graph.node
    behind = {node.op_type for node in nodes if any(name.startswith("0.Conv") for name in node.input)}
    assert ("InstanceNormalization" in {node.op_type for node in nodes}, "Reshape" in behind) == (not kept, not kept)


def test_convolutions_add_the_zeros_so_that_onnxruntime_runs_all_in_int8(tmp_path):
    model, _ = calibrated("zeros around", "onnxruntime")
    artifact = sq.export(model, "onnxruntime", tmp_path)
    nodes = onnx.load(artifact.file).graph.node
    assert "Pad" not in {node.op_type for node in nodes}
    outputs = [name for name in named_nodes(model.module) if name.endswith("_aftergemm_quantizer")]
    roles = {name.partition(".")[0]: named_nodes(model.module)[name].role for name in outputs}
    assert roles["stem"] == roles["a"] == Role.GEMM_OUTPUT and roles["b"] == Role.CONV_OUTPUT
    details = artifact.load().details
    assert (details["int8_gemms"], details["all_gemms"]) == (4, 4)


@pytest.mark.parametrize(
    ("engine", "policy", "type_"),
    share([("openvino", "qdq-unsigned", "int8"), ("openvino", "qdq", "float32"), ("onnxruntime", "qdq", "float32")], 3),
)
def test_an_engine_says_how_it_runs_a_transposed_convolution(engine, policy, type_, tmp_path):
    pytest.importorskip(engine)
    model, _ = calibrated("transposed", policy)
    found = sq.export(model, engine, tmp_path).load().details["gemms"]
    plain = ("0.Conv", "6.Conv")  # OpenVINO gives the transposed ones names of its own
    assert [kind for name, kind in found.items() if name.partition("/")[0] not in plain] == [type_] * 2


@pytest.mark.parametrize("policy", ["qdq", "qdq-unsigned"])
@exact_int8
def test_transposed_convolutions_are_right_however_often_openvino_compiles_them(policy, tmp_path):
    openvino = pytest.importorskip("openvino")
    model, x = calibrated("transposed", policy)
    wanted, file = model(x), sq.export(model, "openvino", tmp_path).file
    core = openvino.Core()
    for _ in range(8):  # with int8 inputs nineteen compilations in twenty were wrong
        network = core.read_model(str(file))
        network.reshape([8, 3, 16, 16])
        found = core.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x.numpy()])[0]
        assert sqnr(wanted, found.reshape(wanted.shape)) > 40


class Joined(nn.Module):
    """A convolution without a bias whose output is read twice, by an addition too."""

    def __init__(self, join, groups=1):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 18, 3, padding=1, bias=False, groups=groups), nn.GroupNorm(2, 18)
        self.join, self.head = join, nn.Linear(18, 10)

    def forward(self, x):
        return self.head(self.join(self.stem(x), self.norm).mean((-1, -2)))


def poolformer():
    import_timm()  # allows torchvision beside a CPU-only torch
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    found = transformers.PoolFormerForImageClassification(transformers.PoolFormerConfig(num_labels=10, depths=[1] * 4))

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = found

        def forward(self, x):
            return self.network(x).logits

    return Logits(), 128


OPEN = {
    "itself": lambda: (Joined(lambda x, norm: x + torch.tanh(x)), 16),
    "a norm": lambda: (Joined(lambda x, norm: x - norm(x)), 16),
    "its mean": lambda: (Joined(lambda x, norm: x + x.mean((-1, -2), keepdim=True)), 16),
    "groups": lambda: (Joined(lambda x, norm: x - norm(x), groups=3), 16),
    "PoolFormer": poolformer,
}


@pytest.mark.parametrize("name", OPEN)
@exact_int8
def test_open_shapes_give_what_fixed_shapes_give(name, tmp_path):
    module, side = OPEN[name]()
    images = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module.eval()(images)
    model = sq.wrap(module, side)
    sq.calibrate(model, [images], passes=[])
    file = sq.export(model, "openvino", tmp_path).file
    core = pytest.importorskip("openvino").Core()
    assert sqnr(expected, core.compile_model(core.read_model(file), "CPU")(images.numpy())[0]) > 25


@pytest.mark.nightly
def test_verify_warns_of_a_file_that_open_shapes_change(tmp_path, caplog):
    """OpenVINO 2026.4 does so to timm's MViTv2, whose biases are added to a part of the logits in place."""
    import_timm()
    from timm.models import mvitv2

    torch.manual_seed(0)
    sizes = {"depths": (1, 1), "embed_dim": (32, 64), "num_heads": (1, 2), "stride_q": ((1, 1), (2, 2))}
    module = mvitv2.MultiScaleVit(mvitv2.MultiScaleVitCfg(**sizes), img_size=64, num_classes=10).eval()
    nn.init.normal_(module.head.fc.weight, std=0.3)
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        (tmp_path / split / "some").mkdir(parents=True)
        for number in range(16):
            pixels = random.integers(0, 256, (64, 64, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / "some" / f"{number}.png")
    preprocess = sq.Preprocess(64, True, "bicubic", mean=(0, 0, 0), std=(1, 1, 1), crop_ratio=1.0)
    model = sq.calibrate(sq.wrap(module, 64, preprocess=preprocess), str(tmp_path), passes=[])
    assert sq.verify(sq.export(model, "openvino", tmp_path / "out"), str(tmp_path))
    assert "computes something else (mean |Δlogit| " in caplog.text and "where shapes are left open" in caplog.text
