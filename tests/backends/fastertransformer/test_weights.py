"""The amaxList against the specification's tables, written out index by index (section 3.4)."""

import numpy as np
import pytest

from swin_quant.backends.fastertransformer.weights import amax_list

NODES = [
    "attn.qkv._input", "attn.qkv._aftergemm", "attn.proj._input", "attn.proj._aftergemm", "attn.matmul_q_input",
    "attn.matmul_k_input", "attn.matmul_v_input", "attn.matmul_a_input", "attn.softmax_input", "mlp.fc1._input",
    "mlp.fc1._aftergemm", "mlp.fc2._input", "mlp.fc2._aftergemm",
]  # fmt: skip
OTHERS = {1: ["add1_residual_input", "add2_residual_input"], 2: ["attn.mha_q_input", "attn.mha_k_input"]}
WEIGHTS = ["attn.qkv._weight", "attn.proj._weight", "mlp.fc1._weight", "mlp.fc2._weight"]
MERGING = [f"downsample.reduction._{x}" for x in ("input", "aftergemm", "weight")]


def ranges(version, merging):
    names = [*NODES, *OTHERS[version], *WEIGHTS, *(MERGING if merging else [])]
    return {name: 0.37 * (i + 1) ** 1.3 for i, name in enumerate(names)}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("merging", [True, False])
def test_every_index(version, merging):
    a = ranges(version, merging)
    given = {f"{name}_quantizer": value for name, value in a.items()}
    expected = np.zeros(96)
    quads = [*NODES, *OTHERS[version], *(MERGING[:2] if merging else [])]
    for i, name in enumerate(quads):
        expected[4 * i : 4 * i + 4] = a[name], a[name] / 127, a[name] / 127**2, 127 / a[name]
    expected[72:76] = [a[name] for name in WEIGHTS]
    for i, layer in enumerate(["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]):
        expected[77 + i] = a[f"{layer}._input"] * a[f"{layer}._weight"] / (127 * a[f"{layer}._aftergemm"])
    q, k = ("attn.mha_q_input", "attn.mha_k_input") if version == 2 else ("attn.matmul_q_input", "attn.matmul_k_input")
    expected[81] = a[q] * a[k] / (127 * a["attn.softmax_input"])
    expected[82] = a["attn.matmul_a_input"] * a["attn.matmul_v_input"] / (127 * a["attn.proj._input"])
    if merging:
        expected[76] = a[MERGING[2]]
        expected[83] = a[MERGING[0]] * a[MERGING[2]] / (127 * a[MERGING[1]])
    got, stored = amax_list(given, version).numpy(), expected.astype(np.float32)
    at = {"q": 52, "k": 56} if version == 2 else {"q": 16, "k": 20}
    # From here on computed from stored entries: float32 products, divided in double (section 3.4).
    stored[85] = float(stored[at["q"]] * stored[at["k"]]) / (127.0 * 127.0)
    stored[86] = 127.0 / float(stored[28])
    stored[87] = float(stored[24] * stored[28]) / (127.0 * float(stored[8]))
    np.testing.assert_array_equal(got[85:], stored[85:])
    np.testing.assert_allclose(got[:85], stored[:85], rtol=2e-7, atol=0)


def test_the_fused_factors_round_their_products_to_float32():
    """87 and 82 are the same product of ranges, but not always the same float32."""
    lists = [
        amax_list({f"{n}_quantizer": a * s for n, a in ranges(1, False).items()}, 1) for s in np.linspace(1, 2, 99)
    ]
    differ = [bool(values[82] != values[87]) for values in lists]
    assert any(differ) and not all(differ)
