"""Launches that `test_sizes` lacks: the widest network, pictures of 384, and windows of 12, 16 and 24.

Only a GPU runs them, beside those of `test_sizes`. Batches are small: references of attention keep all logits.
"""

import pytest

from tests.backends.cuda.conftest import spec_of_model
from tests.backends.cuda.kernels.test_sizes import FUSED, check, distinct

ATTENTION = {"attention", "attention_norm"}
OF_MAPS = {"patch_embed", "merge_quantize", "pool"}  # kernels whose addresses depend on the picture's size
PLAIN = {"gemm", "norm_quantize"}
LARGE, AT_384 = "swin_large_patch4_window7_224_22kto1k_finetune", "swin_base_patch4_window12_384_finetune"
WINDOW_16, WINDOW_24 = "swinv2_tiny_patch4_window16_256", "swinv2_base_patch4_window12to24_192to384_22kto1k_ft"
CASES = (  # model, batch, precision, kernels
    (LARGE, 2, "int8", FUSED | ATTENTION | OF_MAPS | PLAIN),
    (LARGE, 2, "float", FUSED),
    (AT_384, 1, "int8", ATTENTION | OF_MAPS),
    *((model, 1, precision, ATTENTION) for model in (WINDOW_16, WINDOW_24) for precision in ("int8", "float")),
)


def launches():
    for model, batch, precision, ops in CASES:
        for launch in distinct(spec_of_model(model, precision), batch):
            if launch.op in ops:
                yield pytest.param(launch, id=f"{precision} {model}: {launch.name}, {launch.op}")


def test_every_large_window_is_among_them():
    found = [case.values[0] for case in launches()]
    assert {launch.arguments["windows"].window for launch in found if launch.op == "attention"} >= {7, 12, 16, 24}
    assert {launch.op for launch in found} >= FUSED | ATTENTION | OF_MAPS | PLAIN


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu"], indirect=True)
@pytest.mark.parametrize("launch", [*launches()])
def test_launches_of_wide_networks(run, launch):
    check(run, launch)
