"""Damaged files of every kind that the tool reads: it reads or refuses them in one line, quickly, within limits.

Foreign code, files that appear, other exceptions, crashes, 2 s of computing and 512 MB are faults. `make fuzz` tries
more; `python tests/nightly/fuzz/run.py --parser NAME --case NUMBER --keep FOLDER` writes the files of one case.
"""

import pytest
from parsers import PARSERS
from runner import CAN_WATCH, attack

CASES = 200

pytestmark = pytest.mark.skipif(not CAN_WATCH, reason="memory is watched through Linux's /proc")


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_damaged_files_are_read_or_refused(parser):
    tally = attack(parser, range(CASES))
    assert tally.faults == []
    assert tally.cases == CASES and tally.accepted and bool(tally.refused) == parser.refuses
