import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import quantize

ROOT = Path(__file__).parents[1]
IMAGES = torch.randn(8, 3, 32, 32)


@pytest.fixture
def memory(monkeypatch):
    """The module of the benchmarks that counts memory."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("training")


def test_a_linear_and_a_gelu_keep_their_inputs_and_a_tensor_that_is_kept_twice_counts_once(memory):
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU())
    x = torch.randn(7, 10)
    assert memory.saved_bytes(model, lambda: model(x)) == 4 * 7 * (10 + 20)
    x = torch.randn(7, 10, requires_grad=True)
    assert memory.saved_bytes(nn.Identity(), lambda: x.exp() * x) == 2 * 4 * 70  # x, and the result of exp


def test_qat_keeps_hardly_more_than_float_training(memory, tiny_model, use_policy):
    model = tiny_model()
    use_policy(model, "ft-mode1")
    calibrate(model, [IMAGES], Method())
    model.train()
    images, labels = IMAGES.repeat(8, 1, 1, 1), torch.zeros(64, dtype=torch.int64)
    plain = memory.saved_bytes(model, lambda: F.cross_entropy(model(images), labels))
    quantize(model)
    quantized = memory.saved_bytes(model, lambda: F.cross_entropy(model(images), labels))
    weights = sum(parameter.nbytes for parameter in model.parameters())  # saved again, quantized
    assert quantized < 1.05 * plain + weights


# A process of its own, whose allocator gives back what is freed: the most that it ever held during a step, without
# what it held before and the gradients that it holds afterwards; and the same as the benchmark counts it.
REAL_STEP = """
import json, sys
import torch
import torch.nn.functional as F
import training
from swin_quant.config import find_config, load_config
from swin_quant.models import build_model

model = build_model(load_config(find_config("swin_tiny_patch4_window7_224")))
training.set_training(model, sys.argv[1])
images, labels = torch.randn(4, 3, 224, 224), torch.zeros(4, dtype=torch.int64)

def forward():
    with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[2] == "O1"):
        return F.cross_entropy(model(images).float(), labels)

def held(key):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

def step():
    for stage in model.layers:
        stage.checkpointing = True
    before = held("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    forward().backward()
    most = held("VmHWM") - before - sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    model.zero_grad(set_to_none=True)
    return most

step()  # libraries keep what they made in their first
print(json.dumps([step(), training.checkpointed_bytes(model, forward)]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("training", "precision"), [("float", "O0"), ("float", "O1"), ("QAT", "O0")])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_step_of_swin_t_takes_the_memory_that_is_counted(training, precision):
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
    place = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks"))), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", REAL_STEP, training, precision]
    done = subprocess.run(words, env=os.environ | allocator | place, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    taken, counted = json.loads(done.stdout)
    assert abs(counted / taken - 1) < 0.05, (taken, counted)
