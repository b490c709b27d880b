"""Files on imitated CPUs without VNNI: plain ones are inexact or avoid saturation, safe ones are as exact as ever.

OpenVINO obeys ONEDNN_MAX_CPU_ISA; for ONNX Runtime the CPU itself is imitated (tests/standin/older_cpu.c).
"""

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decibels import sqnr
from nightly import share

from swin_quant.backends.onnx.export import export
from swin_quant.backends.saturation import without_saturation
from swin_quant.quant.policy import apply_policy, load_policy, quantize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other CPUs have no such kernels"),
]
STANDIN = Path(__file__).parents[2] / "standin" / "older_cpu.c"
# Logits of artifacts on an engine, and of the same files in a session of somebody's own; cautions on standard error.
CHILD = """
import sys
import numpy, torch
from swin_quant.base import progress
from swin_quant.backends import engine_loader
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.score.options import EngineOptions

engine, folder, *files = sys.argv[1:]
progress.set_up()
images = torch.from_numpy(numpy.load(folder + "/images.npy"))
for number, file in enumerate(files):
    logits = engine_loader(engine)(open_artifact(file), EngineOptions(threads=1))(images)
    numpy.save(f"{folder}/{number}.npy", logits.numpy())
    if engine == "onnxruntime":
        import onnxruntime
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        numpy.save(f"{folder}/own{number}.npy", session.run(None, {"images": images.numpy()})[0])
"""


@pytest.fixture(scope="module")
def files(calibrated, tmp_path_factory):
    """A plain and a safe artifact, their images, and fake-quant's logits for each."""
    folder = tmp_path_factory.mktemp("saturation")
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    np.save(folder / "images.npy", images.numpy())
    paths, expected = [], []
    for name, policy in (("plain", load_policy("cpu")), ("safe", without_saturation(load_policy("cpu")))):
        model, card = calibrated("swin", "cpu")
        paths.append(export(model, replace(card, policy=policy.to_dict()), folder / name).file)
        apply_policy(model, policy)
        quantize(model)
        with torch.no_grad():
            expected.append(model(images).numpy())
    return folder, paths, expected


@pytest.fixture
def child(files):
    """child(engine, environment) -> its output, or None if such a CPU cannot be imitated."""

    def run(engine, **environment):
        folder, paths, _ = files
        command = [sys.executable, "-c", CHILD, engine, str(folder), *map(str, paths)]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        assert done.returncode in (0, 77), done.stderr
        return None if done.returncode else done.stderr

    return run


@pytest.fixture
def far(files):
    """far(name) -> dB between fake-quant and the logits of that name, for the plain file and for the safe one."""
    folder, _, expected = files
    return lambda name: [sqnr(fake, np.load(folder / f"{name}{i}.npy")) for i, fake in enumerate(expected)]


@pytest.mark.parametrize("isa", share(["AVX2", "AVX512_CORE"], 2))
def test_openvino(isa, child, far):
    said = child("openvino", ONEDNN_MAX_CPU_ISA=isa)
    plain, safe = far("")
    assert safe > 38 and plain < safe - 8
    assert said.count("warning: openvino: this CPU has no VNNI") == 1 and "--saturation-safe" in said


@pytest.mark.parametrize("kind", ["avx2", "avx512"])
def test_onnxruntime(kind, child, far, tmp_path):
    library = tmp_path / "older_cpu.so"
    try:
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(STANDIN), "-o", str(library)], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    said = child("onnxruntime", OLDER_CPU=kind, LD_PRELOAD=str(library))
    if said is None:
        pytest.skip("this CPU or its hypervisor does not let CPUID be trapped")
    plain, safe = far("own")
    assert safe > 38 and plain < safe - 8
    assert min(far("")) > 38  # our engine asks for exact kernels if a file needs them
    assert said.count("warning: onnxruntime: this CPU has no VNNI") == 1 and "slower kernels" in said
