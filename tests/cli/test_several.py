"""Flags of several words may be repeated and end where a file begins; older command lines still parse."""

import argparse

import pytest
from shown import PARSERS

OURS = {
    name: parser for name, parser in PARSERS.items() if any(not action.option_strings for action in parser._actions)
}
SEVERAL = [
    (name, action)
    for name, parser in OURS.items()
    for action in parser._actions
    if action.nargs == "+" and action.option_strings
]
WORDS = {"N": ["1", "8"], "KEY VALUE": ["SEED", "1"], "KEY=VALUE": ["epochs=1", "lr=1"],
         "OP=DOMAIN::NAME": ["roll=a::B", "gather=a::C"], "FILE": ["a.so", "b.so"], "PLACE": ["a.jpg", "more/b.jpg"],
         "NAME|FILE": ["mine.yaml", "qdq"]}  # fmt: skip


def words_of(action):
    return list(action.choices)[:2] if action.choices else WORDS.get(action.metavar, ["one", "two"])


def given(parser, *words):
    """Parse `words` after the arguments that the command requires."""
    needed = [(action.option_strings[0], str(next(iter(action.choices or ["out"])))) for action in parser._actions
              if action.required and action.option_strings]  # fmt: skip
    return parser.parse([word for pair in needed for word in pair] + [str(word) for word in words])


def places(parser):
    """The first positional argument, and as many files as the command requires."""
    actions = [action for action in parser._actions if not action.option_strings]
    return actions[0], ["x.pth"] * (len([action for action in actions if action.nargs in (None, "+")]) or 1)


@pytest.mark.parametrize(("command", "action"), SEVERAL, ids=[f"{name} {one.dest}" for name, one in SEVERAL])
def test_a_flag_of_several_words_ends_at_a_file_and_may_be_repeated(command, action):
    parser, flag, (one, two) = OURS[command], action.option_strings[0], words_of(action)
    place, files = places(parser)
    if place.choices:
        pytest.skip("takes no file by its place")
    before = vars(given(parser, *files, flag, one, two))
    step = [flag, one, two] if action.metavar == "KEY VALUE" else [flag, one, flag, two]
    assert vars(given(parser, flag, one, two, *files)) == before
    assert vars(given(parser, *step, *files)) == before
    assert vars(given(parser, *files, *step)) == before
    assert len(before[action.dest]) == 2


@pytest.mark.parametrize(
    ("command", "words", "policy", "rest"),
    [
        ("nodes", ["--policy", "ft-mode1", "FILE"], ["ft-mode1"], {"checkpoint": "FILE"}),
        ("nodes", ["--policy", "FILE.yaml", "FILE"], ["FILE.yaml"], {"checkpoint": "FILE"}),
        ("nodes", ["FILE", "--policy", "qdq", "FILE.yaml"], ["qdq", "FILE.yaml"], {"checkpoint": "FILE"}),
        ("nodes", ["--policy", "qdq", "timm:resnet18"], ["qdq"], {"checkpoint": "timm:resnet18"}),
        ("evaluate", ["--policy", "qdq", "cpu", "a.onnx", "FILE"], ["qdq", "cpu"], {"files": ["a.onnx", "FILE"]}),
        ("evaluate", ["--policy", "qdq", "FOLDER"], ["qdq", "FOLDER"], {"files": []}),  # a policy's name may be meant
        ("evaluate", ["--off", "x", "--policy", "qdq", "--", "FILE"], ["qdq"], {"files": ["FILE"]}),
        ("evaluate", ["--opts", "MODEL.RESUME", "a.pth", "b.pth"], None, {"files": ["b.pth"]}),
        ("finetune", ["--set", "teacher=a.pth", "lr=1", "FILE"], None, {"checkpoint": "FILE"}),
    ],
)
def test_what_is_a_file_is_told_by_its_ending_or_because_it_is_there(
    command, words, policy, rest, tmp_path, monkeypatch
):
    for file in ("FILE", "FILE.yaml"):
        (tmp_path / file).touch()
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    found = vars(given(OURS[command], *words))
    assert list(found.get("policy") or ()) == (policy or [])
    assert {key: list(found[key]) if isinstance(found[key], tuple) else found[key] for key in rest} == rest


def test_a_flag_without_a_word_is_still_refused():
    with pytest.raises(Exception, match="--policy: expected at least one argument"):
        given(OURS["nodes"], "x.pth", "--policy")


def test_every_flag_of_several_words_is_of_the_kind_that_can_be_repeated():
    actions = [action for parser in PARSERS.values() for action in parser._actions if action.option_strings]
    assert {action.nargs for action in actions} <= {None, 0, 1, "?", "+"}
    assert not [action for action in actions if isinstance(action, argparse._AppendAction)]
