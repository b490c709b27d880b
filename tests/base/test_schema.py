"""External data match the annotations, or are refused in one line with source and key."""

import functools
import math
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypedDict

import pytest

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import Must, allow, check_fields, check_record, checked, within
from tests.helpers.refusals import refused

MADE = {"made": 0.0}


@pytest.mark.parametrize("key", [1, None, (1, 2), b"x"])
def test_keys_of_a_mapping_are_text(key):
    refused(lambda: checked(dict[str, int], {key: 1}, "x.json", "a"), "x.json: a has the key ", ", which must be text")


class Base(TypedDict):
    width: int


class Grown(Base, total=False):
    height: int


@dataclass
class Holder:
    grown: list[Grown]
    note: str = "none"
    made: float = field(default_factory=time.time)
    tags: list[str] = field(default_factory=list)


def test_what_came_later_may_be_absent_but_for_what_is_computed():
    check_record(Holder, {"grown": [{"width": 1}], "made": 0.0}, "f.json")
    check_record(Holder, {"grown": [{"width": 1, "height": 2}], "made": 0.0, "note": "n", "tags": []}, "f.json")
    refused(lambda: check_record(Holder, {"grown": []}, "f.json"), "lacks", "made")
    refused(lambda: check_record(Holder, [], "f.json"), "the content must be a mapping")
    refused(lambda: check_record(Holder, {"grown": [{"height": 1}], "made": 0.0}, "f.json"), "grown[0].width")
    tall = {"grown": [{"width": 1, "height": "2"}]}
    refused(lambda: check_record(Holder, tall | MADE, "f.json"), "height", "a whole number")
    refused(lambda: check_record(Holder, {"grown": [], "rest": {}} | MADE, "f.json"), "unknown key 'rest'")


def test_unknown_keys_are_left_out_where_the_caller_says_so():
    content = {"grown": [{"width": 1, "depth": 3}], "odd": 1} | MADE
    assert check_record(Holder, content, "f.json", lenient=True) == {"grown": [{"width": 1}]} | MADE


Share = Annotated[float, within(least=0, most=1)]


@dataclass(frozen=True)
class Inner:
    share: Share = 0.5
    pair: tuple[Share, Share] = (0.0, 1.0)

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Must(str.isidentifier, "a name")]
    inner: Inner = field(default_factory=Inner)
    kind: Literal["one", "two"] = "one"
    method: Annotated[str, allow(["max", "mse"])] = "max"
    count: Annotated[int, within(above=0)] | None = None
    switch: bool = False
    many: tuple[int, ...] = ()
    more: dict[str, int] = field(default_factory=dict)
    words: list[str] | None = None


def test_records_are_made_of_data_with_lists_for_tuples():
    given = {"name": "x", "inner": {"pair": [0, 1]}, "many": [1, 2, 3], "count": None, "more": {"k": 3}, "words": ["a"]}
    made = checked(Outer, given, "f.yaml")
    assert made == Outer("x", Inner(pair=(0.0, 1.0)), many=(1, 2, 3), more={"k": 3}, words=["a"])
    assert type(made.inner.pair[0]) is float


def test_text_is_read_as_what_is_due_only_where_it_may_be():
    given = {
        "name": "x",
        "inner": {"share": "1e-1", "pair": "[0, 0.5]"},
        "count": "none",
        "switch": "True",
        "many": "()",
    }
    assert checked(Outer, given, "--set", text=True) == Outer("x", Inner(0.1, (0, 0.5)), switch=True)
    refused(lambda: checked(Inner, {"share": "1e-1"}, "--set"), "--set", "share must be a number, not '1e-1'")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "a b"}, "name is 'a b', but must be a name"),
        ({"inner": {"share": 2}}, "inner.share is 2.0, but must be at least 0 and at most 1"),
        ({"inner": {"share": math.nan}}, "inner.share must be a number, not nan"),
        ({"inner": {"share": "nan"}}, "inner.share must be a number, not 'nan'"),
        ({"inner": {"pair": [0, 7]}}, "inner.pair[1] is 7.0"),
        ({"inner": {"pair": [0]}}, "inner.pair must be 2 values, not [0]"),
        ({"inner": {"pair": "0, 1"}}, "inner.pair must be 2 values"),
        ({"inner": {"shore": 1}}, "unknown key 'inner.shore'; did you mean inner.share?"),
        ({"inner": [0.5]}, "inner must be a mapping, not [0.5]"),
        ({"kind": "three"}, "kind is 'three', but must be one of one, two"),
        ({"kind": ["one"]}, "kind must be text"),
        ({"method": "best"}, "method is 'best', but must be one of max, mse"),
        ({"count": 0}, "count is 0, but must be above 0"),
        ({"count": True}, "count must be a whole number or None, not True"),
        ({"switch": "maybe"}, "switch must be true or false"),
        ({"many": [1, "x"]}, "many[1] must be a whole number, not 'x'"),
        ({"more": {"k": 1.5}}, "more.k must be a whole number, not 1.5"),
        ({"more": {"k": True}}, "more.k must be a whole number"),
        ({"words": ["a", 2]}, "words[1] must be text"),
        ({"words": "a"}, "words must be a list or None, not 'a'"),
        ({"zebra": 1}, "unknown key 'zebra'; known are name, inner, kind"),
        ({3: 1}, "unknown key '3'"),
    ],
)
def test_what_cannot_be_meant_is_one_line_with_its_key(change, words):
    given = {"name": "x", **change}
    check = functools.partial(checked, Outer, given, "f.yaml", text=True, error=UsageError)
    assert refused(check, words, kind=UsageError).startswith("f.yaml: ")


def test_messages_stay_short_whatever_the_value():
    bomb = [0]
    for _ in range(5):
        bomb = [bomb] * 10
    for change in (
        {"inner": bomb},
        {"many": bomb},
        {"name": "x" * 10**6 + "!"},
        {"\n" * 10**5: 1},
        {"count": "1" * 10**4},
        {"inner": {"share": 10**400}},
    ):
        assert len(refused(functools.partial(checked, Outer, {"name": "x", **change}, "f.yaml"), "f.yaml")) < 1000
    assert len(refused(lambda: checked(Outer, {"name": bomb}, "f.yaml"), "f.yaml")) < 1000
