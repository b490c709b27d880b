"""The launch list: its bytes and operations, and that no two live buffers share a byte."""

import pytest

from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.spec import make_spec
from swin_quant.models.geometry import Geometry

SWIN_T = Geometry(
    224, 4, 3, 1000, 96, (2, 2, 6, 2), (3, 6, 12, 24), 7, 4.0, True, None, 0.0, 0.0, False, True, (0, 0, 0, 0)
)  # fmt: skip


def overlapping(program):
    """Pairs of buffers that share bytes while both hold values that are still to be read."""
    lives = {}
    for number, launch in enumerate(program.launches):
        for operand in launch.operands.values():
            if not operand.packed:
                lives.setdefault(operand.name, []).append(number)
    for name in (program.images.name, program.logits.name):
        lives[name] = [0, len(program.launches)]
    spans = {
        name: (program.places[name], program.places[name] + program.buffers[name].nbytes, min(at), max(at))
        for name, at in lives.items()
    }
    return [
        (a, b)
        for a in spans
        for b in spans
        if a < b
        and spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]
        and spans[a][2] <= spans[b][3] and spans[b][2] <= spans[a][3]
    ]  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("precision", ["int8", "float"])
def test_buffers_share_bytes_only_when_dead(version, precision):
    program = build_program(make_spec(SWIN_T, version, precision), 8)
    assert overlapping(program) == []
    everything = sum(buffer.nbytes for buffer in program.buffers.values())
    assert program.nbytes < everything / 3
    assert all(place % 256 == 0 for place in program.places.values())


def test_narrow_heads_are_filled_up():
    narrow = Geometry(32, 4, 3, 5, 96, (1, 1), (4, 8), 4, 4.0, True, None, 0.0, 0.0, False, True, (0, 0))
    packed = build_program(make_spec(narrow, 1), 1).packed
    assert packed["layers.0.blocks.0.attn.qkv.weight"].shape == (3 * 4 * 32, 96)
    assert packed["layers.0.blocks.0.attn.proj.weight"].shape == (96, 4 * 32)
