"""A checkpoint whose weights passes changed is trained, exported, verified and scored like any other."""

import pytest
import torch

from swin_quant.config import load_config
from swin_quant.models import build_model
from tests.outliers import plant

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["swin", "swinv2"])
def kind(request):
    return request.param


@pytest.fixture
def changed(run, kind, write_config, randomise, pictures, tmp_path):
    """A calibrated checkpoint with equalized channels and corrected biases; its original is planted.pth."""
    config = write_config(tmp_path, kind, EMBED_DIM=32, DEPTHS=[1, 1])  # head sizes that FasterTransformer supports
    model = plant(randomise(build_model(load_config(config))), "v", 100)
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_amax")}
    torch.save({"model": state}, tmp_path / "planted.pth")
    flags = ["--cfg", config, "--data-path", pictures, "--pictures", 8, "--batch", 4, "--half", "none", "--no-eval"]
    done = run("calibrate", tmp_path / "planted.pth", *flags, "--policy", "ft-mode1", "--passes", "fast",
               "--output", tmp_path)  # fmt: skip
    assert done.code == 0 and "dB at most" in done.err, done
    return tmp_path / f"{kind}_micro_calib.pth"


def test_every_backend_computes_what_the_changed_weights_say(run, changed, pictures, tmp_path):
    for target, policy in (("fastertransformer", "ft-mode1"), ("onnxruntime", "qdq"), ("openvino", "cpu")):
        if target == "openvino":
            pytest.importorskip("openvino")
        folder = tmp_path / target
        made = run("export", changed, "--for", target, "--policy", policy, "--output", folder)
        assert made.code == 0, made
        (file,) = (path for path in folder.iterdir() if path.suffix in (".onnx", ".safetensors"))
        checked = run("verify", file, "--data-path", pictures, "--checkpoint", changed)
        assert checked.code == 0, checked


def test_deltas_are_to_the_file_that_the_user_had(run, changed, pictures, card_of):
    done = run("evaluate", changed, "--data-path", pictures, "--policy", "ft-mode1", "qdq", "--half", "none")
    assert done.code == 0 and "corrected" in done.out, done
    results = card_of(changed)["results"]
    assert {result["weights"] for result in results if result["policy"]} == {"ptq"}
    assert all(result["delta_acc1"] is not None for result in results if result["policy"])


def test_training_goes_on_from_the_changed_weights(run, changed, pictures, tmp_path, card_of):
    done = run("finetune", changed, "--data-path", pictures, "--epochs", 1, "--batch", 4, "--half", "none",
               "--output", tmp_path / "qat", "--device", "cpu")  # fmt: skip
    assert done.code == 0, done
    (trained,) = (tmp_path / "qat").glob("*_qat.pth")
    results = card_of(trained)["results"]
    assert {result["weights"] for result in results} == {"original", "qat"}
    assert all(result["delta_acc1"] is not None for result in results if result["weights"] == "qat")
