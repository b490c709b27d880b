"""`doctor` on machines of several kinds: what it finds, and its findings where parts are missing."""

import importlib
import json
import sys
from importlib.metadata import version

import pytest
import torch

from swin_quant.verbs import doctor as task
from swin_quant.verbs.doctor import doctor

VNNI = {"avx2": True, "avx512_f": True, "avx512_vnni": True, "amx_int8": True, "amx_bf16": True}


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    return lambda has: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)


def facts():
    return {one.name: one for one in doctor()}


def test_a_cpu_with_vnni_is_exact_and_one_without_has_a_remedy(cpu):
    cpu(VNNI)
    found = facts()["openvino, int8"]
    assert found.is_good and "exact" in found.value
    cpu({"avx2": True})
    found = facts()["openvino, int8"]
    assert not found.is_good and "--saturation-safe" in found.remedy
    cpu({})
    assert "not known" in facts()["onnxruntime, int8"].value


def test_a_torchvision_that_cannot_be_imported_is_named_with_the_command_that_mends_it(monkeypatch):
    def broken(name):
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return importlib.import_module(name)

    monkeypatch.setattr(task, "importlib", type("Broken", (), {"import_module": staticmethod(broken)}))
    found = facts()["torchvision"]
    assert not (found.is_good or found.is_absent) and "torchvision::nms does not exist" in found.value
    assert "!  torchvision: operator" in str(doctor())
    made_for_torch = version("torchvision").rpartition(".")[0]
    assert "--no-deps" in found.remedy and f"'torchvision=={made_for_torch}.*'" in found.remedy, "torch stays as it is"


def test_engines_that_are_missing_or_broken_say_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # makes its import fail
    found = facts()
    assert (
        found["onnxruntime"].is_absent
        and not found["onnxruntime"].is_good
        and "'.[onnx]'" in found["onnxruntime"].remedy
    )
    if importlib.util.find_spec("tensorrt") is None:
        assert not found["tensorrt"].is_good and "pip install tensorrt" in found["tensorrt"].remedy


def test_the_command_prints_a_line_for_each_fact_and_json(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    lines = run("doctor").ok().out.splitlines()
    found = json.loads(run("doctor", "--json").out)
    assert len(lines) == len(found) and {"Python", "torch", "openvino", "CPU", "GPU"} < {one["name"] for one in found}
    (line,) = (line for line in lines if line.startswith("-  onnxruntime: "))
    assert "pip install" in line
