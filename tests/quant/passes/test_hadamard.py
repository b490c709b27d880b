"""Turned heads: the matrix, the float function at published sizes, the spread of a large channel, refusals."""

import pytest
import torch
from scipy.linalg import hadamard as sylvester
from torch import nn

import swin_quant as sq
from swin_quant.base.compat import import_timm
from swin_quant.config import find_config, load_config
from swin_quant.models import build_model
from swin_quant.models.registry import turns_of
from swin_quant.quant.passes.hadamard import HadamardOptions, hadamard, run
from swin_quant.quant.passes.places import turn


@pytest.mark.parametrize("depth", [1, 2, 3, 6, 12, 32, 48, 49, 64, 80])
def test_the_matrix_is_orthogonal_and_spreads_every_channel(depth):
    found = hadamard(depth)
    torch.testing.assert_close(found @ found.T, torch.eye(depth, dtype=torch.float64))
    assert found.abs().max() <= (2 / depth) ** 0.5 + 1e-12
    if depth & (depth - 1) == 0:
        torch.testing.assert_close(found * depth**0.5, torch.from_numpy(sylvester(depth)).double())


def test_one_large_channel_of_a_head_becomes_as_large_as_the_rms(small):
    """In closed form: a vector along one of d channels has amax / rms = sqrt(d), and 1 once it is turned."""
    model = small("swin")
    place = turns_of(model)[0]
    v = next(part for part in place.parts if part.name.endswith("qkv.bias"))
    with torch.no_grad():
        values = v.cut(model.get_parameter(v.name).detach())
        values.copy_(torch.eye(len(values))[3] * 5)
        turn(model, place, hadamard(16))
    torch.testing.assert_close(values.detach().abs(), torch.full((16,), 5 / 4))


def turned(network, images):
    """How far the outputs move, relative to their norm, if every place is turned, each by other signs; their number."""
    with torch.no_grad():
        before = network(images)
        places = turns_of(network)
        for number, place in enumerate(places):
            depth = place.depth(network)
            signs = torch.randn(depth, 1, generator=torch.Generator().manual_seed(number)).sign().double()
            turn(network, place, hadamard(depth).T * signs)
        return len(places), ((network(images) - before).norm() / before.norm()).item()


@pytest.mark.parametrize("name, places", [("swin_tiny_patch4_window7_224", 24), ("swinv2_tiny_patch4_window8_256", 24)])
def test_swin_keeps_its_function(name, places):
    torch.manual_seed(0)
    network = build_model(load_config(find_config(name)))
    for parameter in network.parameters():
        if parameter.dim() == 1:  # biases, also q's and v's
            nn.init.normal_(parameter, 0.5, 0.2)
    found, far = turned(network, torch.randn(1, *network.input_shape))
    assert found == places and far < 1e-5


@pytest.mark.parametrize("name, places", [("deit_tiny_patch16_224", 24), ("swin_tiny_patch4_window7_224", 24)])
def test_timm_s_own_module_keeps_its_function(name, places):
    torch.manual_seed(0)
    module = import_timm().create_model(name).eval()
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    found, far = turned(sq.wrap(module, 224).module, torch.randn(1, 3, 224, 224))
    assert found == places and far < 1e-5


class Attention(nn.Module):
    """Two heads of eight channels on tokens of four pixels, each way to read q, k and v by `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed, self.qkv, self.proj, self.head = (
            nn.Linear(*sizes) for sizes in ((12, 16), (16, 48), (16, 16), (16, 5))
        )
        self.norm, self.near = nn.LayerNorm(8), nn.Linear(16, 16)

    def forward(self, x):
        x = self.embed(x.unflatten(-1, (-1, 4)).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()
        if self.kind == "normed":
            q, k = self.norm(q), self.norm(k)
        if self.kind == "positive":
            q, v = q.relu(), v.relu()
        if self.kind == "cut":  # a head's channels are not beside each other
            q, k, v = self.qkv(x).unflatten(-1, (3, 8, 2)).permute(2, 0, 4, 1, 3).unbind()
        y = ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        if self.kind == "read":
            y = y + self.near(v.transpose(1, 2).flatten(2))
        if self.kind == "twice":
            y = self.qkv(y)[..., :16] + y
        return self.head(x + self.proj(y)).mean(1)


@pytest.mark.parametrize(
    "kind, places", [("plain", 2), ("normed", 1), ("positive", 0), ("cut", 0), ("read", 1), ("twice", 1)]
)
def test_only_channels_that_nothing_but_products_in_a_head_reads_are_turned(kind, places):
    torch.manual_seed(0)
    found, far = turned(sq.wrap(Attention(kind).eval(), 8).module, torch.randn(2, 3, 8, 8))
    assert found == places and far < 1e-5


def test_a_network_without_attention_is_left(images, make_context):
    context = make_context("swin")
    object.__setattr__(context, "turns", ())
    assert run(context, HadamardOptions()).startswith("no attention")
