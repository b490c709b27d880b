"""`doctor` on machines of several kinds: what it finds, and its findings where parts are missing."""

import importlib
import importlib.metadata
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import swin_quant as sq
from swin_quant.verbs import doctor as task
from swin_quant.verbs.doctor import doctor, mismatch_remedy

VNNI = {"avx2": True, "avx512_f": True, "avx512_vnni": True, "amx_int8": True, "amx_bf16": True}


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Replaces the fresh Python, which takes a second to import torchvision. A test sets its outcome: an error, or
    None."""
    fails = {"text": None}
    monkeypatch.setattr(task, "_fails", lambda code: fails["text"])
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
    found = topic("CPU")
    assert "AVX-512 VNNI, AMX" in found["int8"].value and "AMX bfloat16" in found["half precision"].value
    assert found["openvino, int8"].state == "good" and "exact" in found["openvino, int8"].value
    cpu({"avx2": True})
    assert topic("CPU")["openvino, int8"].state == "caution"
    assert "--saturation-safe" in topic("CPU")["openvino, int8"].remedy
    cpu({})
    assert "not known" in topic("CPU")["onnxruntime, int8"].value


def test_a_torchvision_for_cuda_beside_a_torch_for_cpus_is_named_with_the_command_that_mends_it(no_process):
    no_process["text"] = "RuntimeError: operator torchvision::nms does not exist"
    found = topic("versions")["torchvision"]
    version = importlib.metadata.version("torchvision").partition("+")[0]
    assert found.state == "caution" and "built for CUDA" in found.value
    command = found.remedy.partition("same version: ")[2].partition(". Where")[0].split()
    assert command[0] == sys.executable and command[-1] == f"torchvision=={version}"
    assert "--no-deps" in command, "torch must stay as it is"
    assert mismatch_remedy("0.28.0+cu130").count("0.28.0+") == 0
    no_process["text"] = "ImportError: libjpeg.so.8: cannot open"
    other = topic("versions")["torchvision"]
    assert "libjpeg.so.8" in other.value and torch.__version__ in other.remedy


def test_the_way_without_an_installation_works():
    """After the two lines that the remedy shows, `import timm` works."""
    assert "from swin_quant.base.compat import import_timm" in mismatch_remedy("1")
    from swin_quant.base.compat import import_timm

    import_timm()
    assert importlib.import_module("timm").__name__ == "timm"


def test_engines_that_are_missing_or_broken_say_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # makes its import fail
    monkeypatch.setattr(task, "_version", lambda package: None)
    found = topic("engines")
    assert found["onnxruntime"].state == "caution" and "'.[onnx]'" in found["onnxruntime"].remedy
    if importlib.util.find_spec("tensorrt") is None:
        assert found["tensorrt"].state == "missing" and "pip install tensorrt" in found["tensorrt"].remedy
    assert "simulated" in found["fastertransformer"].value


def test_a_topic_that_cannot_be_asked_takes_no_other_along(monkeypatch):
    def gone(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", gone)
    (unknown,) = topic("extras").values()
    assert unknown.state == "caution" and "swin-quant" in unknown.value
    assert topic("GPU") and topic("CPU")


def test_a_gpu_says_what_its_tensor_cores_multiply(monkeypatch, tmp_path):
    gpu = SimpleNamespace(name="NVIDIA T4", major=7, minor=5, total_memory=16 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    found = topic("GPU")["GPU 0"].value
    assert "sm 75" in found and "16 GiB" in found and found.endswith("float16, int8")
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n")
    assert task._driver(file) == "580.82.07" and task._driver(tmp_path / "none") is None


def test_a_gpu_beside_a_torch_for_cpus_is_a_caution(monkeypatch):
    monkeypatch.setattr(task, "_driver", lambda: "580.82.07")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "cannot use the GPU" in topic("GPU")["torch"].value
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "'7'" in topic("GPU")["torch"].remedy


def test_a_cache_folder_that_cannot_be_written_is_a_caution(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(task.os, "access", lambda path, mode: path != tmp_path)
    found = topic("cache folders")["Triton's kernels"]
    assert found.state == "caution" and str(tmp_path) in found.remedy


def test_the_command_prints_lines_of_80_columns_and_json(run, tmp_path, no_process):
    no_process["text"] = "RuntimeError: operator torchvision::nms does not exist"
    done = run("doctor", "--json", str(tmp_path / "machine.json")).ok()
    lines = done.out.splitlines()
    assert max(map(len, (line for line in lines if "/" not in line))) <= 80  # paths are not wrapped
    assert lines[0] == "What to do" and any(line.startswith("* torchvision: ") for line in lines)
    assert "engines" in lines and "CPU" not in lines
    whole = run("doctor", "--all").out.splitlines()
    assert whole[0] == "What to do" and {"engines", "CPU", "cache folders"} < set(whole)
    found = json.loads((tmp_path / "machine.json").read_text())["found"]
    assert {one["topic"] for one in found} == set(task.TOPICS)
    assert json.loads(run("doctor", "--json").out)["schema"] == "swin-quant/doctor/1"


def test_in_a_notebook_it_is_a_table():
    found = sq.doctor()
    assert "<table>" in found._repr_html_() and "torch" in str(found)


@pytest.mark.slow
def test_a_fresh_process_is_asked(monkeypatch):
    monkeypatch.undo()
    assert task._fails("pass") is None
    assert task._fails("raise SystemExit('no torch here')") == "no torch here"
    assert task._fails("import sys; sys.exit(3)") == "it ended with 3"


def test_the_operators_are_tested_anew(with_operators):
    found = topic("operators")
    assert found["C++ compiler"].state == found["operators of OpenVINO"].state == "good"
    assert str(with_operators) in found["operators of OpenVINO"].value


def test_operators_that_are_not_compiled_are_a_caution_with_the_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = topic("operators")
    assert found["C++ compiler"].state == "missing" and "no-such-compiler" in found["C++ compiler"].value
    assert found["operators of OpenVINO"].state == "caution" and "is 0" in found["operators of OpenVINO"].remedy
