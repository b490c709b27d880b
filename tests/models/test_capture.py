"""Modules of all kinds, captured: they compute what they did, and every product of activations has its nodes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import swin_quant as sq
from swin_quant.checkpoint import load_float, save_float
from swin_quant.models.captured import captured
from swin_quant.quant.quantizer import named_nodes
from tests.models.test_legal_modules import _module, _tokens


def _attention(net, x):
    """torch's own, whose first weight has another name; pictures are in dimension 1."""
    x = net.stem(x).flatten(2).permute(2, 0, 1)
    return net.head(net.attn(x, x, x)[0].mean(0))


def _standardised(net, x):
    """A weight computed from parameters."""
    weight = net.conv.weight
    weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
    x = F.conv2d(x, weight * net.gain[:, None, None, None], net.conv.bias, padding=1)
    return net.head(F.relu(x).mean((2, 3)))


def _joined(net, x):
    """A bias joined from parameters and a buffer that no checkpoint has, after a blur whose filter is a buffer."""
    x = F.conv2d(x, net.blur, padding=1, groups=3).flatten(2).mean(2)
    return net.head(F.linear(x, net.weight, torch.cat([net.q, net.k, net.v])))


def _make_joined():
    vectors = {"q": lambda: nn.Parameter(torch.randn(3)), "v": lambda: nn.Parameter(torch.randn(3))}
    net = _module(_joined, weight=lambda: nn.Parameter(torch.randn(9, 3)), **vectors, head=lambda: nn.Linear(9, 5))
    net.register_buffer("k", torch.zeros(3), persistent=False)
    net.register_buffer("blur", torch.full((3, 1, 3, 3), 1 / 9))
    return net


def _windows(net, x):
    """A mask written in place, a resized table of positions, sizes taken from the input."""
    batch, channels, height, width = x.shape
    places = net.mlp(F.interpolate(net.table, size=(height, width)).flatten(2).transpose(1, 2))
    tokens = _tokens(x) + (places + places.roll(1, 1))
    mask = x.new_zeros((height * width, height * width))
    mask[: width * 2, width * 2 :] = -100.0
    q, k, v = net.qkv(tokens).reshape(batch, -1, 3, 3).unbind(2)
    tokens = tokens + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    tokens += 1
    return net.head(tokens.reshape(-1, channels)).view(batch, height * width, 5).mean(1)


def _kinds(net, x):
    """A convolution with one dimension, one with three, and a transposed one."""
    y = net.line(x.flatten(2)).reshape(x.shape[0], 1, 4, 31, 2)
    return net.head(net.up(net.volume(y).mean(2)).mean((2, 3)))


def _causal(groups):
    def run(net, x):
        x = _tokens(x)
        q = net.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        kv = net.kv(x).unflatten(-1, (4 // groups, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=groups > 1)
        return net.head(y.transpose(1, 2).flatten(2).mean(1))

    return _with_head(run, q=lambda: nn.Linear(3, 8), kv=lambda: nn.Linear(3, 8 // groups))


def _registers(net, x):
    """A parameter without elements, as for zero register tokens."""
    return net.head(torch.cat([net.registers.expand(x.shape[0], -1, -1), net.embed(_tokens(x))], 1).mean(1))


def _summed(net, x):
    """Products by einsum and baddbmm, with dimensions in every order."""
    maps, queries = net.conv(x), net.embed(_tokens(x))
    masks = torch.einsum("bqc,bchw->bqhw", queries, maps)
    scores = torch.einsum("bhwq, bhqw -> bq", masks.permute(0, 2, 3, 1), masks.permute(0, 2, 1, 3))
    outer = torch.einsum("bchw,bdwh->bhdc", maps, maps)  # h in one factor, w in the other
    mask = torch.zeros_like(queries[:, :8, :1]).masked_fill(queries[:, :8, :1] > 0, -torch.inf)
    added = torch.baddbmm(mask, maps.mean(2).transpose(1, 2), maps.mean(3)).softmax(1)
    return net.head(added.mean(1) + scores.mean(1, True) + outer.mean((2, 3)))


def _viewed(net, x):
    """A view that fits only the strides of fused attention."""
    q = net.q(_tokens(x)).unflatten(-1, (4, 2)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q)
    return net.head(y.transpose(1, 2).view(x.shape[0], -1, 8).mean(1))


def _wide(net, x):
    """An average over a window larger than the map, as in the EfficientNet of transformers."""
    x = F.relu(net.conv(x))
    return net.head((net.pool(x) + F.avg_pool2d(x, (6, 9), ceil_mode=True)).flatten(1))


def _with_head(run, width=8, **parts):
    return lambda: _module(run, **parts, head=lambda: nn.Linear(width, 5))


class Shared(nn.Module):
    """A block under two names, called by both, as in CoaT."""

    def __init__(self):
        super().__init__()
        self.one = self.other = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        return self.head(self.other(1000 * self.one(x.mean((2, 3)))))


class Masked(nn.Module):
    """torch's own encoder and decoder under masks that are made in the forward pass: one is causal, one is not."""

    def __init__(self):
        super().__init__()
        sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True, "norm_first": True}
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 5)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 1)

    def forward(self, x):
        tokens = self.embed(_tokens(x))
        places = torch.arange(tokens.shape[1])
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        far = (places[:, None] - places).abs() > 8
        return self.head(self.decoder(self.encoder(tokens, causal), tokens, tgt_mask=far).mean(1))


MODULES = {
    "attention": _with_head(_attention, stem=lambda: nn.Conv2d(3, 8, 4, 4), attn=lambda: nn.MultiheadAttention(8, 2)),
    "standardised": _with_head(
        _standardised, conv=lambda: nn.Conv2d(3, 8, 3, padding=1), gain=lambda: nn.Parameter(torch.ones(8))
    ),
    "windows": _with_head(
        _windows,
        3,
        table=lambda: nn.Parameter(torch.randn(1, 3, 4, 4)),
        mlp=lambda: nn.Linear(3, 3),
        qkv=lambda: nn.Linear(3, 9),
    ),
    "kinds": _with_head(
        _kinds,
        2,
        line=lambda: nn.Conv1d(3, 4, 3),
        volume=lambda: nn.Conv3d(1, 2, 2),
        up=lambda: nn.ConvTranspose2d(2, 2, 2, 2),
    ),
    "causal": _causal(1),
    "grouped": _causal(2),
    "registers": _with_head(
        _registers, 4, registers=lambda: nn.Parameter(torch.empty(1, 0, 4)), embed=lambda: nn.Linear(3, 4)
    ),
    "summed": _with_head(_summed, conv=lambda: nn.Conv2d(3, 6, 1), embed=lambda: nn.Linear(3, 6)),
    "viewed": _with_head(_viewed, q=lambda: nn.Linear(3, 8)),
    "wide": _with_head(_wide, 6, conv=lambda: nn.Conv2d(3, 6, 3), pool=lambda: nn.AvgPool2d(64, ceil_mode=True)),
    "shared": Shared,
    "masked": Masked,
}


@pytest.mark.parametrize("kind", MODULES)
def test_it_computes_the_same_for_every_batch_keeps_its_names_and_calibrates_every_node(kind):
    torch.manual_seed(0)
    module, x = MODULES[kind]().eval(), torch.randn(8, 3, 8, 8)
    model = sq.wrap(module, 8, name=kind)
    assert {*module.state_dict()} <= {*model.module.state_dict()}
    with torch.no_grad():
        for batch in (1, 3, 8):
            torch.testing.assert_close(model.module(x[:batch]), module(x[:batch]))
        exact = module(x)
    sq.calibrate(model, [x[:5], x[5:]], "qdq", passes=[])
    assert 20 * torch.log10(exact.norm() / (model(x) - exact).norm()) > 20
    covered = model.card.calibration["coverage"]
    assert covered["left"] == {} and covered["share"] == 1 and covered["products"] >= 2


def test_each_call_of_a_layer_has_a_range_of_its_own_and_float_files_load(tmp_path):
    torch.manual_seed(0)
    module = Shared()
    model = sq.calibrate(sq.wrap(module, 8), [torch.randn(8, 3, 8, 8)], "qdq", method="max", passes=[])
    ranges = [node.amax for name, node in named_nodes(model.module).items() if name.endswith("._input_quantizer")]
    assert len(ranges) == 3 and ranges[1] > 100 * ranges[0]
    other = captured(copy.deepcopy(module), (3, 8, 8), 5, what="shared")
    torch.save(Shared().state_dict(), tmp_path / "float.pth")
    load_float(other, tmp_path / "float.pth")
    assert torch.equal(*(one.weight for one in other.modules() if isinstance(one, nn.Linear) and len(one.weight) == 3))


@pytest.mark.parametrize("own", [0, 1])
def test_a_transposed_convolution_may_be_told_its_size(own):
    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 3, 3, 2, 1, output_padding=own)

        def forward(self, x):
            return self.up(self.down(x), output_size=[16 - own, 16 - own])

    torch.manual_seed(0)
    module, x = Told().eval(), torch.randn(4, 3, 16, 16)
    model = sq.wrap(module, 16)
    torch.testing.assert_close(model(x), module(x))
    sq.calibrate(model, [x], passes=[])
    assert model(x).shape == (4, 3, 16 - own, 16 - own)


def test_a_transposed_convolution_has_a_weight_range_for_each_output(tmp_path):
    torch.manual_seed(0)
    up, norm = nn.ConvTranspose2d(3, 4, 3, 2, padding=1, output_padding=1), nn.BatchNorm2d(4)
    for value in (norm.weight, norm.running_var):
        nn.init.uniform_(value, 0.5, 2)
    module, x = nn.Sequential(up, norm).eval(), torch.randn(8, 3, 8, 8)
    model = sq.calibrate(sq.wrap(module, 8, name="up"), [x], "qdq", method="max", passes=[])
    with torch.no_grad():
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        weight = up.weight * factor.view(-1, 1, 1)
        step, scale = weight.abs().amax((0, 2, 3), keepdim=True) / 127, x.abs().max() / 127
        values, bias = (x / scale).round() * scale, up.bias * factor + norm.bias
        wanted = F.conv_transpose2d(values, (weight / step).round() * step, bias, 2, 1, 1)
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)
        assert model.card.calibration["coverage"]["left"] == {}
        model.save(tmp_path / "up_calib.pth")
        torch.testing.assert_close(sq.load(tmp_path / "up_calib.pth", copy.deepcopy(module))(x), model(x))


BORROWING = {**MODULES, "joined": _make_joined}


@pytest.mark.parametrize(
    ("kind", "layer"), [("attention", "attn.in_proj"), ("standardised", "conv2d"), ("joined", "linear")]
)
def test_a_borrowed_weight_follows_its_owner(kind, layer, tmp_path):
    torch.manual_seed(0)
    first, second = BORROWING[kind]().eval(), BORROWING[kind]().eval()
    torch.save(second.state_dict(), tmp_path / "theirs.pth")
    model = captured(first, (3, 8, 8), 5, what=kind)
    assert model.get_submodule(layer).sources
    load_float(model, tmp_path / "theirs.pth")
    save_float(model, tmp_path / "ours.pth")
    again = captured(BORROWING[kind]().eval(), (3, 8, 8), 5, what=kind)
    load_float(again, tmp_path / "ours.pth")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), second(x))
        torch.testing.assert_close(again(x), second(x))


def test_a_borrowed_weight_is_trained():
    model = captured(MODULES["attention"]().eval(), (3, 8, 8), 5, what="attention")
    names = [name for name, _ in model.named_parameters()]
    assert "attn.in_proj_weight" in names and len(names) == len({*names})
    model.train()(torch.randn(2, 3, 8, 8)).sum().backward()
    assert model.attn.in_proj_weight.grad is not None


class Several(nn.Module):
    """A classifier with a map beside its logits, in a dict."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x):
        x = self.conv(x)
        return {"logits": self.head(x.mean((2, 3))), "maps": [x, x[:, :, ::2]], "count": 3}


def test_outputs_by_name():
    x = torch.randn(2, 3, 8, 8)
    module = Several()
    model = sq.wrap(module, 8)
    assert model.module.classes == 5 and model.module(x).shape == (2, 5)
    maps = sq.wrap(module, 8, output="maps").module
    assert maps.output_names == ("maps.0", "maps.1") and [tuple(one.shape) for one in maps(x)] == [
        (2, 6, 8, 8),
        (2, 6, 4, 8),
    ]


class Wrong(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.fc, self.how = nn.Linear(192, 5), how

    def forward(self, x):
        y = self.fc(x.flatten(1))
        if self.how == "random":
            return nn.functional.dropout(y, training=True)
        if self.how == "last":
            self.last = y + getattr(self, "last", 0)
            return self.last
        return self.fc(torch.stack([x[n].flatten() for n in range(len(x))]))


AGAIN = "x: gives another output when it is called again: it keeps a state, or draws random numbers"
BATCH = r"x: its forward pass fits batches of 2 alone at test_capture.py:\d+ .*len\(x\).*`: take the"


@pytest.mark.parametrize(("how", "says"), [("random", AGAIN), ("last", AGAIN), ("batch", BATCH)])
def test_what_cannot_be_wrapped_is_one_line(how, says):
    """`test_functional_modules` and `tests/verbs/test_wrapped_outputs.py` have more."""
    with pytest.raises(sq.SwinQuantError, match=says) as raised:
        sq.wrap(Wrong(how), 8, name="x")
    assert "\n" not in str(raised.value)
