"""The software and hardware that figures depend on."""

import importlib.metadata
import platform
import re
from pathlib import Path

from swin_quant.base import __version__


def versions() -> dict[str, str | None]:
    """Versions of software, and the hardware; None for anything absent."""
    import torch  # cards are read without it

    return {
        "swin_quant": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{package: _installed(package) for package in ("timm", "numpy")},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)  # reads a file: importing timm would take seconds
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()
