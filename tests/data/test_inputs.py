"""Several inputs by name, packed in rows and taken apart again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.base.errors import UsageError
from swin_quant.data.inputs import TYPES, Inputs
from swin_quant.data.prepared import Prepared


@st.composite
def _examples(draw):
    batch = draw(st.integers(1, 3))
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    made = {}
    for name in names:
        shape, kind = draw(st.lists(st.integers(1, 3), max_size=3)), draw(st.sampled_from(sorted(TYPES)))
        values = torch.randint(-(1 << 24), 1 << 24, (batch, *shape)) / (3 if kind == "float32" else 1)
        made[name] = values.to(TYPES[kind])
    return made


@given(_examples())
def test_packed_inputs_come_back_as_they_were(examples):
    inputs = Inputs.from_examples(examples)
    packed = inputs.pack(examples)
    assert packed.shape[1:] == inputs.shape and torch.equal(inputs.pack(packed), packed)
    for name, one in inputs.unpack(packed).items():
        assert one.dtype == examples[name].dtype and torch.equal(one, examples[name])
    assert Inputs.from_records(inputs.records()) == inputs
    for name, one in inputs.unpack(inputs.noise(2)).items():
        if not one.is_floating_point():
            assert torch.equal(one[1], examples[name][0])


WORDS, MASK = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"words": WORDS}, "inputs lack mask: give words, mask"),
        (WORDS, r"inputs are int64 \[2, 2\]: give a mapping of words, mask"),
        ({"words": WORDS, "mask": MASK, "more": 1}, "no input more: give words, mask alone"),
        ({"words": WORDS[:, :1], "mask": MASK}, r"input words is int64 \[2, 1\]: must be int64 \[B, 2\]"),
        ({"words": WORDS.float(), "mask": MASK}, r"input words is float32 \[2, 2\]: must be int64 \[B, 2\]"),
        ({"words": WORDS[:1], "mask": MASK}, "inputs are of several batch sizes: words 1, mask 2"),
        ({"words": WORDS << 30, "mask": MASK}, "input words holds 4294967296: the largest is 16777216"),
        ({"words": "a", "mask": MASK}, "input words is str: give a tensor"),
    ],
)
def test_what_does_not_fit_is_one_line(given, says):
    prepared = Prepared(None, inputs=Inputs.from_examples({"words": WORDS, "mask": MASK}))
    with pytest.raises(UsageError, match=says):
        prepared(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no inputs: give an example of each"),
        ({"a": 3}, "input a is int: give an example of one or more"),
        ({"a": torch.zeros(2, dtype=torch.float64)}, r"input a is float64 \[2\]"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, r"input a is complex64 \[2\]"),
        ({"a": torch.zeros(0, 2)}, r"input a is float32 \[0, 2\]"),
        ({"a b": WORDS}, "input 'a b': must be the name of an argument"),
    ],
)
def test_what_is_no_example_is_one_line(given, says):
    with pytest.raises(UsageError, match=says):
        Inputs.from_examples(given)
