"""The CPU's cores, and its instructions for int8 and bfloat16, which decide how much these types can win."""

import os
import re
from pathlib import Path

# Flags in /proc/cpuinfo, x86 and ARM.
INT8_FEATURES = ("avx2", "avx512bw", "avx_vnni", "avx512_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")
BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")


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


def usable_cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
