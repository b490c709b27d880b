"""The engine's kernels for every kind of GPU, none of which is here: one of each, of Swin-T and SwinV2-T at full size,
and all shapes of six models on one GPU each.

`benchmarks/cuda_kernels.py` compiles them all.
"""

from dataclasses import replace

import pytest

from swin_quant.backends.cuda.cases import cases, tiled_cases
from swin_quant.backends.cuda.crosscompile import TARGETS, cross_compile
from swin_quant.backends.cuda.fusions import candidates
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import spec_of_config
from swin_quant.backends.cuda.timing import tiles_to_try
from swin_quant.base.errors import UsageError
from swin_quant.config import load_config
from swin_quant.config.files import find_config

pytest.importorskip("triton")
KERNELS = {
    "gemm", "attention", "norm_quantize", "norm_residual", "merge_quantize", "norm_gemm", "gemm_norm", "mlp",
    "attention_norm",
}  # fmt: skip
MODELS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_patch4_window8_256")


@pytest.fixture(scope="module")
def kernels():
    """One of each kind: the largest, which the last stage has."""
    found = {}
    for name in MODELS:
        launches = program_of(spec_of_config(load_config(find_config(name))), 32).launches
        for call in cases(launches):
            constants = dict(call.constants)
            found[call.name, constants.get("KIND"), dict(call.types).get("a"), constants.get("WINDOW") == 8] = call
        found |= {(call.name,): call for call in cases(candidates(launches))}
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_compile_fit_and_multiply_in_int8(kernels, capability):
    assert {call.name for call in kernels} >= KERNELS
    for call in kernels:
        made, types, constants = cross_compile(call, capability), dict(call.types), dict(call.constants)
        named = f"{call.name} {constants}: {made}"
        assert made.spilled == 0 and made.programs > 0, named
        if "*i8" in (types.get("w"), types.get("qkv")):
            assert made.int8, named
            if capability == 90 and constants.get("BM", 0) >= 64 and made.warps >= 4:
                assert "IGMMA" in made.mma, named


LARGE = "swin_large_patch4_window7_224_22kto1k_finetune"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, precision, name, sides, capability",
    [
        (LARGE, "int8", "attention_norm", {"N": 192}, 100),
        ("swinv2_base_patch4_window8_256", "int8", "attention_norm", {"N": 512}, 90),
        (MODELS[0], "fp8", "attention_norm", {"N": 384}, 90),
        ("swinv2_tiny_patch4_window16_256", "int8", "attention_norm", {"N": 192}, 120),
        (MODELS[0], "int8", "norm_gemm", {"N": 1152, "K": 384}, 100),
        (LARGE, "int8", "norm_gemm", {"N": 3072, "K": 768}, 100),
        (MODELS[1], "int8", "norm_gemm", {"N": 288, "K": 96}, 86),
        (MODELS[0], "fp8", "norm_gemm", {"N": 3072, "K": 768}, 120),
    ],
)
def test_what_once_spilled_does_not(model, precision, name, sides, capability):
    """With 64 rows of 192 and 384 channels behind attention, parts of 128 of 512, two stages of 64 keys, 4 warps for
    normalised rows of 384 and 768 channels, and 64 columns of 288."""
    launches = program_of(spec_of_config(load_config(find_config(model)), precision), 32).launches
    fused = [call for call in cases(candidates(launches)) if call.name == name]
    *_, call = (call for call in fused if sides.items() <= dict(call.constants).items())  # a shifted one
    made = cross_compile(call, capability)
    assert made.spilled == 0 and made.programs > 0, made


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, capability",
    [
        ("swin_small_patch4_window7_224", 80),
        ("swin_base_patch4_window12_384_finetune", 86),
        (LARGE, 90),
        ("swinv2_small_patch4_window16_256", 89),
        ("swinv2_base_patch4_window8_256", 100),
        ("swinv2_large_patch4_window12to24_192to384_22kto1k_ft", 120),
    ],
)
def test_all_shapes_of_a_model_compile(model, capability):
    """On one GPU each, alone and fused; the script has every GPU for each."""
    launches = program_of(spec_of_config(load_config(find_config(model))), 32).launches
    for call in cases([*launches, *candidates(launches)]):
        made = cross_compile(call, capability)
        assert made.spilled == 0 and made.programs > 0, f"{call.name} {dict(call.constants)}: {made}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, precision, capability",
    [
        ("swin_tiny_patch4_window7_224", "int8", 80),
        ("swin_base_patch4_window7_224", "int8", 86),
        ("swinv2_tiny_patch4_window8_256", "fp8", 89),
        ("swinv2_base_patch4_window8_256", "int8", 90),
        (LARGE, "int8", 100),
        ("swinv2_small_patch4_window8_256", "float", 120),
    ],
)
def test_several_windows_a_program_compile(model, precision, capability):
    """As the tuner tries them, with a shift and without. One that spilled would have to be left out there."""
    launches = program_of(spec_of_config(load_config(find_config(model)), precision), 32).launches
    kinds = {one.arguments["windows"].shift > 0: one for one in launches if one.op == "attention"}
    tried = [(one, tiles) for one in kinds.values() for tiles in tiles_to_try(one) if tiles.windows == 2]
    assert len(kinds) == 2 and len(tried) == 6
    for call in tiled_cases(tried):
        made = cross_compile(call, capability)
        assert made.spilled == 0 and made.programs > 0, f"{dict(call.constants)} {dict(call.options)}: {made}"
        assert made.int8 if precision == "int8" else made.mma, made


@pytest.fixture(scope="module")
def of_float8():
    """Products of SwinV2-T in float8, one of each kind, alone and in what is fused around them."""
    launches = program_of(spec_of_config(load_config(find_config(MODELS[1])), "fp8"), 32).launches
    kinds = {(call.name, dict(call.constants).get("KIND")): call for call in cases([*launches, *candidates(launches)])}
    return [call for call in kinds.values() if "*fp8e4nv" in (dict(call.types).get("w"), dict(call.types).get("qkv"))]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_float8_runs_on_its_tensor_cores(of_float8, capability):
    assert {call.name for call in of_float8} == {"gemm", "attention", "norm_gemm", "gemm_norm", "attention_norm", "mlp"}
    for call in of_float8:
        made = cross_compile(call, capability)
        spilled = 16 if capability == 100 else 0  # Triton 3.7 puts four registers of attention into memory there
        assert made.spilled <= spilled and made.programs > 0, f"{call.name}: {made}"
        rows = min(dict(call.constants).get(key, 64) for key in ("BM", "BQ"))
        small = capability in (90, 100) and rows < 64  # float8 is of whole warp groups there
        assert made.float8 or (small and made.mma), f"{call.name}: {made}"


def forms():
    """The name of a form, its spec: FasterTransformer's arithmetic, a bfloat16 stream, pictures as bytes."""
    for name in MODELS:
        int8, half = (spec_of_config(load_config(find_config(name)), precision) for precision in ("int8", "float"))
        yield f"{name}, ft-mode1", replace(int8, arithmetic="ft-mode1", quantized=frozenset(int8.products()))
        yield f"{name}, bfloat16", replace(half, float_type="bfloat16")
    yield f"{name}, pixels", replace(int8, pixels=True)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("form", "spec"), list(forms()))
def test_every_form_compiles(form, spec, capability):
    """The products of each epilogue, and attention, in the types and with the roundings of that form."""
    launches = program_of(spec, 32).launches[:10]  # the first block has all of them
    kinds = {(call.name, dict(call.constants).get("KIND")): call for call in cases([*launches, *candidates(launches)])}
    if spec.pixels:
        kinds = {key: call for key, call in kinds.items() if call.name == "patch_embed"}
        assert dict(kinds["patch_embed", None].types)["images"] == "*u8"
    for call in kinds.values():
        made, types = cross_compile(call, capability), dict(call.types)
        assert made.spilled == 0 and made.programs > 0, f"{call.name}: {made}"
        operand = types.get("w", types.get("qkv"))
        assert made.int8 if operand == "*i8" else made.mma or operand is None, f"{call.name}: {made}"


def test_older_gpus_are_refused_by_name(of_float8):
    call = next(call for call in of_float8 if call.name == "attention")
    with pytest.raises(UsageError, match="attention: float8 needs compute capability 8.9, not 8.6"):
        cross_compile(call, 86)


@pytest.mark.slow
def test_the_last_norm_of_v2_with_factors_in_front_spills_nowhere():
    spec = replace(spec_of_config(load_config(find_config(MODELS[1]))), exit_factors=True)
    (call,) = (call for call in cases(program_of(spec, 32).launches) if call.name == "pool")
    for capability in (86, 100):
        made = cross_compile(call, capability)
        assert made.spilled == 0 and made.programs > 0, made
