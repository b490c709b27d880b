"""swin-quant tune where there is no GPU; on one, tests/gpu."""

import pytest
import torch


def test_without_a_gpu_it_says_so_in_a_line(run, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "torch finds none here" in run("tune", tmp_path / "none.safetensors").error(2)
