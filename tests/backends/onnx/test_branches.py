"""Branches of captured networks as compiled operators: which are found, however they are written, and what stays
plain."""

from copy import deepcopy

import onnx
import pytest
import torch
from decibels import sqnr
from nightly import share
from operator_nodes import exact_policy, mlp, token_branch
from torch import nn
from torch.nn import functional

from swin_quant.backends.onnx.branches import BRANCHES, call_operator, find_left
from swin_quant.backends.onnx.branches.mlp import NO_MLP
from swin_quant.backends.onnx.export import OnnxOptions, export, record_compiled
from swin_quant.backends.onnx.network import network as lowered
from swin_quant.backends.openvino import engine
from swin_quant.base.compat import import_timm, import_torchvision
from swin_quant.cards.card import RunCard
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.captured import captured, graphs, run_graph
from swin_quant.operators.plugins import Plugging, parse_plugins
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, quantize
from swin_quant.score.options import EngineOptions


class Attention(nn.Module):
    """Attention in one of the ways that people write it."""

    def __init__(self, width, heads, how):
        super().__init__()
        self.heads, self.how = heads, how
        inner = heads * (24 if how == "odd heads" else width // heads)
        if how in ("three linears", "interleaved"):
            self.q, self.k, self.v = (nn.Linear(width, inner, bias=part != "k") for part in "qkv")
        else:
            self.qkv = nn.Linear(width, 3 * inner, bias=how != "no bias")
        self.out = nn.Linear(inner, width)
        self.normal = nn.LayerNorm(inner // heads)
        self.normal_k = nn.LayerNorm(inner // heads)
        nn.init.uniform_(self.normal_k.weight, 0.5, 1.5)
        self.table = nn.Parameter(torch.linspace(-2, 2, 9 * heads).view(9, heads))

    def rotated(self, x):
        """All tokens but the first one, in pairs of neighbours or of halves."""
        first, x = x[..., :1, :], x[..., 1:, :]
        depth = x.shape[-1]
        angles = torch.arange(x.shape[-2])[:, None] / 3 ** torch.arange(depth // 2)
        if self.how == "rotated pairs":
            angles = angles.repeat_interleave(2, -1)
            other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            x = x * angles.cos() + other * angles.sin()
        elif self.how == "rotated apart":
            left, right = x.chunk(2, -1)
            x = torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)
        else:
            angles = torch.cat([angles, angles], -1)
            x = torch.cat([-x[..., depth // 2 :], x[..., : depth // 2]], -1) * angles.sin() + x * angles.cos()
        return torch.cat([first, x], -2)

    def forward(self, x):
        if self.how in ("three linears", "interleaved"):
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            q, k, v = self.qkv(x).chunk(3, -1)
        if self.how == "interleaved":  # the channels of all heads side by side
            q, k, v = (part.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2) for part in (q, k, v))
        else:
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        if self.how in ("normal q", "normal heads", "normal and rotated heads"):
            q = self.normal(q)
        if self.how in ("normal heads", "normal and rotated heads"):
            k = self.normal_k(k)
        if self.how == "normal v":
            v = self.normal(v)
        if "rotated" in self.how:
            q, k = self.rotated(q), (k if self.how == "rotated q" else self.rotated(k))
        if self.how == "fused":
            y = functional.scaled_dot_product_attention(q, k, v)
        elif self.how == "masked":
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
            if self.how == "biased":  # by the distance of two tokens
                places = torch.arange(x.shape[1])
                scores = scores + self.table[(places[:, None] - places).abs().clamp(max=8)].permute(2, 0, 1)
            if self.how == "biased by pictures":
                scores = x[:, None, :, :1].transpose(-2, -1) + scores
            y = scores.softmax(dim=-1) @ v
        if self.how == "seen by others":
            return self.out(y.transpose(1, 2).flatten(2)) + v.mean((1, 2, 3), keepdim=True).squeeze(1)
        y = y.transpose(1, 2) if self.how != "interleaved" else y.permute(0, 2, 3, 1)
        return self.out(y.flatten(2))


class Mlp(nn.Module):
    """An MLP around one of the activations, or a half of one."""

    def __init__(self, width, how):
        super().__init__()
        self.fc1, self.fc2, self.how = nn.Linear(width, 128), nn.Linear(128, width), how
        if how in ("gated", "gated by sigmoid"):
            self.gate = nn.Linear(width, 128)
        if how == "gated in one":
            self.fc1 = nn.Linear(width, 256)

    def forward(self, x):
        y = self.fc1(x)
        if self.how in ("quick_gelu", "silu by sigmoid"):
            y = y * torch.sigmoid(1.702 * y if self.how == "quick_gelu" else y)
        elif self.how == "gelu_tanh":
            y = functional.gelu(y, approximate="tanh")
        elif self.how == "gated":
            y = functional.silu(self.gate(x)) * y
        elif self.how == "gated by sigmoid":
            y = torch.sigmoid(self.gate(x)) * y
        elif self.how == "gated in one":
            y, gate = y.chunk(2, -1)
            y = y * functional.gelu(gate)
        else:
            y = getattr(functional, self.how if self.how in ("relu", "silu", "tanh") else "gelu")(y)
        out = self.fc2(y)
        return out + y.mean(-1, keepdim=True) if self.how == "seen by others" else out


class Block(nn.Module):
    """Attention and MLP, with what stands around them in one of several orders."""

    def __init__(self, width, heads, attention="plain", mlp="gelu", around="first"):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp, self.around = Attention(width, heads, attention), Mlp(width, mlp), around
        self.scales = nn.ParameterList(torch.linspace(-1, 1, width + 1)[:width].clone() for _ in range(2))

    def forward(self, x):
        first, second = self.scales if "scaled" in self.around else (None, None)
        if "last" in self.around:
            x = x + self._scaled(first, self.norm1(self.attn(x)))
            return x + self._scaled(second, self.norm2(self.mlp(x)))
        if self.around == "behind":  # as BERT has it
            x = self.norm1(x + self.attn(x))
            return self.norm2(x + self.mlp(x))
        if self.around == "none":
            return self.mlp(self.norm2(self.attn(self.norm1(x))))
        if self.around == "another stream":
            y = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(y))
        x = x + self._scaled(first, self.attn(self.norm1(x)))
        return self._scaled(second, self.mlp(self.norm2(x))) + x

    @staticmethod
    def _scaled(scale, x):
        return x if scale is None else scale * x


class Net(nn.Module):
    """Patches with a class token and a register, through blocks by name."""

    def __init__(self, blocks, tokens=16):
        super().__init__()
        width = 64
        self.count = tokens
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.tokens = nn.Parameter(0.1 * torch.randn(1, 2, width))
        self.blocks = nn.ModuleDict({name: Block(width, 2, **how) for name, how in blocks.items()})
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.tokens.expand(len(x), -1, -1), x], 1) if self.count > 1 else x.mean(1, keepdim=True)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)[:, 0])


VARIANTS = {  # block -> how it is written, and whether its attention and its MLP can be compiled
    "plain": ({}, True, True),
    "fused": ({"attention": "fused", "mlp": "relu"}, True, True),
    "three_linears": ({"attention": "three linears", "mlp": "silu"}, True, True),
    "no_bias": ({"attention": "no bias", "mlp": "silu by sigmoid"}, True, True),
    "interleaved_heads": ({"attention": "interleaved", "mlp": "gelu_tanh"}, True, True),
    "scaled": ({"around": "scaled", "mlp": "quick_gelu"}, True, True),
    "norms_last": ({"around": "last"}, True, True),
    "scaled_norms_last": ({"around": "scaled last"}, True, True),
    "masked": ({"attention": "masked"}, True, True),
    "biased": ({"attention": "biased", "mlp": "relu"}, True, True),
    "biased_by_pictures": ({"attention": "biased by pictures"}, False, True),
    "normal_q": ({"attention": "normal q"}, False, True),
    "normal_v": ({"attention": "normal v"}, False, True),
    "normal_heads": ({"attention": "normal heads"}, True, True),
    "normal_rotated": ({"attention": "normal and rotated heads"}, True, True),
    "rotated_pairs": ({"attention": "rotated pairs", "around": "last"}, True, True),
    "rotated_halves": ({"attention": "rotated halves"}, True, True),
    "rotated_apart": ({"attention": "rotated apart"}, True, True),
    "rotated_q": ({"attention": "rotated q"}, False, True),
    "odd_heads": ({"attention": "odd heads"}, False, True),
    "seen_v": ({"attention": "seen by others"}, False, True),
    "seen_hidden": ({"mlp": "seen by others"}, True, False),
    "tanh": ({"mlp": "tanh"}, True, False),
    "gated": ({"mlp": "gated"}, True, True),
    "gated_in_one": ({"mlp": "gated in one", "around": "scaled"}, True, True),
    "gated_by_sigmoid": ({"mlp": "gated by sigmoid"}, True, False),
    "norms_behind": ({"around": "behind"}, False, False),
    "another_stream": ({"around": "another stream"}, True, False),
    "no_addition": ({"around": "none"}, False, False),
}


def calibrated(blocks, side=16, any_size=False, tokens=16, policy="cpu-operators", again=()):
    """Fake-quant of a captured network, and pictures that it was calibrated with. `again`: blocks that run twice."""
    torch.manual_seed(0)
    net = Net(blocks, tokens).eval()
    for name in again:
        net.blocks[f"{name}_again"] = net.blocks[name]
    network = captured(net, (3, side, side), 10, what="net", any_size=any_size)
    network.any_size = any_size
    images = torch.randn(8, 3, side, side, generator=torch.Generator().manual_seed(1))
    calibrate(network, [images], Method("max"))
    apply_policy(network, exact_policy(policy))
    quantize(network)
    return network, images


def by_force(plugin, node):
    """The result of an operator's node."""
    compute = {"mlp": mlp, "token_branch": token_branch}[plugin.operator]
    return torch.from_numpy(compute(*(one.numpy() for one in node.inputs), **node.attributes)).float()


def replaced(network, images):
    """The lowered network with every branch as an operator, what it computes, and its operators and their owners."""
    model = lowered(network, OnnxOptions(target="openvino", plain=True), None)
    names = {part: name for name, part in model.named_modules()}
    taken = set()
    for part, graph in graphs(model):
        for operator, rewrite in BRANCHES.items():
            for node in list(graph.nodes):
                branch = rewrite.at(part, node)
                if branch and not branch.fault:
                    taken.add((operator, f"{names[part]}.{branch.owner}".strip(".")))
                    call_operator(part, graph, branch, operator)
        run_graph(part, graph)
    with torch.no_grad(), Plugging(parse_plugins([f"{name}=my::{name}" for name in BRANCHES]), by_force):
        return model, model(images), taken


@pytest.mark.parametrize("tokens", share([16, 1], 2))
def test_branches_are_found_by_pattern_and_the_others_stay_plain(tokens):
    """All ways to write a block in one network, which computes the same afterwards."""
    network, images = calibrated({name: how for name, (how, *_) in VARIANTS.items()}, tokens=tokens)
    images = images[:2]  # brute force takes seconds a picture
    _, found, taken = replaced(network, images)
    able = {(f"blocks.{name}.attn", f"blocks.{name}.mlp"): flags for name, (_, *flags) in VARIANTS.items()}
    assert taken == {
        (operator, owner)
        for owners, flags in able.items()
        for operator, owner, flag in zip(("token_branch", "mlp"), owners, flags, strict=True)
        if flag
    }
    with torch.no_grad():  # each alone is 130 dB near; of 29 blocks in a row one rounds a tie the other way
        assert sqnr(network(images), found) > 30


def test_a_block_that_runs_twice_and_one_of_float_attention():
    """The second run of a linear is a copy of it, which has a branch of its own. Policy cpu leaves attention float."""
    network, images = calibrated({"plain": {}}, again=["plain"])
    _, found, _ = replaced(network, images)
    with torch.no_grad():
        assert sqnr(network(images), found) > 40
    network, images = calibrated({"plain": {}, "scaled": {"around": "scaled"}}, policy="cpu")
    _, found, taken = replaced(network, images)
    assert taken == {("mlp", "blocks.plain.mlp"), ("mlp", "blocks.scaled.mlp")}
    with torch.no_grad():
        assert sqnr(network(images), found) > 40


@pytest.mark.parametrize("side, any_size, attentions", share([(16, False, 2), (16, True, 0), (100, False, 0)], 3))
def test_attention_is_compiled_by_default_for_as_many_tokens_as_are_fast(
    side, any_size, attentions, measured, tmp_path
):
    """Heads of 32 channels: for at most 576 tokens, whose number is known. The MLP takes any; another activation stays
    plain, since a file has one."""
    blocks = {"first": {}, "second": {"around": "scaled"}}
    blocks |= {} if any_size else {"third": {"attention": "normal q", "mlp": "relu"}}
    network, images = calibrated(blocks, side, any_size)
    preprocess = Preprocess(side, False, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    card = RunCard("net", {}, preprocess.to_dict(), policy=exact_policy("cpu-operators").to_dict())
    artifact = export(deepcopy(network), card, tmp_path, OnnxOptions(target="openvino"))
    nodes = [node.op_type for node in onnx.load(artifact.file).graph.node]
    assert (nodes.count("TokenBranch"), nodes.count("Mlp")) == (attentions, 2)
    found = f"{attentions} of {len(blocks)}", f"2 of {len(blocks)}"
    assert artifact.record["options"]["compiled"] == dict(zip(("token_branch", "mlp"), found, strict=True))
    if any_size:
        return  # engines open files of maps alone
    quantize(network)
    with torch.no_grad():
        wanted = network(images[:2])
    assert sqnr(wanted, engine.load(artifact, EngineOptions(threads=1, float_type="float32"))(images[:2])) > 30


CONVOLVED, POINTWISE = "has a convolution between its linears", "is made of 1 x 1 convolutions"
FAMILIES = [  # timm's model, its options, the MLPs that are compiled, and why others stay plain
    ("cait_xxs24_224", {"depth": 1}, 3, {}),  # two of them of the class token
    ("davit_tiny", {"depths": (1, 1, 1, 1)}, 8, {}),
    ("maxvit_tiny_tf_224", {"depths": (1, 1, 1, 1)}, 8, {}),
    ("xcit_tiny_12_p16_224", {"depth": 1}, 1, {NO_MLP: 2}),  # the class token's are added to other tokens, too
    ("poolformer_s12", {}, 0, {POINTWISE: 12}),
    ("poolformerv2_s12", {}, 0, {POINTWISE: 12}),
    ("resnet18", {}, 0, {}),
    ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, 0, {CONVOLVED: 4}),
    ("segformer", {}, 0, {CONVOLVED: 8}),
]


@pytest.mark.parametrize("name, options, mlps, left", share(FAMILIES, 3))
def test_the_mlps_of_other_families_are_compiled_or_the_card_says_why_not(name, options, mlps, left):
    """By their publishers, at their published widths: the network computes what fake-quant does."""
    torch.manual_seed(0)
    import_torchvision()  # transformers imports it
    if name == "segformer":
        given = pytest.importorskip("transformers").SegformerForImageClassification
        net = given(given.config_class(num_labels=10))
    else:
        net = import_timm().create_model(name, num_classes=10, **options)
    side = 224 if name in ("cait_xxs24_224", "maxvit_tiny_tf_224") else 64
    network = captured(net.eval(), (3, side, side), 10, what=name)
    images = torch.randn(2, 3, side, side)
    calibrate(network, [images], Method("max"))
    apply_policy(network, exact_policy("cpu"))
    quantize(network)
    model, found, taken = replaced(network, images)
    assert len([operator for operator, _ in taken if operator == "mlp"]) == mlps
    assert find_left(model)["mlp"] == left
    with torch.no_grad():
        wanted, found = ([one] if isinstance(one, torch.Tensor) else one for one in (network(images), found))
    assert all(sqnr(*pair) > 30 for pair in zip(wanted, found, strict=True))
    recorded = {}
    record_compiled(recorded, {"mlp": mlps}, {"mlp": left})
    count = mlps + sum(left.values())
    assert recorded == ({"compiled": {"mlp": f"{mlps} of {count}"}} if count else {}) | (
        {"left_plain": {"mlp": left}} if left else {}
    )
