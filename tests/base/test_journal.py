"""What was measured is measured once, whatever happens in between."""

import json

import pytest

from swin_quant.base.journal import Journal


def test_a_result_is_kept_for_the_next_run(tmp_path):
    calls = []
    for _ in range(2):
        journal = Journal(tmp_path / "x.json", {"checkpoint": "abc", "sizes": (1, 2)})
        assert journal.remember("a", lambda: calls.append(1) or {"ms": 1.5, "none": float("nan")}) == {
            "ms": 1.5, "none": None}  # fmt: skip
    assert calls == [1] and journal.found == 1


def test_what_raises_leaves_what_was_there(tmp_path):
    journal = Journal(tmp_path / "x.json", {})
    journal.remember("a", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        journal.remember("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert Journal(tmp_path / "x.json", {}).entries == {"a": 1}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"subject": {}, "entries": 3}', json.dumps({"subject": {"x": 1}, "entries": {"a": 2}})]
)
def test_another_run_s_or_a_damaged_file_is_begun_anew(tmp_path, caplog, content):
    (tmp_path / "x.json").write_text(content)
    journal = Journal(tmp_path / "x.json", {})
    assert journal.entries == {} and "begun anew" in caplog.text
    assert journal.remember("a", lambda: 1) == 1
