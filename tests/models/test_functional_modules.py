"""Neighbours of the modules in `test_legal_modules`: parameters in calls of functions, layers that are changed on the
instance, values without a batch, batches of one, and constants that no checkpoint holds."""

import types

import pytest
import torch
import torch.nn.functional as F
from nightly import share
from torch import nn
from vnni import exact_int8

import swin_quant as sq
from tests.models.test_legal_modules import _conv, _module, _tokens, _tokens_linear, alike, check_engine


def _norm(kind=nn.BatchNorm2d, channels=8, **options):
    """A batch norm that has seen something."""

    def made():
        norm = kind(channels, **options)
        for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            tensor.data.uniform_(0.3, 2)
        return norm

    return made


def _normed(net, x, **other):
    """`net.n` as a function, with other arguments than its own."""
    own = {"running_mean": net.n.running_mean, "running_var": net.n.running_var, "weight": net.n.weight}
    return F.batch_norm(net.a(x), **(own | {"bias": net.n.bias} | other))


def _with_norm(run):
    parts = {"a": _conv(), "n": _norm(), "m": _norm(), "p": lambda: nn.Parameter(torch.randn(8))}
    return lambda: _module(run, **parts)


def _two(run):
    """`run` of two convolutions, whose second has a kernel of one pixel."""
    return lambda: _module(run, a=_conv(), b=lambda: nn.Conv2d(8, 5, 1))


def _same_bias():
    net = _with_norm(lambda net, x: net.n(net.a(x)))()
    net.a.bias = net.n.bias
    return net


def _patched(forward):
    """A convolution with another forward pass, on the instance."""

    def made():
        net = _two(lambda net, x: net.b(net.a(x)))()
        net.a.forward = types.MethodType(forward, net.a)
        return net

    return made


def _tokens_normed(count):
    def run(net, x):
        return net.n(net.a(_tokens(x)[:, :count]))

    return lambda: _module(run, a=_tokens_linear, n=_norm(nn.BatchNorm1d, count))


def _doubled(net, x):
    return torch.func.functional_call(net.a, {"weight": net.a.weight * 2}, (x,)) + net.a(x)


def _kernels(net, x):
    """A convolution whose kernel is computed from the whole batch."""
    return F.conv2d(net.a(x), net.c(x.mean((0, 2, 3))).view(4, 8, 1, 1))


class _Residual(nn.Linear):
    """A linear layer that adds its input, as a function in it and not around it."""

    def forward(self, x):
        return x.sigmoid() + super().forward(x)


class _Attending(nn.Linear):
    """A linear layer with products of activations in it."""

    def forward(self, x):
        y = super().forward(x)
        return (y @ y.transpose(1, 2)).softmax(-1) @ y


def _within(kind):
    """Tokens, a layer of eight channels with more operations than its product, and another one."""
    return lambda: _module(
        lambda net, x: net.b(net.a(net.e(_tokens(x)))),
        e=_tokens_linear,
        a=lambda: kind(8, 8),
        b=lambda: nn.Linear(8, 5),
    )


def _with_compiled_part():
    net = _two(lambda net, x: net.b(net.a(x)))()
    net.a = torch.compile(net.a, backend="eager")
    return net


def _of_spectra(join):
    """What `join` gives of the spectra of two maps, in real numbers."""

    def run(net, x):
        t = net.a(x)
        return net.b(torch.view_as_real(join(torch.fft.fft2(t), torch.fft.fft2(t.relu()))).sum(-1))

    return _two(run)


def _threes(x):
    """A number for each picture that is summed in whole numbers."""
    return ((x * 0).long() + (x * 0 + 3).long()).sum((1, 2, 3), keepdim=True)


def _hooked_norm():
    """A norm whose output a hook changes."""
    net = _with_norm(lambda net, x: net.n(net.a(x)))()
    net.n.register_forward_hook(lambda layer, inputs, output: output * 2 + inputs[0])
    return net


def _collecting():
    """A hook that keeps an output in the module."""
    net = _two(lambda net, x: net.b(net.a(x)))()
    net.kept = {}
    net.a.register_forward_hook(lambda layer, inputs, output: net.kept.update(a=output))
    return net


def _tied_decoder():
    """A transposed convolution with the weight of a convolution, whose last name is the decoder's."""
    parts = {"a": _conv(bias=False), "n": _norm(), "d": lambda: nn.ConvTranspose2d(8, 3, 3, bias=False)}
    net = _module(lambda net, x: net.d(net.n(net.a(x)).relu()), **parts)
    net.d.weight = net.a.weight
    return net


def _embedded(run):
    """`run` of tokens and `net.p`, an embedding that is called too."""
    net = _module(lambda net, x: run(net, net.a(_tokens(x))), a=_tokens_linear, p=lambda: nn.Embedding(64, 8))
    net.register_buffer("places", torch.arange(64), persistent=False)
    return net


def _listed():
    """A weight that the forward pass has from a list, too."""
    net = _two(lambda net, x: net.b(net.a(x)) + F.conv2d(x, net.listed[0])[:, :5])()
    net.listed = [net.a.weight]
    return net


MODULES = {
    "hooked norm": _hooked_norm,
    "collecting hook": _collecting,
    "tied decoder": _tied_decoder,
    "embedding as a head": lambda: _embedded(lambda net, t: F.linear(t + net.p(net.places), net.p.weight)),
    "product with one vector": lambda: _embedded(lambda net, t: F.linear(net.p(net.places) + t, net.a.bias)),
    "listed": _listed,
    "sum of spectra": _of_spectra(torch.add),
    "product of spectra": _of_spectra(lambda a, b: a @ b.mT),
    "sum of whole numbers": _two(lambda net, x: net.b(net.a(x) + _threes(x))),
    "compiled part": _with_compiled_part,
    "addition in a layer": _within(_Residual),
    "products in a layer": _within(_Attending),
    "another epsilon": _with_norm(lambda net, x: _normed(net, x, eps=0.5)),
    "folded epsilon": lambda: nn.Sequential(_conv()(), _norm(eps=0.5)()),
    "another variance": _with_norm(lambda net, x: _normed(net, x, running_var=net.m.running_var)),
    "another factor": _with_norm(lambda net, x: _normed(net, x, weight=net.p)),
    "bias of the norm": _same_bias,
    "norm of tokens": _tokens_normed(12),
    "norm of as many tokens as channels": _tokens_normed(8),
    "called with another weight": _two(lambda net, x: net.b(_doubled(net, x))),
    "another forward": _patched(lambda layer, x: F.conv2d(x, layer.weight * 2, layer.bias)),
    "mean of the batch": _two(lambda net, x: net.b(net.a(x)) + x.mean() * net.a(x)[:, :5].mean()),
    "kernel of the batch": lambda: _module(_kernels, a=_conv(), c=lambda: nn.Linear(3, 32)),
    "squeeze": _two(lambda net, x: net.b(net.a(x).mean((2, 3), keepdim=True)).squeeze()),
    "squeeze of the batch": _two(lambda net, x: net.b(net.a(x).squeeze(0))),
    "autocast that is off": _two(lambda net, x: net.b(torch.autocast("cpu", enabled=False)(net.a)(x))),
}


@pytest.mark.parametrize("kind", MODULES)
def test_it_computes_what_the_module_does_in_float_in_int8_and_loaded(kind, tmp_path):
    given, module, fresh = alike(MODULES[kind], 3)
    x = torch.randn(6, 3, 8, 8)
    model = sq.wrap(given, 8, name="mine")
    with torch.no_grad():
        for batch in (1, 3, 5):
            wanted = module(x[:batch])
            found = model.module(x[:batch])
            torch.testing.assert_close(found, wanted.reshape(found.shape), rtol=1e-4, atol=1e-5)
            assert len(found) == batch, "it drops the batch"
        wanted = module(x)
    sq.calibrate(model, [x[:3], x[3:]], "qdq", passes=["equalize"])
    loaded = sq.load(model.save(tmp_path / "mine.pth"), fresh)
    assert wanted.square().sum() > 1000 * (model(x) - wanted).square().sum()
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("kind", share(MODULES, 9))
def test_an_engine_computes_what_the_module_does(kind, tmp_path):
    check_engine(MODULES[kind], ["equalize"], tmp_path)


@exact_int8
def test_openvino_leaves_out_the_rounding_of_a_convolution_that_is_added_to_a_relu(tmp_path):
    """Its answers are those of fake-quant without this one node, and no farther from the module than with it."""
    pytest.importorskip("openvino")
    parts = {"a": _conv(), "b": lambda: nn.Conv2d(8, 8, 3, padding=1), "c": lambda: nn.Conv2d(8, 5, 1)}

    def run(net, x):
        t = net.a(x)
        return net.c(net.b(t) + t.relu())

    torch.manual_seed(0)
    module, x = _module(run, **parts).eval(), torch.randn(6, 3, 8, 8)
    model = sq.calibrate(sq.wrap(module, 8), [x], "qdq", passes=[])
    without = sq.calibrate(sq.wrap(module, 8), [x], sq.policy("qdq").off("add1_left_input_quantizer"), passes=[])
    found = sq.export(model, "openvino", tmp_path).load()(x)
    with torch.no_grad():
        exact = module(x)
    assert exact.square().sum() > 1e4 * (found - without(x)).square().sum()
    assert (found - exact).square().sum() < 1.1 * (model(x) - exact).square().sum()


def _autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return net.a(x).float()


def _clamping(net, x):
    with torch.no_grad():
        net.a.weight.clamp_(-0.1, 0.1)
    return net.a(x)


REFUSED = {
    "autocast": (_two(_autocast), "computes in torch.bfloat16 by torch.autocast: leave torch.autocast out"),
    "cond": (
        _two(lambda net, x: torch.cond(x.mean() > 0, lambda t: net.a(t), lambda t: net.a(2 * t), (x,))),
        "calls torch's cond, which is not supported: write it by torch.where",
    ),
    "parameter": (_two(_clamping), "its forward pass changes a.weight: a state is not supported"),
    "data": (_two(lambda net, x: F.conv2d(x, net.a.weight.data / 2)), "it sets or reads `.data` of a parameter"),
    "values": (
        _two(lambda net, x: net.a(x) if x.mean() > 0 else net.a(2 * x)),
        "what it computes depends on values in tensors, which are not known here: write it by torch.where",
    ),
    "batch of one": (
        _two(lambda net, x: net.a(x) * (1 if x.shape[0] > 1 else 2)),
        "computes something else when captured, for a batch of 1: its control flow depends on",
    ),
    "not one": (
        _two(lambda net, x: net.a(x).mean((2, 3), keepdim=True).squeeze().flatten(1)),
        "does not take a batch of 1: Dimension out of range",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_cannot_be_captured_is_one_true_line(kind):
    make, why = REFUSED[kind]
    with pytest.raises(sq.SwinQuantError) as caught:
        sq.wrap(make().eval(), 8, name="x")
    assert str(caught.value).startswith("x: ") and why in str(caught.value) and "\n" not in str(caught.value)


def test_an_operation_without_a_form_in_onnx_is_named(tmp_path):
    pytest.importorskip("onnxruntime")
    module = _two(lambda net, x: net.b(torch.linalg.inv(net.a(x) + 3 * torch.eye(6))))().eval()
    model = sq.calibrate(sq.wrap(module, 8), [torch.randn(4, 3, 8, 8)], "qdq", passes=[])
    with pytest.raises(sq.SwinQuantError, match="No ONNX function found for .*linalg_inv") as caught:
        sq.export(model, "onnxruntime", tmp_path)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize("kept", ["attribute", "buffer"])
def test_a_file_is_not_loaded_into_a_module_with_other_constants_than_it_was_calibrated_with(kept, tmp_path):
    def made():
        net = _two(lambda net, x: net.b(net.a(x) * net.scale))()
        if kept == "buffer":
            net.register_buffer("scale", torch.rand(6), persistent=False)
        else:
            net.scale = torch.rand(6)
        return net.eval()

    first, x = made(), torch.randn(4, 3, 8, 8)
    second, third = made(), made()
    second.scale = first.scale.clone()
    model = sq.calibrate(sq.wrap(first, 8), [x], "qdq", passes=[])
    file = model.save(tmp_path / "mine.pth")
    assert torch.equal(sq.load(file, second)(x), model(x))
    with pytest.raises(sq.SwinQuantError, match=r"mine.pth: was calibrated with another \w*scale, which it does not"):
        sq.load(file, third)
