"""Attention as the operator that is compiled at first use: which files have it, what they compute, and without it."""

import logging
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from decibels import sqnr
from nightly import share
from operator_nodes import core_with, exact_policy
from vnni import exact_int8

from swin_quant.backends.backend import ONNX_TOLERANCES
from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.openvino import COMPILED, engine, operators
from swin_quant.backends.saturation import caution
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.config.load import load_config, portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.export_target import policy_for

OPERATOR = ["attention=swin_quant::Attention"]
BRANCH = ["attention_branch=swin_quant::AttentionBranch"]


@pytest.fixture(scope="module")
def calibrated_for(tiny_model, tiny_config):
    """make(kind, window, side, KEY=value ...) -> a calibrated model, by default a stage of two blocks; its card."""

    def make(kind="swin", window=4, side=None, **keys):
        side = side or 4 * window  # 2 x 2 windows of patches of 2 x 2 pixels
        keys = {"WINDOW_SIZE": window, "IMG_SIZE": side, "DEPTHS": [2], "NUM_HEADS": [1]} | keys
        keys |= {"PRETRAINED_WINDOW_SIZES": [0] * len(keys["DEPTHS"])} if kind == "swinv2" else {}
        model = tiny_model(kind, **keys)
        calibrate(model, [pictures(8, side)], Method("max"))
        preprocess = Preprocess(side, False, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        policy = exact_policy("cpu-operators")
        apply_policy(model, policy)
        config = portable_config(tiny_config(kind, **keys))
        return model, RunCard(f"{kind}_{window}", config, preprocess.to_dict(), policy=policy.to_dict())

    return make


@pytest.fixture(scope="module")
def file(calibrated_for, library, tmp_path_factory):
    """An artifact with the operator."""
    model, card = calibrated_for("swin", 7)
    model = deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "library", lambda: library)
        return export(model, card, tmp_path_factory.mktemp("file"), OnnxOptions(target="openvino"))


def pictures(count, side, seed=3):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def missing():
    """The library of operators, where none can be compiled."""
    raise SwinQuantError("no C++ compiler is installed")


def attentions(artifact):
    return sum(node.op_type in ("Attention", "AttentionBranch") for node in onnx.load(artifact.file).graph.node)


CASES = [("swin", 7, None), ("swinv2", 8, None)]
SLOW_CASES = [(kind, window, None) for kind in ("swin", "swinv2") for window in (4, 7, 8, 12, 16, 24)]
SLOW_CASES = [case for case in SLOW_CASES if case not in CASES] + [("swin", 8, 12), ("swinv2", 8, 12)]


@pytest.mark.parametrize("kind, window, side", [*CASES, *share(SLOW_CASES, len(SLOW_CASES))])
def test_a_file_with_the_operator_computes_what_fake_quant_does(
    kind, window, side, calibrated_for, with_operators, tmp_path
):
    """Within `verify`'s limit, for any batch, also for windows larger than the map; NaN stays in its picture."""
    model, card = calibrated_for(kind, window, side)
    model = deepcopy(model)
    is_default = window <= 8
    asked = {} if is_default else {"plugin": tuple(OPERATOR)}  # plain nodes are faster for larger windows
    artifact = export(model, card, tmp_path, OnnxOptions(target="openvino", **asked))
    assert artifact.record["options"]["plugin"][:1] in (OPERATOR, BRANCH) and attentions(artifact) == 2
    found = engine.load(artifact, EngineOptions(threads=1))
    assert found.details["extensions"] == {with_operators.name: compute_sha256(with_operators)}
    apply_policy(model, exact_policy("cpu-operators"))
    for batch in (1, 8):
        images = pictures(batch, side or 4 * window, seed=batch)
        with torch.no_grad():
            wanted = model(images)
        got = found(images)
        assert float((got - wanted).abs().mean()) < ONNX_TOLERANCES.quantized
        assert sqnr(wanted, got) > 30
    spoilt = images.clone()
    spoilt[0, 0] = torch.nan
    np.testing.assert_array_equal(found(spoilt)[1:], got[1:])
    two_threads = engine.load(artifact, EngineOptions(threads=2))
    np.testing.assert_allclose(two_threads(images), got, atol=1e-5)


MANY = (*BRANCH, *(f"{one}=swin_quant::{COMPILED[one]}" for one in ("mlp", "patch_merging", "patch_embedding")))
KEPT = ["cache", "cache for speed", "cache for size", "saved", "saved again", "exported", "saved as float16"]


@pytest.mark.nightly
@pytest.mark.parametrize("plugins", [MANY, tuple(OPERATOR), BRANCH], ids=["all", "attention", "branch"])
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_what_openvino_keeps_of_a_file_computes_the_same_bits(kind, plugins, calibrated_for, library, tmp_path):
    """Its caches, saved models and exports; float16, as `save_model` rounds where no Q/DQ pair is left, is refused.
    `ovc --extension` fuses float additions in another order."""
    import openvino

    model, card = calibrated_for(kind, 8, DEPTHS=[2, 2], NUM_HEADS=[1, 2])
    artifact = export(deepcopy(model), card, tmp_path, OnnxOptions(target="openvino", plugin=tuple(plugins)))
    core = core_with(str(library))
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    images = pictures(2, 32).numpy()

    def read():
        found = core.read_model(artifact.file)
        found.reshape(images.shape)
        return found

    def result(compiled):
        return np.array(compiled([images])[0])

    def saved(found, name, **options):
        openvino.save_model(found, tmp_path / f"{name}.xml", **options)  # a new one: the weights of another are mapped
        return core.read_model(tmp_path / f"{name}.xml")

    def kept(how):
        if how.startswith("cache"):
            mode = {"cache for speed": "OPTIMIZE_SPEED", "cache for size": "OPTIMIZE_SIZE"}.get(how)
            settings = exact | {"CACHE_DIR": str(tmp_path / how)} | ({"CACHE_MODE": mode} if mode else {})
            core.compile_model(read(), "CPU", settings)
            assert list((tmp_path / how).iterdir())
            return result(core.compile_model(read(), "CPU", settings))
        if how == "exported":
            return result(core.import_model(core.compile_model(read(), "CPU", exact).export_model(), "CPU", exact))
        found = saved(read(), how, compress_to_fp16=how == "saved as float16")
        if how == "saved again":
            found = saved(found, "twice", compress_to_fp16=False)
        return result(core.compile_model(found, "CPU", exact))

    wanted = result(core.compile_model(read(), "CPU", exact))
    converted = openvino.convert_model(artifact.file, extension=[str(library)])
    converted.reshape(images.shape)
    converted = saved(converted, "converted", compress_to_fp16=False)
    np.testing.assert_allclose(result(core.compile_model(converted, "CPU", exact)), wanted, atol=1e-6)
    for how in KEPT:
        if plugins == MANY and how == "saved as float16":
            with pytest.raises(RuntimeError, match="PatchEmbedding: its input 2 .* with compress_to_fp16=False"):
                kept(how)
        else:
            np.testing.assert_array_equal(kept(how), wanted, how)


@pytest.mark.parametrize(
    "kind, plugins",
    share([("swin", None), ("swin", MANY), ("swinv2", MANY), ("swinv2", None)], 2),
    ids=["swin-plain", "swin-operators", "swinv2-operators", "swinv2-plain"],
)
@exact_int8
def test_a_file_reshaped_to_pictures_of_another_size_is_refused(kind, plugins, calibrated_for, library, tmp_path):
    """Four pictures of 16 pixels have the values of one of 32: either was taken for the other."""
    model, card = calibrated_for(kind, 4, DEPTHS=[2, 2], NUM_HEADS=[1, 2])
    options = OnnxOptions(target="openvino", plugin=plugins) if plugins else OnnxOptions(target="openvino", plain=True)
    artifact = export(deepcopy(model), card, tmp_path, options)
    core = core_with(str(library))
    for shape in ([1, 3, 32, 32], [1, 3, 16, 64], [16, 3, 4, 4], [1, 3, 32, 16], [1, 3, 18, 16], [1, 1, 16, 16]):
        with pytest.raises(RuntimeError):
            found = core.read_model(artifact.file)
            found.reshape(shape)
            core.compile_model(found, "CPU")
    images = pictures(3, 16)
    with torch.no_grad():
        wanted = model(images)
    assert float((engine.load(artifact, EngineOptions())(images) - wanted).abs().mean()) < ONNX_TOLERANCES.quantized


@pytest.mark.parametrize(
    "gains, wanted",
    [pytest.param({"attention": 1.2}, OPERATOR, marks=pytest.mark.kernels), ({"attention_branch": 1.1}, BRANCH)],
)
def test_the_branch_takes_the_place_of_attention_where_it_was_measured_to_be_faster(
    gains, wanted, calibrated_for, with_operators, tmp_path, monkeypatch
):
    monkeypatch.setattr(operators, "gain", lambda architecture, operator, kind=None: gains.get(operator, 0))
    model, card = calibrated_for()
    artifact = export(deepcopy(model), card, tmp_path, OnnxOptions(target="openvino"))
    assert artifact.record["options"]["plugin"] == wanted and attentions(artifact) == 2


def test_what_no_operator_is_compiled_for():
    no_linear = (*OPERATOR, "patch_embedding=swin_quant::PatchEmbedding")
    assert OnnxOptions(target="openvino", int4_weights=True).compiled == no_linear
    for options in ({"plain": True}, {"precision": "float"}, {"target": "portable"}, {"replace": ("roll",)}):
        assert OnnxOptions(**{"target": "openvino"} | options).compiled == ()


@exact_int8
def test_a_file_runs_as_plain_nodes_where_the_library_is_not_to_be_had(file, with_operators, monkeypatch, caplog):
    images = pictures(3, 28)
    wanted = engine.load(file, EngineOptions(threads=1))(images)

    monkeypatch.setattr(operators, "library", missing)
    for _ in range(2):  # said once
        found = engine.load(file, EngineOptions(threads=1))
    assert "extensions" not in found.details and float((found(images) - wanted).abs().mean()) < 0.02
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == f"{file.file}: its operators run as plain nodes, slower: no C++ compiler is installed"


def test_a_file_runs_as_plain_nodes_where_the_library_cannot_run_them(
    file, with_operators, tmp_path, monkeypatch, caplog
):
    """A library that OpenVINO cannot load, as one of another version, and a node that takes more than ours."""
    images = pictures(1, 28)
    wanted = engine.load(file, EngineOptions(threads=1))(images)
    later = onnx.load(file.file)
    for node in later.graph.node:
        if node.op_type == "Mlp":
            node.input.append(node.input[-1])
    for function in later.functions:
        if function.name == "Mlp":
            function.input.append("more")
    copy = tmp_path / "later.onnx"
    onnx.save(later, copy)
    own = engine.verified(file)
    monkeypatch.setattr(engine, "verified", lambda artifact: replace(own, path=copy))
    found = engine.load(file, EngineOptions(threads=1))
    monkeypatch.setattr(engine, "verified", lambda artifact: own)
    monkeypatch.setattr(operators, "library", lambda: tmp_path / "broken.so")
    (tmp_path / "broken.so").write_bytes(b"not a library")
    for plain in (found, engine.load(file, EngineOptions(threads=1))):
        assert "extensions" not in plain.details and float((plain(images) - wanted).abs().mean()) < 0.02
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2 and all(": its operators run as plain nodes, slower: " in line for line in said)
    assert "Mlp: wants 13 inputs" in said[0] and "cannot load it as an extension" in said[1]


def test_a_file_whose_products_all_run_in_operators_is_not_said_to_saturate(
    file, calibrated_for, with_operators, tmp_path, monkeypatch
):
    model, card = calibrated_for("swin", 7)
    partly = export(deepcopy(model), card, tmp_path, OnnxOptions(target="openvino", plugin=tuple(OPERATOR)))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.setattr(operators, "library", lambda: with_operators)  # else one for AVX2 is compiled
    assert caution("openvino", file) is None and "saturate at 16 bits" in caution("openvino", partly)

    monkeypatch.setattr(operators, "library", missing)
    assert "saturate at 16 bits" in caution("openvino", file)


@pytest.mark.parametrize(
    "cause, said",
    [
        ("compiler", "no-such-compiler, which is not installed"),
        ("cpu", "this CPU has no AVX2"),
        ("folder", "others have access"),
    ],
)
def test_a_plain_file_is_the_default_where_they_do_not_run_and_a_line_says_why(
    cause, said, calibrated_for, tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv(operators.SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(operators, "cpu_kind", lambda: None if cause == "cpu" else "avx512-vnni")
    monkeypatch.setenv("CXX", "no-such-compiler")
    if cause == "folder":
        (tmp_path / "cache" / "swin-quant" / "operators").mkdir(parents=True)
        os.chmod(tmp_path / "cache" / "swin-quant" / "operators", 0o770)
    operators._library.cache_clear()
    _, card = calibrated_for()
    assert [policy_for("openvino", replace(card, policy=None)).name for _ in range(2)] == ["cpu", "cpu"]
    operators._library.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        said in line and line.startswith("OpenVINO's window attention and MLP are not compiled: ") and "\n" not in line
    )
    times = prod(max(operators.gain("swin", operator), 1) for operator in operators.NODES)
    assert f"{times:.2f} times as long" in line


LARGE = {"WINDOW_SIZE": 32, "IMG_SIZE": 128}


@pytest.mark.parametrize(
    "kind, keys, wanted",
    [
        ("swin", LARGE, (False, False)),  # no kernel is made for it
        ("swin", LARGE | {"OUTPUT_KIND": "features"}, (False, False)),
        ("swinv2", {"EMBED_DIM": 48}, (False, False)),
        *(("swin", {"WINDOW_SIZE": window, "IMG_SIZE": 4 * window}, (True, False)) for window in (12, 16, 24)),
        ("swin", {"OUTPUT_KIND": "features"}, (True, False)),  # with AMX only attention alone was measured
        ("swin", {"IMG_SIZE": [32, 48]}, (True, False)),
    ],
)
def test_operators_are_the_default_where_they_were_measured_to_be_faster(kind, keys, wanted, tiny_config, monkeypatch):
    monkeypatch.setattr(operators, "library", (lambda: "there") if any(wanted) else None)  # None must not be called
    config = portable_config(tiny_config(kind, **keys))
    for cpu, expected in zip(("avx512-vnni", "amx"), wanted, strict=True):
        monkeypatch.setattr(operators, "cpu_kind", lambda cpu=cpu: cpu)
        assert operators.are_default(config) is expected


@pytest.mark.parametrize(
    "name, side, expected",
    [
        ("deit_small_patch16_224", 224, True),
        ("vit_base_patch16_224", 384, True),
        ("vit_small_patch14_dinov2", 224, True),
        ("vit_small_patch14_dinov2", 518, False),  # 1,370 tokens
        ("vit_small_patch16_dinov3", 224, True),
        ("eva02_small_patch14_224", 224, True),  # its MLP, which has a gate, stays plain
        ("vit_base_patch16_rope_mixed_224", 224, False),  # rotations that differ by head
        ("beit_base_patch16_224", 224, True),
        ("resnet50", 224, False),
    ],
)
def test_plain_vits_of_timm_get_the_operators_of_one_window(name, side, expected, monkeypatch):
    monkeypatch.setattr(operators, "library", (lambda: "there") if expected else None)
    monkeypatch.setattr(operators, "cpu_kind", lambda: "avx512-vnni")
    config = portable_config(load_config(f"timm:{name}", ["DATA.IMG_SIZE", str(side)]))
    assert operators.are_default(config) is expected
    assert operators.are_default(config | {"MODEL": config["MODEL"] | {"OUTPUT_KIND": "features"}}) is False


def test_a_library_is_for_one_version_of_openvino_and_one_kind_of_cpu(monkeypatch, tmp_path):
    pytest.importorskip("openvino")
    asked = []
    monkeypatch.setattr(operators, "compiled", lambda sources, what, built_for: asked.append(built_for) or tmp_path)
    monkeypatch.setattr(operators, "cpu_kind", lambda: "amx")
    monkeypatch.delenv(operators.SWITCH)
    assert operators._library.__wrapped__() == tmp_path
    version = operators.installed("openvino", "openvino").__version__
    assert asked == [{"OPENVINO": version, "ISA": "amx"}]


@pytest.mark.nightly
def test_a_library_for_instructions_that_the_cpu_lacks_is_refused_in_a_line(file, tmp_path):
    has = torch.cpu.get_capabilities()
    kinds = [kind for name, kind in operators.KINDS.items() if kind != "amx" and not has.get(name)]
    if not kinds:
        pytest.skip("this CPU has all of them")
    environment = os.environ | {"ISA": kinds[0], "PYTHON": sys.executable}
    subprocess.run(["sh", operators.sources() / "build.sh", tmp_path], env=environment, check=True, timeout=600)
    library = str(tmp_path / "libswin_quant_plugins.so")
    with pytest.raises(SwinQuantError, match="instructions that this CPU does not have") as caught:
        engine.load(file, EngineOptions(threads=1, extensions=(library,)))
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_every_kernel_keeps_to_its_memory_and_to_defined_operations(sanitizer, tmp_path):
    """A small shape of each, beside its plain loops, in a library with a sanitizer, which takes minutes to compile."""
    pytest.importorskip("openvino")
    flags = {"CXXFLAGS": f"-fsanitize={sanitizer} -fno-sanitize-recover=all -O1", "PYTHON": sys.executable}
    sources, standin = operators.sources(), Path(__file__).parents[2] / "standin"
    subprocess.run(["sh", sources / "build.sh", tmp_path], check=True, env=os.environ | flags)
    shared = tmp_path / "shared_dlopen.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shared, standin / "shared_dlopen.c"], check=True)
    names = ("libasan.so", "libstdc++.so.6") if sanitizer == "address" else ("libubsan.so",)
    runtimes = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    more = {"ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0", "LD_PRELOAD": " ".join([str(shared), *runtimes])}
    words = [sys.executable, sources / "selftest.py", tmp_path / "libswin_quant_plugins.so"]
    done = subprocess.run(words, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
