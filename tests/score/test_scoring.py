"""Every figure of an evaluation against a second implementation in NumPy."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.loader import Batch
from swin_quant.score.engine import Engine
from swin_quant.score.scoring import evaluate, is_guessing, make_results

CPU = torch.device("cpu")


def scores(logits, labels, sizes):
    """Evaluate engines that look up their logits: `logits` {name: [N, classes]}, in batches of `sizes`."""
    ends = np.cumsum(sizes)
    batches = []
    for end, size in zip(ends, sizes, strict=True):
        places = torch.arange(end - size, end)
        batches.append(Batch(places, torch.as_tensor(labels[end - size : end]), places.tolist(), []))
    tables = {name: torch.as_tensor(table) for name, table in logits.items()}
    engines = {name: lambda places, table=table: table[places] for name, table in tables.items()}
    return evaluate(engines, batches, CPU)


def reference(table, base, labels):
    """acc1, acc5, loss, agreement, sqnr, delta, standard error of the delta."""
    table, base = table.astype(np.float64), base.astype(np.float64)
    order = np.argsort(-table, axis=1, kind="stable")
    right = order[:, 0] == labels
    before = base.argmax(1) == labels
    top5 = [label in row[:5] for label, row in zip(labels, order, strict=True)]
    largest = table.max(1, keepdims=True)
    log_sum = np.log(np.exp(table - largest).sum(1)) + largest[:, 0]
    loss = (log_sum - table[np.arange(len(labels)), labels]).mean()
    noise = ((table - base) ** 2).sum()
    difference = right.astype(float) - before.astype(float)
    return {
        "acc1": 100 * right.mean(),
        "acc5": 100 * np.mean(top5),
        "loss": loss,
        "agreement": 100 * (order[:, 0] == base.argmax(1)).mean(),
        "sqnr_db": 10 * math.log10((base**2).sum() / noise) if noise else None,
        "delta_acc1": 100 * difference.mean(),
        "delta_acc1_se": 100 * difference.std() / math.sqrt(len(labels)),
    }


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    classes=st.integers(2, 12),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    noise=st.sampled_from([0.0, 0.1, 3.0]),
    scale=st.sampled_from([0.1, 1.0, 50.0]),
)
def test_figures_are_those_of_numpy(seed, classes, sizes, noise, scale):
    random = np.random.default_rng(seed)
    count = sum(sizes)
    base = (scale * random.normal(size=(count, classes))).astype(np.float32)
    other = base + (noise * random.normal(size=base.shape)).astype(np.float32)
    labels = random.integers(0, classes, count)
    found = scores({"float32": base, "int8": other}, labels, sizes)
    for name, table in (("float32", base), ("int8", other)):
        assert found[name].pictures == count
        for key, value in reference(table, base, labels).items():
            expected = None if value is None else pytest.approx(value, rel=1e-6, abs=1e-9)
            assert getattr(found[name], key) == expected, (name, key)


def test_the_standard_error_is_paired():
    """The second engine loses 3 of 100 pictures and gains 1: only those 4 disagree, whatever the accuracy is."""
    labels = np.zeros(100, dtype=np.int64)
    base, other = np.tile([1.0, 0.0], (100, 1)), np.tile([1.0, 0.0], (100, 1))
    base[:21] = other[:20] = [0.0, 1.0]  # the second engine gains picture 20
    other[97:] = [0.0, 1.0]  # and loses the last 3
    score = scores({"float32": base, "int8": other}, labels, [100])["int8"]
    assert score.delta_acc1 == pytest.approx(-2.0)
    assert score.delta_acc1_se == pytest.approx(100 * math.sqrt((0.04 - 0.02**2) / 100))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_name_the_engine(value):
    bad = np.zeros((4, 3), dtype=np.float32)
    bad[2, 1] = value
    with pytest.raises(SwinQuantError, match="engine int8: logits hold NaN or infinity"):
        scores({"float32": np.zeros((4, 3), dtype=np.float32), "int8": bad}, np.zeros(4, dtype=np.int64), [4])


def test_qat_is_paired_with_the_ptq_of_its_policy():
    """QAT gains pictures 0 to 5 on PTQ and gives 6 up; under another policy there is no PTQ to compare with."""
    labels, right, wrong = np.zeros(100, dtype=np.int64), [1.0, 0.0], [0.0, 1.0]
    tables = {"float32": np.tile(right, (100, 1)), "PTQ": np.tile(right, (100, 1)), "QAT": np.tile(right, (100, 1))}
    tables["PTQ"][:6], tables["QAT"][6] = wrong, wrong
    tables["other"] = tables["QAT"]
    facts = {"PTQ": ("ptq", "a"), "QAT": ("qat", "a"), "other": ("qat", "b")}
    engines = {}
    for name, table in tables.items():
        weights, policy = facts.get(name, (None, None))
        run = partial(torch.Tensor.__getitem__, torch.as_tensor(table))
        engines[name] = Engine("torch", name, policy, run, weights=weights, policy_sha256=policy)
    places = torch.arange(100)
    measured = evaluate(engines, [Batch(places, torch.as_tensor(labels), places.tolist(), [])], CPU)
    dataset = {"name": "x", "split": "val", "pictures": 100, "sha256": None}
    found = make_results(engines, measured, dataset, 100, CPU, [])
    assert found["QAT"].delta_ptq == pytest.approx(5.0)
    assert found["QAT"].delta_ptq_se == pytest.approx(100 * math.sqrt((0.07 - 0.05**2) / 100))
    assert all(found[name].delta_ptq is found[name].delta_ptq_se is None for name in ("float32", "PTQ", "other"))


def at_most(right, pictures, chance):
    """The binomial distribution in exact arithmetic, on whole numbers over one denominator."""
    hit, whole = chance.as_integer_ratio()
    ways = (math.comb(pictures, n) * hit**n * (whole - hit) ** (pictures - n) for n in range(right + 1))
    return Fraction(sum(ways), whole**pictures)


@pytest.mark.parametrize(("pictures", "classes"), [(5, 2), (12, 10), (7, 3), (400, 10), (100, 2)])
def test_who_guesses(pictures, classes):
    """At least 1 % of guessers are as good, and at most one of 10,000 models halfway to perfection as bad."""
    for right in {*range(0, pictures + 1, max(1, pictures // 40))}:
        is_chance = 1 - at_most(right - 1, pictures, 1 / classes) > 0.01
        is_rare = at_most(right, pictures, (1 + 1 / classes) / 2) < 1e-4
        assert is_guessing(right, pictures, classes) is (is_chance and is_rare), right
    assert is_guessing(50, 50_000, 1000) and not is_guessing(500, 50_000, 1000)
