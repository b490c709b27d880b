"""Recipes of passes: valid files, and refusals in one line."""

import pytest

from swin_quant.base.errors import UsageError
from swin_quant.quant.passes.recipe import load_passes, parse_steps


def test_every_shipped_recipe_is_read_and_survives_being_written():
    for name in ("fast", "best"):
        for steps in filter(None, vars(load_passes(name)).values()):
            assert parse_steps([step.to_dict() for step in steps]) == steps


def test_fewer_bits_may_have_passes_of_their_own(tmp_path):
    file = tmp_path / "mine.yaml"
    few = "passes: [equalize]\nbelow_8_bits: [gptq]\n"
    wanted = dict.fromkeys(("W4A4", "W4A8", "W8A6"), "gptq") | dict.fromkeys(("W8A8", "W7A8", "W16A16"), "equalize")
    for text in (few, few + "activations_below_8_bits: [reconstruct]\n"):
        file.write_text(text)
        recipe = load_passes(str(file))
        for title, name in wanted.items():
            w, a = map(int, title[1:].split("A"))
            assert [step.name for step in recipe.for_bits(min(w, a), a)] == [name], title
        wanted |= {"W4A4": "reconstruct", "W8A6": "reconstruct"}
    for key in ("below_8_bits", "activations_below_8_bits"):
        file.write_text(f"passes: [equalize]\n{key}: [reconstrukt]\n")
        with pytest.raises(UsageError, match=f" {key}: pass 1: there is no pass"):
            load_passes(str(file))


@pytest.mark.parametrize(
    "given, message",
    [
        ("equalize", "must be a list"),
        ([{"alpha": 0.5}], "pass 1: must be the name of a pass"),
        (["equalise"], "there is no pass 'equalise', only equalize"),
        ([{"name": "equalize", "strength": 1}], "unknown key 'strength'"),
        ([{"name": "equalize", "alpha": "much"}], "alpha"),
        ([{"name": "equalize", "alpha": [2.0]}], "at most 1"),
        ([{"name": "equalize", "alpha": []}], "alpha is (), but must be a list of 1 to 64 entries"),
        ([{"name": "gptq", "pictures": 0}], "at least 1"),
        ([{"name": "range_search", "weighted": "maybe"}], "weighted"),
        (
            ["bias_correction", "equalize", "distill"],
            "equalize after bias_correction: passes measure by the network that",
        ),
        (["gptq", "equalize"], "equalize after gptq: ranges are found again behind it: put it before"),
        ([7], "pass 1: must be the name of a pass"),
    ],
)
def test_invalid_steps_are_refused_in_one_line(given, message):
    with pytest.raises(UsageError) as caught:
        parse_steps(given, "mine.yaml")
    assert message in str(caught.value) and str(caught.value).startswith("mine.yaml") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("- equalize", "must be a mapping"),
        ("passes: [equalize]\nnaem: x", "unknown key 'naem'; did you mean name"),
        ("", "must be a mapping"),
    ],
)
def test_a_file_is_checked(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_passes(str(file))
