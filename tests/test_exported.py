"""The engines that take an artifact, their devices, and the artifact's own checkpoint."""

from dataclasses import replace

import pytest

from swin_quant.backends.artifact import finish_artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.description import GraphEnd, described
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.config.load import portable_config
from swin_quant.config.outputs import FEATURES
from swin_quant.exported import find_checkpoint, list_engine_names, no_checkpoint, on_its_device, read_config
from swin_quant.quant.policy import load_policy
from swin_quant.score.options import EngineOptions

PREPROCESS = {"size": 32, "crop": False, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.fixture
def exported(tmp_path, tiny_config):
    """exported(backend, options, checkpoint, size) -> an artifact in out/, whatever its content."""
    (tmp_path / "out").mkdir()

    def make(backend="onnx", options=None, checkpoint=None, size=32, policy=None, precision="int8"):
        record = {"file": checkpoint.name, "sha256": compute_sha256(checkpoint)} if checkpoint else None
        preprocess = {**PREPROCESS, "size": size}
        card = RunCard("m", portable_config(tiny_config()), preprocess, checkpoint=record, policy=policy)
        file = tmp_path / "out" / "m.bin"
        file.write_bytes(b"artifact")
        return finish_artifact(file, card, backend, precision, options or {})

    return make


@pytest.fixture
def installed(monkeypatch):
    def only(*names):
        monkeypatch.setattr(Backend, "is_installed", property(lambda one: one.name in names or one.needs is None))

    return only


def test_default_engines_are_those_that_take_it_and_are_there(exported, installed):
    installed("onnxruntime", "openvino", "tensorrt")
    assert list_engine_names(exported("onnx"), None) == ["onnxruntime", "openvino"]
    assert list_engine_names(exported("onnx", {"target": "openvino"}), None) == ["openvino"]
    assert list_engine_names(exported("onnx", {"target": "tensorrt"}), None) == ["onnxruntime", "openvino"]
    assert list_engine_names(exported("fastertransformer"), None) == ["fastertransformer"]
    assert list_engine_names(exported("tensorrt"), None) == ["tensorrt"]
    installed("openvino")
    assert list_engine_names(exported("onnx", {"target": "onnxruntime"}), None) == ["openvino"]


def test_float8_among_other_types_is_for_engines_that_have_it(exported, installed):
    installed("onnxruntime", "openvino")
    for name, engines in (("tensorrt-fp8", ["onnxruntime"]), ("w4a8", ["onnxruntime", "openvino"])):
        artifact = exported("onnx", policy=load_policy(name).to_dict(), precision="mixed")
        assert list_engine_names(artifact) == engines


def test_a_file_that_is_no_onnx_is_described_by_its_card(exported):
    artifact = exported("torchscript")
    found = described(artifact, ["cat", "dog"])
    assert (found.input.shape, found.outputs) == ((3, 32, 32), (GraphEnd("logits", "float32", (2,)),))
    config = artifact.card.config | {"MODEL": artifact.card.config["MODEL"] | {"OUTPUT_KIND": FEATURES}}
    with pytest.raises(UsageError, match="maps are served and packaged from ONNX files"):
        described(replace(artifact, card=replace(artifact.card, config=config)))


def test_none_installed_says_how_to_get_one(exported, installed):
    installed()
    with pytest.raises(UsageError, match=r"m.bin: no engine for it is installed: .*'\.\[onnx\]' in the checkout or"):
        list_engine_names(exported("onnx"), None)
    with pytest.raises(UsageError, match="engine tensorrt is not installed: pip install tensorrt"):
        list_engine_names(exported("tensorrt"), ["tensorrt"])


def test_a_named_engine_must_take_it(exported, installed):
    installed("onnxruntime", "openvino")
    assert list_engine_names(exported("onnx"), ["openvino", "onnxruntime", "openvino"]) == ["openvino", "onnxruntime"]
    with pytest.raises(UsageError, match="onnxruntime does not run fastertransformer artifacts: use fastertransformer"):
        list_engine_names(exported("fastertransformer"), ["onnxruntime"])


def test_cpu_engines_run_on_the_cpu_of_a_machine_with_a_gpu():
    cuda = EngineOptions(threads=3, device="cuda")
    assert on_its_device("openvino", cuda) == EngineOptions(threads=3, device="cpu")
    assert on_its_device("tensorrt", EngineOptions()).device == "cuda"
    assert on_its_device("fastertransformer", cuda).device == "cuda"


def test_the_checkpoint_is_found_beside_or_one_folder_up_by_its_hash(exported, tmp_path):
    checkpoint = tmp_path / "m_calib.pth"
    checkpoint.write_bytes(b"weights")
    artifact = exported(checkpoint=checkpoint)
    assert find_checkpoint(artifact) == checkpoint
    beside = tmp_path / "out" / "m_calib.pth"
    beside.write_bytes(b"others")  # the same name, but another file
    assert find_checkpoint(artifact) == checkpoint
    checkpoint.unlink()
    assert find_checkpoint(artifact) is None and "its m_calib.pth is neither beside it" in no_checkpoint(artifact)
    with pytest.raises(SwinQuantError, match="m_calib.pth: is not the checkpoint that m.bin was exported from"):
        find_checkpoint(artifact, beside)
    beside.write_bytes(b"weights")
    assert find_checkpoint(artifact, beside) == beside == find_checkpoint(artifact)


def test_the_config_is_the_card_s_with_overrides_of_this_machine(exported):
    cfg = read_config(exported(), {"DATA.DATA_PATH": "here", "DATA.BATCH_SIZE": 5})
    assert (cfg.DATA.DATA_PATH, cfg.DATA.BATCH_SIZE, cfg.DATA.IMG_SIZE) == ("here", 5, 32)
    with pytest.raises(SwinQuantError, match="m.json: preprocess.size is 48, but the model takes 32"):
        read_config(exported(size=48))
    with pytest.raises(UsageError, match="command line: DATA.BATCH_SIZE must be a whole number"):
        read_config(exported(), {"DATA.BATCH_SIZE": "many"})
