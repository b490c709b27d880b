"""Whole networks by the kernels themselves, through Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from swin_quant.backends.artifact import open_artifact
from swin_quant.backends.cuda.engine import load
from tests.backends.cuda.conftest import pictures

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


@pytest.mark.slow
def test_kernels_compute_what_their_references_do(exported, tmp_path):
    """FasterTransformer's arithmetic to the last bit; `cuda` but for sums of floats in another order."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    files = {}
    for form in FORMS:
        file = exported(*form)[0].file
        folder = tmp_path / "-".join(form)
        folder.mkdir()
        for part in (file, file.with_suffix(".json")):
            part.rename(folder / part.name)
        files[form] = folder / file.name
    images = pictures(2, seed=4)
    torch.save(images, tmp_path / "images.pt")
    words = [sys.executable, "-c", CHILD, str(tmp_path / "images.pt"), *map(str, files.values())]
    subprocess.run(words, check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=600)
    for (_, policy), file in files.items():
        name, logits, pooled = torch.load(f"{file}.found")
        assert name == "cuda (interpreted)"
        engine = load(open_artifact(file))
        expected = engine(images)
        (bound,) = engine.run._bound.values()
        if policy.startswith("ft"):
            assert torch.equal(pooled.half(), bound.buffers["pooled"].half())
        assert (logits - expected).abs().mean() < (0.001 if policy.startswith("ft") else 0.01)
