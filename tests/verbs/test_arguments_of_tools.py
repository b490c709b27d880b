"""Whatever the verbs beside quantization take reaches the step that it is for, as in test_every_argument.py."""

import importlib
import inspect
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Reached

import swin_quant as sq
from swin_quant.backends.tensorrt.build import BuildOptions
from swin_quant.loading import ModelFile
from swin_quant.serving.app import ServiceLimits


@pytest.fixture
def verb():
    return lambda name: importlib.import_module(f"swin_quant.verbs.{name}")


@pytest.fixture(scope="module")
def exported(micro, pictures, tmp_path_factory):
    model = sq.load(micro / "swin.pth", config=micro / "swin.yaml")
    sq.calibrate(model, sq.pictures(pictures, "train", 8), "qdq", passes=[])
    return sq.export(model, "onnxruntime", tmp_path_factory.mktemp("onnx"))


def assert_all(function, *names):
    assert {*inspect.signature(function).parameters} == {*names}


def test_package(verb, exported, tmp_path, heard):
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n")
    calls = heard(verb("package"), "write_package", ends=True)
    asked = {"labels": tmp_path / "names.txt", "overwrite": True, "max_batch": 16, "delay_us": 1000, "instances": 2}
    with pytest.raises(Reached):
        verb("package").package(exported, tmp_path / "made", **asked)
    facts, serving, folder, overwrite = calls[0].values()
    assert asdict(serving) == {name: asked[name] for name in ("max_batch", "delay_us", "instances")}
    assert (list(facts.served.labels), folder, overwrite) == (["one", "two", "three"], tmp_path / "made", True)
    assert_all(verb("package").package, "exported", "folder", *asked)


def test_report(verb, exported, pictures, val, tmp_path, heard):
    sq.evaluate(exported, val, half="none", own_float=False)
    card = exported.file.with_suffix(".json")
    verb("report").report((card,), folder=tmp_path / "table")
    assert {one.suffix for one in (tmp_path / "table").iterdir()} == {".md", ".csv", ".json"}
    pages = heard(verb("report"), "write_page", ends=True)
    with pytest.raises(Reached):
        verb("report").report((card,), html=tmp_path / "page.html", pictures=sq.pictures(pictures, "val", 3))
    file, cards, source = pages[0].values()
    assert (file, [*cards], source.count) == (tmp_path / "page.html", [card], 3)
    assert_all(verb("report").report, "cards", "folder", "html", "pictures")


def test_analyze(verb, model, heard):
    calls = heard(verb("analyze"), "analyze_module", ends=True)
    asked = {"targets": ("onnxruntime",), "replace": ("roll",), "check_replacements": True}
    images = torch.zeros(3, 3, 32, 32)
    for more, batch in (({"images": images}, 3), ({"batch": 5}, 5)):
        with pytest.raises(Reached):
            verb("analyze").analyze(model, **more, **asked)
        found = calls.pop()
        assert tuple(list(found.values())[1]) == (batch, 3, 32, 32)
        assert (tuple(found["targets"]), tuple(found["replace"]), found["check"]) == (("onnxruntime",), ("roll",), True)
    assert_all(verb("analyze").analyze, "model", "images", "batch", *asked)


def test_serve(verb, exported, tmp_path, heard):
    services, places = heard(verb("serve"), "load_service", ends=True), heard(verb("serve"), "_listening")
    limits = ServiceLimits(max_batch=3, max_queue=5)
    asked = {"host": "localhost", "port": 0, "name": "mine", "labels": tmp_path / "names.txt", "threads": 2}
    asked |= {"float_type": "float32", "extension": ("mine.so",), "limits": limits, "device": "cpu"}
    with pytest.raises(Reached):
        verb("serve").serve(exported.file, "onnxruntime", **asked)
    _, engine, options, given, name, labels = services[0].values()
    assert (engine, given, name, labels) == ("onnxruntime", limits, "mine", str(tmp_path / "names.txt"))
    assert (options.threads, options.float_type, options.device) == (2, "float32", "cpu")
    assert options.extensions == ("mine.so",) and list(places[0].values()) == ["localhost", 0]
    assert_all(verb("serve").serve, "artifact", "engine", *asked)


def test_engine_of_an_exported_file(verb, exported, tmp_path, heard):
    plans = heard(importlib.import_module("swin_quant.verbs.export_here"), "make_plan", ends=True)
    asked = {"min_batch": 2, "opt_batch": 4, "max_batch": 6, "workspace": 64, "timing_cache": tmp_path / "cache"}
    with pytest.raises(Reached):
        verb("export").export(exported, "tensorrt", build=BuildOptions(**asked, allow_float32=True))
    assert list(asdict(plans[0]["options"]).values()) == [*asked.values(), True]


def test_align(verb, micro, model, train, exported, val, tmp_path, heard):
    module, file = verb("align"), tmp_path / "calib.pth"
    sq.calibrate(model, train, "qdq", passes=[]).save(file)
    opened, loaded = heard(module, "open_side"), heard(module, "artifact_side")
    compared, dumped = heard(module, "compare"), heard(module, "write_dump")
    form = ModelFile(cfg=str(micro / "swin.yaml"))
    how = {"policy": ("qdq", "ft-mode1"), "engine": "onnxruntime", "float_type": "float32", "extension": ()}
    told = {"below": 12.0, "only": ("head",), "to": tmp_path / "a.npz", "names": "mindspore", "device": "cpu"}
    found = module.align(file, exported, val, form=form, **how, **told)
    asked, policy, _, options, world = opened[0].values()
    assert (asked.cfg, policy.name, options.float_type) == (form.cfg, "qdq", "float32")
    assert world.device.type == "cpu" and list(loaded[0].values())[1] == "onnxruntime"
    assert (compared[0]["below"], found.shown, dumped[0]["names"]) == (12.0, ("head",), "mindspore")
    assert Path(dumped[0]["file"]) == tmp_path / "a.npz" and len(np.load(tmp_path / "a.npz")) > 0
    loaded = heard(module, "artifact_side", ends=True)
    with pytest.raises(Reached):
        module.align(exported, extension=("mine.so",), to=tmp_path / "c.npz")
    assert loaded[0]["arguments"][2].extensions == ("mine.so",)
    steps = heard(module, "take_step", ends=True)
    with pytest.raises(Reached):
        module.align(micro / "swin.pth", None, val, form=form, to=tmp_path / "b.npz", step=True, lr=0.5)
    assert steps[0]["lr"] == 0.5
    assert_all(module.align, "a", "b", "images", "form", "step", "lr", *how, *told)


def test_show(verb, micro, exported, tmp_path, heard):
    module = verb("show")
    nodes, graphs, products = (heard(module, name, ends=True) for name in ("model_or_shapes", "_inspect", "_gemms"))
    shapes = ModelFile(cfg=str(micro / "swin.yaml"))
    for subject, more in (
        (shapes, {"policy": "ft-mode2"}),
        (exported.file, {"engine": "onnxruntime", "npu": "qnn"}),
        (shapes, {"gemms": 4, "tuned": ("a.in",), "write": tmp_path / "b.in"}),
    ):
        with pytest.raises(Reached):
            module.show(subject, **more)
    assert nodes[0]["policy"].name == "ft-mode2"
    assert list(graphs[0].values())[1:] == ["onnxruntime", "qnn"]
    assert list(products[0].values())[1:] == [4, ("a.in",), tmp_path / "b.in"]
    assert_all(module.show, "subject", "policy", "engine", "npu", "gemms", "tuned", "write")
