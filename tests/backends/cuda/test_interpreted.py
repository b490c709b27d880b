"""Whole networks by the kernels themselves, in Triton's interpreter, in a separate process."""

import os
import subprocess
import sys

import pytest
import torch

from swin_quant.backends.cuda.engine import load
from swin_quant.backends.open_artifact import open_artifact
from tests.backends.conftest import pictures

FORMS = [("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swinv2", "ft-mode1"), ("swin", "cuda"), ("swinv2", "cuda")]
FORMS += [("swin", "cuda-fp8"), ("swinv2", "tensorrt-fp8")]
CHILD = """
import sys, torch
from swin_quant.backends.cuda.engine import load
from swin_quant.backends.open_artifact import open_artifact

torch.set_num_threads(1)
for file in sys.argv[2:]:
    engine = load(open_artifact(file))
    logits = engine(torch.load(sys.argv[1]))
    (bound,) = engine.run._bound.values()
    torch.save((engine.name, logits, bound.buffers["pooled"]), f"{file}.found")
"""


@pytest.mark.nightly
def test_kernels_compute_what_their_references_do(exported, tmp_path):
    """FasterTransformer's arithmetic to the last bit; `cuda` except for sums of floats in another order and, in int8,
    GELU's polynomial: both move values next to a tie by a level."""
    pytest.importorskip("triton")
    files, images = {}, pictures(2, seed=4)
    for form in FORMS:
        file = exported(*form)[0].file
        folder = tmp_path / "-".join(form)
        folder.mkdir()  # where no other export overwrites it
        for part in (file.with_suffix(".json"), file):
            files[form] = part.rename(folder / part.name)
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
        bound = 0.001 if policy.startswith("ft") else 0.02 if policy == "cuda" else 0.01
        assert (logits - expected).abs().mean() < bound
