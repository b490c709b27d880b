"""Whole networks by the kernels themselves, in Triton's interpreter, in a separate process."""

import os
import subprocess
import sys

import pytest
import torch

from swin_quant.backends.cuda.engine import load
from swin_quant.backends.open_artifact import open_artifact
from tests.backends.conftest import pictures
from tests.backends.cuda.conftest import HEADS_OF_24

FORMS = [("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swinv2", "ft-mode1"), ("swin", "cuda"), ("swinv2", "cuda")]
FORMS += [("swin", "cuda-fp8"), ("swinv2", "tensorrt-fp8")]
CHILD = """
import sys, torch
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.cuda.engine import load

torch.set_num_threads(1)
for file in sys.argv[2:]:
    engine = load(open_artifact(file))
    logits = engine(torch.load(sys.argv[1]))
    (bound,) = engine.run._bound.values()
    torch.save((engine.name, logits, bound.buffers["pooled"]), f"{file}.found")
"""


def kept(artifact, folder):
    """The artifact's file, moved to a folder where no other export overwrites it."""
    folder.mkdir()
    for part in (artifact.file, artifact.file.with_suffix(".json")):
        part.rename(folder / part.name)
    return folder / artifact.file.name


def interpret(files, images, folder, script=CHILD):
    """Run the script on these pictures and exports, with Triton's interpreter; it writes FILE.found for each."""
    pytest.importorskip("triton")
    torch.save(images, folder / "images.pt")
    words = [sys.executable, "-c", script, str(folder / "images.pt"), *map(str, files)]
    subprocess.run(words, check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=600)


@pytest.mark.nightly
def test_kernels_compute_what_their_references_do(exported, tmp_path):
    """FasterTransformer's arithmetic to the last bit; `cuda` except for sums of floats in another order and, in int8,
    GELU's polynomial: both move values next to a tie by a level."""
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
        bound = 0.001 if policy.startswith("ft") else 0.02 if policy == "cuda" else 0.01
        assert (logits - expected).abs().mean() < bound


STEPS = """
import sys, torch
from pathlib import Path
from swin_quant.backends.cuda import binding
from swin_quant.backends.cuda.file import read_network
from swin_quant.backends.cuda.launches import build_program

torch.set_num_threads(1)
images = torch.load(sys.argv[1])
for file in sys.argv[2:]:
    network, found = read_network(Path(file)), []
    program = build_program(network.spec, len(images))
    whole = program, network.tensors, network.scalars, torch.device("cpu")
    kernels = binding.bind(*whole)
    binding.by_kernels, by_kernels = (lambda device: False), binding.by_kernels
    references = binding.bind(*whole)
    binding.by_kernels = by_kernels
    for bound in (kernels, references):
        bound.images.copy_(images)
    for launch, kernel, reference in zip(program.launches, kernels.calls, references.calls):
        kernel(), reference()
        name = launch.operands["out"].name
        got, expected = kernels.buffers[name], references.buffers[name]
        found.append((launch.op, launch.name, got.clone(), expected.clone()))
        got.copy_(expected)  # each launch is given the same
    torch.save(found, f"{file}.found")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_heads_of_24_channels(exported, tmp_path, kind):
    """In int8, also with a bfloat16 stream, in half and in FasterTransformer's arithmetic, launch by launch: heads are
    padded to 32 in memory. Products of bfloat16 themselves, such as the patch embedding, are not compared: the
    interpreter multiplies their bits.

    Sums of floats over 96 channels have another order: a value on a tie may become its neighbour, except in integers.
    """
    forms = {
        "cuda": ("cuda", {}),
        "ft-mode1": ("ft-mode1", {}),
        "float": ("cuda", {"precision": "float"}),
        "bfloat16": ("cuda", {"float_type": "bfloat16"}),
    }
    files = {}
    for name, (policy, options) in forms.items():
        artifact, _ = exported(kind, policy, HEADS_OF_24, **options)
        files[name] = kept(artifact, tmp_path / name)
    interpret(files.values(), pictures(1, HEADS_OF_24["IMG_SIZE"], seed=4), tmp_path, STEPS)
    for form, file in files.items():
        found = torch.load(f"{file}.found")
        assert sum(op == "attention" for op, *_ in found) == 3
        for op, name, got, expected in found:
            if form == "bfloat16" and op == "patch_embed":
                continue
            moved = (got != expected).float().mean()
            if form == "ft-mode1" and op in ("gemm", "attention") and name != "head":
                assert kind == "swinv2" or moved == 0, name  # V2's q and k are normalised: floats
            if got.dtype == torch.int8:
                assert moved < 0.01 and (got.int() - expected.int()).abs().max() <= 1, name
            else:
                wide = 3e-2 if got.dtype == torch.bfloat16 else 4e-3
                torch.testing.assert_close(got, expected, rtol=wide, atol=wide)
