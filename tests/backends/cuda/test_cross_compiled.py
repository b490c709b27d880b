"""The engine's kernels for every kind of GPU, none of which is here: one of each kind, from Swin-T and SwinV2-T at full
size, and all shapes of larger models on one GPU each, in int8, half precision and float8.

`tools/cuda/crosscompile.py` compiles others.
"""

import re
from dataclasses import replace

import pytest
from compiled_kernels import TARGETS, CompiledKernel, cross_compile, kernel_faults
from crosscompile import OLDEST_FLOAT8, KernelCall, compiled, list_kernels
from fusions import with_fusions
from nightly import share

from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import build_program
from swin_quant.base.errors import UsageError
from tests.backends.cuda.conftest import launches_of, spec_of_model

pytest.importorskip("triton")
KERNELS = {
    "gemm", "attention", "norm_quantize", "norm_residual", "merge_quantize", "norm_gemm", "gemm_norm", "mlp",
    "attention_norm",
}  # fmt: skip
MODELS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_patch4_window8_256")


def assert_fine(call, capability):
    """The kernel does not spill, fits, and multiplies on its type's tensor cores; no two warps do the same work."""
    made = cross_compile(call, capability)
    found = list(kernel_faults(call, made))
    assert not found, f"{call.name} {dict(call.constants)}: {found}, {made}"


def test_what_is_wrong_with_a_kernel_is_found():
    product = KernelCall("product", (("a", "*i8"), ("w", "*i8")), (("BM", 64),), (), ())
    good = CompiledKernel(90, 4, 128, 0, 4096, {"IGMMA": 1})
    wrong = {
        "spills 8 bytes": {"spilled": 8},
        "300000 bytes of shared memory, more than a program may have": {"shared": 300_000},
        "no int8 tensor-core instructions": {"mma": {"HGMMA": 1}},
        "not by warp groups": {"mma": {"IMMA": 4}},
        "warps compute the same: 1.50 times its products": {"repeated": 1.5},
    }
    assert list(kernel_faults(product, good)) == []
    for found, change in wrong.items():
        assert list(kernel_faults(product, replace(good, **change))) == [found]
    assert list(kernel_faults(product, replace(good, warps=2, mma={"IMMA": 4}))) == []  # no group of four warps
    half = product._replace(types=(("qkv", "*bf16"),))
    assert list(kernel_faults(half, replace(good, mma={}))) == ["no tensor-core instructions"]


@pytest.fixture(scope="module")
def kernels():
    """One of each kind: the largest, from the last stage."""
    found = {}
    for name in MODELS:
        launches = launches_of(name)
        for call in list_kernels(launches):
            constants = dict(call.constants)
            found[call.name, constants.get("KIND"), dict(call.types).get("a"), constants.get("WINDOW") == 8] = call
        found |= {(call.name,): call for call in list_kernels(with_fusions(launches)[len(launches) :])}
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", share((90, 80, 86, 89, 100, 120), 6))
def test_kernels_compile_fit_and_multiply_in_int8(kernels, capability):
    assert {call.name for call in kernels} >= KERNELS
    for call in kernels:
        assert_fine(call, capability)


LARGE = "swin_large_patch4_window7_224_22kto1k_finetune"
SHAPES = (
    ("swin_small_patch4_window7_224", "int8"),
    ("swin_base_patch4_window7_224", "int8"),
    (LARGE, "int8"),
    ("swinv2_base_patch4_window8_256", "int8"),
    ("swinv2_large_patch4_window12to24_192to384_22kto1k_ft", "int8"),
    ("swin_base_patch4_window7_224", "float"),
    (MODELS[1], "float"),
    ("swinv2_base_patch4_window8_256", "float"),
    ("swin_base_patch4_window7_224", "fp8"),
    ("swinv2_base_patch4_window8_256", "fp8"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("model, precision", SHAPES)
def test_all_shapes_of_a_model_compile(model, precision):
    """Single and fused, for one kind of GPU each: the script compiles for all."""
    turn = SHAPES.index((model, precision))
    capable = [one for one in TARGETS if precision != "fp8" or one >= OLDEST_FLOAT8]
    for call in list_kernels(with_fusions(launches_of(model, precision))):
        assert_fine(call, capable[turn % len(capable)])


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90])
def test_the_head_of_one_picture_compiles(capability):
    """One row: Triton makes the number of rows a constant."""
    call = list_kernels(launches_of(MODELS[0], batch=1))[-1]
    assert dict(call.constants)["rows_in_all"] == 1
    assert_fine(call, capability)


@pytest.mark.nightly
def test_no_two_warps_compute_the_same():
    """Eight warps with 64 rows did: products and GELU were computed twice."""
    mlps = [one for one in with_fusions(launches_of(MODELS[0])) if one.op == "mlp"]
    launch = next(one for one in mlps if one.arguments["w1"].shape[1] == 192)
    once, twice = list_kernels([launch, (launch, Tiles(64, 64, 64, warps=8, stages=2))])
    assert (cross_compile(once, 80).repeated, cross_compile(twice, 80).repeated) == (1, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("op", ["attention", "attention_norm"])
def test_the_position_bias_of_a_window_of_7_is_loaded_in_vectors(op):
    """Rows of 49 halves start at any address: each value was one load, 25 a thread."""
    call = next(call for call in list_kernels(with_fusions(launches_of(MODELS[0]))) if call.name == op)
    _, made = compiled(call, 80)
    loads = re.findall(r"ld\.global\S*", made.asm["ptx"])
    assert loads and not [load for load in loads if load.endswith((".b16", ".b8"))], loads


@pytest.fixture(scope="module")
def of_float8():
    """Products of SwinV2-T in float8, one of each kind, single and fused."""
    found = list_kernels(with_fusions(launches_of(MODELS[1], "fp8")))
    kinds = {(call.name, dict(call.constants).get("KIND")): call for call in found}
    return [call for call in kinds.values() if "*fp8e4nv" in (dict(call.types).get("w"), dict(call.types).get("qkv"))]


@pytest.mark.slow
@pytest.mark.parametrize("capability", share((89, 90, 100, 120), 4))
def test_float8_runs_on_its_tensor_cores(of_float8, capability):
    assert {call.name for call in of_float8} == {"gemm", "attention", "norm_gemm", "gemm_norm", "attention_norm", "mlp"}
    for call in of_float8:
        assert_fine(call, capability)


@pytest.mark.nightly
@pytest.mark.parametrize("op", ["attention", "attention_norm"])
def test_sums_of_float8_are_added_up_in_float32_after_each_tile(op):
    """Hopper's tensor cores keep 14 bits of a sum. Float8 probabilities, and windows of several tiles of keys."""
    spec = spec_of_model("swinv2_tiny_patch4_window16_256", "fp8")
    launches = build_program(replace(spec, quantized=frozenset(spec.products())), 32).launches
    call = next(call for call in list_kernels(with_fusions(launches)) if call.name == op)
    for capability in (89, 90, 100, 120):
        assert_fine(call, capability)
    _, made = compiled(call, 90)
    sums = r"dot (\S+), (\S+), (\S+) \{.*maxNumImpreciseAcc = (\d+)"
    added = [int(most) for *_, to, most in re.findall(sums, made.asm["ttgir"]) if not to.startswith("%cst")]
    assert added and max(added) <= 128, added


def forms():
    """A form's name and spec: FasterTransformer's arithmetic, a bfloat16 stream, pictures as bytes."""
    for name in MODELS:
        int8, half = (spec_of_model(name, precision) for precision in ("int8", "float"))
        for mode in ("ft-mode1", "ft-mode2")[: 1 if int8.version == 2 else 2]:
            yield f"{name}, {mode}", spec_of_model(name, mode)
        yield f"{name}, bfloat16", replace(half, float_type="bfloat16")
        yield f"{name}, int8 with bfloat16", replace(int8, float_type="bfloat16")
    yield f"{name}, pixels", replace(int8, pixels=True)


def of_each_form(spec):
    """One launched kernel for each distinct set of constants and operand types in a network."""
    found = {}
    for call in list_kernels(with_fusions(build_program(spec, 32).launches)):
        rounding = (dict(call.constants).get(word) for word in ("KIND", "PRODUCT_ROUNDS", "HALF_STEPS", "POST"))
        found.setdefault((call.name, *rounding, call.types), call)
    return found.values()


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("form", "spec"), list(forms()))
def test_every_form_compiles(form, spec, capability):
    """Each epilogue, attention, norms, merging and pooling, in the types and with the roundings of that form."""
    calls = of_each_form(spec)
    if spec.pixels:
        calls = [call for call in calls if call.name == "patch_embed"]
        assert dict(calls[0].types)["images"] == "*u8"
    else:
        assert {call.name for call in calls} >= {"patch_embed", "gemm", "attention", "merge_quantize", "pool"}
    rounds = {dict(call.constants).get("PRODUCT_ROUNDS") for call in calls} - {None}
    assert spec.pixels or rounds == ({True, False} if spec.arithmetic == "ft-mode2" else {True})
    for call in calls:
        assert_fine(call, capability)


def test_older_gpus_are_refused_by_name(of_float8):
    call = next(call for call in of_float8 if call.name == "attention")
    with pytest.raises(UsageError, match="attention: float8 needs compute capability 8.9, not 8.6"):
        cross_compile(call, 86)
