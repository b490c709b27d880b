"""Programs for XNNPACK: arithmetic written out in NumPy, whole Swins beside fake-quant, and what is refused."""

import json
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from decibels import sqnr
from nightly import share

from swin_quant.backends.executorch.export import ExecutorchOptions, export, load
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.classifier import Classifier
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.layer import QuantConv2d, QuantLinear
from swin_quant.quant.policy import apply_policy, load_policy, policy_from_dict, quantizing
from swin_quant.quant.quantizer import Role
from swin_quant.score.options import EngineOptions

pytest.importorskip("executorch")
pytestmark = pytest.mark.slow  # its import takes seconds
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))
FIXED = policy_from_dict(
    {
        "name": "fixed",
        "rules": [
            {"enable": ["role:gemm_input", "role:gemm_output"]},
            {"enable": "role:gemm_weight", "granularity": "per-channel"},
            {"nodes": "role:one_sided_input", "symmetric": False},
        ],
    },
    "fixed",
)


class TwoLinears(Classifier):
    """fc2(relu(fc1(x))) of 64 tokens of 3 numbers, and the mean of the tokens."""

    def __init__(self):
        super().__init__((3, 8, 8), 5)
        self.fc1, self.fc2 = QuantLinear(3, 16), QuantLinear(16, 5)
        self.fc2._input_quantizer.role = Role.ONE_SIDED_INPUT

    def forward(self, images):
        tokens = images.flatten(2).transpose(1, 2)
        return self.fc2(torch.relu(self.fc1(tokens))).mean(1)


class TwoConvolutions(Classifier):
    """A convolution with ReLU, one by channel, and a mean."""

    def __init__(self):
        super().__init__((3, 8, 8), 6)
        self.conv1 = QuantConv2d(3, 6, 3, padding=1)
        self.conv2 = QuantConv2d(6, 6, 3, padding=1, groups=6)
        self.conv2._input_quantizer.role = Role.ONE_SIDED_INPUT

    def forward(self, images):
        return self.conv2(torch.relu(self.conv1(images))).mean((2, 3))


def write(folder, model, policy, images=IMAGES, **options):
    """Calibrate and export: the artifact, the model's quantized output."""
    policy = load_policy(policy)
    torch.manual_seed(3)
    calibrate(model.eval(), [images], Method("max"))
    preprocess = Preprocess(model.input_shape[-1], False, "bicubic", (0.5,) * 3, (0.5,) * 3).to_dict()
    card = RunCard("net", {}, preprocess, policy=policy.to_dict())
    apply_policy(model, policy)
    with torch.inference_mode(), quantizing(model):
        expected = model(images)
    return export(model, card, folder, ExecutorchOptions(**({"batch": len(images)} | options))), expected


@pytest.fixture
def written(tmp_path):
    """written(model, policy, images=IMAGES, **options) -> artifact, the model's quantized output."""
    return partial(write, tmp_path)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    """The file of a program with fixed ranges, and what fake-quant computes."""
    artifact, expected = write(tmp_path_factory.mktemp("fixed"), made(TwoLinears), FIXED)
    return artifact.file, expected


@pytest.fixture
def copied(fixed, tmp_path):
    """A copy of the file and its card, which a test may damage."""
    for file in (fixed[0], card_path(fixed[0])):
        shutil.copy(file, tmp_path)
    return open_artifact(tmp_path / fixed[0].name)


def made(kind):
    torch.manual_seed(1)
    return kind().requires_grad_(False)


def by_token(x, linear):
    """A linear as XNNPACK computes it: each token on its own 255 steps, each row of the weight on 127."""
    low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    step = (high - low) / 255
    zero = np.round(-128 - low / step)
    x = (np.clip(np.round(x / step) + zero, -128, 127) - zero) * step
    weight = linear.weight.double().numpy()
    rows = np.abs(weight).max(1, keepdims=True) / 127
    return x @ (np.round(weight / rows) * rows).T + linear.bias.double().numpy()


@pytest.mark.nightly
def test_weights_alone_give_int8_products_by_the_token(written):
    model = made(TwoLinears)
    artifact, simulated = written(model, "executorch")
    tokens = IMAGES.double().flatten(2).transpose(1, 2).numpy()
    expected = by_token(np.maximum(by_token(tokens, model.fc1), 0), model.fc2).mean(1)
    found = load(artifact)(IMAGES)
    assert sqnr(expected, found) > sqnr(simulated, found) + 6
    np.testing.assert_allclose(found, expected, atol=2e-3)  # a token between two levels: a step of 2 ranges, in 64
    assert artifact.record["options"]["products"] == {"fc1": "int8", "fc2": "int8"}


def test_fixed_ranges_with_results_are_int8_and_equal_fake_quant(fixed):
    artifact, expected = open_artifact(fixed[0]), fixed[1]
    assert sqnr(expected, load(artifact)(IMAGES)) > 50  # half a step of one of 64 tokens
    assert artifact.record["precision"] == "int8"
    assert artifact.record["options"]["products"] == {"fc1": "int8", "fc2": "int8"}


@pytest.mark.nightly
def test_without_a_rounded_result_a_layer_stays_float_by_name_and_equals_fake_quant(written):
    """The result of fc1 is rounded by the node of fc2, behind ReLU."""
    artifact, expected = written(made(TwoLinears), "cpu")
    assert sqnr(expected, load(artifact)(IMAGES)) > 50
    assert artifact.record["options"]["products"] == {"fc1": "int8", "fc2": "float32"}


@pytest.mark.parametrize(("policy", "kinds"), share([("executorch", "int8 float32"), ("cpu", "int8 float32")], 2))
def test_convolutions(written, policy, kinds):
    """By channel XNNPACK has fixed ranges alone; with ReLU between, the next layer's node rounds the result."""
    artifact, expected = written(made(TwoConvolutions), policy)
    assert [*artifact.record["options"]["products"].values()] == kinds.split()
    assert sqnr(expected, load(artifact)(IMAGES)) > 30


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_swin_has_all_products_of_its_blocks_in_int8(kind, tiny_model, written):
    more = {"PRETRAINED_WINDOW_SIZES": [0, 0]} if kind == "swinv2" else {}
    model = tiny_model(kind, IMG_SIZE=32, WINDOW_SIZE=4, DEPTHS=[2, 1], NUM_HEADS=[1, 2], **more)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    artifact, expected = written(model, "executorch", images)
    products = artifact.record["options"]["products"]
    floats = {name for name, type_ in products.items() if type_ != "int8"}
    assert floats <= {"head", "patch_embed.proj", "patch_embed"} and len(products) - len(floats) == 3 * 4 + 1
    loaded = load(open_artifact(artifact.file), EngineOptions(threads=1))
    found = loaded(images)
    assert sqnr(expected, found) > 30 and loaded.details["int8_gemms"] == 13
    torch.testing.assert_close(loaded(images[:1]), found[:1])  # filled up to the program's batch
    with pytest.raises(UsageError, match="a batch of 3 is above its limit of 2 pictures"):
        loaded(torch.zeros(3, 3, 32, 32))


def test_float_equals_torch_and_another_size_is_refused_in_words(written):
    artifact, _ = written(made(TwoLinears), "executorch", precision="float")
    loaded = load(artifact)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(IMAGES), made(TwoLinears)(IMAGES), rtol=1e-5, atol=1e-5)
    assert artifact.file.name == "net_fp32.pte"
    with pytest.raises(UsageError, match=r"net_fp32.pte: takes pictures of \[3, 8, 8\], not \[3, 9, 8\]"):
        loaded(torch.zeros(1, 3, 9, 8))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"enable": "role:gemm_input", "bits": 4}, "no activations of other than 8 bits: fc1._input_quantizer"),
        ({"enable": "role:gemm_input", "narrow_range": True}, "no activations of a narrow range"),
        ({"enable": "role:gemm_weight", "format": "fp8"}, "no float8: fc1._weight_quantizer"),
        ({"enable": "role:gemm_weight", "granularity": "per-channel", "block": 16}, "takes no weights in blocks"),
    ],
)
def test_formats_that_xnnpack_lacks_are_refused_by_node(written, rule, said):
    model = made(TwoLinears)
    model.fc1 = QuantLinear(3, 16) if "block" not in rule else model.fc1
    with pytest.raises(UsageError, match=said):
        written(model, policy_from_dict({"name": "own", "rules": [rule | {"enable": _first(rule)}]}, "own"))


def _first(rule):
    """The rule's node in one layer whose row it fits."""
    own = "input" if rule["enable"] == "role:gemm_input" else "weight"
    return f"fc{2 if 'block' in rule else 1}._{own}_quantizer"


@pytest.mark.parametrize("batch", [0, -1, 1.5, True])
def test_a_batch_is_a_number(batch):
    with pytest.raises(UsageError, match="a program takes one batch size"):
        ExecutorchOptions(batch=batch)


def test_open_sizes_are_refused(written):
    model = made(TwoLinears)
    model.any_size = True
    with pytest.raises(UsageError, match="takes pictures of one size and gives one output"):
        written(model, "executorch")


def test_an_operator_outside_the_core_set_is_one_line(written):
    class Spectrum(TwoLinears):
        def forward(self, images):
            return super().forward(torch.fft.fft2(images).real)

    with pytest.raises(SwinQuantError, match="net: ExecuTorch cannot take this network: .") as caught:
        written(made(Spectrum), "executorch")
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_one_line(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(UsageError, match=r"executorch cannot be imported .*\[executorch\]"):
        written(made(TwoLinears), "executorch")


def test_damaged_files_and_other_releases_and_contradicting_cards_are_one_line(copied):
    artifact = copied
    content, card = artifact.file.read_bytes(), json.loads(card_path(artifact.file).read_text())
    for key, value in (("precision", "float32"), ("options", card["artifact"]["options"] | {"batch": 8})):
        changed = card | {"artifact": card["artifact"] | {key: value}}
        card_path(artifact.file).write_text(json.dumps(changed))
        with pytest.raises(SwinQuantError, match="the card was changed: export again"):
            open_artifact(artifact.file)
    assert content[4:8] == b"ET12"  # a program's format, by its number
    for wrong in (content[:100], b"", content[:4] + b"ET99" + content[8:]):
        artifact.file.write_bytes(wrong)
        with pytest.raises(SwinQuantError, match="damaged, or of another release") as caught:
            load(artifact)
        assert "\n" not in str(caught.value)
