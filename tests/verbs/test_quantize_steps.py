"""Steps that were done before in a folder are skipped; each thing that differs makes one run again, and is named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest

from swin_quant.base.arguments import Fields
from swin_quant.base.errors import SwinQuantError
from swin_quant.data.picture_set import PictureSet
from swin_quant.verbs.quantize_steps import Steps, hash_files
from tests.helpers.refusals import refused

PICTURES = Annotated[PictureSet, Fields(PictureSet, "pictures")]


@pytest.fixture
def go(tmp_path, caplog):
    """go(text, inputs, pictures, then) -> what the step said; it writes the text to a YAML file in the folder."""
    caplog.set_level("INFO", "swin_quant")

    def write(text: str, pictures: PICTURES = PictureSet()) -> SimpleNamespace:
        (tmp_path / "made.yaml").write_text(text)
        return SimpleNamespace(file=tmp_path / "made.yaml")

    def run(text="a", inputs=None, pictures=PictureSet(), then=lambda _: None, file=Path("x")):
        caplog.clear()
        steps = Steps(tmp_path / "x.steps", 1, is_dry=False)
        how = {"then": then, "replaces": True}
        made, _ = steps.run(write, {"text": text, "pictures": pictures}, inputs or {}, file, **how)
        assert made == tmp_path / "made.yaml"
        return caplog.messages[-1].partition("write a")[2]

    return run


def test_only_the_same_words_and_inputs_of_a_file_that_is_there_are_done(go, tmp_path):
    assert go() == "" and go() == ": done before"
    assert go(pictures=PictureSet("elsewhere", workers=3)).endswith(": done before"), "only their hash counts"
    assert go(inputs={"the pictures": "1"}) == ": done again, changed: the pictures"
    assert "done again, changed: --split, val" in go(inputs={"the pictures": "1"}, pictures=PictureSet(split="val"))
    (tmp_path / "made.yaml").write_text("damaged")
    assert not go(inputs={"the pictures": "1"}, pictures=PictureSet(split="val")).endswith("done before")
    (tmp_path / "made.yaml").unlink()
    assert not go(inputs={"the pictures": "1"}, pictures=PictureSet(split="val")).endswith("done before")


def test_a_file_that_is_replaced_is_named(go, tmp_path, capsys):
    made = tmp_path / "made.yaml"
    go(file=made)
    assert go(file=made) == ": done before"
    again = go(inputs={"the pictures": "1"}, file=made)
    assert again == f": done again, changed: the pictures; replaces {made} and its results"

    def write() -> None: ...

    Steps(tmp_path / "x.steps", 1, is_dry=True).run(write, {}, {}, made, replaces=True)
    assert capsys.readouterr().out.endswith(f"# replaces {made} and its results\n")


def test_a_step_whose_result_is_refused_is_not_done(go):
    def refuse(_):
        raise SwinQuantError("no")

    refused(lambda: go(then=refuse), "no")
    assert go() == ""


def test_a_record_names_no_file_outside_its_folder_and_a_damaged_one_is_refused(go, tmp_path):
    go()
    record = tmp_path / "x.steps"
    (tmp_path / "other.yaml").write_text("a")
    record.write_text(record.read_text().replace("made.yaml", f"../{tmp_path.name}/other.yaml"))
    steps = Steps(record, 1, is_dry=False)
    assert steps.records[0]["file"].startswith("..") and hash_files(tmp_path / "none") == {}
    (tmp_path / "other.yaml").unlink()
    assert go() == ""
    record.write_text('[{"words": 3}]')
    refused(lambda: go(), "x.steps: lacks")


def test_an_interrupt_says_that_the_same_command_goes_on(tmp_path):
    def stop(text: str) -> None:
        raise KeyboardInterrupt(*text.split())

    steps = Steps(tmp_path / "x.steps", 2, is_dry=False)
    for text, told in (("", "the same command goes on with this step"), ("own", "^own$")):
        with pytest.raises(KeyboardInterrupt, match=told):
            steps.run(stop, {"text": text}, {}, Path("x"))
