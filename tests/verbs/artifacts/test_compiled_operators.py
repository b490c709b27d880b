"""A new user's way: files for OpenVINO have the compiled operators, and every command that opens one finds them."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from vnni import exact_int8

import swin_quant as sq
from swin_quant.backends.openvino import operators
from swin_quant.config import load_config
from swin_quant.models import build_model

SWIN = {"PATCH_SIZE": 2, "EMBED_DIM": 32, "DEPTHS": [2, 2]}
WITHOUT_US = (
    "import sys; sys.modules |= dict.fromkeys(['torch', 'swin_quant'])\n"
    "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.fixture(scope="module")
def given(tmp_path_factory, write_config, randomise):
    """Flags: a float checkpoint with heads of 32 channels, and its config."""
    folder = tmp_path_factory.mktemp("heads")
    config = write_config(folder, "swin", "heads", **SWIN)
    torch.save({"model": randomise(build_model(load_config(config))).state_dict()}, folder / "heads.pth")
    return [folder / "heads.pth", "--cfg", config]


def kinds(file):
    return {node.op_type for node in onnx.load(file).graph.node}


@exact_int8
def test_every_verb_finds_the_library_and_a_package_brings_it(run, given, pictures, with_operators, tmp_path):
    flags = ["--data-path", pictures, "--for", "openvino", "--pictures", "8", "--output", tmp_path / "out"]
    assert run("quantize", *given, *flags).code == 0
    (file,) = (tmp_path / "out").glob("*.onnx")
    exported = sq.artifact(file)
    assert "Mlp" in kinds(file) and {"Attention", "AttentionBranch"} & kinds(file)
    assert exported.card.policy["name"] == "cpu-operators"
    assert "openvino" in {one.engine for one in exported.card.measured()} and exported.card.verification[0]["passed"]
    assert with_operators.name in exported.load().details["extensions"]
    assert run("verify", file, "--data-path", pictures).code == 0
    picture = sorted((pictures / "val").rglob("*.png"))[0]
    assert run("predict", file, picture).code == 0

    package = tmp_path / "package"
    assert run("package", file, "--output", package).code == 0
    served = package / "models" / "heads" / "1" / "model.onnx"
    assert not onnx.load(served).functions and "Softmax" in kinds(served)
    sources = {file.name for file in operators.sources().glob("*.[hcs][ph]*")}
    assert {"build.sh", "extension.cpp", "mlp_fast.hpp"} < sources < set(os.listdir(package / "operators"))
    assert "libswin_quant_plugins.so" in os.listdir(package / "operators")
    with_library = infer(package, picture, "openvino", tmp_path)
    plain = infer(package, picture, "onnxruntime", tmp_path)
    assert with_library.stderr == "" and np.abs(with_library.out - plain.out).mean() < 0.02
    library = package / "operators" / "libswin_quant_plugins.so"
    library.unlink()
    assert f": {library} is not there: `sh " in infer(package, picture, "openvino", tmp_path).stderr
    library.write_bytes(b"of another machine")
    without = infer(package, picture, "openvino", tmp_path)
    assert without.stderr.startswith("the plain model runs, slower: ") and without.stderr.count("\n") == 1
    assert np.abs(without.out - plain.out).mean() < 0.02
    build = ["sh", package / "operators" / "build.sh", package / "operators"]
    loops = {"PYTHON": sys.executable, "ISA": "plain", "CXXFLAGS": "-O0"}  # vectors take three times as long
    subprocess.run(build, check=True, env=os.environ | loops, timeout=600)
    assert infer(package, picture, "openvino", tmp_path).stderr == ""


def infer(package, picture, engine, folder):
    words = [package / "infer.py", picture, "--engine", engine, "--threads", "1", "--save", folder / "out.npy"]
    words = [sys.executable, "-c", WITHOUT_US, *map(str, words)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    done.out = np.load(folder / "out.npy")
    return done
