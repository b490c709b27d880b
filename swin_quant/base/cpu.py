"""The CPU: its cores, its instructions for int8 and bfloat16, and matrix products that are the same to the bit."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Flags in /proc/cpuinfo, x86 and ARM.
INT8_FEATURES = ("avx2", "avx512bw", "avx_vnni", "avx512_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")
BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
INT8_PRODUCTS = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8")
# A limit on oneDNN's instructions (ONEDNN_MAX_CPU_ISA) -> those for int8 that it still allows. Others allow all.
_LIMITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("sse41", "avx"), ()),
    **dict.fromkeys(("avx2", "avx512_core"), ("avx2",)),
    **dict.fromkeys(("avx2_vnni", "avx2_vnni_2"), ("avx2", "avx_vnni")),
    **dict.fromkeys(("avx512_core_vnni", "avx512_core_bf16"), ("avx2", "avx512_vnni")),
}


def within(limit: str) -> tuple[str, ...]:
    """The instructions for int8 products that a limit of oneDNN's allows, as torch names them."""
    return _LIMITS.get(limit.lower(), INT8_PRODUCTS)


def features(wanted: tuple[str, ...], text: str | None = None) -> list[str]:
    """The `wanted` features that the CPU has, in that order; `text` replaces /proc/cpuinfo."""
    if text is None:
        try:
            text = Path("/proc/cpuinfo").read_text()
        except OSError:
            return []
    match = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    present = set(match[1].split()) if match else set()
    return [name for name in wanted if name in present]


def cpu_kind() -> dict[str, Any]:
    """The facts about this CPU that decide which of two files is faster."""
    return {"cores": usable_cores(), "features": features(("avx2", "avx512f", "avx512_vnni", "amx_int8"))}


def usable_cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reproducible() -> None:
    """Let a matrix product depend neither on the number of threads nor on the other rows of the batch, on Intel CPUs.

    MKL reads its variable once, at its first product, so call this first. The commands do; in a process of your own it
    is your choice, since it makes MKL a little slower. Without it, the last bits of ranges may depend on the number of
    threads. A value that is set already stays. Calibration itself depends on no batch and no number of ranks either way
    (`quant.calibration`).
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
