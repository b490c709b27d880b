"""Plain PyTorch that is captured as it computes: writes in place, weights read twice, kernels from the input."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from nightly import share
from torch import nn
from torch.nn.utils import prune
from vnni import exact_int8

import swin_quant as sq
from swin_quant.base.compat import import_timm


def _module(run, **parts):
    """A module with these parts whose forward pass is `run`, a function of it and its input."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part())

        def forward(self, x):
            return run(self, x)

    return Module()


def _conv(channels=8, **options):
    return lambda: nn.Conv2d(3, channels, 3, **options)


def _then(kind, **options):
    """A convolution, and an activation in place whose input is read again."""

    def run(net, x):
        t = net.a(x)
        return net.b(net.act(t)) + t

    return lambda: _module(run, a=_conv(), act=lambda: kind(inplace=True, **options), b=lambda: nn.Conv2d(8, 8, 1))


def _of_view(net, x):
    t = net.a(x)
    net.act(t[:, :4])
    return net.b(t) + t


def _item(net, x):
    t = net.a(x)
    t[:, 0] = t[:, 1] * 2
    t[:, 2:4] += 1
    return net.b(t)


def _per_picture(net, x):
    batch, channels, height, width = x.shape
    kernels = net.kernels(x.mean((2, 3))).reshape(batch * channels, 1, 3, 3)
    y = F.conv2d(x.reshape(1, batch * channels, height, width), kernels, padding=1, groups=batch * channels)
    return net.out(y.reshape(x.shape))


def _tokens(x):
    return x.flatten(2).transpose(1, 2)


def _tokens_linear():
    return nn.Linear(3, 8)


def _windows(net, x):
    """Swin's partition and Microsoft's `window_reverse`, whose batch is `int` of a quotient, as in SwinIR."""
    height, width, window = 8, 8, 4
    y = net.a(x).permute(0, 2, 3, 1)
    y = y.view(y.shape[0], height // window, window, width // window, window, -1)
    windows = net.b(y.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, y.shape[-1]))
    batch = int(windows.shape[0] / (height * width / window / window))
    y = windows.view(batch, height // window, width // window, window, window, -1)
    return y.permute(0, 1, 3, 2, 4, 5).contiguous().view(batch, height, width, -1)


def _tied(net, x):
    return F.conv_transpose2d(net.a(x).relu(), net.a.weight)


def _changed(change):
    """A linear layer that torch changes by a parametrization or a hook, behind another one."""

    def linear():
        layer = nn.Linear(3, 8)
        change(layer)
        return layer

    return lambda: _module(lambda net, x: net.b(net.a(_tokens(x))), a=linear, b=lambda: nn.Linear(8, 5))


def _tokens_with(run):
    """`run` of a linear `a` and a parameter `p` [2, 8, 4]."""
    parts = {"a": _tokens_linear, "p": lambda: nn.Parameter(torch.randn(2, 8, 4)), "b": lambda: nn.Linear(8, 8)}
    return lambda: _module(lambda net, x: run(net, net.a(_tokens(x))), **parts)


def _tied_to_another():
    net = _tokens_with(lambda net, x: net.b(net.c(x).relu()) + net.c(x.tanh()))()
    net.c = nn.Linear(8, 8)
    net.b.weight = net.c.weight
    return net


def _doubling():
    net = _module(lambda net, x: net.b(net.a(x)), a=_conv(), b=lambda: nn.Conv2d(8, 8, 1))
    net.a.register_forward_hook(lambda module, inputs, output: output * 2)
    return net


def _batch_first(count):
    """A forward pass that takes the number of pictures by `count`."""

    def run(net, x):
        t = net.a(x)
        return net.b(t.view(count(t) * 4, 2, *t.shape[2:])).view(count(t), -1)

    return lambda: _module(run, a=_conv(), b=lambda: nn.Conv2d(2, 2, 1))


def _of_conv1d(change=lambda layer: layer):
    """A one-dimensional convolution that is called twice."""
    parts = {"a": _conv(), "b": lambda: change(nn.Conv1d(8, 8, 3, padding=1))}
    return lambda: _module(lambda net, x: net.b(net.b(net.a(x).flatten(2)).relu()), **parts)


def _before(layer, flat=False):
    """A convolution before `layer`, with pixels in one dimension if `flat`."""
    return lambda: _module(lambda net, x: net.b(net.a(x).flatten(2) if flat else net.a(x)), a=_conv(), b=layer)


MODULES = {
    "tied to another": _tied_to_another,
    "forward hook": _doubling,
    "int of the batch": _batch_first(lambda x: int(x.shape[0])),
    "len": _batch_first(lambda x: len(x)),
    "float of the batch": lambda: _module(lambda net, x: net.a(x) * float(x.shape[0]), a=_conv()),
    "int as a type": lambda: _module(lambda net, x: net.a(x) * torch.arange(1, 37, dtype=int).view(6, 6), a=_conv()),
    "int is int": lambda: _module(lambda net, x: net.a(x) * (2 if type(len("ab")) is int else 1), a=_conv()),
    "floor of a quotient": _batch_first(lambda x: math.floor(x.numel() / x[0].numel())),
    "ceil of half a quotient": _batch_first(lambda x: math.ceil(2 * x.numel() / x[0].numel()) // 2),
    "conv1d twice": _of_conv1d(),
    "conv1d twice, weight norm": _of_conv1d(nn.utils.weight_norm),
    "transposed, groups": _before(lambda: nn.ConvTranspose2d(8, 8, 2, 2, groups=4)),
    "transposed, 1-D": _before(lambda: nn.ConvTranspose1d(8, 6, 4, 2, 1), flat=True),
    "transposed, weight norm": _before(lambda: nn.utils.weight_norm(nn.ConvTranspose2d(8, 6, 4, 2, 1))),
    "einsum, dots": _tokens_with(lambda net, x: torch.einsum("...c,dc->...d", x, net.b.weight)),
    "einsum, no output": _tokens_with(lambda net, x: torch.einsum("btc,cd", x, net.b.weight)),
    "window_reverse": lambda: _module(_windows, a=_conv(padding=1), b=lambda: nn.Linear(8, 8)),
    "tied": lambda: _module(_tied, a=_conv()),
    "weight norm": _changed(nn.utils.weight_norm),
    "spectral norm": _changed(nn.utils.spectral_norm),
    "pruned": _changed(lambda layer: prune.l1_unstructured(layer, "weight", 0.4)),
    "parametrized weight norm": _changed(nn.utils.parametrizations.weight_norm),
    "parametrized spectral norm": _changed(nn.utils.parametrizations.spectral_norm),
    "orthogonal": _changed(nn.utils.parametrizations.orthogonal),
    "weight in a product": _tokens_with(lambda net, x: net.b(x) @ net.b.weight),
    "weight in a norm": _tokens_with(lambda net, x: net.b(x) * net.b.weight.norm()),
    "bias": _tokens_with(lambda net, x: net.b(x) * net.b.bias),
    "cosine": _tokens_with(lambda net, x: F.linear(F.normalize(x, dim=-1), F.normalize(net.b.weight, dim=-1))),
    "einsum": _tokens_with(lambda net, x: torch.einsum("btc,hcd->bhtd", x, net.p)),
    "einsum, weight first": _tokens_with(lambda net, x: torch.einsum("hcd,btc->bhdt", net.p, x)),
    "einsum, two sums": _tokens_with(lambda net, x: torch.einsum("btc,hcd->bthd", x, net.p).flatten(2).sum(1)),
    "mm": _tokens_with(lambda net, x: x @ net.p[0].contiguous()),
    "matmul": _tokens_with(lambda net, x: torch.matmul(x, net.b.weight.t())),
    "addmm": _tokens_with(lambda net, x: torch.addmm(net.b.bias, x.mean(1), net.b.weight.t())),
    **{kind.__name__: _then(kind) for kind in (nn.ReLU, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.ReLU6, nn.Dropout)},
    "view": lambda: _module(_of_view, a=_conv(), act=lambda: nn.ReLU(inplace=True), b=lambda: nn.Conv2d(8, 8, 1)),
    "item": lambda: _module(_item, a=_conv(), b=lambda: nn.Conv2d(8, 8, 1)),
    "pictures": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 8, 3)),
    "normalised": lambda: _module(lambda net, x: net.a(x.sub_(0.5).div_(2)), a=_conv()),
    "another bias": lambda: _module(
        lambda net, x: net.a(_tokens(x)) + F.linear(_tokens(x), net.a.weight), a=_tokens_linear
    ),
    "bias first": lambda: _module(
        lambda net, x: F.linear(_tokens(x), net.a.weight) + net.a(_tokens(x)), a=_tokens_linear
    ),
    "dilation": lambda: _module(
        lambda net, x: net.a(x)[:, :, 1:-1, 1:-1] + F.conv2d(x, net.a.weight, net.a.bias, dilation=2), a=_conv()
    ),
    "stride first": lambda: _module(
        lambda net, x: F.conv2d(x, net.a.weight, net.a.bias, 2, 1) + F.avg_pool2d(net.a(x), 2), a=_conv(padding=1)
    ),
    "circular": lambda: _module(
        lambda net, x: net.a(x) + F.conv2d(x, net.a.weight, net.a.bias, padding=1),
        a=_conv(padding=1, padding_mode="circular"),
    ),
}


def alike(make, times):
    """The same module several times: torch copies none with weight norm."""
    return [torch.manual_seed(0) and make().eval() for _ in range(times)]


def check_engine(make, passes, folder):
    """ONNX Runtime computes what the module does, for a single picture, too."""
    pytest.importorskip("onnxruntime")
    (given, module), x = alike(make, 2), torch.randn(6, 3, 8, 8)
    model = sq.calibrate(sq.wrap(given, 8, name="mine"), [x[:3], x[3:]], "qdq", passes=passes)
    engine = sq.export(model, "onnxruntime", folder).load()
    with torch.no_grad():
        wanted = module(x.clone())
    assert wanted.square().sum() > 1000 * (engine(x) - wanted).square().sum() and len(engine(x[:1])) == 1


@pytest.mark.parametrize("kind", MODULES)
def test_it_computes_what_the_module_does_in_float_and_in_int8(kind):
    (given, module), x = alike(MODULES[kind], 2), torch.randn(6, 3, 8, 8)
    model = sq.wrap(given, 8, name="mine")
    with torch.no_grad():
        for batch in (1, 3, 5):
            given = x[:batch].clone()
            torch.testing.assert_close(model.module(given), module(given.clone()))
            assert torch.equal(given, x[:batch]), "it changes its input"
        wanted = module(x.clone())
    sq.calibrate(model, [x[:3], x[3:]], "qdq", passes=[])
    if kind.startswith(("einsum", "matmul", "addmm")):
        assert model.card.calibration["coverage"]["share"] == 1
    noise = model(x) - wanted
    assert wanted.square().sum() > 1000 * noise.square().sum()


@pytest.mark.parametrize("kind", share(MODULES, 12))
def test_an_engine_computes_what_the_module_does(kind, tmp_path):
    check_engine(MODULES[kind], [], tmp_path)


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("transposed, 1-D", "convtranspose1d (no int8 kind of it)"),
        ("transposed, groups", "convtranspose2d (no int8 kind of it)"),
        ("conv1d twice, weight norm", "conv1d (its weight is a constant, shared or computed)"),
        pytest.param("lstm", "lstm (no int8 kind of it)", marks=pytest.mark.nightly),
        ("einsum of three", "einsum (no int8 kind of it)"),
    ],
)
def test_a_product_that_stays_float_is_named_and_counted(kind, left):
    """The share is that of a count by hand: multiplications of a picture, int8 ones in the first layer."""
    others = {
        "lstm": lambda: _module(
            lambda net, x: net.b(net.a(_tokens(x)))[0], a=_tokens_linear, b=lambda: nn.LSTM(8, 8, batch_first=True)
        ),
        "einsum of three": _tokens_with(lambda net, x: torch.einsum("btc,hcd,hde->bte", x, net.p, net.p.mT)),
    }
    conv, linear = 36 * 27 * 8, 64 * 3 * 8
    by_hand = {
        "transposed, 1-D": conv / (conv + 36 * 8 * 6 * 4),
        "transposed, groups": conv / (conv + 36 * 8 * 2 * 4),
        "conv1d twice, weight norm": conv / (conv + 2 * 36 * 8 * 8 * 3),
        "lstm": linear / (linear + 64 * 4 * (8 + 8) * 8),
        "einsum of three": linear / (linear + 64 * 2 * 8 * 4 * 8),
    }
    torch.manual_seed(0)
    model = sq.wrap((others | MODULES)[kind]().eval(), 8)
    found = sq.calibrate(model, [torch.randn(4, 3, 8, 8)], "qdq", passes=[]).card.calibration["coverage"]
    assert list(found["left"]) == [left]
    assert found["share"] == pytest.approx(by_hand[kind])


def test_equalization_leaves_weights_that_are_read_elsewhere():
    def run(net, x):
        t = net.b(net.a(x).relu())
        return t + F.conv2d(x, net.a.weight, padding=1).mean() * net.c(net.d(x).relu())

    torch.manual_seed(0)
    parts = {name: _conv(padding=1) for name in "ad"} | {name: lambda: nn.Conv2d(8, 8, 1) for name in "bc"}
    module, x = _module(run, **parts).eval(), torch.randn(6, 3, 8, 8)
    module.c.weight = module.b.weight  # what moves between d and c would change b
    with torch.no_grad():
        for layer in (module.a, module.d):
            layer.weight[0] *= 100
            layer.bias[0] *= 100
        wanted = module(x)
    model = sq.calibrate(sq.wrap(copy.deepcopy(module), 8), [x], "qdq", passes=["equalize"])
    with torch.no_grad():
        torch.testing.assert_close(model.module(x), wanted, rtol=1e-4, atol=1e-3)
    assert model.network.own_exchanges == ()


def test_sensitivity_compares_with_the_module_as_it_was_given():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()
    x = torch.randn(6, 3, 8, 8)
    model = sq.calibrate(sq.wrap(copy.deepcopy(module), 8), [x], "qdq", passes=["bias_correction"])
    with torch.no_grad():
        wanted, noise = module(x).double(), model(x).double() - module(x)
        noise = 10 * torch.log10(wanted.square().sum() / noise.square().sum())
    assert sq.sensitivity(model, [x]).record["overall"]["sqnr_db"] == pytest.approx(noise.item(), abs=1e-3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(5)), "1.weight is not initialized: call the module once"),
        (
            lambda: _module(lambda net, x: net.a(x), a=_conv(), k=lambda: nn.Parameter(torch.ones(2) * 1j)),
            "k holds complex numbers, which no checkpoint does: keep torch.view_as_real of it",
        ),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 5))), "0 is scripted: give the module that"),
    ],
)
def test_a_part_that_cannot_be_copied_is_named(make, why):
    with pytest.raises(sq.SwinQuantError, match=why):
        sq.wrap(make(), 8)


def test_a_pickle_of_a_wrapped_model_names_the_call_that_saves_it(tmp_path):
    model = sq.wrap(nn.Sequential(nn.Conv2d(3, 8, 3)), 8)
    for one in (model, model.module):
        with pytest.raises(sq.UsageError, match=r"^a wrapped model is not pickled: model.save\(FILE\) writes it"):
            pickle.dumps(one)
        with pytest.raises(sq.UsageError, match=r"model.save\(FILE\)"):
            torch.save(one, tmp_path / "model.pth")
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(copy.deepcopy(model).module(x), model.module(x))


def test_several_outputs_with_outlying_channels_are_calibrated():
    torch.manual_seed(0)
    heads = {"a": _conv(padding=1), "b": lambda: nn.Conv2d(8, 5, 1), "c": lambda: nn.Conv2d(8, 4, 1)}

    def run(net, x):
        t = F.relu(net.a(x))
        return [net.b(t), net.c(t)]

    module, x = _module(run, **heads).eval(), torch.randn(6, 3, 8, 8)
    with torch.no_grad():
        module.a.weight[0] *= 100
        module.b.weight[:, 0] /= 100
        module.c.weight[:, 0] /= 100
        wanted = module(x)
    model = sq.calibrate(sq.wrap(copy.deepcopy(module), 8), [x], "qdq")
    with torch.no_grad():
        for ours, theirs in zip(model.module(x), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_convolution_with_kernels_for_each_picture_is_refused_in_one_line():
    module = _module(_per_picture, kernels=lambda: nn.Linear(3, 27), out=lambda: nn.Conv2d(3, 5, 1))
    with pytest.raises(sq.SwinQuantError, match=r"^x: conv2d has kernels for each picture, .*torch.matmul$"):
        sq.wrap(module, 8, name="x")


@exact_int8
def test_an_fft_runs_or_the_engine_refuses_the_file(tmp_path):
    """OpenVINO 2026.4 infers the shape behind a one-sided DFT wrong."""
    pytest.importorskip("openvino")

    def filtered(net, x):
        spectrum = torch.fft.rfft2(net.a(x)) * torch.view_as_complex(net.kernel)
        return net.b(torch.fft.irfft2(spectrum, s=(6, 6)))

    parts = {"a": _conv(), "b": lambda: nn.Conv2d(8, 8, 1)}
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    whole = _module(lambda net, x: net.b(torch.fft.fft2(net.a(x)).abs()), **parts).eval()
    one_sided = _module(filtered, kernel=lambda: nn.Parameter(torch.randn(8, 6, 4, 2)), **parts).eval()
    for module, engine, refused in ((whole, "openvino", None), (one_sided, "openvino", "openvino cannot load it: ")):
        model = sq.calibrate(sq.wrap(module, 8), [x], "qdq", passes=[])
        with torch.no_grad():
            wanted = module(x)
        if refused:
            with pytest.raises(sq.SwinQuantError, match=refused):
                sq.export(model, engine, tmp_path).load()
        else:
            noise = sq.export(model, engine, tmp_path).load()(x) - wanted
            assert wanted.square().sum() > 1000 * noise.square().sum()
    noise = sq.export(model, "onnxruntime", tmp_path).load()(x) - wanted
    assert wanted.square().sum() > 1000 * noise.square().sum()


@pytest.mark.nightly
def test_a_module_that_ran_with_gradients_before_is_wrapped():
    """timm's EfficientViT keeps its biases of the last forward pass in a dictionary, with their gradient function."""
    module = import_timm().create_model("efficientvit_m0").eval()
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    wanted = module(images).detach()
    model = sq.wrap(module, 224)
    with torch.no_grad():
        torch.testing.assert_close(model.module(images), wanted, rtol=1e-3, atol=1e-4)
