"""Launch lists, in which no two live buffers share a byte; fusions, their choice for a GPU, and networks with all."""

from itertools import pairwise
from random import Random

import pytest
import torch
from fusions import chosen, with_fusions

from swin_quant.backends.cuda.fusions import FUSIONS, fused, fused_program, get_size, listed, rows
from swin_quant.backends.cuda.gpu import gpus, load_machine
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.program import bind, format_shape
from swin_quant.backends.cuda.spec import make_spec_from_config, spec_for
from tests.backends.conftest import pictures
from tests.backends.cuda.conftest import spec_of_model

MODELS = {"swin": "swin_tiny_patch4_window7_224", "swinv2": "swinv2_tiny_patch4_window8_256"}
FORMS = [("swin", "int8"), ("swinv2", "int8"), ("swin", "float"), ("swinv2", "float")]
SPEC = spec_of_model(MODELS["swin"])


def full_size(kind, batch, precision="int8"):
    return build_program(spec_of_model(MODELS[kind], precision), batch)


def all_fused(program):
    return fused(program, rows(program.launches))


def assert_no_live_buffers_overlap(program):
    """A buffer lives from the launch that first names it to the last."""
    lives = {}
    for number, launch in enumerate(program.launches):
        for operand in launch.operands.values():
            if not operand.packed:
                lives.setdefault(operand.name, []).append(number)
    lives |= {one.name: [0, len(program.launches)] for one in (program.images, program.logits)}
    for number in range(len(program.launches)):
        live = [program.buffers[name] for name, at in lives.items() if min(at) <= number <= max(at)]
        spans = sorted((program.places[one.name], program.places[one.name] + one.nbytes) for one in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize(("kind", "precision"), FORMS)
def test_fused_launches_move_what_is_left_and_compute_the_same(kind, precision):
    program = full_size(kind, 8, precision)
    whole = all_fused(program)
    operations = [sum(launch.operations for launch in one.launches) for one in (program, whole)]
    moved = [sum(x.nbytes for launch in one.launches for x in launch.operands.values()) for one in (program, whole)]
    assert operations[0] == operations[1] and moved[1] < 0.8 * moved[0]
    for one in (program, whole):
        assert_no_live_buffers_overlap(one)
        assert all(place % 256 == 0 for place in one.places.values())
    assert program.nbytes < sum(buffer.nbytes for buffer in program.buffers.values()) / 3
    assert whole.packed == program.packed and sorted(whole.scalars) == sorted(program.scalars)


def ops(batch, gpu):
    return [(one.op, one.name) for one in fused_program(SPEC, batch, load_machine(gpu)).launches]


def test_the_table_chooses_by_shape_and_gpu():
    """Wide stages stay apart: each program would read all weights."""
    large, one = ops(32, "h200"), ops(1, "h200")
    stages = [{op for op, name in large if f"layers.{stage}." in name} for stage in range(4)]
    assert "mlp" in stages[0] and "mlp" not in stages[3]
    assert len(one) < len(build_program(SPEC, 1).launches) and len(large) < len(build_program(SPEC, 32).launches)
    assert len({tuple(ops(32, gpu)) for gpu in ("h200", "a100", "rtx4090", "b200")}) > 1
    assert fused_program(SPEC, 32, None).launches == build_program(SPEC, 32).launches


def test_every_gpu_has_a_table_of_fusions_that_exist():
    titles = {fusion.title for fusion in FUSIONS}
    for gpu in gpus():
        facts = load_machine(gpu).gpu
        assert set(facts.fusions) == {"int8", "half", *(["float8"] if facts.fp8_tflops else [])}, gpu
        for table in facts.fusions.values():
            assert set(table) <= titles and len(table) >= 8
            every = [tokens for widths in table.values() for tokens in widths.values()]
            assert any(every) and all(tokens == sorted(tokens) for tokens in every)


def test_a_fusion_is_taken_between_the_tokens_of_the_nearest_width():
    launches = build_program(SPEC, 8).launches
    group = next(launches[at : at + 2] for at in range(len(launches)) if FUSIONS[0].fits(launches[at:]))
    assert (get_size(group).operands, get_size(group).channels, get_size(group).tokens) == ("int8", 96, 8 * 56 * 56)

    def fused_stages(widths):
        found = listed(launches, {"int8": {FUSIONS[0].title: widths}})
        assert [one for _, launches_of_row in found for one in launches_of_row] == list(launches)
        return {group[0].name.split(".")[1] for fusion, group in found if fusion}

    assert fused_stages({}) == set() == fused_stages({"96": []})
    assert fused_stages({"96": [0]}) == {"0", "1", "2", "3"}  # the only width serves all
    assert fused_stages({"96": [0], "192": []}) == {"0"}
    assert fused_stages({"96": [8 * 28 * 28]}) == {"0", "1"}
    assert fused_stages({"96": [8 * 14 * 14, 8 * 56 * 56]}) == {"1", "2"}


def test_no_other_choice_takes_less_time():
    launches, random = full_size("swin", 8).launches[:20], Random(1)
    times = {format_shape(one): random.uniform(1, 4) for one in with_fusions(launches)}

    def us(launch):
        return times[format_shape(launch)]

    def least(at):
        if at == len(launches):
            return 0.0
        fits = [fusion for fusion in FUSIONS if fusion.fits(launches[at:])]
        ends = [(fusion, at + len(fusion.patterns)) for fusion in fits]
        groups = [us(fusion.merged(launches[at:end])) + least(end) for fusion, end in ends]
        return min([us(launches[at]) + least(at + 1), *groups])

    found = chosen(launches, us)
    assert [one for _, group in found for one in group] == list(launches)
    assert sum(us(f.merged(group) if f else group[0]) for f, group in found) == pytest.approx(least(0))


def test_fastertransformers_arithmetic_and_odd_widths_are_left_alone(calibrated, tiny_config):
    for kind, policy in (("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swinv2", "ft-mode1")):
        launches = build_program(spec_for(calibrated(kind, policy)), 1).launches
        assert len(with_fusions(launches)) == len(launches)
    odd = make_spec_from_config(tiny_config("swin", EMBED_DIM=24), "float")
    launches = build_program(odd, 1).launches
    assert not [one for one in with_fusions(launches)[len(launches) :] if one.name.startswith("layers.0")]


def logits_of(program, network, images):
    bound = bind(program, network.tensors, network.scalars, torch.device("cpu"))
    bound.images.copy_(images)
    bound()
    return bound.logits.clone()


@pytest.mark.parametrize(("kind", "precision"), FORMS)
def test_a_network_with_fusions_equals_one_without(calibrated, kind, precision):
    model = calibrated(kind)
    network = pack(model, spec_for(model, precision))
    program = build_program(network.spec, 3)
    whole = all_fused(program)
    assert {"norm_gemm", "attention_norm", "mlp"} <= {one.op for one in whole.launches}
    assert torch.equal(logits_of(whole, network, pictures(3)), logits_of(program, network, pictures(3)))
