"""Branches of captured networks as compiled operators: which are found, what they compute, and what stays plain."""

from copy import deepcopy

import numpy as np
import onnx
import pytest
import torch
from nightly import share
from operator_nodes import (
    assert_near,
    attended,
    compiled,
    linear,
    normalised,
    one_node,
    product,
    stream,
    without_library,
)
from torch import nn
from torch.nn import functional

import swin_quant as sq
from swin_quant.backends.onnx.branches import BRANCHES, call_operator
from swin_quant.backends.onnx.branches.tokens import token_branch
from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx.network import network as lowered
from swin_quant.backends.openvino import engine, operators
from swin_quant.base.compat import import_torchvision
from swin_quant.cards.card import RunCard
from swin_quant.config import find_config, load_config
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.models.captured import captured, graphs, run_graph
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, load_policy, quantize
from swin_quant.score.options import EngineOptions

SCALES = [0.03, 0.04, 0.02]  # of q, k and v
BOTH = ("token_branch=swin_quant::TokenBranch", "mlp=swin_quant::Mlp")


def constants(heads, depth, x_zero=None):
    """The operator's constants, in order."""
    random, width = np.random.default_rng(0), heads * depth
    norm = random.standard_normal((2, width)).astype(np.float32)
    qkv, proj = linear(random, width, 3 * width, 0.03, x_zero), linear(random, width, width, 0.012, None)
    return [*norm, *qkv, *proj]


def brute_force(x, constants, heads, scales, norm_last):
    """x plus its branch: products in integers, all else in float64."""
    *norm, x = *constants[:2], x.astype(float)
    y = product(x if norm_last else normalised(x, *norm), *constants[2:7])
    q, k, v = y.reshape(*x.shape[:2], 3, heads, -1).transpose(2, 0, 3, 1, 4)
    y = attended(q, k, v, 0.0, (), scales).swapaxes(1, 2)
    y = product(y.reshape(x.shape), *constants[7:])
    return x + (normalised(y, *norm) if norm_last else y)


CASES = {  # heads, depth, tokens, zero point
    "DeiT-tiny": (3, 64, 197, 131),
    "one token": (2, 64, 1),
    "the most tokens": (1, 64, 1024),
    "heads of 32 channels": (3, 32, 50),
    "more tokens than the fast loops take": (1, 64, 1025),
    "heads of no fast loops": (2, 24, 17),
}
given_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@given_cases
@pytest.mark.parametrize("is_rounded", [False, True], ids=["softmax", "rounded softmax"])
def test_the_compiled_attention_among_all_tokens_is_brute_force(case, is_rounded, library):
    heads, depth, tokens, *zero = case
    given, scales = constants(heads, depth, *zero), SCALES + [1 / 127] * is_rounded
    x = stream(2, tokens, heads * depth)
    for norm_last in (False, True):
        wanted = brute_force(x, given, heads, scales, norm_last)
        file = one_node("TokenBranch", given, heads=heads, scales=scales, norm_last=int(norm_last))
        for threads in (1, 2):
            model = compiled(library, file, threads)
            for batch in (2, 0):
                assert_near(model(x[:batch]), wanted[:batch], x[:batch], 1e-4)
        spoilt = x.copy()
        spoilt[1, 0] = np.nan
        found = model(spoilt)
        assert np.isfinite(found[0]).all() and np.isnan(found[1]).any()
    other = stream(1, tokens + 3, heads * depth)  # the file takes any number of tokens
    assert_near(model(other), brute_force(other, given, heads, scales, norm_last), other, 1e-4)


@pytest.mark.parametrize("norm_last", [False, True])
def test_the_attention_in_torch_and_its_onnx_function_are_brute_force(norm_last):
    given, x = constants(2, 24), stream(2, 17, 48)
    for scales in (SCALES, [*SCALES, 1 / 127]):
        how = {"heads": 2, "scales": scales, "norm_last": int(norm_last)}
        wanted = brute_force(x, given, 2, scales, norm_last)
        for found in without_library(
            token_branch, "TokenBranch", one_node("TokenBranch", given, **how), (x, *given), **how
        ):
            assert_near(found, wanted, x, 1e-5)


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

    def forward(self, x):
        if self.how in ("three linears", "interleaved"):
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            q, k, v = self.qkv(x).chunk(3, -1)
        if self.how == "interleaved":  # the channels of all heads side by side
            q, k, v = (part.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2) for part in (q, k, v))
        else:
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        if self.how == "normal q":
            q = self.normal(q)
        if self.how == "fused":
            y = functional.scaled_dot_product_attention(q, k, v)
        elif self.how == "masked":
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
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
        if how == "gated":
            self.gate = nn.Linear(width, 128)

    def forward(self, x):
        y = self.fc1(x)
        if self.how in ("quick_gelu", "silu by sigmoid"):
            y = y * torch.sigmoid(1.702 * y if self.how == "quick_gelu" else y)
        elif self.how == "gelu_tanh":
            y = functional.gelu(y, approximate="tanh")
        elif self.how == "gated":
            y = functional.silu(self.gate(x)) * y
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
    "masked": ({"attention": "masked"}, False, True),
    "normal_q": ({"attention": "normal q"}, False, True),
    "odd_heads": ({"attention": "odd heads"}, False, True),
    "seen_v": ({"attention": "seen by others"}, False, True),
    "seen_hidden": ({"mlp": "seen by others"}, True, False),
    "tanh": ({"mlp": "tanh"}, True, False),
    "gated": ({"mlp": "gated"}, True, False),
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
    apply_policy(network, load_policy(policy))
    quantize(network)
    return network, images


def sqnr(found, wanted):
    return 10 * float(torch.log10(wanted.square().sum() / (found - wanted).square().sum()))


def replaced(network):
    """The lowered network with every branch as an operator in torch, and the operators and owners of these."""
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
    return model, taken


@pytest.mark.parametrize("tokens", [16, 1])
def test_branches_are_found_by_pattern_and_the_others_stay_plain(tokens):
    """All ways to write a block in one network, which computes the same afterwards."""
    network, images = calibrated({name: how for name, (how, *_) in VARIANTS.items()}, tokens=tokens)
    model, taken = replaced(network)
    able = {(f"blocks.{name}.attn", f"blocks.{name}.mlp"): flags for name, (_, *flags) in VARIANTS.items()}
    assert taken == {
        (operator, owner)
        for owners, flags in able.items()
        for operator, owner, flag in zip(("token_branch", "mlp"), owners, flags, strict=True)
        if flag
    }
    with torch.no_grad():
        assert sqnr(model(images), network(images)) > 40


def test_a_block_that_runs_twice_and_one_of_float_attention():
    """The second run of a linear is a copy of it, which has a branch of its own. Policy cpu leaves attention float."""
    network, images = calibrated({"plain": {}}, again=["plain"])
    model, taken = replaced(network)
    with torch.no_grad():
        assert sqnr(model(images), network(images)) > 40
    network, images = calibrated({"plain": {}, "scaled": {"around": "scaled"}}, policy="cpu")
    model, taken = replaced(network)
    assert taken == {("mlp", "blocks.plain.mlp"), ("mlp", "blocks.scaled.mlp")}
    with torch.no_grad():
        assert sqnr(model(images), network(images)) > 40


def exported_to(folder, network, **options):
    """The artifact of a network under policy cpu-operators."""
    preprocess = Preprocess(network.input_shape[1], False, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    card = RunCard("net", {}, preprocess.to_dict(), policy=load_policy("cpu-operators").to_dict())
    return export(deepcopy(network), card, folder, OnnxOptions(target="openvino", **options))


@pytest.mark.parametrize("side, any_size, attentions", [(16, False, 2), (100, False, 0), (16, True, 0)])
def test_attention_is_compiled_by_default_for_as_many_tokens_as_are_fast(
    side, any_size, attentions, with_operators, tmp_path, monkeypatch
):
    """Heads of 32 channels: for at most 576 tokens, whose number is known. The MLP takes any; another activation stays
    plain, since a file has one."""
    monkeypatch.setattr(operators, "gain", lambda architecture, operator, kind=None: 1.1 * (architecture == "vit"))
    blocks = {"first": {}, "second": {"around": "scaled"}}
    blocks |= {} if any_size else {"third": {"attention": "masked", "mlp": "relu"}}
    network, images = calibrated(blocks, side, any_size)
    artifact = exported_to(tmp_path, network)
    nodes = [node.op_type for node in onnx.load(artifact.file).graph.node]
    assert (nodes.count("TokenBranch"), nodes.count("Mlp")) == (attentions, 2)
    found = f"{attentions} of {len(blocks)}", f"2 of {len(blocks)}"
    assert artifact.record["options"]["compiled"] == dict(zip(("token_branch", "mlp"), found, strict=True))
    if any_size:
        return  # engines open files of maps alone
    quantize(network)
    with torch.no_grad():
        wanted = network(images[:2])
    assert sqnr(engine.load(artifact, EngineOptions(threads=1, float_type="float32"))(images[:2]), wanted) > 30


@pytest.mark.slow
def test_every_branch_of_a_published_deit_is_compiled(with_operators, tmp_path):
    """By timm, at its published size: as near to fake-quant as the plain file."""
    torch.manual_seed(0)
    cfg = load_config(find_config("timm:deit_tiny_patch16_224"))
    network = build_model(cfg)
    images = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    calibrate(network, [images], Method("max"))
    policy = load_policy("cpu-operators")
    card = RunCard("deit", portable_config(cfg), Preprocess.from_config(cfg).to_dict(), policy=policy.to_dict())
    files = {
        plugin: export(deepcopy(network), card, tmp_path / str(len(plugin)), OnnxOptions(target="openvino", **how))
        for plugin, how in ((BOTH, {"plugin": BOTH}), ((), {"plain": True}))
    }
    assert files[BOTH].record["options"]["compiled"] == dict.fromkeys(("token_branch", "mlp"), "12 of 12")
    apply_policy(network, policy)
    quantize(network)
    with torch.no_grad():
        wanted = network(images)
    noise = {
        plugin: float((engine.load(file, EngineOptions(threads=1))(images) - wanted).square().sum())
        for plugin, file in files.items()
    }
    assert noise[BOTH] < max(2 * noise[()], 2e-3 * float(wanted.square().sum()))


SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}


class FirstToken(nn.Module):
    """The class token of a model of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images).last_hidden_state[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", share(["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "CLIPVision", "SiglipVision", "torchvision"], 3)
)
def test_the_branches_of_other_publishers_vits_are_compiled(name, with_operators, tmp_path):
    """Three linears or one, masks that keep everything, layer scale, registers, torch's own attention."""
    torchvision = import_torchvision()
    torch.manual_seed(0)
    if name == "torchvision":
        given = torchvision.models.vision_transformer.VisionTransformer(64, 16, 2, 2, 128, 256)
        nn.init.normal_(given.heads.head.weight)
    else:
        transformers = pytest.importorskip("transformers")
        more = {} if name.startswith("Dinov2") else {"intermediate_size": 256}
        config = getattr(transformers, f"{name}Config")(**SMALL, **more)
        given = FirstToken(getattr(transformers, f"{name}Model")(config))
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    model = sq.calibrate(sq.wrap(given.eval(), 64), [images], "cpu-operators", passes=[])
    artifact = sq.export(model, "openvino", tmp_path)
    assert artifact.card.artifact["options"]["compiled"] == dict.fromkeys(("token_branch", "mlp"), "2 of 2")
    with torch.no_grad():
        assert sqnr(torch.as_tensor(artifact.load()(images)), model(images)) > 30
        assert sqnr(torch.as_tensor(artifact.load()(images)), given(images)) > 25
