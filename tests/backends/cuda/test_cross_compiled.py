"""The engine's kernels for every kind of GPU, none of which is here: one of each kind, from Swin-T and SwinV2-T at full
size, and all shapes of larger models on one GPU each, in int8, half precision and float8.

`tools/cuda/crosscompile.py` compiles others.
"""

import re
from dataclasses import replace

import pytest
import torch
from compiled_kernels import TARGETS, CompiledKernel, cross_compile, kernel_faults
from crosscompile import OLDEST_FLOAT8, KernelCall, compile_ahead, compiled, list_kernels, recorded
from fusions import with_fusions
from nightly import share

from swin_quant.backends.cuda import program as programs
from swin_quant.backends.cuda.kernels.kernel import without_spills
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.spec import make_spec_from_config
from swin_quant.base.errors import UsageError
from tests.backends.cuda.conftest import launches_of, spec_of_model
from tests.backends.cuda.test_tuning import BEST, timed

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
KERNELS = {  # of single launches, and of fused ones
    False: {"gemm", "attention", "norm_quantize", "norm_residual", "merge_quantize"},
    True: {"norm_gemm", "gemm_norm", "mlp", "attention_norm"},
}
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
    """kernels(name, fused) -> one of each kind, single or fused: the largest, from the last stage."""

    def of_model(name, fused):
        launches, found = launches_of(name), {}
        for call in list_kernels(with_fusions(launches)[len(launches) :] if fused else launches):
            kind = () if fused else (dict(call.constants).get("KIND"), dict(call.types).get("a"))
            found[(call.name, *kind)] = call
        return list(found.values())

    return of_model


EVERYWHERE = [(at, name, fused) for name in MODELS for fused in (False, True) for at in (90, 80, 86, 89, 100, 120)]


@pytest.mark.parametrize(("capability", "name", "fused"), share(EVERYWHERE, len(EVERYWHERE)))
def test_kernels_compile_fit_and_multiply_in_int8(kernels, capability, name, fused):
    found = kernels(name, fused)
    assert {call.name for call in found} >= KERNELS[fused] - ({"norm_residual"} if name == MODELS[0] else set())
    for call in found:
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


@triton.jit
def product(a, w, out, rows, scale, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :], mask=(m < rows)[:, None], other=0)
    y = tl.load(w + n[:, None] * K + k[None, :])
    sums = tl.dot(x, y.T, out_dtype=tl.int32).to(tl.float32) * scale
    tl.store(out + m[:, None] * BN + n[None, :], sums.to(tl.float16), mask=(m < rows)[:, None])


def launch(rows, warps=4):
    a, w = (torch.empty(side, 64, dtype=torch.int8, device="meta") for side in (rows, 32))
    out = torch.empty(rows, 32, dtype=torch.float16, device="meta")
    product[(-(-rows // 64),)](a, w, out, rows, 0.5, K=64, BM=64, BN=32, num_warps=warps)


def test_a_launch_is_recorded_once_for_all_that_the_compiler_is_not_told():
    run = triton.JITFunction.run
    with recorded() as calls:
        launch(64)
        launch(128)  # its number of rows is divisible by 16 too
        launch(65)
        launch(64, warps=2)
    assert triton.JITFunction.run is run
    first, odd, narrow = calls
    assert dict(first.types) == dict(
        a="*i8", w="*i8", out="*fp16", rows="i32", scale="fp32", K="constexpr", BM="constexpr", BN="constexpr"
    )
    assert dict(first.constants) == dict(K=64, BM=64, BN=32) and dict(first.options) == {"num_warps": 4}
    assert "rows" in first.aligned and "rows" not in odd.aligned and dict(narrow.options) == {"num_warps": 2}


@pytest.mark.parametrize("own, all_registers, taken", [(0, 0, False), (4, 0, True), (4, 2, False)])
def test_a_kernel_has_all_registers_only_where_that_ends_its_spills(own, all_registers, taken):
    chosen = without_spills({"num_warps": 4}, lambda options: all_registers if "maxnreg" in options else own)
    assert chosen == {"num_warps": 4} | ({"maxnreg": 255} if taken else {})


@pytest.fixture(scope="module")
def program(tiny_config):
    return build_program(make_spec_from_config(tiny_config("swin", EMBED_DIM=64)), 8)


def test_the_engine_launches_what_is_compiled_ahead_with_the_tiles_that_were_timed(program, monkeypatch):
    monkeypatch.setattr(programs, "by_kernels", lambda device: True)
    tensors = {name: torch.empty(ref.shape, dtype=ref.dtype) for name, ref in program.packed.items()}
    bound = program, tensors, dict.fromkeys(program.scalars, 0.25), torch.device("cpu")
    table = timed(program.launches[2], [8])
    for given, tiles in ((programs.NO_TILES, None), (table, BEST)):
        with recorded() as calls:
            programs.bind(*bound, given)()
        wanted = [(one, tiles if programs.format_shape(one) in table else None) for one in program.launches]
        assert calls == list_kernels(wanted)


@pytest.mark.nightly
def test_processes_compile_and_what_is_refused_is_told(program, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pool, gemm = (next(one for one in program.launches if one.op == op) for op in ("pool", "gemm"))
    odd = Tiles(48, 32, 32)  # no powers of two
    report = compile_ahead([(pool, None), (pool, None), (gemm, odd)], 80, 120, processes=2)
    assert (report.done, report.left) == (1, 0) and len(report.refused) == 1 and report.refused[0].startswith("gemm: ")
    assert list(tmp_path.rglob("*.cubin"))
