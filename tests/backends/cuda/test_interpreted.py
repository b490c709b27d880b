"""Whole networks by the kernels themselves, through Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from swin_quant.backends.artifact import open_artifact
from swin_quant.backends.cuda.engine import load
from tests.backends.cuda.conftest import HEADS_OF_24, pictures

FORMS = [("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swinv2", "ft-mode1"), ("swin", "cuda"), ("swinv2", "cuda")]
FORMS += [("swin", "cuda-fp8"), ("swinv2", "tensorrt-fp8")]
CHILD = """
import sys, torch
from swin_quant.backends.artifact import open_artifact
from swin_quant.backends.cuda.engine import load

torch.set_num_threads(1)
for file in sys.argv[2:]:
    engine = load(open_artifact(file))
    logits = engine(torch.load(sys.argv[1]))
    (bound,) = engine.run._bound.values()
    torch.save((engine.name, logits, bound.buffers["pooled"]), f"{file}.found")
"""


def kept(artifact, folder):
    """Its file, moved to a folder where no other export overwrites it."""
    folder.mkdir()
    for part in (artifact.file, artifact.file.with_suffix(".json")):
        part.rename(folder / part.name)
    return folder / artifact.file.name


def interpret(files, images, folder):
    torch.save(images, folder / "images.pt")
    words = [sys.executable, "-c", CHILD, str(folder / "images.pt"), *map(str, files)]
    subprocess.run(words, check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=600)


@pytest.mark.slow
def test_kernels_compute_what_their_references_do(exported, tmp_path):
    """FasterTransformer's arithmetic to the last bit; `cuda` but for sums of floats in another order."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    files = {form: kept(exported(*form)[0], tmp_path / "-".join(form)) for form in FORMS}
    images = pictures(2, seed=4)
    interpret(files.values(), images, tmp_path)
    for (_, policy), file in files.items():
        name, logits, pooled = torch.load(f"{file}.found")
        assert name == "cuda (interpreted)"
        engine = load(open_artifact(file))
        expected = engine(images)
        (bound,) = engine.run._bound.values()
        if policy.startswith("ft"):
            assert torch.equal(pooled.half(), bound.buffers["pooled"].half())
        assert (logits - expected).abs().mean() < (0.001 if policy.startswith("ft") else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_heads_of_24_channels(exported, tmp_path, kind):
    """Filled up to 32 in memory: in int8 and half, and as FasterTransformer computes them."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    forms = {"cuda": "int8", "ft-mode1": "int8", "float": "float"}
    files = {}
    for name, precision in forms.items():
        artifact, _ = exported(kind, "cuda" if name == "float" else name, HEADS_OF_24, precision=precision)
        files[name] = kept(artifact, tmp_path / name)
    images = pictures(2, HEADS_OF_24["IMG_SIZE"], seed=4)
    interpret(files.values(), images, tmp_path)
    for name, file in files.items():
        said, logits, pooled = torch.load(f"{file}.found")
        assert said == "cuda (interpreted)"
        engine = load(open_artifact(file))
        expected = engine(images)
        (bound,) = engine.run._bound.values()
        if name.startswith("ft"):
            assert torch.equal(pooled.half(), bound.buffers["pooled"].half())
        assert (logits - expected).abs().mean() < {"cuda": 0.01, "float": 0.002}.get(name, 0.001)
