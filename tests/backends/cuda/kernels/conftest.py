"""Run kernels in Triton's interpreter, and on a GPU if there is one."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import currently_in_test_context, reject
from interpreted import Interpreter
from kernel_runs import FLOAT8, NO_FLOAT8, has_float8

from swin_quant.backends.cuda.kernels import KERNELS

HERE = Path(__file__).parent
# What CI interprets, with these parameters: each kernel in each type. `make kernels` interprets all.
IN_CI = {
    "test_attention": {"d": 32},
    "test_attention_of_wide_shifted_maps": {"m": (16, 8, 4)},
    "test_attention_of_several_windows_a_program": {"how": "int8"},
    "test_attention_in_tiles_of_keys": {"how": "int8", "window": 12},
    "test_norm_and_linear": {},
    "test_merging_and_its_linear": {},
    "test_linear_residual_and_norm": {},
    "test_attention_projection_and_norm": {},
    "test_mlp": {},
    "test_attention_with_its_projection_equals_them_apart": {"dtype": torch.int8, "post": False},
    "test_gemm_to_int8": {},
    "test_gemm_to_float": {},
    "test_gemm_to_float8": {},
    "test_rounding_to_float8": {},
    "test_gemm_with_gelu": {},
    "test_gemm_with_residual": {},
    "test_gemm_to_unit_vectors": {"d": 32},
    "test_gemm_of_fastertransformer": {},
    "test_gelu_is_erfs": {},
    "test_int8_is_half_to_even_and_saturated": {},
    "test_a_nan_stays_one_where_the_type_has_it": {"kind": "quantize"},
    "test_norm_quantize": {},
    "test_merge_quantize": {},
    "test_norm_residual": {},
    "test_pool": {},
    "test_patch_embed": {"ft": False},
    "test_launches_of_small_networks": {"precision": "int8", "kind": "swin"},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == HERE and given.get("run") == "interpreter":
            item.add_marker(pytest.mark.slow)
            wanted = IN_CI.get(item.originalname)
            if wanted is None or any(given[name] != value for name, value in wanted.items()):
                item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def interpreter():
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    made = Interpreter()
    yield made
    made.close()


def on_gpu(operation, outputs, arguments):
    check_types(arguments.values())
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    for name, value in arguments.items():  # shared tensors stay shared
        moved |= {other: moved[name] for other in outputs if arguments[other] is value}
    tiles = moved.pop("tiles", None)
    KERNELS[operation](**moved).launch(tiles)
    return {name: moved[name].cpu() for name in outputs}


def check_types(values):
    """A draw that this GPU cannot compute is not counted; a test with no other draws is skipped."""
    if any(isinstance(value, torch.Tensor) and value.dtype == FLOAT8 for value in values) and not has_float8():
        reject() if currently_in_test_context() else pytest.skip(NO_FLOAT8)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """run(operation, outputs, arguments) -> what the kernel writes into the arguments named `outputs`."""
    if request.param == "interpreter":
        return request.getfixturevalue("interpreter").run
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return on_gpu
