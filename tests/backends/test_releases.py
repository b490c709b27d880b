"""Releases of engines that the matrix knows to be wrong: named in requirements, refused by engines and packages."""

from dataclasses import replace

import pytest

from swin_quant.backends.releases import EngineReleases, ReleaseFault, known, list_faults, refuse_wrong
from swin_quant.base.errors import SwinQuantError

WRONG = ReleaseFault("is wrong", {"precision": ("int8",)}, releases=("2024.5", "2024.6"))
OLD = ReleaseFault("does not read it", {"opset": (18, 20)}, below="2024.3")
ENGINE = EngineReleases("2023.2", (WRONG, OLD))


@pytest.mark.parametrize(
    "facts, wanted",
    [
        ({"precision": "float32", "opset": 17}, ">=2023.2"),
        ({"precision": "int8", "opset": 17}, ">=2023.2,!=2024.5.*,!=2024.6.*"),
        ({"precision": "float32", "opset": 20}, ">=2024.3"),
    ],
)
def test_requirements_are_pip_s(facts, wanted):
    specifiers = pytest.importorskip("packaging.specifiers")
    assert ENGINE.requirement(facts) == wanted
    allowed = specifiers.SpecifierSet(wanted)
    for version in ("2023.1.0", "2023.2.0", "2024.2.0", "2024.3.0", "2024.5.0", "2024.6.0", "2025.0.0", "2026.4.1"):
        right = not any(fault.affects(version) and fault.shows_with(facts) for fault in ENGINE.faults)
        assert (version in allowed) == (right and version != "2023.1.0")


def test_a_release_that_is_known_to_be_wrong_is_refused_by_name(artifact_of, small_net):
    artifact = artifact_of(small_net())
    card = replace(artifact.card, config={"MODEL": {"TYPE": "swin"}})
    artifact = replace(artifact, card=card)
    with pytest.raises(
        SwinQuantError, match=r"openvino 2023\.3\.0 computes .*install 'openvino>=2023\.2,!=2023\.3\.\*'"
    ):
        refuse_wrong("openvino", "2023.3.0-13775-ceeafaf64f3", artifact)
    refuse_wrong("openvino", "2023.3.0-13775-ceeafaf64f3", artifact, batch=1)  # as an engine that fixes every shape
    refuse_wrong("openvino", "2024.6.0-17404-4c0f47d2335", artifact)
    with pytest.raises(SwinQuantError, match=r"onnxruntime 1\.15\.1 is older than all .*install 'onnxruntime>=1\.16'"):
        refuse_wrong("onnxruntime", "1.15.1", artifact)
    assert any("wrongly" in why for why in list_faults("openvino", "2023.3.0")) and not list_faults("tensorrt", "10.0")


def test_every_fact_of_the_table_is_one_of_a_file():
    facts = {"precision", "opset", "batch", "type", "maps"}
    assert {fact for one in known().values() for fault in one.faults for fact in fault.when} <= facts
