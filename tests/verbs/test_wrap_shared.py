"""Norms behind layers whose parameters are read elsewhere or shared, and the float module that comparisons refer to."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import swin_quant as sq
from swin_quant.quant.fold import is_fold_exact
from swin_quant.quant.layer import QuantConv2d


def spread(norm):
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        tensor.data.uniform_(0.3, 2)
    return norm


class Base(nn.Module):
    """Convolution, norm, convolution; `read` is a key of FORWARDS."""

    def __init__(self, read="same norm"):
        super().__init__()
        self.c, self.d = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn, self.read = spread(nn.BatchNorm2d(8)), read

    def normed(self, x):
        return torch.relu(self.bn(self.c(x)))

    def forward(self, x):
        return FORWARDS[self.read](self, self.normed(x))


# How parameters of the layer before the norm, or of the norm, are read a second time, after the norm.
FORWARDS = {
    "weight": lambda net, x: F.conv_transpose2d(net.d(x), net.c.weight, padding=1),
    "bias": lambda net, x: net.d(x * net.c.bias.view(1, -1, 1, 1)),
    "variance": lambda net, x: net.d(x * net.bn.running_var.view(1, -1, 1, 1)),
    "gamma": lambda net, x: net.d(x * net.bn.weight.view(1, -1, 1, 1)),
    "scale": lambda net, x: net.d(x) * net.c.weight.norm(),
    "same norm": lambda net, x: torch.relu(net.bn(net.d(x))),
}


class Shared(Base):
    """Two layers with one weight; both, or the first alone, have a norm behind them."""

    norms = 2

    def __init__(self):
        super().__init__()
        self.e = nn.Conv2d(8, 8, 3, padding=1)
        self.e.weight = self.d.weight
        self.first, self.second = spread(nn.BatchNorm2d(8)), spread(nn.BatchNorm2d(8))

    def forward(self, x):
        x = self.e(torch.relu(self.first(self.d(self.normed(x)))))
        return torch.relu(self.second(x) if self.norms == 2 else x)


class SharedOnce(Shared):
    norms = 1


class SharedNorm(Base):
    def __init__(self):
        super().__init__()
        self.again = spread(nn.BatchNorm2d(8))
        self.again.weight = self.bn.weight

    def forward(self, x):
        return torch.relu(self.again(self.d(self.normed(x))))


KINDS = {name: partial(Base, name) for name in FORWARDS}
KINDS |= {kind.__name__: kind for kind in (Shared, SharedOnce, SharedNorm)}


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(8, 3, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibrated_module_loads_into_a_fresh_instance(kind, x, tmp_path):
    module = KINDS[kind]().eval()
    model = sq.calibrate(sq.wrap(module, 8), [x], "qdq", passes=[])
    file = model.save(tmp_path / "mine.pth")
    fresh = sq.load(file, KINDS[kind]().eval())
    with torch.no_grad():
        torch.testing.assert_close(model.module(x), module(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fresh.module(x), module(x), rtol=1e-4, atol=1e-4)
        assert torch.equal(fresh(x), model(x))
    assert ("bn" in model.module.foldable) == (kind not in FORWARDS)


def test_a_fold_that_changes_an_output_is_noticed_and_undone(x):
    class Careless(Base):
        foldable = {"bn": "c"}  # noqa: RUF012

        def __init__(self):
            super().__init__("weight")
            self.c = QuantConv2d(3, 8, 3, padding=1)

    wrong = Careless().eval()
    before = {key: value.clone() for key, value in wrong.state_dict().items()}
    assert not is_fold_exact(wrong, x)
    after = wrong.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[key], before[key]) for key in before)
    wrong.forward = lambda images: wrong.d(wrong.normed(images))
    assert is_fold_exact(wrong, x)


class Sorts(nn.Module):
    """A classifier; its answers depend on its seed."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.norm, self.head = nn.Conv2d(3, 16, 3), spread(nn.BatchNorm2d(16)), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.stem(x))).mean((2, 3)) * 10)


def labelled(module, x):
    with torch.no_grad():
        return [(x, module.eval()(x).argmax(1))]


def test_the_float_reference_is_the_module_as_it_was_given(x):
    module = Sorts(1).eval()
    model = sq.calibrate(sq.wrap(module, 8), [x], "qdq")
    assert model.original is not model.module
    with torch.no_grad():
        assert torch.equal(model.original(x), module(x))
        model.module.head.bias.add_(torch.tensor([9.0, 0, 0, 0, 0]))
    assert model.original is None  # the weights are others now


@pytest.mark.parametrize("passes", [[], ["bias_correction"]])
def test_the_float_reference_follows_new_weights_at_recalibration(x, passes):
    first, other = Sorts(1).eval(), Sorts(2).eval()
    model = sq.wrap(first, 8)
    sq.calibrate(model, [x], "qdq", passes=passes)
    folded = sq.calibrate(sq.wrap(other, 8), [x], "qdq", passes=[]).module.state_dict()
    model.module.load_state_dict({key: value for key, value in folded.items() if "_amax" not in key}, strict=False)
    sq.calibrate(model, [x], "qdq", passes=passes)
    assert sq.evaluate(model, labelled(other, x), half="none").float32.acc1 == 100
    with torch.no_grad():
        torch.testing.assert_close(model.original(x), other(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("calibrated", [False, True])
def test_an_interrupted_calibration_leaves_module_card_and_reference(x, error, calibrated):
    module = Sorts(1).eval()
    model = sq.wrap(module, 8)
    if calibrated:
        sq.calibrate(model, [x], "qdq", passes=[])

    def broken():
        yield x
        raise error("stop")

    card, original = model.card, model.original
    state = {key: value.clone() for key, value in model.module.state_dict().items()}
    with pytest.raises(error, match="stop"):
        sq.calibrate(model, broken(), "cpu")
    after = model.module.state_dict()
    assert model.card is card and model.original is original
    assert after.keys() == state.keys() and all(torch.equal(after[key], state[key]) for key in state)
    other = Sorts(2).eval()
    if not calibrated:  # other weights, and the whole call
        model.module.load_state_dict(other.state_dict(), strict=False)
        sq.calibrate(model, [x], "qdq", passes=[])
        assert sq.evaluate(model, labelled(other, x), half="none").float32.acc1 == 100
