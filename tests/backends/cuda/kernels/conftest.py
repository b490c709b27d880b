"""Run kernels in Triton's interpreter, and on a GPU if there is one."""

import importlib.util

import pytest
import torch
from hypothesis import currently_in_test_context, reject
from interpreted import Interpreter
from kernel_runs import FLOAT8, NO_FLOAT8, has_float8

from swin_quant.backends.cuda.kernels import KERNELS


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
