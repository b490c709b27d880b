"""Each measurement is made once, whatever happens in between."""

import json

import pytest

from swin_quant.base.files import Journal


def test_a_result_is_kept_for_the_next_run(tmp_path):
    calls = []
    for _ in range(2):
        journal = Journal(tmp_path / "x.json", {"checkpoint": "abc", "sizes": (1, 2)})
        measured = lambda: calls.append(1) or {"ms": 1.5, "none": float("nan")}  # noqa: E731
        assert journal.remember("a", dict[str, float | None], measured) == {"ms": 1.5, "none": None}
    assert calls == [1] and journal.found == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"subject": {}, "entries": 3}', json.dumps({"subject": {"x": 1}, "entries": {"a": 2}})]
)
def test_another_run_s_or_a_damaged_file_is_begun_anew(tmp_path, caplog, content):
    (tmp_path / "x.json").write_text(content)
    journal = Journal(tmp_path / "x.json", {})
    assert journal.entries == {} and "begun anew" in caplog.text
    assert journal.remember("a", int, lambda: 1) == 1


def test_what_is_of_another_kind_is_measured_anew(tmp_path, caplog):
    Journal(tmp_path / "x.json", {}).keep({"a": "fast"}, str)
    journal = Journal(tmp_path / "x.json", {})
    assert journal.remember("a", float, lambda: 1.5) == 1.5 and "a must be a number, not 'fast'" in caplog.text
    assert Journal(tmp_path / "x.json", {}).known("a", float) == 1.5
