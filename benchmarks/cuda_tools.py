"""What scripts use of `tools/cuda`."""

import sys

from pages import ROOT

sys.path.append(str(ROOT / "tools" / "cuda"))

from crosscompile import OLDEST_FLOAT8, KernelCall, compile_ahead, kernels_of  # noqa: E402
from estimates import floor_us  # noqa: E402
from tune import COPIES, filled, microseconds  # noqa: E402

__all__ = ["COPIES", "OLDEST_FLOAT8", "KernelCall", "compile_ahead", "filled", "floor_us", "kernels_of", "microseconds"]
