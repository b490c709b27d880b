"""A user's module, from wrapping to an engine."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from vnni import exact_int8

import swin_quant as sq
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.sensitivity import sensitivity
from tests.helpers.refusals import refused


class Net(nn.Module):
    """Grouped and depthwise convolutions, norms, a shortcut, a branch that depends on an argument."""

    def __init__(self, careless=False):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.again = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.grouped, self.head = nn.Conv2d(8, 8, 1, groups=2), nn.Linear(8, 4)
        self.careless = careless

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        y = self.grouped(torch.relu(self.again(self.depthwise(x))))
        if self.careless and float(y.detach().mean()) > 0:
            return self.head(x.mean((2, 3)))
        return self.head(torch.relu(x + y).mean((2, 3)))


class Custom(Net):
    """An operator that torch knows on a CPU alone."""

    def forward(self, x):
        if not hasattr(torch.ops.swins, "double"):
            library = torch.library.Library("swins", "FRAGMENT")
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", lambda x: x * 2, "CPU")
            Custom.library = library
        return super().forward(torch.ops.swins.double(x))


class Cache(Net):
    """It keeps its first result."""

    kept = None

    def forward(self, x):
        self.kept = super().forward(x) if self.kept is None else self.kept
        return self.kept


class Stateful(Net):
    """It counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.fixture
def module():
    torch.manual_seed(1)
    net = Net()
    net(torch.randn(32, 3, 8, 8))  # gives norms running statistics
    return net


@pytest.fixture
def x(module):
    return torch.randn(16, 3, 8, 8)


@pytest.fixture
def model(module, x):
    """The module, wrapped and calibrated."""
    return sq.calibrate(sq.wrap(module, 8, name="mine"), [x], "cpu", passes=[])


def test_it_is_calibrated_scored_and_left_as_it_was(module, x):
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with torch.no_grad():
        labels = module.eval()(x).argmax(1)
    model = sq.wrap(module, 8, name="mine")
    torch.testing.assert_close(model.module(x), module(x))
    sq.calibrate(model, [x], "cpu", passes=[])
    found = sq.evaluate(model, [(x, labels)], half="none")
    assert found.float32.acc1 == 100 and found.quantized.sqnr_db > 20
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert {"depthwise._input_quantizer", "add1_right_input_quantizer"} <= enabled_nodes(model.module).keys()


def test_corrected_weights_are_scored_beside_the_original_or_it_is_said_that_there_is_none(module, x, tmp_path, caplog):
    model = sq.calibrate(sq.wrap(module, 8, name="mine"), [x], "cpu", passes=["gptq"])
    found = sq.evaluate(model, [(x, torch.zeros(16))], half="none")
    with torch.no_grad():
        right = 100 * float((module.eval()(x).argmax(1) == 0).float().mean())
    assert found.quantized.weights == "ptq" and found.float32.acc1 == right and "no delta" not in caplog.text
    assert found.quantized.delta_acc1 == found.quantized.acc1 - right
    model.save(tmp_path / "mine_calib.pth")
    again = sq.evaluate(sq.load(tmp_path / "mine_calib.pth", module), [(x, torch.zeros(16))], half="none")
    assert (again.float32.acc1, again.quantized.delta_acc1) == (right, found.quantized.delta_acc1)
    assert "no delta" not in caplog.text  # the module's weights are those that were given
    found = sq.evaluate(sq.load(tmp_path / "mine_calib.pth", Net()), [(x, torch.zeros(16))], half="none")
    assert found.quantized.weights == "ptq" and found.quantized.delta_acc1 is None
    assert "no delta" in caplog.text


def test_new_weights_after_wrapping_are_the_ones_that_a_given_module_must_have(module, x, tmp_path):
    model, new = sq.wrap(module, 8, name="mine"), sq.wrap(Net(), 8, name="mine")
    model.module.load_state_dict(new.module.state_dict())
    sq.calibrate(model, [x], "cpu", passes=["gptq"]).save(tmp_path / "mine_calib.pth")
    assert sq.load(tmp_path / "mine_calib.pth", module).original is None, "the module that was wrapped has old weights"


def test_sensitivity_has_a_profile_of_its_units_and_the_losses_of_whole_forwards(module, x):
    layers = nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1), module
    model = sq.calibrate(sq.wrap(nn.Sequential(*layers), 8, name="mine"), [x], "qdq", passes=[])
    costs = sq.sensitivity(model, [x])
    assert {"0", "2", "3"} <= {row.name.partition(".")[0] for row in costs.rows()}
    found = costs.record
    assert len(found["profile"]) > 2
    assert {group["name"] for group in found["groups"] if group["kind"] == "block"} <= found["profile"].keys()
    whole = sensitivity(model.module, [x], {}, reference=model.original)
    alone = {(group["kind"], group["name"]): group["alone"] for group in found["groups"]}
    assert all(alone[group.kind, group.name] == group.alone.record() for group in whole.groups)
    assert found["forwards"] < whole.forwards


def test_modules_that_cannot_be_wrapped_are_refused_in_one_line(module):
    for made, size, says in (
        (Net(careless=True), 8, r"mine: cannot be captured at test_wrap.py:\d+ `if self.careless and float"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(0)), 8, r"mine: gives output \[512\] for 2 inputs"),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), 8, r"mine: does not take \[2, 3, 8, 8\]: mat1 and"),
        (Net().double(), 8, r"mine: stem.weight is float64: give module.float\(\)"),
        (Custom(), 8, r"captured at test_wrap.py:\d+ `return .*`: operator .*swins.double.*register_fake"),
        (Cache(), 8, "mine: no linear and no convolution depends on its input: if it keeps results"),
        (nn.Sequential(OrderedDict(classes=Net())), 8, "classes: no part of a network may have this name"),
        (Stateful(), 8, "mine: its forward pass changes calls: a state is not supported"),
    ):
        with pytest.raises(sq.SwinQuantError, match=says) as raised:
            sq.wrap(made, size, name="mine")
        assert "\n" not in str(raised.value)
    refused(lambda: sq.wrap(module, 0), "size 0", kind=sq.UsageError)


def test_it_is_saved_and_loaded_into_a_module_of_its_structure(module, x, tmp_path):
    model = sq.calibrate(sq.wrap(module, 8, name="mine", stem=False), [x], "cpu", passes=[])
    model.save(tmp_path / "mine_calib.pth")
    again = sq.load(tmp_path / "mine_calib.pth", Net())
    assert torch.equal(again(x), model(x)) and again.policy == model.policy
    how = {"shape": [3, 8, 8], "stem": False, "output": None, "outputs": ["output"], "classes": 4}
    assert {key: value for key, value in again.card.wrapped.items() if key != "weights"} == how
    with pytest.raises(sq.SwinQuantError, match="does not fit the model"):
        sq.load(tmp_path / "mine_calib.pth", nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4)))
    (tmp_path / "mine_calib.json").unlink()
    with pytest.raises(sq.UsageError, match="has no run card of a wrapped module beside it"):
        sq.load(tmp_path / "mine_calib.pth", Net())


def _convolutions(kind, channels):
    """A network for the inputs [B, channels, ...] of this kind of convolution."""
    pools = {nn.Conv1d: nn.AdaptiveAvgPool1d, nn.Conv2d: nn.AdaptiveAvgPool2d, nn.Conv3d: nn.AdaptiveAvgPool3d}
    return nn.Sequential(kind(channels, 8, 3), nn.ReLU(), kind(8, 8, 3), pools[kind](1), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (lambda: _convolutions(nn.Conv3d, 3), (3, 6, 8, 10)),
        (lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)), (7,)),
    ],
)
@exact_int8
def test_inputs_of_any_shape_go_the_whole_way(made, shape, tmp_path):
    torch.manual_seed(0)
    net, x = made().eval(), torch.randn(8, *shape)
    model = sq.calibrate(sq.wrap(net, shape, name="mine"), [x], "cpu", passes=[])
    with torch.no_grad():
        wanted = net(x)
        torch.testing.assert_close(model.module(x), wanted)
    made = sq.export(model, "openvino", tmp_path)
    for engine in ("openvino", "onnxruntime"):
        loaded = made.load(engine)
        assert wanted.square().sum() > 300 * (loaded(x) - wanted).square().sum(), engine
        assert torch.equal(loaded(x[:1]), loaded(x[:1])) and loaded(x[:1]).shape == (1, wanted.shape[1])
        with pytest.raises(sq.UsageError, match=r"inputs are|images \[|takes pictures of"):
            loaded(torch.zeros(2, *shape, 1))


def test_a_shape_that_cannot_be_is_one_line(module):
    square = sq.Preprocess(8, False, "bilinear", (0.5,) * 3, (0.5,) * 3)
    for size, given, says in (
        ((8, 0), {}, r"size \(8, 0\), channels 3: must be whole numbers"),
        ((), {}, "must be whole numbers"),
        ((8, 12), {"preprocess": square}, r"takes \[3, 8, 12\], and its `preprocess` makes \[3, 8, 8\]"),
    ):
        with pytest.raises(sq.UsageError, match=says):
            sq.wrap(module, size, **given)
    model = sq.wrap(module, (8, 12))
    for images, says in ((torch.zeros(2, 3, 12, 8), r"takes \[B, 3, 8, 12\]"), (torch.zeros(3, 8, 12), "images")):
        with pytest.raises(sq.UsageError, match=says):
            model(images)
    refused(lambda: sq.calibrate(model, [torch.zeros(2, 3, 12, 8)], "cpu"), "takes [B, 3, 8, 12]", kind=sq.UsageError)
    video = sq.wrap(_convolutions(nn.Conv3d, 3), (3, 6, 8, 10))
    with pytest.raises(sq.UsageError, match=r"inputs are float32 .*: must be float \[B, 3, 6, 8, 10\]"):
        sq.calibrate(video, [torch.zeros(2, 3, 8, 10)], "cpu")


def test_a_policy_is_searched_for_against_the_module_that_was_wrapped(tmp_path, clock):
    """The input is a spectrogram, neither square nor of three channels. A pass changed the weights, so that only the
    wrapped module is float. Each policy's figure is that of whole forwards."""
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    module, x = nn.Sequential(*layers, nn.Linear(8, 4)).eval(), torch.randn(16, 1, 12, 9)
    model = sq.calibrate(sq.wrap(module, (1, 12, 9), name="mine"), [x], "qdq", passes=["gptq"])

    def sqnr():
        expected = module(x).detach().double()
        return 10 * math.log10(expected.square().sum() / (model(x).double() - expected).square().sum())

    whole = sqnr()
    found = sq.search(model, [x[:4], x], "onnxruntime", tmp_path, "qdq", budget=sq.Budget(min_sqnr=whole + 1))
    tried = {one["policy"]: one["loss"]["sqnr_db"] for one in found.record["tried"]}
    assert found and tried["qdq"] == pytest.approx(whole, abs=1e-3)
    assert found.file.name == "mine_auto_onnxruntime.yaml" and model.policy.sha256 == found.policy.sha256
    (chosen,) = (one["loss"]["sqnr_db"] for one in found.record["tried"] if one["found"])
    assert chosen == pytest.approx(sqnr(), abs=1e-3) and sqnr() >= whole + 1


def test_unnamed_the_policy_uses_the_whole_grid_behind_relu(tmp_path):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), *[layer for _ in range(4) for layer in (nn.ReLU(), nn.Conv2d(16, 16, 3))]]
    net, x = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)).eval(), torch.randn(16, 3, 16, 16)
    exact = net(x)
    noise = {}
    for policy in (None, "qdq"):
        model = sq.calibrate(sq.wrap(net, 16, name="net"), [x], policy, method="max", passes=[])
        run = sq.export(model, "onnxruntime", tmp_path / str(policy)).load()
        noise[policy] = (run(x) - exact).square().sum()
        assert (run(x) - model(x)).square().sum() < 0.3 * noise[policy]
    assert noise[None] < 0.8 * noise["qdq"], "weights and the input have the rest"
