"""docs/bits.md matches the exporters: each cell of its table is exported."""

from pathlib import Path

import pytest

from swin_quant.backends.fastertransformer.limits import find_int8_mode
from swin_quant.backends.onnx.export import OnnxOptions, choose_nodes, int4_nodes
from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.policy import Rule, load_policy
from swin_quant.score.engine import get_precision

WEIGHTS, ACTIVATIONS = ("role:gemm_weight",), ("role:activation",)
CASES = {
    "W8 A8": [()],
    "float8 (`tensorrt-fp8`, `cuda-fp8`)": ["tensorrt-fp8", "cuda-fp8"],
    "W4 to W7 A8": [(Rule(nodes=WEIGHTS, bits=bits),) for bits in (4, 5, 6, 7)],
    "weights alone, W4 (`w4a16`)": ["w4a16"],
    "W4 A8 (`w4a8`) with `--int4-weights`": ["w4a8"],
    "weights alone, W4, with `--int4-weights`": ["w4a16"],
    "weights alone, W4 in blocks (`w4a16-blocks`)": ["w4a16-blocks"],
    "weights alone, W4 in blocks, with `--int4-weights`": ["w4a16-blocks"],
    "W4 and W8, node by node, with `--int4-weights`": [(Rule(nodes=("*.fc1._weight_quantizer",), bits=4),)],
    "activations of fewer than 8": [(Rule(nodes=ACTIVATIONS, bits=bits),) for bits in range(2, 8)],
}
BASE = {"portable": "qdq", "onnxruntime": "qdq", "openvino": "qdq", "tensorrt": "tensorrt"}


def table():
    """Row -> cells by the backends of the head."""
    lines = (Path(__file__).parents[3] / "docs" / "bits.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = [cell.replace("onnx,", "portable,").split(", ") for cell in rows[0][1:]]
    return {row[0]: {name: cell for names, cell in zip(head, row[1:], strict=True) for name in names}
            for row in rows[2:]}  # fmt: skip


def policy_of(case, base):
    return load_policy(case) if isinstance(case, str) else load_policy(base).and_then(*case)


def said_by_onnx(calibrated, target, row, case):
    model, card = calibrated("swin")
    policy = policy_of(case, BASE[target])
    card = card.__class__(card.name, {}, card.preprocess, policy=policy.to_dict())
    try:
        options = OnnxOptions(target=target, int4_weights="--int4-weights" in row)
        choose_nodes(model, card, options)
        if int4_nodes(model, card, options):
            return "int4"
        return "fp8" if get_precision(model) == "fp8" else "int8"
    except SwinQuantError as error:
        assert "activations" not in row or "._" in str(error), error  # the error names nodes
        return "refused"


def said_by_fastertransformer(calibrated, case):
    try:
        find_int8_mode(calibrated("swin")[0], policy_of(case, "ft-mode1"))
        return "int8"
    except SwinQuantError as error:
        assert "._" in str(error), error
        return "refused"


def test_the_table_has_every_case():
    assert list(table()) == list(CASES)


@pytest.mark.parametrize("row", CASES)
def test_every_cell_holds(row, calibrated):
    for backend, cell in table()[row].items():
        for case in CASES[row]:
            if backend == "fastertransformer":
                assert said_by_fastertransformer(calibrated, case) == cell, (backend, case)
            else:
                assert said_by_onnx(calibrated, backend, row, case) == cell, (backend, case)
