"""The places of nodes: one block of each version against a straight-line version of docs/reference, section 1.4.

The reference is written from the spec with plain torch operations, window by window. Nodes have four bits and ranges
that clip, so that a misplaced node changes much of the result; the last test shows that it does.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.quantizer import State, named_nodes
from tests.helpers.settings import change

BITS = 4


def fake_quantized(x, amax):
    step = amax / 7
    return torch.clamp(torch.round(x / step), -8, 7) * step


class Reference:
    """Parameters and ranges of a module by name; `q` is a node, `linear` the spec's quantized linear with bias."""

    def __init__(self, module, on):
        self.p = module.state_dict()
        self.on = on

    def q(self, name, x):
        return fake_quantized(x, self.p[f"{name}._amax"]) if name in self.on else x

    def linear(self, name, x, bias=None):
        x = self.q(f"{name}._input_quantizer", x)
        weight = self.q(f"{name}._weight_quantizer", self.p[f"{name}.weight"])
        bias = self.p.get(f"{name}.bias") if bias is None else bias
        product = self.q(f"{name}._aftergemm_quantizer", x @ weight.T)
        return product if bias is None else product + bias

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.p[f"{name}.weight"], self.p[f"{name}.bias"], 1e-5)

    def mlp(self, x):
        return self.linear("mlp.fc2", F.gelu(self.linear("mlp.fc1", x)))

    def windows(self, x, side, window, shift, attention):
        """Roll; every window in turn through `attention(tokens [B, L, C], mask [L, L])`; roll back."""
        maps = x.view(len(x), side, side, -1).roll((-shift, -shift), (1, 2))
        result = torch.empty_like(maps)
        for number in range((side // window) ** 2):
            top, left = number // (side // window) * window, number % (side // window) * window
            part = (slice(None), slice(top, top + window), slice(left, left + window))
            mask = self.p["attn_mask"][number] if shift else torch.zeros(window**2, window**2)
            tokens = maps[part].reshape(len(x), window**2, -1)
            result[part] = attention(tokens, mask).view(len(x), window, window, -1)
        return result.roll((shift, shift), (1, 2)).reshape(x.shape)

    def heads(self, x, heads):
        return x.view(len(x), x.shape[1], heads, -1).transpose(1, 2)


class ReferenceV1(Reference):
    def attention(self, tokens, mask, heads=1):
        q, k, v = (self.heads(part, heads) for part in self.linear("attn.qkv", tokens).chunk(3, dim=-1))
        q, k = self.q("attn.matmul_q_input_quantizer", q), self.q("attn.matmul_k_input_quantizer", k)
        v = self.q("attn.matmul_v_input_quantizer", v)
        table = self.p["attn.relative_position_bias_table"]
        bias = table[self.p["attn.relative_position_index"].flatten()].view(*mask.shape, heads).permute(2, 0, 1)
        logits = self.q("attn.softmax_input_quantizer", q @ k.mT) * q.shape[-1] ** -0.5
        a = self.q("attn.matmul_a_input_quantizer", torch.softmax(logits + bias + mask, dim=-1))
        return self.linear("attn.proj", (a @ v).transpose(1, 2).reshape(tokens.shape))

    def block(self, x, side, window, shift, heads):
        h = self.norm("norm1", self.q("layernorm_input1_quantizer", x))
        y = self.windows(h, side, window, shift, lambda tokens, mask: self.attention(tokens, mask, heads))
        x1 = self.q("add1_local_input_quantizer", y) + self.q("add1_residual_input_quantizer", x)
        z = self.mlp(self.norm("norm2", self.q("layernorm_input2_quantizer", x1)))
        return self.q("add2_local_input_quantizer", z) + self.q("add2_residual_input_quantizer", x1)

    def merging(self, cat4):
        return self.linear("reduction", self.norm("norm", cat4))


class ReferenceV2(Reference):
    def attention(self, tokens, mask, heads=1):
        bias = torch.cat([self.p["attn.q_bias"], torch.zeros_like(self.p["attn.q_bias"]), self.p["attn.v_bias"]])
        q, k, v = (self.heads(part, heads) for part in self.linear("attn.qkv", tokens, bias).chunk(3, dim=-1))
        q, k = self.q("attn.matmul_q_input_quantizer", q), self.q("attn.matmul_k_input_quantizer", k)
        v = self.q("attn.matmul_v_input_quantizer", v)
        scale = torch.exp(torch.clamp(self.p["attn.logit_scale"], max=math.log(100)))
        q = q / q.norm(dim=-1, keepdim=True).clamp(min=1e-12) * scale
        k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        q, k = self.q("attn.mha_q_input_quantizer", q), self.q("attn.mha_k_input_quantizer", k)
        logits = self.q("attn.softmax_input_quantizer", q @ k.mT)
        hidden = F.relu(
            F.linear(
                self.p["attn.relative_coords_table"], self.p["attn.cpb_mlp.0.weight"], self.p["attn.cpb_mlp.0.bias"]
            )
        )
        table = (hidden @ self.p["attn.cpb_mlp.2.weight"].T).view(-1, heads)
        index = self.p["attn.relative_position_index"].flatten()
        bias = 16 * torch.sigmoid(table[index].view(*mask.shape, heads).permute(2, 0, 1))
        a = self.q("attn.matmul_a_input_quantizer", torch.softmax(logits + bias + mask, dim=-1))
        return self.linear("attn.proj", (a @ v).transpose(1, 2).reshape(tokens.shape))

    def block(self, x, side, window, shift, heads):
        y = self.windows(x, side, window, shift, lambda tokens, mask: self.attention(tokens, mask, heads))
        branch = self.q("add1_local_input_quantizer", self.norm("norm1", self.q("layernorm_input1_quantizer", y)))
        x1 = branch + self.q("add1_residual_input_quantizer", x)
        branch = self.norm("norm2", self.q("layernorm_input2_quantizer", self.mlp(x1)))
        return self.q("add2_local_input_quantizer", branch) + self.q("add2_residual_input_quantizer", x1)

    def merging(self, cat4):
        return self.norm("norm", self.linear("reduction", cat4))


REFERENCES = {"swin": ReferenceV1, "swinv2": ReferenceV2}


@pytest.fixture(scope="module", params=REFERENCES)
def calibrated(request, tiny_model):
    """(kind, model) with two heads in the first stage and ranges of 80 % of the largest value."""
    torch.manual_seed(1)
    model = tiny_model(request.param, NUM_HEADS=[2, 4, 8, 16])
    calibrate(model, [torch.randn(2, 3, 32, 32)], Method("max"))
    for node in named_nodes(model).values():
        node.amax = 0.8 * node.amax
        change(node, bits=BITS)
    return request.param, model


def switched_on(model, names):
    for name, node in named_nodes(model).items():
        node.state = State.QUANTIZE if name in names else State.OFF


def share_that_differs(one, other):
    return ((one - other).abs() > 1e-4).float().mean().item()


def active(names, which):
    ft_off = ("layernorm_input", "softmax_input", "local_input", "residual_input")
    return {
        "none": set(),
        "all": set(names),
        "ft-mode1": {name for name in names if not any(word in name for word in ft_off)},
    }[which]


@pytest.mark.parametrize("which", ["none", "ft-mode1", "all"])
@pytest.mark.parametrize("index", [0, 1], ids=["unshifted", "shifted"])
@torch.no_grad()
def test_block_is_that_of_the_spec(calibrated, index, which):
    kind, model = calibrated
    block = model.layers[0].blocks[index]
    names = active(named_nodes(block), which)
    switched_on(block, names)
    x = torch.randn(4, 256, 32)
    expected = REFERENCES[kind](block, names).block(x, 16, 4, 2 * index, heads=2)
    # A value on the border of two steps may fall either way; a window is 1/64 of the result.
    assert share_that_differs(block(x), expected) < 0.05


@pytest.mark.parametrize("which", ["none", "all"])
@torch.no_grad()
def test_merging_is_that_of_the_spec(calibrated, which):
    kind, model = calibrated
    merging = model.layers[0].downsample
    names = active(named_nodes(merging), which)
    switched_on(merging, names)
    x = torch.randn(4, 16, 16, 32)
    corners = [x[:, row::2, column::2] for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
    expected = REFERENCES[kind](merging, names).merging(torch.cat(corners, dim=-1).view(4, 64, 128))
    assert share_that_differs(merging(x.view(4, 256, 32)), expected) < 0.05


def test_a_shift_of_v2_s_qkv_goes_into_the_biases_that_checkpoints_hold_of_q_and_v(tiny_model):
    model = tiny_model("swinv2")
    copied = copy.deepcopy(model)
    attn, other = (network.layers[0].blocks[0].attn for network in (copied, model))
    keys, width = list(copied.state_dict()), len(attn.q_bias)
    shift, x = torch.arange(3.0 * width) + 1, torch.randn(2, 16, width)
    q, v, product = attn.q_bias.clone(), attn.v_bias.clone(), attn.qkv(x)
    attn.qkv.shift_bias(shift)
    taken = torch.cat([shift[:width], torch.zeros(width), shift[2 * width :]])
    torch.testing.assert_close(attn.qkv(x), product + taken)
    assert torch.equal(attn.q_bias, q + shift[:width]) and torch.equal(attn.v_bias, v + shift[2 * width :])
    assert torch.equal(other.q_bias, q), "the copy's layer is of the copy"
    assert list(copied.state_dict()) == keys
