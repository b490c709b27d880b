"""`export`: every target, from a calibrated file or from memory; the fastest form by `--tune`; refusals in one line."""

import json
from dataclasses import replace
from math import prod

import onnx
import onnx.numpy_helper
import pytest
import torch
from cards_of_results import TRAINING
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import swin_quant as sq
from swin_quant.backends.onnx_reader.file import open_onnx
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import targets
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.quant.policy import Rule, load_policy
from swin_quant.verbs import export_here, quantize, timing
from swin_quant.verbs.export_here import fastest
from swin_quant.verbs.export_target import policy_for


def exported(done):
    """The artifact whose path is the only output of a successful export."""
    return open_artifact(done.ok().out.strip())


def test_onnx_takes_config_and_preprocessing_from_the_card(run, calibrated, tmp_path):
    done = run("export", "--checkpoint", calibrated, "--for", "openvino", "--output", tmp_path / "new")
    artifact = exported(done)
    assert artifact.file.parent == tmp_path / "new"
    assert artifact.record["precision"] == "int8" and artifact.record["options"]["target"] == "openvino"
    before = RunCard.read(calibrated.with_suffix(".json"))
    assert artifact.card.preprocess == before.preprocess
    assert artifact.card.checkpoint == {**before.checkpoint, "path": str(calibrated)}
    assert artifact.card.policy["name"] in targets()["openvino"].exports.policies
    assert open_onnx(artifact.file).quantizers > 0
    assert f"next: swin-quant verify {artifact.file} --data-path DIR" in done.err


WEIGHTS = "role:gemm_weight"
CHANGES = {
    "bits and granularity": (
        ["--wprec", 6, "--quant-per-tensor"],
        lambda policy: policy.and_then(Rule(nodes=(WEIGHTS,), bits=6, granularity="per-tensor")),
    ),
    "off and range": (
        ["--off", "*.attn.*", "*mlp.fc2*", "--narrow-range"],
        lambda policy: policy.narrow_range(WEIGHTS).off("*.attn.*", "*mlp.fc2*"),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("change", CHANGES)
def test_a_policy_is_changed_in_place_as_python_changes_it(run, calibrated, tmp_path, change):
    flags, changed = CHANGES[change]
    words = ("--for", "onnx", "--policy", "qdq", *flags, "--output", tmp_path)
    artifact = exported(run("export", "--checkpoint", calibrated, *words))
    graph = onnx.load(artifact.file).graph
    assert artifact.card.policy["rules"] == changed(load_policy("qdq")).to_dict()["rules"]
    assert artifact.card.policy["name"].startswith("qdq ")
    weights = [onnx.numpy_helper.to_array(one) for one in graph.initializer if one.data_type == onnx.TensorProto.INT8]
    weights = [weight for weight in weights if weight.ndim == 2]
    scales = [node.name for node in graph.node if node.op_type == "QuantizeLinear"]
    assert weights and scales
    if change == "off and range":
        assert not any(".attn." in name or "fc2" in name for name in scales)
        assert min(weight.min() for weight in weights) == -127
    else:
        assert max(abs(weight.astype(int)).max() for weight in weights) <= 32


def test_fastertransformer_takes_the_mode_of_the_card(run, with_card, calibrated_32, tmp_path):
    checkpoint = with_card(calibrated_32, policy=load_policy("ft-mode2").to_dict())
    words = ("--for", "fastertransformer", "--sm", 75, "--check", "--output", tmp_path / "new")
    done = run("export", checkpoint, *words)
    artifact = exported(done)
    assert artifact.record["options"]["sm"] == 75 and artifact.card.policy["name"] == "ft-mode2"
    with safe_open(artifact.file, "pt") as weights:
        assert len(weights.keys()) > 0
    assert "check: " in done.err


def test_a_float_checkpoint_is_refused(run, micro, tmp_path):
    words = ("--cfg", micro / "swin.yaml", "--for", "onnxruntime", "--output", tmp_path / "new")
    refused = run("export", "--checkpoint", micro / "swin.pth", *words)
    assert "was never calibrated; run `swin-quant calibrate`" in refused.error(1)
    assert "zero points" not in refused.err


MEANINGLESS = [
    ("--for onnx --sm 80", "--sm: means nothing to --for onnx"),
    ("--for fastertransformer --opset 20", "--opset: means nothing to --for fastertransformer"),
    ("--for onnx --opset 16", "opset 16: must be 17 to 20"),
    ("--for openvino --float-type float16", "give --float-type float32"),
    ("--for openvino --policy cpu --int4-weights", "has no weights of 4 bits"),
    ("--for onnx --policy none-such", "none-such"),
    ("--for onnx --off *.attn.*", "name the policy that --off"),
    ("--for onnx --off *.attn.* --policy qdq --precision float", "leave it out with --precision float"),
    ("--for fastertransformer", "head width 16"),
    ("--for openvino --policy qdq --saturation-safe", "openvino multiplies two activations where policy qdq"),
    ("--for tensorrt --saturation-safe", "means nothing to --for tensorrt"),
    ("--for openvino --precision float --saturation-safe", "nothing to --for openvino with precision float"),
    ("--for=nowhere", "nowhere"),
    ("--for onnx --opts DATA.IMG_SIZE", "--opts takes pairs KEY VALUE"),
]


@pytest.mark.parametrize(("words", "says"), MEANINGLESS)
def test_meaningless_options_are_refused_before_anything_is_written(run, calibrated, tmp_path, words, says):
    assert says in run("export", "--checkpoint", calibrated, *words.split(), "--output", tmp_path / "new").error(2)
    assert not (tmp_path / "new").exists()


def test_fastertransformer_needs_one_of_its_policies(run, with_card, calibrated_32, tmp_path):
    for policy, says in (
        (load_policy("qdq").to_dict(), ["needs the policy ft-mode1 or ft-mode2, the run card's is qdq: give --policy"]),
        ({"name": "ft-mode1", "rules": [{"enable": ["role:gemm_input"]}]}, ["policy ft-mode1 (mine ", "it differs in"]),
    ):
        theirs = with_card(calibrated_32, policy=policy)
        error = run("export", theirs, "--for", "fastertransformer", "--output", tmp_path / "new").error(2)
        assert all(part in error for part in says)


@pytest.mark.parametrize("target", ["onnx", "onnxruntime", "openvino", "tensorrt", "cuda"])
def test_a_policy_of_one_s_own_in_the_card_stays(target, caplog):
    own = load_policy("qdq").to_dict() | {"name": "searched"}
    assert policy_for(target, RunCard("x", {}, {}, policy=own)).name == "searched"
    built_in = policy_for(target, RunCard("x", {}, {}, policy=load_policy("ft-mode1").to_dict()))
    assert built_in.name in targets()[target].exports.policies
    assert policy_for(target, None) == built_in
    float8 = policy_for(target, RunCard("x", {}, {}, policy=load_policy("tensorrt-fp8").to_dict()))
    assert float8.name == ("tensorrt-fp8" if target in ("onnx", "tensorrt", "cuda") else built_in.name)
    assert (f"{built_in.name} goes into the file, not the run card's tensorrt" in caplog.text) == (float8 == built_in)
    assert policy_for(target, RunCard("x", {}, {}, policy=load_policy("w4a8").to_dict())).name == "w4a8"


@pytest.mark.nightly
def test_ranges_of_before_zero_points_get_the_best_policy_without(run, own, tmp_path):
    state = torch.load(own, weights_only=True)
    torch.save({key: value for key, value in state.items() if not key.endswith("_bounds")}, own)
    card = json.loads(own.with_suffix(".json").read_text())
    card["checkpoint"]["sha256"] = compute_sha256(own)
    own.with_suffix(".json").write_text(json.dumps(card))
    words = ("export", "--checkpoint", own, "--for", "openvino", "--output", tmp_path / "new")
    done = run(*words)
    assert "policy qdq: these ranges have no lower end for zero points; calibrate again for cpu" in done.err
    assert exported(done).card.policy["rules"] == load_policy("qdq").to_dict()["rules"]
    error = run(*words, "--policy", "cpu").error(1)
    assert "without the lower end" in error and "mlp.fc2._input_quantizer" in error and "calibrate" in error


SCORED = {"engine": "fake-quant", "precision": "int8", "dataset": {"name": "x", "split": "val", "pictures": 1,
          "sha256": None}, "pictures": 1, "acc1": 0.0, "acc5": 0.0, "loss": None, "batch_size": 1,
          "device": "cpu"}  # fmt: skip


BETTER = "{target} runs policy cpu best"
OTHER = "policy {gets} goes into the file, not the run card's {own}"
OWN = "the run card's policy {own} goes into the file; {target} runs policy cpu best"
CHOSEN = [  # the card's policy, what was scored, the target, the file's policy, what is said
    *[("qdq", "qdq", name, "qdq", "") for name in ("onnx", "onnxruntime", "tensorrt", "cuda", "torchscript")],
    *[("a16", "a16", "onnx", "a16", ""), ("ft-mode1", "ft-mode1", "cuda", "ft-mode1", "")],
    ("ft-mode2", "ft-mode2", "fastertransformer", "ft-mode2", ""),
    ("qdq", "qdq", "openvino", "qdq", BETTER),
    *[("ft-mode1", "ft-mode1", "openvino", "cpu", OTHER), ("cpu", "cpu", "tensorrt", "tensorrt", OTHER)],
    ("onnxruntime", "onnxruntime", "onnx", "qdq", OTHER),
    # `evaluate --policy` scores any: a policy that was scored goes before one that was not
    ("ft-mode1", "qdq", "openvino", "qdq", ""),
    ("cpu", "qdq", "openvino", "cpu", OWN),
    # a model keeps the policy that it was trained under
    *[("cpu", None, "openvino", "cpu", ""), ("qdq", None, "onnx", "qdq", "")],
    ("ft-mode1", None, "openvino", "ft-mode1", OWN),
]


@pytest.mark.parametrize(("own", "scored", "target", "gets", "said"), CHOSEN)
def test_the_scored_or_trained_policy_is_exported_or_a_warning_names_the_other(own, scored, target, gets, said, caplog):
    caplog.set_level("INFO" if said == BETTER or own == "a16" else "WARNING")
    result = scored and SCORED | {"policy": scored, "policy_sha256": load_policy(scored).sha256}
    how = {"results": [result]} if scored else {"training": TRAINING}
    card = RunCard("x", {}, {}, policy=load_policy(own).to_dict(), **how)
    assert policy_for(target, card).name == gets
    assert said.format(own=own, target=target, gets=gets) in caplog.text and bool(said) == bool(caplog.text)


def test_a_policy_of_the_user_s_that_bears_a_built_in_name_is_not_taken_for_that(caplog):
    mine = {"name": "cpu", "rules": [{"enable": ["*.fc1._input_quantizer", "*.fc1._weight_*"]}]}
    assert policy_for("openvino", RunCard("x", {}, {}, policy=mine)).to_dict()["rules"] == mine["rules"]
    assert "not the built-in cpu: policy cpu takes that one" in caplog.text and "cpu (mine " in caplog.text


@pytest.mark.nightly
def test_python_exports_what_is_in_memory_as_the_command_exports_its_file(run, calibrated, tmp_path):
    model = sq.load(calibrated)
    before = model.nodes()
    made = sq.export(model, "onnxruntime", tmp_path / "memory")
    done = run("export", calibrated, "--for", "onnxruntime", "--output", tmp_path / "file")
    assert made.artifact.record["sha256"] == exported(done).record["sha256"]
    assert made.card.checkpoint == exported(done).card.checkpoint
    assert model.nodes() == before


def test_a_refused_export_writes_nothing_and_float_models_are_saved_as_float(model, tmp_path):
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
    assert ("its ranges were not" in caplog.text) == calibrated
    assert torch.equal(next(saved.module.parameters()), next(model.module.parameters()))


def test_a_file_of_the_user_s_own_is_not_written_over(model, train, tmp_path):
    sq.calibrate(model, train, "qdq")
    own = tmp_path / "swin_micro_calib.pth"
    own.write_bytes(b"mine")
    with pytest.raises(sq.UsageError, match="swin_micro_calib.pth: was not written by `save` of swin_micro"):
        sq.export(model, "onnx", tmp_path)
    assert own.read_bytes() == b"mine"


ROW = st.fixed_dictionaries(
    {"sqnr_db": st.floats(0, 60), "ms": st.fixed_dictionaries({"1": st.floats(0.1, 100), "8": st.floats(0.1, 1000)})}
)


@pytest.fixture
def quick(monkeypatch):
    """Two candidates, timed for a moment."""
    every = export_here.tuned_forms
    monkeypatch.setattr(export_here, "tuned_forms", lambda target: [every(target)[0], every(target)[-3]])
    monkeypatch.setattr(export_here, "BATCHES", (2,))
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SECONDS", 0.01)


@given(st.lists(ROW, min_size=1, max_size=8))
def test_the_fastest_of_the_most_accurate_files_is_chosen(rows):
    best = fastest(rows)
    most = max(row["sqnr_db"] for row in rows)
    assert best["sqnr_db"] >= most - 0.3
    assert all(row["sqnr_db"] < most - 0.3 or prod(row["ms"].values()) >= prod(best["ms"].values()) for row in rows)


def test_the_fastest_file_is_written_and_its_card_has_the_comparison(run, calibrated, tmp_path, quick):
    done = run("export", calibrated, "--for", "openvino", "--tune", "--output", tmp_path).ok()
    artifact = open_artifact(done.out.strip())
    rows = artifact.record["tuned"]["files"]
    assert {row["policy"] for row in rows} == {"cpu", "cpu-operators"}
    assert all(row["ms"]["2"] > 0 and row["sqnr_db"] > 10 for row in rows)
    best = fastest(rows)
    assert artifact.card.policy["name"] == best["policy"] and artifact.record["options"]["plugin"] == best["plugins"]
    assert {file.suffix for file in tmp_path.iterdir()} == {".onnx", ".json"}  # no candidate is left


CHOOSES = "chooses policy and operators"


def test_options_that_leave_nothing_to_tune_are_refused(run, calibrated, tmp_path):
    for words, says in (
        ("--for onnx", "--tune: means nothing to --for onnx"),
        ("--for openvino --policy qdq", CHOOSES),
        ("--for openvino --plain", CHOOSES),
        ("--for openvino --int4-weights", CHOOSES),
        ("--for openvino --precision float", CHOOSES),
    ):
        assert says in run("export", calibrated, *words.split(), "--tune", "--output", tmp_path).error(2)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"training": TRAINING}, "policy qdq, and the model was trained under it"),
        ({"policy": load_policy("qdq").and_then(Rule(disable="*fc1*")).to_dict()}, "and it is your own"),
    ],
)
def test_a_policy_of_training_or_of_the_user_stays(changed, says, model, tmp_path):
    model.card = replace(model.card, **{"policy": load_policy("qdq").to_dict()} | changed)
    with pytest.raises(UsageError, match=says):
        sq.export(model, "openvino", tmp_path, tune=True)
    assert not list(tmp_path.iterdir())


def test_a_model_without_ranges_or_without_logits_is_refused(model, tmp_path):
    with pytest.raises(SwinQuantError, match="no range"):
        sq.export(model, "openvino", tmp_path, tune=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="about logits"):
        card = model.card
        features = card.config | {"MODEL": card.config["MODEL"] | {"OUTPUT_KIND": "features"}}
        model.card = type(card)(card.name, features, card.preprocess)
        sq.export(model, "openvino", tmp_path, tune=True)


def words_of_quantize(micro, pictures, folder):
    model = [micro / "swin.pth", "--cfg", micro / "swin.yaml", "--data-path", pictures, "--pictures", 8]
    return ["quantize", *model, "--for", "openvino", "--tune", "--half", "none", "--output", folder]


@pytest.mark.nightly
def test_quantize_tunes_once_and_again_on_another_cpu(run, micro, pictures, tmp_path, quick, monkeypatch):
    words = words_of_quantize(micro, pictures, tmp_path)
    assert run(*words).code == 0
    (card,) = tmp_path.glob("*_openvino.json")
    artifact = open_artifact(card.with_suffix(".onnx"))
    assert artifact.card.policy["name"] == fastest(artifact.record["tuned"]["files"])["policy"]
    assert run(*words, "--dry-run").out.count("# done") == 4
    untuned = [word for word in words if word != "--tune"]
    assert run(*untuned, "--dry-run").out.count("# done") == 1  # the calibration
    monkeypatch.setattr(quantize, "cpu_kind", lambda: {"cores": 96, "features": []})
    assert run(*words, "--dry-run").out.count("# done") == 1
