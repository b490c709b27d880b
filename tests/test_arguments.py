"""Calls of the Python functions with missing, exchanged or strange arguments: one line with the right call."""

import inspect
import pickle

import pytest
import torch
from torch import nn

import swin_quant as sq
from swin_quant.arguments import checked

X = torch.zeros(2, 3, 8, 8)


@pytest.fixture(scope="module")
def model():
    return sq.wrap(nn.Sequential(nn.Conv2d(3, 8, 3)), 8)


CALLS = {
    "wrap(net)": (lambda model: sq.wrap(nn.ReLU()), "wrap: missing .*'size': call sq.wrap(module, size)"),
    "wrap(8, net)": (lambda model: sq.wrap(8, nn.ReLU()), "wrap: size is a model: call sq.wrap(module, size)"),
    "wrap(net, x)": (lambda model: sq.wrap(nn.ReLU(), X), "size is a tensor [2, 3, 8, 8]: give a side, .*"),
    "wrap(model)": (lambda model: sq.wrap(model.module, 8), "model: is a model already: give it to sq.calibrate"),
    "calibrate(model)": (
        lambda model: sq.calibrate(model),
        "calibrate: missing .*: call sq.calibrate(model, pictures)",
    ),
    "calibrate(model, policy, data)": (
        lambda model: sq.calibrate(model, "qdq", [X]),
        "calibrate: pictures is a policy, 'qdq': call sq.calibrate(model, pictures, policy='qdq')",
    ),
    "calibrate(data, model)": (
        lambda model: sq.calibrate([X], model, "qdq"),
        "calibrate: model is pictures: call sq.calibrate(model, pictures, policy='qdq')",
    ),
    "evaluate(model, policy, data)": (
        lambda model: sq.evaluate(model, "qdq", [X]),
        "evaluate: pictures is a policy, 'qdq': call sq.evaluate(model, pictures, policies='qdq')",
    ),
    "export(model, folder, backend)": (
        lambda model: sq.export(model, "out", "onnxruntime"),
        "export: folder is a backend, 'onnxruntime': call sq.export(model, 'onnxruntime', folder='out')",
    ),
    "quantize(model, backend, data)": (
        lambda model: sq.quantize(model, "openvino", [X], "out"),
        "quantize: pictures is a backend, 'openvino': call sq.quantize(model, pictures, 'openvino', folder='out')",
    ),
    "calibrate(model, policy, place)": (
        lambda model: sq.calibrate(model, "cpu", "imagenet"),
        "calibrate: pictures is a policy, 'cpu': call sq.calibrate(model, 'imagenet', policy='cpu')",
    ),
    "predict(data, model)": (
        lambda model: sq.predict(X, model),
        "predict: model is pictures: call sq.predict(model, images)",
    ),
    "an unknown option": (
        lambda model: sq.calibrate(model, [X], polcy="qdq"),
        "calibrate: got an unexpected keyword argument 'polcy'; did you mean policy?",
    ),
    "a number as text": (
        lambda model: sq.pictures("imagenet", "val", "5"),
        "pictures: count is '5': must be a whole number",
    ),
    "no checkpoint": (lambda model: sq.load(5), "load: checkpoint is 5: must be text or a path"),
    "no policy": (lambda model: sq.policy(5), "policy: name_or_path is 5: must be text"),
    "a class": (
        lambda model: sq.Preprocess(224),
        "Preprocess: missing .* 'crop': call sq.Preprocess(size, crop, interpolation, mean, std)",
    ),
    "an option of a class": (
        lambda model: sq.Budget(max_dorp=1),
        "Budget: got an unexpected keyword argument 'max_dorp'; did you mean max_drop?",
    ),
    "a limit": (
        lambda model: sq.app("a.onnx", max_bacth=1),
        "ServiceLimits: got an unexpected keyword argument 'max_bacth'; did you mean max_batch?",
    ),
    "an option like no other": (
        lambda model: sq.package(model, "out", zzz=1),
        "package: got an unexpected keyword argument 'zzz': there are .*folder.*",
    ),
    **{
        f"a command's word: {verb}({word}=...)": (
            lambda model, verb=verb, word=word: getattr(sq, verb)(model, **{word: "x"}),
            f"{verb}: got an unexpected keyword argument '{word}'; did you mean {right}?",
        )
        for verb, word, right in (
            ("load", "cfg", "config"),
            ("quantize", "cfg", "config"),
            ("calibrate", "calibrator", "method"),
            ("evaluate", "policy", "policies"),
            ("export", "output", "folder"),
            ("export", "bits", "policy"),
            ("finetune", "lr", "changes"),
            ("search", "backend", "engine"),
            ("predict", "data_path", "images"),
            ("evaluate", "batch", "batch_size"),
        )
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_answered_with_the_right_one(model, call):
    wrong, line = CALLS[call]
    for sign in "()[]?":
        line = line.replace(sign, f"\\{sign}")
    with pytest.raises(sq.UsageError, match=f"^{line}$"):
        wrong(model)


@pytest.mark.parametrize("name", sorted({*sq.__all__} - {"__version__", "SwinQuantError", "UsageError"}))
def test_every_name_refuses_an_unknown_option_in_one_line(name):
    """Except for those with options of any name, which what they are passed to refuses: `load`, `export`, `app`."""
    if "VAR_KEYWORD" not in {one.kind.name for one in inspect.signature(getattr(sq, name)).parameters.values()}:
        with pytest.raises(sq.UsageError, match=f"^{name}: got an unexpected keyword argument 'zzz'"):
            getattr(sq, name)(zzz=1)


def test_another_default_type_is_named(model):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for call in (lambda: sq.wrap(nn.ReLU(), 8), lambda: sq.calibrate(model, [X], "qdq"), lambda: sq.load("a.pth")):
            with pytest.raises(sq.UsageError, match=r"type is float64: call torch.set_default_dtype\(torch.f"):
                call()
    finally:
        torch.set_default_dtype(before)


def test_arguments_that_may_be_of_a_kind_stay(tmp_path, monkeypatch):
    """A folder may have a backend's name, and pictures may lie in a folder that a policy is named like."""
    got = []

    @checked
    def export(model, backend, folder, policy=None):
        got.append((backend, folder, policy))

    @checked
    def calibrate(model, pictures, policy=None):
        got.append((pictures, policy))

    (tmp_path / "qdq").mkdir()
    monkeypatch.chdir(tmp_path)
    export(nn.ReLU(), "onnx", "onnx")
    export("a.pth", "openvino", "out", "openvino")
    calibrate(nn.ReLU(), "qdq")
    calibrate(nn.ReLU(), [(X, [1])], sq.policy("qdq"))
    assert len(got) == 4


@pytest.mark.parametrize("name", sorted({*sq.__all__} - {"__version__"}))
def test_every_name_can_be_pickled_for_another_process(name):
    assert pickle.loads(pickle.dumps(getattr(sq, name))) is getattr(sq, name)
