"""An export: its files, the loader script, the check, and the refusal of incomplete or foreign files."""

import hashlib
import json
import runpy
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from swin_quant.backends.artifact import finish_artifact
from swin_quant.backends.fastertransformer import export as module
from swin_quant.backends.fastertransformer.emulator import load
from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, check, export
from swin_quant.backends.fastertransformer.manifest import read_export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import load_calibrated, load_float, save_calibrated
from swin_quant.cli import main
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.score.options import EngineOptions

QKV_BIAS = "0001.layers.0.blocks.0.attn.qkv.bias"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_files(exported):
    artifact, _ = exported("swin", mode=2, sm=75)
    others = ["load_weights.py", "micro_calib.pth", "micro_int8_sm75_manifest.json"]
    assert names(artifact.file.parent) == sorted([*others, "micro_int8_sm75.json", "micro_int8_sm75.safetensors"])
    record, options = artifact.record, {"kind": "int8", "max_batch": 128, "fix_gelu_bias": False, "int8_mode": 2}
    assert record["options"] == {"sm": 75} | options and artifact.card.policy["name"] == "ft-mode2"
    assert sorted(other["file"] for other in record["others"]) == others


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_the_checkpoint_is_one_that_its_scripts_load(exported, calibrated, kind):
    artifact, model = exported(kind)
    again = calibrated(kind, NUM_CLASSES=5)
    load_calibrated(again, artifact.file.with_name("micro_calib.pth"))
    state = torch.load(artifact.file.with_name("micro_calib.pth"), weights_only=True)
    assert "layers.0.blocks.0.attn.qkv._input_quantizer._amax" in state
    assert {key for key in model.state_dict() if not key.endswith("_bounds")} == state.keys()  # it loads them strictly
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


def test_the_checkpoint_lies_beside_the_one_that_is_exported(calibrated, card, tmp_path):
    model, file = calibrated(), tmp_path / "micro_calib.pth"
    for node in named_nodes(model).values():
        if node.role is not Role.GEMM_WEIGHT:
            node.bounds = torch.tensor([-1.0, 2.0])
    save_calibrated(model, file)
    before = file.read_bytes()
    record = {"file": file.name, "sha256": hashlib.sha256(before).hexdigest()}
    artifact = export(model, replace(card(), checkpoint=record), tmp_path)
    state = torch.load(tmp_path / "micro_int8_sm80_calib.pth", weights_only=True)
    assert file.read_bytes() == before and open_artifact(artifact.file)
    assert len(state) == len(torch.load(file, weights_only=True)) - sum("_bounds" in key for key in model.state_dict())


@pytest.mark.parametrize("float_kind", ["float16", "float32"])
def test_a_float_export(exported, calibrated, float_kind):
    artifact, model = exported("swinv2", kind=float_kind)
    assert artifact.card.policy is None and artifact.record["precision"] == float_kind
    load_float(calibrated("swinv2"), artifact.file.with_name(f"micro_{float_kind}_sm80.pth"))
    stored = read_export(artifact)
    qkv, first = model.layers[0].blocks[0].attn.qkv.weight, stored.tensors["layers.0.blocks.0.attn.qkv.weight"]
    assert torch.equal(first, qkv.detach().to(first.dtype))
    packed = load_file(artifact.file)["0000.layers.0.blocks.0.attn.qkv.weight"]
    heads, dim, c = 1, 32, 32
    expected = qkv.detach().view(3, heads, dim, c).permute(3, 1, 0, 2).reshape(c, 3 * c).to(packed.dtype)
    assert torch.equal(packed, expected)  # docs/reference, section 3.7
    with pytest.raises(UsageError, match=f"is a {float_kind} export"):
        load(artifact)


@pytest.mark.parametrize(("kind", "log"), [("int8", np.float16), ("float16", np.float32), ("float32", np.float32)])
def test_the_logit_scale_is_exp_of_what_the_exporter_has(exported, calibrated, kind, log):
    """FasterTransformer's INT8 exporter clamps a float16 at ln 100 (FasterTransformer spec, 3.9)."""
    artifact, model = exported("swinv2", kind=kind)
    stored = np.float32 if kind == "float32" else np.float16
    for i, stage in enumerate(model.layers):
        for j, block in enumerate(stage.blocks):
            logs = block.attn.logit_scale.detach().numpy().astype(log)
            expected = np.exp(np.minimum(logs, log(np.log(100))).astype(np.float64)).astype(stored)
            got = read_export(artifact).tensors[f"layers.{i}.blocks.{j}.attn.logit_scale"].numpy()
            assert got.dtype == stored
            np.testing.assert_allclose(got, expected, rtol=5e-7 if kind == "float32" else 0)


def loaded(artifact):
    script = runpy.run_path(str(artifact.file.with_name("load_weights.py")))
    return script["load"](artifact.file.with_name(f"{artifact.file.stem}_manifest.json"), "cpu")


@pytest.mark.parametrize(("kind", "count"), [("swin", 3 * 16 + 2 * 5 + 6), ("swinv2", 3 * 17 + 2 * 5 + 6)])
def test_the_loader_builds_the_op_s_list(exported, kind, count):
    artifact, model = exported(kind)
    weights, arguments, head = loaded(artifact)
    assert len(weights) == count and len(arguments) == 16
    mode, depths, heads, *rest = arguments
    assert mode == 1 and depths.tolist() == [2, 1] and heads.tolist() == [1, 2] and depths.dtype is torch.int32
    assert rest == [128, 8, 2, 3, 32, 2, False, True, 2, 4.0, True, 1.0, 1 if kind == "swin" else 2]
    assert weights[0].shape == (96, 32) and weights[2].shape == (32 * 32,) and weights[13].device.type == "cpu"
    assert {w.dtype for w in weights[:12]} == {torch.float16}
    assert torch.equal(weights[12], weights[13]) and weights[12].dtype is torch.float32
    stored = load_file(artifact.file)["0000.layers.0.blocks.0.attn.qkv.weight"]
    assert torch.equal(weights[0].flatten().view(torch.int8)[: 96 * 32], stored)  # the second half is not defined
    assert torch.equal(head[0], model.head.weight)


def test_the_loader_needs_nothing_of_this_package(exported, tmp_path):
    artifact, _ = exported("swin")
    code = """import sys
sys.modules["swin_quant"] = None
from load_weights import load
print(len(load("micro_int8_sm80_manifest.json", "cpu")[0]))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=artifact.file.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "64", done.stderr
    assert len(artifact.file.with_name("load_weights.py").read_text().splitlines()) <= 46


@pytest.mark.parametrize(("sm", "gpu"), [(80, (7, 5)), (75, (8, 0)), (75, (8, 6))])
def test_the_loader_stops_on_a_gpu_of_another_generation(exported, monkeypatch, sm, gpu):
    artifact, _ = exported("swin", sm=sm)
    script = runpy.run_path(str(artifact.file.with_name("load_weights.py")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    with pytest.raises(SystemExit, match=f"exported for compute capability {sm}, this GPU has {gpu[0]}.{gpu[1]}"):
        script["load"](artifact.file.with_name(f"{artifact.file.stem}_manifest.json"))


@pytest.mark.parametrize("sm", [75, 80])
@pytest.mark.parametrize("kind", ["int8", "float16", "float32"])
@pytest.mark.parametrize("model", ["swin", "swinv2"])
def test_the_check_finds_rounding_and_no_more(exported, model, kind, sm):
    artifact, source = exported(model, kind=kind, sm=sm)
    differences = check(artifact, source)
    kernels = {slot.name for slot in read_export(artifact).entries if slot.container}
    assert len(kernels) == (13 if kind == "int8" else 0)
    assert all(0.3 < differences[name] < 0.57 for name in kernels)
    assert kind != "float32" or max(differences.values()) == 0


@pytest.mark.parametrize("fix", [False, True])
def test_what_is_said_of_a_bias_that_the_kernel_misreads(calibrated, card, tmp_path, caplog, fix):
    model = calibrated("swin", MLP_RATIO=68.0)
    with caplog.at_level("INFO"):
        artifact = export(model, card(), tmp_path, FasterTransformerOptions(fix_gelu_bias=fix, check=True))
    assert artifact.record["options"]["fix_gelu_bias"] is fix
    manifest = json.loads((tmp_path / "micro_int8_sm80_manifest.json").read_text())
    assert manifest["target"]["fix_gelu_bias"] is fix
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    (said,) = [record.message for record in caplog.records if "fc1's bias of " in record.message]
    biases = [load_file(artifact.file)[e["key"]] for e in manifest["entries"] if e["name"].endswith("fc1.bias")]
    assert [len(bias) for bias in biases] == [2176, 2176, 4352 + 3 * fix]
    assert (4352 + 3 * fix,) in [w.shape for w in loaded(artifact)[0]]
    if fix:
        assert "cuts those three off" in warning and "stored as the kernel of GELU reads it" in said
        fc1 = model.layers[1].blocks[0].mlp.fc1.bias.detach().half()
        assert torch.equal(biases[2], torch.cat([fc1[:4096], torch.zeros(3).half(), fc1[4096:]]))
    else:
        assert "three places off" in warning and "fix_gelu_bias" in warning
        noise = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        fixed = export(model, card(), tmp_path / "fixed", FasterTransformerOptions(fix_gelu_bias=True))
        change = load(artifact)(noise) - load(fixed)(noise)
        assert f"mean |Δlogit| {change.abs().mean():.3g}, max {change.abs().max():.3g}" in said and change.any()


def test_the_check_notices_another_model_and_a_wrong_layout(exported, calibrated):
    artifact, model = exported("swin")
    other = calibrated("swin")
    other.layers[1].blocks[0].norm2.bias.data[3] += 0.01
    with pytest.raises(SwinQuantError, match="1 tensors differ .* layers.1.blocks.0.norm2.bias"):
        check(artifact, other)
    other = calibrated("swin")
    other.head.bias.data[0] += 1
    with pytest.raises(SwinQuantError, match="head.bias"):
        check(artifact, other)
    tensors = load_file(artifact.file)
    key = "0002.layers.0.blocks.0.attn.proj.weight"
    tensors[key] = tensors[key].roll(1)
    save_file(tensors, artifact.file)
    with pytest.raises(SwinQuantError, match="1 tensors differ .* layers.0.blocks.0.attn.proj.weight"):
        check(vouched(artifact), model)


def test_an_export_that_stops_in_the_middle_leaves_nothing(calibrated, card, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write_json", None)
    with pytest.raises(TypeError):
        export(calibrated(), card(), tmp_path)
    assert names(tmp_path) == []


def vouched(artifact):
    """The artifact with a card for the files as they are now."""
    return finish_artifact(artifact.file, artifact.card, "fastertransformer", "int8", artifact.record["options"])


def edited(artifact, edit):
    """The artifact with its manifest changed, and a card that vouches for it."""
    path = artifact.file.with_name(f"{artifact.file.stem}_manifest.json")
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    return vouched(artifact)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.update(schema="x"), "not a FasterTransformer manifest of this version"),
        (lambda m: m["entries"].pop(), "lists 63 tensors, the op takes 64"),
        (lambda m: m["entries"][2].update(layout="COL4_4R2_8C"), "entry 0002.* is not what the op takes"),
        (lambda m: m["target"].update(sm=75), "entry 0000.* is not what the op takes"),
        (lambda m: m["arguments"].update(depths=[2, 2]), "contradicts|takes"),
        (lambda m: m["arguments"].update(depths=[10**9, 1]), "depths\\[0\\] is 1000000000, but must be"),
        (lambda m: m["arguments"].update(num_heads=[0, 0]), "num_heads\\[0\\] is 0, but must be at least 1"),
        (lambda m: m["arguments"].update(int8_mode=3), "int8_mode is 3, but must be at least 1 and at most 2"),
        (lambda m: m["arguments"].update(qk_scale="1"), "arguments.qk_scale must be a number, not '1'"),
        (lambda m: m["arguments"].update(ape=True), "manifest.json: FasterTransformer cannot run this model: APE"),
        (lambda m: m["arguments"].pop("version"), "are not those of"),
        (lambda m: m["plugin"].update(name="x"), "plugin contradicts"),
        (lambda m: m["target"].update(classes=7), "head.weight is float32"),
    ],
)
def test_a_manifest_that_contradicts_itself(exported, edit, says):
    artifact, _ = exported("swin")
    with pytest.raises(SwinQuantError, match=says) as error:
        load(edited(artifact, edit))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop("head.bias"), "missing or unknown tensors: head.bias"),
        (lambda t: t.update({QKV_BIAS: torch.zeros(9).half()}), "is float16 .9., must be"),
        (lambda t: t["head.bias"].fill_(float("nan")), "head.bias holds NaN"),
        (lambda t: t["0015.layers.0.blocks.0.attn.trt_relative_position_bias"].zero_(), "not padded with -30000"),
    ],
)
def test_tensors_that_are_not_the_list_s(exported, edit, says):
    artifact, _ = exported("swin")
    tensors = load_file(artifact.file)
    edit(tensors)
    save_file(tensors, artifact.file)
    with pytest.raises(SwinQuantError, match=says):
        load(vouched(artifact))


def test_engine_options_that_the_kernels_do_not_have(exported):
    artifact, _ = exported("swin")
    with pytest.raises(UsageError, match="float_type bfloat16"):
        load(artifact, EngineOptions(float_type="bfloat16"))
    with pytest.raises(UsageError, match="takes pictures of 3 x 8 x 8, not 3 x 16 x 16"):
        load(artifact)(torch.zeros(1, 3, 16, 16))
    artifact, _ = exported("swin", batch=2)
    with pytest.raises(UsageError, match="above its limit of 2 pictures"):
        load(artifact)(torch.zeros(3, 3, 8, 8))


ARCHITECTURE = {"PATCH_SIZE": 2, "EMBED_DIM": 32, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2}
MORE = {"swin": {}, "swinv2": {"PRETRAINED_WINDOW_SIZES": [0, 0]}}


@pytest.fixture
def command(tmp_path, calibrated, capsys):
    """command("--flag ...", kind, wrap) -> exit code and output of an export of a checkpoint as FasterTransformer saves
    it: bare, or by its QAT."""

    def make(flags, kind="swin", wrap=False, backend="fastertransformer", **keys):
        known = ARCHITECTURE | MORE[kind] | keys
        model = {"TYPE": kind, "NAME": f"their_{kind}", "NUM_CLASSES": 5, kind.upper(): known}
        config, file = tmp_path / f"{kind}.yaml", tmp_path / f"{kind}.pth"
        config.write_text(yaml.safe_dump({"DATA": {"IMG_SIZE": 8}, "MODEL": model}))
        state = calibrated(kind, **keys).state_dict()
        torch.save({"model": state, "epoch": 4} if wrap else state, file)
        files = f"--cfg {config} --checkpoint {file} --output {tmp_path}/out"
        return main(f"export --for {backend} {files} {flags}".split()), capsys.readouterr()

    return make


@pytest.mark.parametrize(("kind", "wrap"), [("swin", False), ("swin", True), ("swinv2", False)])
def test_a_checkpoint_of_fastertransformer_s(command, calibrated, kind, wrap):
    code, done = command("--policy ft-mode1 --check --sm 75", kind, wrap)
    assert code == 0 and "tensors differ from the model by rounding alone" in done.err
    artifact = open_artifact(done.out.strip())
    assert artifact.file.name == f"their_{kind}_int8_sm75.safetensors"
    images = torch.randn(4, 3, 8, 8)
    with torch.inference_mode():
        expected = calibrated(kind)(images)
    assert (load(artifact)(images) - expected).abs().mean() < 0.1 * expected.std()


def test_the_command_exports_float(command):
    code, done = command("--precision float --float-type float16 --check", "swinv2")
    manifest = open_artifact(done.out.strip()).file.with_name("their_swinv2_float16_sm80_manifest.json")
    manifest = json.loads(manifest.read_text())
    assert code == 0 and manifest["target"]["op"] == "SwinTransformer"
    assert len(manifest["entries"]) == 3 * 15 + 2 * 5 + 6


def test_fix_gelu_bias(command):
    flags = "--policy ft-mode1 --fix-gelu-bias"
    code, done = command(flags)
    assert code == 2 and "--fix-gelu-bias: it has 256 hidden channels at most" in done.err
    code, done = command(flags, MLP_RATIO=68.0)
    assert code == 0 and open_artifact(done.out.strip()).record["options"]["fix_gelu_bias"] is True
    code, done = command(flags, backend="onnx")
    assert code == 2 and "--fix-gelu-bias: means nothing to --for onnx" in done.err
