"""The search keeps to its budget, leaves no layer float without need, and is close to the optimum."""

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from swin_quant.quant.distance import Loss
from swin_quant.quant.search import Budget, Unit, cheapest, front, in_order, prefix, within_time

errors = st.floats(0.0, 1.0)
times = st.floats(-0.1, 1.0)


@st.composite
def layers(draw):
    pairs = draw(st.lists(st.tuples(errors, times), min_size=1, max_size=7))
    return [Unit(f"layer{i}", (f"layer{i}.a", f"layer{i}.b"), error, ms) for i, (error, ms) in enumerate(pairs)]


def left(units, off):
    """The remaining error with these layers float; errors of layers add up."""
    return sum(unit.error for unit in units if unit.name not in off)


@given(layers(), st.floats(0.0, 3.0))
def test_what_is_found_is_within_the_budget_and_needs_each_of_its_layers(units, most):
    found = cheapest(units, lambda off: left(units, off) <= most)
    assert found is not None and left(units, found) <= most
    saving = [unit for unit in units if unit.name in found and unit.saved_ms >= 0]
    assert all(left(units, found - {unit.name}) > most for unit in saving)


@given(layers(), st.floats(0.0, 3.0))
def test_it_costs_at_most_one_layer_more_than_the_best_of_all(units, most):
    """A greedy knapsack loses at most its largest item against the best of all subsets (Dantzig, 1957)."""
    units = [Unit(unit.name, unit.nodes, unit.error, abs(unit.saved_ms)) for unit in units]

    def cost(off):
        return sum(unit.saved_ms for unit in units if unit.name in off)

    names = [unit.name for unit in units]
    subsets = itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))
    best = min(cost(set(off)) for off in subsets if left(units, off) <= most)
    found = cheapest(units, lambda off: left(units, off) <= most)
    assert cost(found) <= best + max(unit.saved_ms for unit in units) + 1e-6


def test_none_where_even_float_is_not_good_enough():
    units = [Unit("a", ("a.x",), 0.1, 1.0)]
    assert cheapest(units, lambda off: False) is None
    assert cheapest(units, lambda off: True) == frozenset()


def test_what_is_quantized_again_may_have_a_condition_of_its_own():
    units = [Unit("a", ("a.x",), 0.5, 0.1), Unit("b", ("b.x",), 0.4, 0.01), Unit("c", ("c.x",), 0.01, 0.1)]
    asked = []

    def strictly(found):
        asked.append(found)
        return lambda off: left(units, off) <= 0.02

    assert cheapest(units, lambda off: left(units, off) <= 0.45) == {"a"}
    assert cheapest(units, lambda off: left(units, off) <= 0.45, strictly) == {"a", "b"} == asked[0]


def test_layers_that_only_cost_time_stay_float_first():
    slow, bad, good = Unit("slow", (), 0.1, -0.2), Unit("bad", (), 0.5, 0.1), Unit("good", (), 0.01, 1.0)
    assert in_order([good, bad, slow]) == [slow, bad, good]
    assert prefix([good, bad, slow], 2) == {"slow", "bad"}


@given(layers(), st.floats(0.0, 8.0))
@example([Unit(str(i), (), 0.1, ms) for i, ms in enumerate([-0.1, 1.0, 1.0, 1.0])], 0.95)
def test_the_most_layers_that_fit_into_a_time(units, most):
    """Some layers are faster in float: time falls with these, and rises with the rest."""

    def milliseconds(off):
        return 1.0 + sum(unit.saved_ms for unit in units if unit.name in off)

    count = within_time(units, most, milliseconds)
    if count is None:
        assert all(milliseconds(prefix(units, length)) > most for length in range(len(units) + 1))
    else:
        assert milliseconds(prefix(units, count)) <= most
        assert count == len(units) or milliseconds(prefix(units, count + 1)) > most


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_on_the_front_is_what_nothing_is_better_than(points):
    found = {points[index] for index in front(points)}
    assert found == {
        point
        for point in points
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
    }


@pytest.mark.parametrize(
    ("budget", "met"),
    [
        (Budget(), True),
        (Budget(max_drop=0.2), True),
        (Budget(max_drop=0.05), False),
        (Budget(min_agreement=99.5), False),
        (Budget(min_agreement=99.0, min_sqnr=30.0), True),
        (Budget(min_sqnr=31.0), False),
    ],
)
def test_a_budget(budget, met):
    assert budget.allows(Loss(30.5, 1e-3, 99.0, 0.1)) is met
    assert budget.allows(Loss(math.inf, 0.0, 100.0, 0.0))


def test_a_drop_that_a_few_pictures_tell_counts_with_what_it_may_be():
    assert not Budget(max_drop=0.3).allows(Loss(16.2, 2e-2, 98.0, 0.23, drop_error=0.13))
    assert Budget(max_drop=0.3).allows(Loss(35.0, 2e-4, 99.8, 0.02, drop_error=0.02))
    within, beyond = (
        Budget(max_drop=most).allows(Loss(35.0, 2e-4, 99.8, 0.1, drop_error=0.1)) for most in (0.31, 0.29)
    )
    assert within and not beyond


def test_where_no_time_could_be_told_only_the_worst_layers_stay_float():
    units = [Unit(name, (), error, 0.0) for name, error in (("a", 0.01), ("b", 0.5), ("c", 0.02), ("d", 0.3))]
    assert cheapest(units, lambda off: left(units, off) <= 0.05) == {"b", "d"}
