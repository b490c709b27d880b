"""Passes after a calibration: ranges, recipes, messages and records; what `equalize` does to maps and engines."""

import shutil

import pytest
import torch
from commands import command
from nightly import share
from pass_contexts import Step, same
from vnni import exact_int8

import swin_quant as sq
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import save_float
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.layer import made_factors
from swin_quant.quant.passes import Pass, equalize
from swin_quant.quant.passes.recipe import load_passes, parse_steps
from swin_quant.quant.passes.run import PassPlan
from swin_quant.quant.passes.trial import copy_state
from swin_quant.quant.policy import Rule, apply_policy, dequantize, load_policy
from swin_quant.verbs.calibration import Observed, improve, improved, make_context, outliers_left
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
    found, records = improve(make_context(model, [IMAGES], Method()), first, [IMAGES], PassPlan(steps))
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
    first, plan = calibrate(model, [images], Method()), PassPlan(parse_steps(["equalize"]))
    _, records = improve(make_context(model, [images], Method()), first, [images], plan)

    def places():
        return [one.place for one in outliers_left(make_context(model, [images], Method()), records) if one.cure]

    assert records[0]["kept"] and (places() == []) is cured
    apply_policy(model, load_policy("qdq").and_then(Rule(disable=("layers.*",))))
    assert not any(place.startswith("layers.") for place in places())


def test_a_network_in_training_mode_is_improved_as_out_of_it_and_stays_in_it(tiny_model, use_policy):
    method, found = Method(), []
    for training in (False, True):
        model = use_policy(tiny_model("swin", **TWO_BLOCKS, DROP_RATE=0.5, DROP_PATH_RATE=0.5), "qdq").train(training)
        model.layers[0].eval()
        first = Observed(calibrate(model, [IMAGES], method), {}, method, [], [IMAGES])
        improved(model, first, PassPlan(parse_steps(["gptq"])), None, load_policy("qdq"))
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
    assert [step.name for step in PassPlan(recipe=load_passes(str(file))).for_model(model).steps] == [name]


def weights_of(path):
    return {key: value for key, value in torch.load(path, weights_only=True).items() if not key.endswith("_amax")}


def told_in(card):
    return {one["kind"]: one for one in card["calibration"]["advice"]}


def test_channels_that_stand_out_are_evened_out_unasked_and_said(run, float_flags, planted, card_of, tmp_path):
    flags = [*float_flags, "--checkpoint", planted, "--policy", "ft-mode1", "--output"]
    done = run("calibrate", *flags, tmp_path / "on")
    assert done.code == 0 and "outlier channels" in done.err and "--passes none" in done.err, done
    (one,) = card_of(tmp_path / "on" / "swin_micro_calib.pth")["calibration"]["passes"]
    assert one["name"] == "equalize" and one["kept"] and one["sqnr_db"][1] > one["sqnr_db"][0] + 5
    assert "outliers" not in told_in(card_of(tmp_path / "on" / "swin_micro_calib.pth"))
    off = run("calibrate", *flags, tmp_path / "off", "--passes", "none")
    card = card_of(tmp_path / "off" / "swin_micro_calib.pth")
    assert off.code == 0 and "passes" not in card["calibration"]
    (line,) = [line for line in off.err.splitlines() if "outlier channels" in line and "equalize" in line]
    advice = told_in(card)["outliers"]
    assert advice["nodes"] and "‹" not in advice["text"] and line.startswith("advice: ")
    assert advice["text"] in line
    before = torch.load(planted, weights_only=True)["model"]
    kept = weights_of(tmp_path / "off" / "swin_micro_calib.pth")
    assert all(torch.equal(kept[key], before[key]) for key in kept if key in before)


def test_invalid_passes_are_refused_in_one_line(run, float_flags, tmp_path):
    words = ["calibrate", *float_flags, "--output", tmp_path, "--passes"]
    assert "fast" in run(*words, "slow").error(2)
    assert "quantizes nothing" in run(*words, "fast", "--policy", "float").error(2)


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


@exact_int8
def test_every_backend_computes_what_the_changed_weights_say(run, changed, pictures, tmp_path):
    for target, policy in (("fastertransformer", "ft-mode1"), ("openvino", "cpu")):
        folder = tmp_path / target
        run("export", changed, "--for", target, "--policy", policy, "--output", folder).ok()
        (file,) = (path for path in folder.iterdir() if path.suffix in (".onnx", ".safetensors"))
        run("verify", file, "--data-path", pictures, "--checkpoint", changed).ok()


def test_deltas_are_to_the_file_that_the_user_had(run, changed, pictures, card_of):
    done = run("evaluate", changed, "--data-path", pictures, "--policy", "ft-mode1", "qdq", "--half", "none")
    assert done.code == 0 and "corrected" in done.out, done
    results = card_of(changed)["results"]
    assert {result["weights"] for result in results if result["policy"]} == {"ptq"}
    assert all(result["delta_acc1"] is not None for result in results if result["policy"])


def calibrated(micro, file, where=None):
    model = sq.load(micro / "swinv2.pth", config=micro / "swinv2.yaml")
    if where:
        plant(model.module, where, 100)
    return sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "qdq").save(file)


def test_a_classifier_whose_stream_was_evened_out_is_no_backbone(micro, tmp_path):
    file = calibrated(micro, tmp_path / "planted.pth", "stream")
    assert sq.load(file)(torch.randn(1, 3, 32, 32)).shape[1] > 1
    with pytest.raises(SwinQuantError, match=r"planted.pth: `equalize`.*calibrate the float checkpoint with") as told:
        sq.load(file, output_kind="features")
    assert "\n" not in str(told.value)


@pytest.fixture
def off_centre(micro):
    """make(output_kind) -> a V1 whose channels before attention are far from zero."""

    def make(**how):
        model = sq.load(micro / "swin.pth", config=micro / "swin.yaml", **how)
        with torch.no_grad():
            for norm in (block.norm1 for layer in model.module.layers for block in layer.blocks):
                norm.bias[:4] += 10
        return model

    return make


def test_equalize_keeps_the_maps_of_padded_pictures(off_centre):
    """Padding after a norm is zero beside tokens: attention's answer to it depends on attention's own biases."""
    model, padded = off_centre(output_kind="features"), torch.randn(2, 3, 34, 46)
    with torch.inference_mode():
        before = model.module(padded)
    sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "qdq", passes=["equalize"])
    assert "units gain" in model.card.calibration["passes"][0]["note"]
    with torch.inference_mode():
        assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(model.module(padded), before, strict=True))


PICTURES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory, write_config, randomise):
    """The file of a V2 that every engine runs, with an outlier channel in the last stream."""
    folder = tmp_path_factory.mktemp("uneven")
    config = write_config(folder, "swinv2", EMBED_DIM=32, NUM_HEADS=[1, 2])
    module = randomise(build_model(load_config(config)))
    with torch.no_grad():
        module.layers[-1].blocks[0].norm1.weight[3] *= 30
        module.head.weight[:, 3] = 0
    save_float(module, folder / "v2.pth")
    return folder / "v2.pth", config


@pytest.fixture(scope="module")
def evened(uneven, tmp_path_factory):
    """evened(policy) -> the model after `equalize`, from a file that is made once."""
    made = {}

    def make(policy):
        if policy not in made:
            model = sq.calibrate(sq.load(*uneven), [PICTURES], policy, passes=["equalize"])
            made[policy] = model.save(tmp_path_factory.mktemp("evened") / "evened.pth")
        return sq.load(made[policy])

    return make


@pytest.mark.parametrize("policy, engine", share([("qdq", "onnxruntime"), ("cuda", "cuda")], 2))
def test_engines_compute_with_them(policy, engine, evened, tmp_path):
    model = evened(policy)
    with torch.inference_mode():
        expected = model(PICTURES)
    found = torch.as_tensor(sq.export(model, engine, tmp_path).load()(PICTURES))
    noise = (expected - model.module(PICTURES)).abs().mean()
    assert (found - expected).abs().mean() < max(0.02, noise)


def test_fastertransformer_has_no_such_multiplication(evened, uneven, tmp_path):
    with pytest.raises(UsageError, match=r"`equalize` put factors at norm.factors.*under ft-mode1"):
        again = evened("qdq")
        sq.export(sq.calibrate(again, [PICTURES], "ft-mode1", passes=[]), "fastertransformer", tmp_path / "ft")
    model = sq.calibrate(sq.load(*uneven), [PICTURES], "ft-mode1", passes=["equalize"])
    assert not made_factors(model.module)
    assert sq.export(model, "fastertransformer", tmp_path / "ft").file.is_file()


def test_other_tools_get_the_names_that_they_know(evened, tmp_path):
    model = evened("qdq")
    plain = sq.load(model.save(tmp_path / "plain.safetensors"))
    assert not made_factors(plain.module)
    with torch.inference_mode():
        dequantize(model.module)
        assert torch.allclose(plain.module(PICTURES), model.module(PICTURES), atol=1e-3)
