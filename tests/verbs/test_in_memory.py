"""Python beyond the verbs: names, models, policies and tables in a notebook, refusals, and files for other tools."""

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swin_quant as sq
from swin_quant.base.errors import UsageError
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import read_state_dict
from swin_quant.checkpoint.ranges import is_range
from swin_quant.quant.layer import QuantLinear
from tests.helpers.refusals import refused


def test_importing_it_changes_nothing_and_takes_no_torch():
    program = (
        "import os, sys; old = dict(os.environ); import swin_quant\nprint('torch' in sys.modules, old == os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_everything_that_it_names_is_there_and_says_what_it_is():
    for name in sq.__all__:
        assert getattr(sq, name) is not None and name in dir(sq)
        assert name == "__version__" or getattr(sq, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sq.nonsense


def test_a_calibrated_file_is_loaded_and_saved_with_its_ranges(model, train, tmp_path):
    first = sq.calibrate(model, train, "qdq", method="max").save(tmp_path / "first.pth")
    second = sq.load(first).save(tmp_path / "second.pth")
    assert second.read_bytes() == first.read_bytes()
    assert RunCard.read(tmp_path / "second.json").calibration == RunCard.read(tmp_path / "first.json").calibration


def test_calling_a_model_runs_it_quantized(model, train):
    images = torch.randn(2, 3, 32, 32)
    plain = model(images)
    assert torch.equal(plain, model.module(images))
    sq.calibrate(model, train, "qdq")
    assert not torch.equal(model(images), plain) and torch.equal(model.module(images), plain)
    assert "policy qdq" in repr(model) and "8 pictures" in repr(model)


class Own(nn.Module):
    """A user's model with two of our layers."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = QuantLinear(3 * 32 * 32, 16), QuantLinear(16, 3)

    def forward(self, images):
        return self.head(self.hidden(images.flatten(1)).relu())


def test_a_model_of_the_user_s_own_needs_no_file_and_no_config(pictures, tensors, tmp_path):
    policy = sq.policy("float").on("role:gemm_input", "role:gemm_weight")
    model = sq.calibrate(Own().eval(), tensors("train"), policy)
    found = sq.evaluate(model, tensors("val"), half="none")
    assert [result.precision for result in found.results] == ["float32", "int8"]
    assert found.quantized.agreement is not None and found.quantized.sqnr_db > 20
    nodes = [f"{layer}._{node}_quantizer" for layer in ("hidden", "head") for node in ("input", "weight", "aftergemm")]
    ends = {f"{node}._bounds" for node in nodes if "_weight" not in node}
    saved = torch.load(model.save(tmp_path / "own.pth"), weights_only=True)
    assert set(filter(is_range, saved)) == {f"{node}._amax" for node in nodes} | ends
    with pytest.raises(sq.UsageError, match="was not built from a config"):
        _ = model.config
    refused(lambda: sq.calibrate(Own(), sq.pictures(pictures, "train", 8), policy), "preprocess", kind=sq.UsageError)


def test_invalid_arguments_are_refused_in_one_line(model, train, val, pictures, tmp_path):
    unread = iter([torch.zeros(2, 3, 32, 32)])
    for word, value in (("method", "mes"), ("percentile", 150)):
        with pytest.raises(sq.UsageError, match=f"^{word} {value}: must be "):
            sq.calibrate(model, unread, **{word: value})
    assert len(list(unread)) == 1
    images, policy = torch.zeros(2, 3, 32, 32), sq.policy("qdq")
    no_node, shape, loader = policy.off("nothing.*"), r"\[3, 32, 32\]", DataLoader(images)
    for error, says, call in (
        (sq.UsageError, "'nothing.*' names no node of this model", lambda: sq.calibrate(model, train, no_node)),
        (sq.SwinQuantError, r"have no range.*sq\.calibrate", lambda: sq.evaluate(model, val, ["qdq"])),
        (sq.SwinQuantError, r"have no range.*sq\.calibrate", lambda: sq.sensitivity(model, val, "qdq")),
        (sq.UsageError, "pictures is a policy, 'qdq': call sq.calibrate", lambda: sq.calibrate(model, "qdq", loader)),
        (sq.UsageError, "accuracy needs labels", lambda: sq.evaluate(model, [images])),
        (sq.UsageError, f"a batch is images, .* images {shape}: must be", lambda: sq.calibrate(model, [images[0]])),
        (sq.UsageError, "2 images, but labels are", lambda: sq.evaluate(model, [(images, torch.zeros(3))])),
        (sq.SwinQuantError, "no picture", lambda: sq.calibrate(model, [])),
        (sq.UsageError, "have no labels", lambda: sq.evaluate(model, sq.pictures(pictures / "val"))),
        (sq.UsageError, "at least 1", lambda: sq.pictures(pictures, "val", 0)),
        (sq.UsageError, "bits is .*, but must be at least 2 and at most 16", lambda: policy.bits("*", 17)),
        (sq.SwinQuantError, "nowhere: no such file or folder", lambda: sq.pictures(tmp_path / "nowhere").open()),
        (sq.UsageError, "wrap takes a torch.nn.Module, not int", lambda: sq.wrap(3, 224)),
        (sq.UsageError, "preprocess is '0..1': give", lambda: sq.wrap(torch.nn.Identity(), 8, preprocess="0..1")),
    ):
        with pytest.raises(error, match=says):
            call()


PIXELS = torch.randint(0, 256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.zeros(4).long()
DOORS = {
    "the model": lambda model, images: model(images),
    "calibrate": lambda model, images: sq.calibrate(model, [images], "qdq", passes=[]),
    "evaluate": lambda model, images: sq.evaluate(model, [(images, LABELS)], [], half="none"),
    "sensitivity": lambda model, images: sq.sensitivity(model, [images], "qdq"),
    "align": lambda model, images: sq.align(model, model, [images]),
    "analyze": lambda model, images: sq.analyze(model, images),
    "a loader": lambda model, images: sq.calibrate(model, DataLoader(TensorDataset(images, LABELS)), "qdq", passes=[]),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.float()])
def test_pixels_are_refused_where_they_enter(model, door, make):
    refused(lambda: DOORS[door](model, make(PIXELS)), "not normalised: give model.preprocess", kind=UsageError)


def test_only_the_first_call_of_a_model_looks_at_values(model, caplog):
    for _ in range(3):
        model(PIXELS / 255)
    assert caplog.text.count("pixels / 255") == 1
    refused(lambda: model(PIXELS), "uint8", kind=UsageError)


@pytest.mark.parametrize("name", ["small.safetensors", "small.pth"])
def test_half_precision_weights_are_the_rounded_ones(model, micro, tmp_path, name):
    model.save(tmp_path / name, dtype="float16")
    state, _ = read_state_dict(tmp_path / name)
    original, _ = read_state_dict(micro / "swin.pth")
    assert state.keys() == original.keys()
    for key, value in original.items():
        assert torch.equal(state[key], value.half() if value.is_floating_point() else value), key
    card = json.loads((tmp_path / name).with_suffix(".json").read_text())
    assert card["checkpoint"]["file"] == name and card["results"] == []
    assert card["source"]["sha256"] == compute_sha256(micro / "swin.pth")


def test_timm_reads_what_safetensors_reads(model, tmp_path):
    model.save(tmp_path / "weights.safetensors")
    assert "layers.0.blocks.0.attn.qkv.weight" in safetensors.torch.load_file(tmp_path / "weights.safetensors")


def test_mindspore_s_names_are_read_again(model, tmp_path):
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(sq.load(model.save(tmp_path / "x.ckpt"))(images), model(images))


def test_neither_its_own_file_nor_its_card_is_overwritten(model, tmp_path):
    file = model.save(tmp_path / "x.pth")
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}
    for name in ("x.pth", "x.ckpt"):
        with pytest.raises(sq.UsageError, match="or its run card would be lost"):
            sq.load(file).save(tmp_path / name, dtype="float16")
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_weight_beyond_float16_is_named(model, tmp_path):
    with torch.no_grad():
        model.module.head.weight[0, 0] = 1e6
    with pytest.raises(sq.SwinQuantError, match=r"head.weight does not fit into torch.float16"):
        model.save(tmp_path / "x.safetensors", dtype="float16")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def after_passes(model, pictures, tmp_path):
    """after_passes(passes, policy) -> x.pth, the float weights of what these passes calibrated."""

    def made(passes, policy):
        sq.calibrate(model, sq.pictures(pictures, "train", 4), policy, passes=passes)
        calibrated = model.save(tmp_path / "made_calib.pth")
        return sq.load(calibrated).save(tmp_path / "x.pth", dtype="float32")

    return made


def test_corrected_weights_are_no_float_baseline_of_themselves(run, after_passes, scoring_flags, tmp_path):
    """The original of both files is the float file that was calibrated."""
    done = run("evaluate", after_passes(["gptq"], sq.policy("qdq").bits("role:gemm_weight", 4)), *scoring_flags)
    assert done.code == 0 and "corrected float32" in done.out, done
    results = json.loads((tmp_path / "x.json").read_text())["results"]
    assert [result["weights"] for result in results] == ["original", "ptq"]


def test_passes_that_changed_the_weights_stay_in_the_card(after_passes, micro, card_of):
    """The card keeps `equalize` even though logits equal the original's, since maps of stages may not."""
    card = card_of(after_passes(["equalize", {"name": "range_search", "pictures": 4, "rounds": 1}], "cpu"))
    assert [one["name"] for one in card["calibration"]["passes"]] == ["equalize"] and card["policy"] is None
    assert card["source"]["sha256"] == compute_sha256(micro / "swin.pth")
