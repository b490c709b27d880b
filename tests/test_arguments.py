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


MISPLACED = [  # a call, what is wrong, the right call
    ("wrap(nn.ReLU())", "missing a required argument: 'size'", "wrap(module, size)"),
    ("wrap(8, nn.ReLU())", "size is a model", "wrap(module, size)"),
    ("calibrate(model)", "missing a required argument: 'pictures'", "calibrate(model, pictures)"),
    ("calibrate(model, 'qdq', [X])", "pictures is a policy, 'qdq'", "calibrate(model, pictures, policy='qdq')"),
    ("calibrate([X], model, 'qdq')", "model is pictures", "calibrate(model, pictures, policy='qdq')"),
    ("calibrate(model, 'cpu', 'place')", "pictures is a policy, 'cpu'", "calibrate(model, 'place', policy='cpu')"),
    ("evaluate(model, 'qdq', [X])", "pictures is a policy, 'qdq'", "evaluate(model, pictures, policies='qdq')"),
    ("export(model, 'out', 'onnx')", "folder is a backend, 'onnx'", "export(model, 'onnx', folder='out')"),
    (
        "quantize(model, 'onnx', [X], 'out')",
        "pictures is a backend, 'onnx'",
        "quantize(model, pictures, 'onnx', folder='out')",
    ),
    ("quantize('onnx', 'a.pth', 'place')", "model is a backend, 'onnx'", "quantize('a.pth', 'place', 'onnx')"),
    ("predict(X, model)", "model is pictures", "predict(model, images)"),
    ("load(None)", "missing a required argument: 'checkpoint'", "load('path/of/checkpoint.pth')"),
    ("Preprocess(224)", "missing a required argument: 'crop'", "Preprocess(size, crop, interpolation, mean, std)"),
]
UNKNOWN = [  # a word of nobody, of a command or of another function, and the argument that is meant
    *(("calibrate", "polcy", "policy"), ("Budget", "max_dorp", "max_drop"), ("load", "cfg", "config")),
    *(("quantize", "cfg", "config"), ("calibrate", "calibrator", "method"), ("evaluate", "policy", "policies")),
    *(("export", "output", "folder"), ("export", "bits", "policy"), ("finetune", "lr", "changes")),
    *(("search", "backend", "engine"), ("predict", "data_path", "images"), ("evaluate", "batch", "batch_size")),
]
ODD = "got an unexpected keyword argument"
CALLS = {
    "wrap(nn.ReLU(), X)": "size is a tensor [2, 3, 8, 8]: give a side, .*",
    "wrap(model.module, 8)": "model: is a model already: give it to sq.calibrate",
    "pictures('imagenet', 'val', '5')": "pictures: count is '5': must be a whole number",
    "load(5)": "load: checkpoint is 5: must be text or a path",
    "policy(5)": "policy: name_or_path is 5: must be text",
    "search(model, [X], 'openvino', 'o', budget=0.1)": "search: budget is 0.1: must be a Budget",
    "quantize('a.pth', 'data', 'openvino', budget={'max_drop': 1})": "quantize: budget is .*: must be a Budget",
    "evaluate(model, [X], engine=3)": "evaluate: engine is 3: must be text",
    "calibrate(model, [X], 8)": "calibrate: policy is 8: must be text or a Policy or a PolicyChoice",
    "Budget(max_drop='a')": "Budget: max_drop is 'a': must be a number",
    "app('a.onnx', max_bacth=1)": f"ServiceLimits: {ODD} 'max_bacth'; did you mean max_batch?",
    "package(model, 'out', zzz=1)": f"package: {ODD} 'zzz': there are .*folder.*",
    **{call: f"{call.partition('(')[0]}: {wrong}: call sq.{right}" for call, wrong, right in MISPLACED},
    **{f"{name}(model, {word}='x')": f"{name}: {ODD} '{word}'; did you mean {due}?" for name, word, due in UNKNOWN},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_answered_with_the_right_one(model, call):
    line = CALLS[call]
    for sign in "()[]?":
        line = line.replace(sign, f"\\{sign}")
    with pytest.raises(sq.UsageError, match=f"^{line}$"):
        eval(f"sq.{call}", globals() | {"model": model})


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
