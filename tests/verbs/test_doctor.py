"""`doctor` on machines of several kinds: what it finds, and its findings where parts are missing."""

import importlib
import importlib.metadata
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from swin_quant.verbs import doctor as task
from swin_quant.verbs.doctor import doctor

VNNI = {"avx2": True, "avx512_f": True, "avx512_vnni": True, "amx_int8": True, "amx_bf16": True}


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Replaces the fresh Python, which takes a second to import torchvision. A test sets its error."""
    fails = {"text": ""}
    monkeypatch.setattr(
        task.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=bool(fails["text"]), stderr=fails["text"])
    )
    return fails


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    return lambda has: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)


def topic(name):
    return {one.name: one for one in doctor().found if one.topic == name}


def test_a_cpu_with_vnni_is_exact_and_one_without_is_a_caution_with_a_remedy(cpu):
    cpu(VNNI)
    found = topic("machine")["openvino, int8"]
    assert found.state == "good" and "exact" in found.value
    cpu({"avx2": True})
    found = topic("machine")["openvino, int8"]
    assert found.state == "caution" and "--saturation-safe" in found.remedy
    cpu({})
    assert "not known" in topic("machine")["onnxruntime, int8"].value


def test_a_torchvision_that_cannot_be_imported_is_named_with_the_command_that_mends_it(no_process):
    no_process["text"] = "Traceback\nRuntimeError: operator torchvision::nms does not exist\n"
    found = topic("versions")["torchvision"]
    assert found.state == "caution" and "torchvision::nms does not exist" in found.value
    assert "--no-deps" in found.remedy and torch.__version__ in found.remedy, "torch must stay as it is"
    assert f"torchvision=={importlib.metadata.version('torchvision').partition('+')[0]}" in found.remedy


def test_engines_that_are_missing_or_broken_say_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # makes its import fail
    found = topic("engines")
    assert found["onnxruntime"].state in ("missing", "caution") and "'.[onnx]'" in found["onnxruntime"].remedy
    if importlib.util.find_spec("tensorrt") is None:
        assert found["tensorrt"].state == "missing" and "pip install tensorrt" in found["tensorrt"].remedy
    assert "simulated" in found["fastertransformer"].value


def test_the_command_prints_lines_of_80_columns_and_json(run, tmp_path, no_process):
    no_process["text"] = "RuntimeError: operator torchvision::nms does not exist"
    done = run("doctor", "--json", str(tmp_path / "machine.json")).ok()
    lines = done.out.splitlines()
    assert max(map(len, (line for line in lines if "/" not in line))) <= 80  # paths are not wrapped
    assert lines[0].startswith("What to do") and any(line.startswith("* torchvision: ") for line in lines)
    assert {"versions", "engines", "machine"} < {line.strip() for line in lines}
    found = json.loads((tmp_path / "machine.json").read_text())["found"]
    assert {one["topic"] for one in found} == {"versions", "engines", "machine"}
    assert json.loads(run("doctor", "--json").out)["schema"] == "swin-quant/doctor/1"
