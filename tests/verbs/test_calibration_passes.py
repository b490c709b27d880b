"""Passes after a calibration: the ranges are those of the network that they left; recipes, messages and records; on
any number of ranks, and through every later verb."""

import shutil

import pytest
import torch
from commands import command
from pass_contexts import Step, same

from swin_quant.checkpoint import save_float
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.passes import Pass, equalize
from swin_quant.quant.passes.recipe import load_passes, parse_steps
from swin_quant.quant.passes.run import PassPlan
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.passes.trial import copy_state
from swin_quant.quant.policy import Rule, apply_policy, load_policy
from swin_quant.verbs.calibration import Observed
from swin_quant.verbs.calibration_passes import improve, improved, make_context, outliers_left
from tests.outliers import plant


@torch.no_grad()
def halve(context, options):
    for block in context.units.values():
        if hasattr(block, "norm2"):
            block.norm2.weight.mul_(0.5)
            block.norm2.bias.mul_(0.5)
            block.mlp.fc1.weight.mul_(2)
    return "the same function"


@torch.no_grad()
def spoil(context, options):
    context.model.head.weight.mul_(-1)
    return "spoiled"


TWO_BLOCKS = {"EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
HALVE, SPOIL = (Step(Pass(run, type(None), keeps_function=True)) for run in (halve, spoil))


@pytest.fixture
def model(tiny_model, use_policy):
    return use_policy(tiny_model("swin", **TWO_BLOCKS), "qdq")


@pytest.mark.parametrize("steps", [(HALVE, SPOIL), (SPOIL, HALVE)])
def test_a_rejected_pass_leaves_the_statistics_after_the_kept_one(steps, model):
    first = calibrate(model, [IMAGES], Method())
    found, records = improve(make_context(model, [(0, IMAGES)], Method()), first, [(0, IMAGES)], PassPlan(steps))
    assert [one["kept"] for one in records] == [step is HALVE for step in steps]
    anew = calibrate(model, [IMAGES], Method())
    assert found.largest == anew.largest and found.largest != first.largest


@pytest.mark.parametrize("least, cured", [(equalize._BETTER, True), (0.0, False)])
def test_outliers_that_equalize_leaves_are_reported(least, cured, model, monkeypatch):
    """Outliers are reported where equalize found no improvement, and only at enabled nodes: float ones lose nothing by
    them."""
    monkeypatch.setattr(equalize, "_BETTER", least)
    plant(model, "norms", 100)
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    first = calibrate(model, [images], Method())
    _, records = improve(
        make_context(model, [(0, images)], Method()), first, [(0, images)], PassPlan(parse_steps(["equalize"]))
    )

    def places():
        return [one.place for one in outliers_left(make_context(model, [(0, images)], Method()), records) if one.cure]

    assert records[0]["kept"] and (places() == []) is cured
    apply_policy(model, load_policy("qdq").and_then(Rule(disable=("layers.*",))))
    assert not any(place.startswith("layers.") for place in places())


@pytest.mark.slow
def test_a_network_in_training_mode_is_improved_as_out_of_it_and_stays_in_it(tiny_model, use_policy):
    method, found = Method(), []
    for training in (False, True):
        model = use_policy(tiny_model("swin", **TWO_BLOCKS, DROP_RATE=0.5, DROP_PATH_RATE=0.5), "qdq").train(training)
        model.layers[0].eval()
        first = Observed(calibrate(model, [IMAGES], method), {}, method, [], [(0, IMAGES)])
        improved(model, first, PassPlan(parse_steps(["gptq"])), None, load_policy("qdq"), Scratch())
        found.append(copy_state(model))
        assert model.training is model.layers[1].training is training and not model.layers[0].training
    assert same(*found)


@pytest.mark.parametrize(
    "nodes, bits, name",
    [("layers.0.blocks.0.mlp.fc1._weight_quantizer", 4, "equalize"), ("role:gemm_weight", 7, "equalize"),
     ("role:gemm_weight", 4, "gptq"), ("role:activation", 4, "reconstruct")],
)  # fmt: skip
def test_a_recipe_goes_by_the_bits_that_most_nodes_have(tiny_model, tmp_path, nodes, bits, name):
    file = tmp_path / "mine.yaml"
    file.write_text("passes: [equalize]\nbelow_8_bits: [gptq]\nactivations_below_8_bits: [reconstruct]\n")
    model = tiny_model()
    apply_policy(model, load_policy("qdq").and_then(Rule(nodes=(nodes,), bits=bits)))
    assert [step.name for step in PassPlan.from_recipe(load_passes(str(file))).for_model(model).steps] == [name]


def weights_of(path):
    return {key: value for key, value in torch.load(path, weights_only=True).items() if not key.endswith("_amax")}


def told_in(card):
    return {one["kind"]: one for one in card["calibration"]["advice"]}


@pytest.mark.slow
def test_channels_that_stand_out_are_evened_out_unasked_and_said(run, float_flags, planted, card_of, tmp_path):
    flags = [*float_flags, "--checkpoint", planted, "--policy", "ft-mode1", "--output"]
    done = run("calibrate", *flags, tmp_path / "on")
    assert done.code == 0 and "channels stand out" in done.err and "--passes none" in done.err, done
    (one,) = card_of(tmp_path / "on" / "swin_micro_calib.pth")["calibration"]["passes"]
    assert one["name"] == "equalize" and one["kept"] and one["sqnr_db"][1] > one["sqnr_db"][0] + 5
    assert "outliers" not in told_in(card_of(tmp_path / "on" / "swin_micro_calib.pth"))
    off = run("calibrate", *flags, tmp_path / "off", "--passes", "none")
    card = card_of(tmp_path / "off" / "swin_micro_calib.pth")
    assert off.code == 0 and "passes" not in card["calibration"]
    (line,) = [line for line in off.err.splitlines() if "channels stand out" in line and "equalize" in line]
    advice = told_in(card)["outliers"]
    assert advice["nodes"] and "‹" not in advice["text"] and line.startswith("advice: ")
    assert advice["text"] in line
    before = torch.load(planted, weights_only=True)["model"]
    kept = weights_of(tmp_path / "off" / "swin_micro_calib.pth")
    assert all(torch.equal(kept[key], before[key]) for key in kept if key in before)


@pytest.mark.parametrize(
    "flags, message", [(["--passes", "slow"], "fast"), (["--passes", "fast", "--policy", "float"], "quantizes nothing")]
)
def test_invalid_passes_are_refused_in_one_line(flags, message, run, float_flags, tmp_path):
    done = run("calibrate", *float_flags, "--output", tmp_path, *flags)
    assert message in done.error(2)


def test_the_pass_that_a_policy_forbids_is_named(run, float_flags, write_config, tmp_path):
    flags = ["--cfg", write_config(tmp_path, "swin", EMBED_DIM=32), "--random-weights", *float_flags[4:]]
    done = run("calibrate", *flags, "--policy", "w4a16-blocks", "--passes", "fast", "--output", tmp_path)
    assert done.code == 2 and "error: gptq: takes no weights in blocks" in done.err.splitlines()[-1], done
    assert "equalize" not in done.err and [file.name for file in tmp_path.iterdir()] == ["swin.yaml"]


@pytest.fixture(scope="module")
def changed_once(write_config, randomise, pictures, tmp_path_factory):
    """A calibrated checkpoint with equalized channels and corrected biases; its original is planted.pth."""
    folder = tmp_path_factory.mktemp("changed")
    config = write_config(folder, "swin", EMBED_DIM=32, DEPTHS=[1, 1])  # head sizes that FasterTransformer supports
    model = plant(randomise(build_model(load_config(config))), "v", 100)
    save_float(model, folder / "planted.pth")
    words = ["calibrate", folder / "planted.pth", "--cfg", config, "--data-path", pictures, "--pictures", 8]
    words += ["--batch", 4, "--policy", "ft-mode1", "--passes", "fast"]
    command(*words, "--output", folder)
    return folder / "swin_micro_calib.pth"


@pytest.fixture
def changed(changed_once, tmp_path):
    """A copy of it, which results are added to."""
    shutil.copytree(changed_once.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / changed_once.name


@pytest.mark.slow
def test_every_backend_computes_what_the_changed_weights_say(run, changed, pictures, tmp_path):
    for target, policy in (("fastertransformer", "ft-mode1"), ("openvino", "cpu")):
        folder = tmp_path / target
        run("export", changed, "--for", target, "--policy", policy, "--output", folder).ok()
        (file,) = (path for path in folder.iterdir() if path.suffix in (".onnx", ".safetensors"))
        run("verify", file, "--data-path", pictures, "--checkpoint", changed).ok()


@pytest.mark.slow
def test_deltas_are_to_the_file_that_the_user_had(run, changed, pictures, card_of):
    done = run("evaluate", changed, "--data-path", pictures, "--policy", "ft-mode1", "qdq", "--half", "none")
    assert done.code == 0 and "corrected" in done.out, done
    results = card_of(changed)["results"]
    assert {result["weights"] for result in results if result["policy"]} == {"ptq"}
    assert all(result["delta_acc1"] is not None for result in results if result["policy"])
