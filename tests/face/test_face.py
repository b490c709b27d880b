"""The Python face gives what the commands give, in memory, and from tensors without any file."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from pass_contexts import CutOff, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swin_quant as sq
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint.ranges import is_range
from swin_quant.config import find_config, load_config
from swin_quant.data.loader import load_batches
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.quant.linear import QuantLinear
from swin_quant.quant.passes import reconstruct
from swin_quant.quant.policy import Policy, Rule, enabled_nodes


@pytest.fixture
def model(micro):
    return sq.load(micro / "swin.pth", config=micro / "swin.yaml")


@pytest.fixture
def train(pictures):
    return sq.pictures(pictures, "train", 8)


@pytest.fixture
def val(pictures):
    return sq.pictures(pictures, "val")


def ranges(path):
    return {key: value.tolist() for key, value in torch.load(path, weights_only=True).items() if is_range(key)}


def tensors(pictures, split, size=3):
    """A DataLoader of what the pictures become."""
    opened = sq.pictures(pictures, split).open()
    batch = next(load_batches(opened, Preprocess(32, False, "bicubic", *MEAN_STD), [range(len(opened))]))
    return DataLoader(TensorDataset(batch.images, batch.labels), batch_size=size)


MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_importing_it_changes_nothing_and_takes_no_torch():
    program = (
        "import os, sys; old = dict(os.environ); import swin_quant; print('torch' in sys.modules, old == os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_everything_that_it_names_is_there_and_says_what_it_is():
    for name in sq.__all__:
        assert getattr(sq, name) is not None and name in dir(sq)
        assert name == "__version__" or getattr(sq, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sq.nonsense


def test_a_file_is_the_one_that_the_command_writes(model, train, micro, pictures, tmp_path, run):
    sq.calibrate(model, train, "ft-mode1").save(tmp_path / "face.pth")
    flags = [
        "--cfg",
        micro / "swin.yaml",
        "--checkpoint",
        micro / "swin.pth",
        "--data-path",
        pictures,
        "--device",
        "cpu",
    ]
    sample = ["--pictures", 8, "--batch", 2, "--no-eval", "--policy", "ft-mode1"]
    assert run("calibrate", *flags, *sample, "--output", tmp_path).code == 0
    assert (tmp_path / "face.pth").read_bytes() == (tmp_path / "swin_micro_calib.pth").read_bytes()
    ours, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("face", "swin_micro_calib"))
    assert ours["calibration"]["files"] == theirs["calibration"]["files"]
    assert ours["policy"] == theirs["policy"] and ours["source"]["sha256"] == theirs["source"]["sha256"]


def test_a_long_pass_that_was_cut_off_leaves_the_model_as_it_was_and_goes_on_in_its_folder(
    micro, train, tmp_path, monkeypatch, caplog
):
    one, other = (sq.load(micro / "swin.pth", config=micro / "swin.yaml") for _ in range(2))
    passes = ["equalize", {"name": "reconstruct", "iterations": 2, "batch": 4}]
    before, card = {name: value.clone() for name, value in one.module.state_dict().items()}, one.card
    learn = CutOff(reconstruct.train_unit, 2)
    monkeypatch.setattr(reconstruct, "train_unit", learn)
    with pytest.raises(KeyboardInterrupt):
        sq.calibrate(one, train, "qdq", passes=passes, folder=tmp_path)
    assert one.card is card and not one.is_calibrated and not enabled_nodes(one.module)
    assert same(one.module.state_dict(), before)
    learn.after = None
    caplog.set_level("INFO")
    sq.calibrate(one, train, "qdq", passes=passes, folder=tmp_path)
    assert "2 of" in caplog.text and not list(tmp_path.iterdir())
    assert same(one.module.state_dict(), sq.calibrate(other, train, "qdq", passes=passes).module.state_dict())


def test_calibrated_again_it_knows_the_passes_that_its_weights_saw(model, train):
    """And no more of those that chose ranges alone, which are gone."""
    few = {"name": "range_search", "pictures": 8, "rounds": 1}
    for passes, known in ((["equalize", few], ["equalize", "range_search"]), ([], ["equalize"])):
        sq.calibrate(model, train, "qdq", passes=passes)
        assert [one["name"] for one in model.card.calibration["passes"] if one["kept"]] == known


def test_calibrated_again_on_pictures_of_several_sizes_it_knows_them_too(micro, train):
    model = sq.load(micro / "swin.pth", config=micro / "swin.yaml", output_kind="features")
    sq.calibrate(model, train, "qdq", passes=["ridge"])
    assert model.card.has_own_weights
    sq.calibrate(model, [torch.randn(1, 3, side, side) for side in (64, 96)], "qdq", passes=[])
    assert model.card.has_own_weights


def test_a_pass_that_changed_nothing_leaves_the_float_model_its_own_baseline(model, pictures):
    one = sq.pictures(pictures, "train", 1)  # reconstruct has none to judge by
    sq.calibrate(model, one, "qdq", passes=["reconstruct"])
    assert not model.card.has_own_weights


def test_the_check_of_a_calibration_is_on_as_many_pictures_whatever_the_batches(micro, pictures):
    counts = set()
    for size in (1, 3, 16):
        model = sq.load(micro / "swin.pth", config=micro / "swin.yaml")
        check = sq.calibrate(model, tensors(pictures, "train", size), "qdq").card.calibration["check"]
        counts.add((check["pictures"], round(check["sqnr_db"], 4)))
    assert len(counts) == 1


@pytest.mark.parametrize("size", [1, 3, 8])
def test_batches_of_tensors_give_the_ranges_of_the_pictures(model, micro, pictures, tmp_path, size):
    sq.calibrate(model, sq.pictures(pictures, "train", 12), "qdq").save(tmp_path / "pictures.pth")
    other = sq.load(micro / "swin.pth", config=micro / "swin.yaml")
    sq.calibrate(other, tensors(pictures, "train", size), "qdq").save(tmp_path / "tensors.pth")
    assert ranges(tmp_path / "pictures.pth") == ranges(tmp_path / "tensors.pth")


def test_a_calibrated_file_is_loaded_and_saved_with_its_ranges(model, train, tmp_path):
    first = sq.calibrate(model, train, "qdq", method="entropy").save(tmp_path / "first.pth")
    second = sq.load(first).save(tmp_path / "second.pth")
    assert second.read_bytes() == first.read_bytes()
    assert RunCard.read(tmp_path / "second.json").calibration == RunCard.read(tmp_path / "first.json").calibration


def test_figures_are_those_of_the_command(model, train, val, pictures, tmp_path, run):
    file = sq.calibrate(model, train, "qdq").save(tmp_path / "x.pth")
    found = sq.evaluate(model, val, half="none", batch_size=4)
    flags = ["--cfg", model_config(model, tmp_path), "--checkpoint", file, "--data-path", pictures, "--half", "none"]
    assert run("evaluate", *flags, "--device", "cpu", "--batch", 4).code == 0
    for ours, theirs in zip(found.results, RunCard.read(tmp_path / "x.json").measured(), strict=True):
        for field in ("precision", "policy", "pictures", "acc1", "acc5", "loss", "agreement", "sqnr_db", "delta_acc1"):
            assert getattr(ours, field) == getattr(theirs, field), field
    assert found.float32.delta_acc1 is None and found.quantized.policy == "qdq"
    assert "Δ acc@1" in str(found)


def model_config(model, folder):
    import yaml

    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(model.card.config))
    return path


def test_labelled_tensors_score_as_their_pictures_do(model, train, val, pictures):
    sq.calibrate(model, train, "qdq")
    one, other = sq.evaluate(model, val, half="none"), sq.evaluate(model, tensors(pictures, "val"), half="none")
    assert [(r.acc1, r.pictures) for r in one.results] == [(r.acc1, r.pictures) for r in other.results]
    again, fewer = (sq.evaluate(model, tensors(pictures, split, 2), half="none") for split in ("val", "train"))
    first = other.quantized.dataset
    assert (first["name"], first["pictures"]) == ("tensors", 7) and again.quantized.dataset == first
    assert fewer.quantized.dataset["sha256"] != first["sha256"]  # so that nobody compares the two


def test_ranges_of_other_bits_are_refused_as_commands_refuse_them(model, train, val):
    sq.calibrate(model, train, sq.policy("qdq").bits("role:activation", 4))
    for ask in (lambda: sq.evaluate(model, val, ["qdq"]), lambda: sq.sensitivity(model, train, "qdq")):
        with pytest.raises(sq.UsageError, match="for 4 bits, and policy qdq"):
            ask()


def test_a_network_in_training_mode_scores_as_it_does_out_of_it_and_stays_in_it():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.9), nn.Flatten(), nn.LazyLinear(4))
    images, labels = torch.randn(32, 3, 8, 8), torch.arange(32) % 4
    network(images)  # norms have seen something
    state = {name: value.clone() for name, value in network.eval().state_dict().items()}
    expected = int((network(images).argmax(1) == labels).sum())
    network.train()
    scored = sq.evaluate(sq.Model(network), [(images, labels)], half="none")
    assert scored.float32.acc1 == pytest.approx(100 * expected / 32)
    sq.analyze(network, images, check_replacements=True)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    network.eval()[2].train()
    assert sq.evaluate(sq.Model(network), [(images, labels)], half="none").float32.acc1 == scored.float32.acc1
    assert network[2].training and not network.training


@pytest.mark.parametrize("training", [True, False])
def test_what_is_timed_of_a_network_is_its_own_work_alone(training):
    """The mode of its parts is set once, however many batches there are."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).train(training)
    switched = []
    network.train = lambda mode=True: switched.append(mode) or nn.Sequential.train(network, mode)
    asked = []
    for count in (1, 5):
        sq.evaluate(sq.Model(network), count * [(torch.randn(2, 3, 2, 2), torch.zeros(2))])
        asked.append(len(switched))
    assert asked[1] == 2 * asked[0] and network.training is training


def test_called_it_gives_what_is_deployed(model, train):
    images = torch.randn(2, 3, 32, 32)
    plain = model(images)
    assert torch.equal(plain, model.module(images))
    sq.calibrate(model, train, "qdq")
    assert not torch.equal(model(images), plain) and torch.equal(model.module(images), plain)
    assert "policy qdq" in repr(model) and "8 pictures" in repr(model)


def test_what_cannot_be_exported_writes_nothing_and_a_float_model_is_not_called_calibrated(model, tmp_path):
    model.file = None
    for backend, options in (("tpu", {}), ("onnx", {"colour": "red"})):
        with pytest.raises(sq.UsageError):
            sq.export(model, backend, tmp_path, precision="float", **options)
    assert not list(tmp_path.iterdir())
    for options in ({}, {"precision": "float", "policy": "qdq"}, {"precision": "float", "saturation_safe": True}):
        with pytest.raises(sq.SwinQuantError):
            sq.export(model, "onnx", tmp_path, **options)
    assert not list(tmp_path.iterdir())
    sq.export(model, "torchscript", tmp_path, precision="float")
    assert [path.name for path in tmp_path.glob("*.pth")] == ["swin_micro_float.pth"]


@pytest.mark.parametrize("calibrated", [False, True])
def test_weights_that_changed_since_their_file_are_not_exported_as_it_has_them(
    model, train, val, tmp_path, caplog, calibrated
):
    if calibrated:
        sq.calibrate(model, train, "qdq")
        model.save(tmp_path / "x.pth")
    sq.evaluate(model, val, half="none")
    assert not model.is_changed
    with torch.no_grad():
        next(model.module.parameters()).mul_(2)
    with pytest.raises(UsageError, match="weights were changed since .*: `save` it to another file first"):
        sq.export(model, "onnxruntime", tmp_path / "out", precision="int8" if calibrated else "float")
    assert model.card.results
    saved = sq.load(model.save(tmp_path / "changed.pth"))
    assert not model.is_changed and model.card.results == [] and saved.card.source is None
    assert ("ranges are those of before" in caplog.text) == calibrated
    assert torch.equal(next(saved.module.parameters()), next(model.module.parameters()))


def test_a_model_that_was_changed_and_calibrated_is_not_compared_with_the_file_it_came_from(model, train):
    with torch.no_grad():
        next(model.module.parameters()).mul_(2)
    assert sq.calibrate(model, train, "qdq").card.source is None


def test_of_a_data_set_a_task_takes_the_split_that_its_command_takes(model, pictures):
    place = sq.pictures(pictures, count=4)
    record = sq.calibrate(model, place, "qdq").card.calibration
    assert record["split"] == "train" and set(record["files"]) <= set(sq.pictures(pictures, "train").open().names)
    costs = [sq.sensitivity(model, one).record["pictures_sha256"] for one in (place, replace(place, split="train"))]
    assert costs[0] == costs[1]
    (result, *_) = sq.evaluate(model, place, half="none").results
    assert result.dataset["split"] == "val"


def test_a_file_of_the_user_s_own_is_not_written_over(model, train, tmp_path):
    sq.calibrate(model, train, "qdq")
    own = tmp_path / "swin_micro_calib.pth"
    own.write_bytes(b"mine")
    with pytest.raises(sq.UsageError, match="swin_micro_calib.pth: was not written by `save` of swin_micro"):
        sq.export(model, "onnx", tmp_path)
    assert own.read_bytes() == b"mine"


def test_a_checkpoint_that_fits_several_configurations_asks_for_config_as_it_is_called_here(tmp_path):
    cfg = load_config(find_config("swinv2_tiny_patch4_window8_256"))
    state = {key: value for key, value in build_model(cfg).state_dict().items() if not key.endswith(("_amax", "index"))}
    without = {key: value for key, value in state.items() if not key.endswith(("attn_mask", "coords_table"))}
    torch.save(without, tmp_path / "mine.pth")
    with pytest.raises(UsageError, match="give config NAME"):
        sq.load(tmp_path / "mine.pth")


def test_an_engine_is_given_libraries_with_operators(model, tmp_path):
    pytest.importorskip("openvino")
    exported = sq.export(model, "openvino", tmp_path, precision="float")
    with pytest.raises(UsageError, match="libnone.so: no such file"):
        exported.load(extensions=[tmp_path / "libnone.so"])


@pytest.mark.slow
def test_an_exported_model_runs_and_can_be_opened_again(model, train, tmp_path):
    pytest.importorskip("onnxruntime")
    exported = sq.export(sq.calibrate(model, train, "qdq"), "onnxruntime", tmp_path)
    images = torch.randn(2, 3, 32, 32)
    assert (exported.load()(images) - model(images)).abs().mean() < 0.02  # verify's tolerance
    again = sq.artifact(exported.file)
    assert torch.equal(again.load("onnxruntime")(images), exported.load()(images))
    assert "policy qdq" in repr(again)  # the policy that was calibrated, though onnxruntime has a better one


@pytest.mark.slow
def test_an_artifact_is_verified_and_names_what_is_in_a_picture(model, train, val, pictures, tmp_path):
    pytest.importorskip("onnxruntime")
    exported = sq.export(sq.calibrate(model, train, "qdq"), "onnxruntime", tmp_path)
    with pytest.raises(UsageError, match="give sq.pictures"):
        sq.verify(exported, [torch.zeros(1, 3, 32, 32)])
    found = sq.verify(exported, val)
    assert found and found.failures == [] and "fake-quant" in str(found)
    assert json.loads(exported.file.with_suffix(".json").read_text())["verification"][0]["passed"] is True
    folder = pictures / "val" / "cat"
    ours, theirs = sq.predict(model, folder, top=3), sq.predict(exported, folder, top=3)
    assert list(ours) == list(theirs) == sorted(str(file) for file in folder.iterdir())
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        assert sum(guess.probability for guess in one) == pytest.approx(1)
        assert {g.index: g.probability for g in one} == pytest.approx({g.index: g.probability for g in other}, abs=0.02)


def test_an_artifact_is_verified_and_asked_on_the_device_that_is_named(write_config, train, val, tmp_path, monkeypatch):
    """Where there is none it is said: references on a CPU would tell nothing of the kernels."""
    for looks in ("torch.cuda.is_available", "torch.cuda.device_count"):
        monkeypatch.setattr(looks, lambda: 0)
    config = write_config(tmp_path, "swin", EMBED_DIM=32, DEPTHS=[1, 1])
    torch.save({"model": build_model(load_config(config)).state_dict()}, tmp_path / "x.pth")
    model = sq.calibrate(sq.load(tmp_path / "x.pth", config=config), train, "cuda")
    exported = sq.export(model, "cuda", tmp_path)
    for check in (partial(sq.verify, exported, val), partial(sq.predict, exported, val.path)):
        with pytest.raises(sq.UsageError, match="device cuda: .* no GPU"):
            check(device="cuda")
    assert sq.artifact(exported.file).card.verification == []


class Own(nn.Module):
    """A model of the user's, of two of our layers."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = QuantLinear(3 * 32 * 32, 16), QuantLinear(16, 3)

    def forward(self, images):
        return self.head(self.hidden(images.flatten(1)).relu())


def test_a_model_of_the_user_s_own_needs_no_file_and_no_config(pictures, tmp_path):
    policy = sq.policy("float").on("role:gemm_input", "role:gemm_weight")
    model = sq.calibrate(Own().eval(), tensors(pictures, "train"), policy)
    found = sq.evaluate(model, tensors(pictures, "val"), half="none")
    assert [result.precision for result in found.results] == ["float32", "int8"]
    assert found.quantized.agreement is not None and found.quantized.sqnr_db > 20
    nodes = [
        f"{layer}.{node}_quantizer" for layer in ("hidden", "head") for node in ("_input", "_weight", "_aftergemm")
    ]
    ends = {f"{node}._bounds" for node in nodes if "_weight" not in node}
    assert ranges(model.save(tmp_path / "own.pth")).keys() == {f"{node}._amax" for node in nodes} | ends
    with pytest.raises(sq.UsageError, match="was not built from a config"):
        _ = model.config
    with pytest.raises(sq.UsageError, match="preprocess"):
        sq.calibrate(Own(), sq.pictures(pictures, "train", 8), policy)


def test_a_policy_shows_all_that_its_rules_say():
    html = sq.policy("cpu").html()
    assert "symmetric" in html and "False" in html
    for field in fields(Rule):
        rule = Rule(**{field.name: {"block": 32, "bits": 4, "amax": 1.5}.get(field.name, ("shown",))})
        assert any(text in Policy("p", (rule,)).html() for text in ("shown", "32", "4", "1.5")), field.name


def test_policies_are_built_from_others():
    built = sq.policy("qdq").off("layers.1.*").bits("*.fc2._weight_quantizer", 4).on("layers.0.*.qkv._input_quantizer")
    assert built.name == "qdq -layers.1.* *.fc2._weight_quantizer=4 +layers.0.*.qkv._input_quantizer"
    assert [(rule.disable, rule.nodes, rule.bits, rule.enable) for rule in built.rules[-3:]] == [
        (("layers.1.*",), (), None, ()),
        ((), ("*.fc2._weight_quantizer",), 4, ()),
        ((), (), None, ("layers.0.*.qkv._input_quantizer",)),
    ]
    with pytest.raises(sq.UsageError, match="bits is .*, but must be at least 2 and at most 8"):
        sq.policy("qdq").bits("*", 9)


def test_what_is_wrong_is_one_sentence(model, train, val, pictures):
    with pytest.raises(sq.UsageError, match="'nothing.*' names no node of this model"):
        sq.calibrate(model, train, sq.policy("qdq").off("nothing.*"))
    unread = iter([torch.zeros(2, 3, 32, 32)])
    for word, value in (("method", "mes"), ("percentile", 150)):
        with pytest.raises(sq.UsageError, match=f"^{word} {value}: must be "):
            sq.calibrate(model, unread, **{word: value})
    assert len(list(unread)) == 1
    with pytest.raises(sq.SwinQuantError, match="have no range"):
        sq.evaluate(model, val, ["qdq"])
    with pytest.raises(sq.UsageError, match="accuracy needs labels"):
        sq.evaluate(model, [torch.zeros(2, 3, 32, 32)])
    with pytest.raises(sq.UsageError, match=r"a batch is images .*, not \[3, 32, 32\]"):
        sq.calibrate(model, [torch.zeros(3, 32, 32)])
    with pytest.raises(sq.UsageError, match="2 images, but labels are"):
        sq.evaluate(model, [(torch.zeros(2, 3, 32, 32), torch.zeros(3))])
    with pytest.raises(sq.SwinQuantError, match="no picture"):
        sq.calibrate(model, [])
    with pytest.raises(sq.UsageError, match="have no labels"):
        sq.evaluate(model, sq.pictures(pictures / "val"))
    with pytest.raises(sq.UsageError, match="at least 1"):
        sq.pictures(pictures, "val", 0)


@pytest.fixture
def shown(model, train, val, tmp_path):
    """Everything that a notebook may be left with."""
    pytest.importorskip("onnxruntime")
    policy = sq.policy("qdq").off("layers.1.*").bits("*.fc2._weight_quantizer", 4)
    sq.calibrate(model, train, policy).save(tmp_path / "a&<b>.pth")
    exported = sq.export(model, "onnxruntime", tmp_path)
    costs = sq.sensitivity(model, sq.pictures(val.path, "val", 2))
    return {
        "policy": (policy, "layers.1.*"),
        "model": (model, "a&amp;&lt;b&gt;.pth"),
        "evaluation": (sq.evaluate(model, val, half="none"), "SQNR"),
        "artifact": (exported, "onnxruntime"),
        "verification": (sq.verify(exported, sq.pictures(val.path, "val", 3)), "verdict"),
        "costs": (costs, "only it<br>SQNR dB"),
    }


@pytest.mark.slow
def test_in_a_notebook_everything_is_a_table_and_in_a_shell_a_line_or_a_table(shown):
    for what, (thing, word) in shown.items():
        page = thing._repr_html_()
        assert "<table>" in page and page.count("<tr>") > 1 and "<pre>" not in page, what
        assert word in page, (what, page)
    assert repr(shown["policy"][0]) == "policy qdq -layers.1.* *.fc2._weight_quantizer=4, 4 rules"
