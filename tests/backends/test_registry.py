"""Backends by name: those that a package announces or a program registers are taken, broken ones left out."""

from dataclasses import replace

import pytest

from swin_quant.backends import registry
from swin_quant.backends.backend import Backend
from swin_quant.base.errors import UsageError


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("lost = no_such_module:BACKEND", "entry point lost of lost: left out, it cannot be imported: No module named"),
        ("wrong = json:dumps", "entry point wrong of wrong: left out, it is no Backend"),
        ("onnx2 = toy_twin:TWIN", "entry point onnx2 of onnx2: left out, another backend is called onnx"),
    ],
)
def test_a_broken_package_is_left_out_with_a_line(install, capsys, caplog, tmp_path, entry, why):
    text = "from swin_quant.backends.backend import Backend\nTWIN = Backend('onnx')\n"
    (tmp_path / "site" / "toy_twin.py").write_text(text)
    install(entry)
    assert set(registry.backends()) == set(registry.BUILT_IN)
    assert why in caplog.text


def test_a_program_registers_its_own_and_cannot_replace_another(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    mine = Backend("mine", runs=("onnx",), load="somewhere:load")
    assert registry.register(mine) is registry.register(mine) is registry.engine_named("mine")
    assert [one.name for one in registry.takers("onnx")] == ["onnxruntime", "openvino", "mine"]
    for other in (replace(mine, home="cpu"), Backend("onnx")):
        with pytest.raises(UsageError, match="there is one of that name already"):
            registry.register(other)
