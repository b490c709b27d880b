"""tools/cuda/fusions.py: the table says what the least sum of times says."""

import re
from random import Random

import fusions as tool

from swin_quant.backends.cuda.fusions import FUSIONS, listed
from swin_quant.backends.cuda.gpu import load_machine
from swin_quant.backends.cuda.program import format_shape


def test_changes_lie_between_known_sizes():
    assert tool.changes({49: 1, 196: 1, 784: -1, 3136: 3}) == [0, 392, 1568]
    assert tool.changes({49: -1, 196: 0}) == [] and tool.changes({}) == []


def test_by_the_table_the_engine_takes_the_fusions_of_the_least_sum():
    """Of any times, if blocks of one size have one best choice."""
    batches = (1, 8)
    programs = tool.list_programs(["swin_tiny_patch4_window7_224"], batches)
    random = Random(3)
    times = {}

    def us(launch, batch):  # the same with a shift and without
        key = re.sub(r"shift=\d+", "", format_shape(launch)), batch
        return times.setdefault(key, random.uniform(1, 4))

    table = tool.choose_table(programs, us)
    assert set(table) == {"int8", "float8", "half"}
    for (_, _, batch), launches in programs.items():
        best = tool.chosen(launches, lambda launch, batch=batch: us(launch, batch))
        assert [fusion for fusion, _ in listed(launches, table)] == [fusion for fusion, _ in best]


def test_a_table_takes_the_place_of_the_one_in_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((tool.MACHINES / "a100.yaml").read_text())
    before = load_machine(str(path))
    table = {"int8": {FUSIONS[0].title: {"192": [10, 20], "96": []}}}
    for _ in range(2):
        tool.write_table(path, table, "by me")
        found = load_machine(str(path))
        assert found.gpu.fusions == table and found.int8_tops == before.int8_tops
    assert path.read_text().count("fusions:") == 1
