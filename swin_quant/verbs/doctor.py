"""Obstacles on this machine, and how to mend them; with --all everything it has."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from swin_quant.backends.registry import engines
from swin_quant.backends.releases import faults_of
from swin_quant.base.cpu import usable_cores
from swin_quant.base.errors import SwinQuantError, listed, one_line
from swin_quant.base.extras import installing
from swin_quant.cards.card import versions
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import tell
from swin_quant.cli.shared import Json
from swin_quant.report.machine import MachineFact, MachineFacts
from swin_quant.report.table import print_fitted

EXAMPLES = """examples:
  swin-quant doctor
  swin-quant doctor --all
  swin-quant doctor --json machine.json                            (for a bug report)"""
_MISMATCH = "torchvision::nms does not exist"
# Capability names of torch.cpu.get_capabilities, x86 and ARM.
_CPU: Mapping[str, Mapping[str, str]] = {
    "int8": {
        "avx_vnni": "AVX-VNNI",
        "avx512_vnni": "AVX-512 VNNI",
        "amx_int8": "AMX",
        "dot": "dot products",
        "i8mm": "matrix products (i8mm)",
    },
    "half precision": {
        "avx512_bf16": "AVX-512 bfloat16",
        "amx_bf16": "AMX bfloat16",
        "amx_fp16": "AMX float16",
        "bf16": "bfloat16",
        "sve_bf16": "SVE bfloat16",
    },
    "vectors": {"avx2": "AVX2", "avx512_f": "AVX-512", "neon": "NEON", "sve": "SVE"},
}
# Type -> the first compute capability whose tensor cores multiply it (NVIDIA's CUDA programming guide).
_GPU = {"float16": 70, "int8": 75, "bfloat16": 80, "fp8": 89}
_REQUIRED = "pip install -c constraints.txt -e . in the checkout"


@dataclass(frozen=True)
class DoctorOptions:
    """How the findings are shown."""

    all: Annotated[bool, Flag("every version, extra, feature and folder, too")] = False
    json: Json = None


def run(options: DoctorOptions) -> None:
    found, rest = doctor(), "" if options.all else "\nEverything else: swin-quant doctor --all\n"

    def show() -> None:
        print_fitted(lambda width, color: found.text(width, color, options.all) + rest, 80)

    tell(options.json, show, found.to_dict())


def doctor() -> MachineFacts:
    """Look at this machine; nothing is downloaded, and nothing changed but the cache of compiled operators.

    A topic that cannot be looked at says why.
    """
    return MachineFacts([one for topic, ask in TOPICS.items() for one in _asked(topic, ask)])


def _asked(topic: str, ask: Callable[[], Iterator[tuple[str, ...]]]) -> Iterator[MachineFact]:
    try:
        for found in ask():
            yield MachineFact(topic, *map(one_line, found))
    except Exception as error:  # noqa: BLE001
        yield MachineFact(topic, "unknown", one_line(f"cannot be asked: {type(error).__name__}: {error}"), "caution")


def _versions() -> Iterator[tuple[str, ...]]:
    found = versions()
    for name in ("swin_quant", "python", "torch", "timm", "numpy"):
        yield (name, version) if (version := found[name]) else (name, "not installed", "caution", _REQUIRED)
    yield "platform", found["platform"] or "unknown"
    yield _torchvision()


def _torchvision() -> tuple[str, ...]:
    """Whether a script of the user's can import torchvision, and so timm: a fresh process tries."""

    version = _version("torchvision")
    if version is None:
        return "torchvision", "not installed", "caution", f"timm needs it: {_REQUIRED}"
    failed = _fails("import torchvision")
    if failed is None:
        return "torchvision", version
    if _MISMATCH not in failed:
        return "torchvision", f"{version}, which cannot be imported: {failed}", "caution", _pairing()
    return "torchvision", f"{version}, built for CUDA, beside a torch for CPUs", "caution", mismatch_remedy(version)


def _pairing() -> str:
    """The torch that the installed torchvision needs, and the one that is installed."""
    import torch

    wanted = [one for one in importlib.metadata.requires("torchvision") or [] if re.match(r"torch\b", one)]
    return f"it is for {listed(wanted) or 'an unknown torch'}, this is {torch.__version__}: install the two together"


def mismatch_remedy(version: str) -> str:
    """The remedy for a torchvision for CUDA beside a torch for CPUs: the CPU build of the same version."""
    plain = version.partition("+")[0]
    return (
        "swin-quant helps itself, but `import torchvision`, `timm` and `transformers` fail in a script of your own. "
        f"Install the CPU build of the same version: {sys.executable} -m pip install --force-reinstall --no-deps "
        f"--index-url https://download.pytorch.org/whl/cpu torchvision=={plain}. Where nothing can be installed, begin "
        "the script with `from swin_quant.base.compat import import_timm` and `import_timm()`"
    )


def _fails(code: str) -> str | None:
    """The last line of the error that a fresh Python, outside of the current folder, ends with; None if it does not."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=120, cwd=sys.prefix
    )
    if done.returncode == 0:
        return None
    return ([""] + done.stderr.strip().splitlines())[-1] or f"it ended with {done.returncode}"


def _engines() -> Iterator[tuple[str, ...]]:
    for name, engine in engines().items():
        if engine.needs is None:
            yield name, "simulated, in torch" if engine.emulates else "part of swin-quant"
        elif not engine.is_installed:
            yield name, "not installed", "missing", engine.remedy
        else:
            yield _importable(name, engine.needs[0], engine.remedy)


def _importable(name: str, package: str, remedy: str) -> tuple[str, ...]:
    try:
        module = importlib.import_module(package)
    except Exception as error:  # noqa: BLE001
        return name, f"is installed, and cannot be imported: {error}", "caution", remedy
    version = _version(package) or getattr(module, "__version__", None)
    if version and (wrong := faults_of(name, version)):
        return name, f"{version}, which {'; '.join(wrong)}", "caution", f"a newer {package}: docs/results/releases.md"
    return name, str(version or "installed, of an unknown version")


def _extras() -> Iterator[tuple[str, ...]]:
    """The optional parts of the package, as its metadata have them."""
    parts: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("swin-quant") or []:
        if found := re.match(r"""([\w.-]+)[^;]*;.*\bextra == ["']([\w-]+)["']""", requirement):
            parts.setdefault(found[2], []).append(found[1])
    for extra, packages in parts.items():
        absent = [package for package in packages if not _is_there(package)]
        if absent:
            yield extra, f"without {listed(absent)}", "missing", installing(extra)
        else:
            yield extra, "installed"


def _is_there(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cpu() -> Iterator[tuple[str, ...]]:
    import torch

    from swin_quant.backends.saturation import saturates

    yield "processor", f"{versions()['cpu'] or 'unknown'}, {usable_cores()} cores for this process"
    has: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    for what, names in _CPU.items():
        here = [found for key, found in names.items() if has.get(key)]
        yield what, ", ".join(here) or "nothing special"
    for name, engine in engines().items():
        if engine.saturation:
            yield f"{name}, int8", *_SATURATION[saturates(name)]


def _operators() -> Iterator[tuple[str, ...]]:
    """Whether files for OpenVINO have compiled operators here: the compiler, and the library, tested anew."""
    from swin_quant.backends.openvino import operators
    from swin_quant.operators.plugins import compiler, self_test

    try:
        yield "C++ compiler", compiler()
    except SwinQuantError as error:
        yield "C++ compiler", str(error), "missing", "it compiles operators for OpenVINO at first use: install g++"
    if not engines()["openvino"].is_installed:
        return
    try:
        library = operators.library()
    except SwinQuantError as error:
        yield "operators of OpenVINO", "plain nodes", "caution", str(error)
        return
    if failed := self_test(operators.sources(), library):
        yield "operators of OpenVINO", "fails its self-test", "caution", f"{failed}: remove {library}"
    else:
        yield "operators of OpenVINO", f"compiled, passes its self-test: {library}"


_SATURATION: Mapping[bool | None, tuple[str, ...]] = {
    False: ("products are exact",),
    None: (
        "whether products saturate is not known of this CPU",
        "caution",
        "compare `verify` with and without `export --saturation-safe`",
    ),
    True: (
        "no VNNI: products saturate at 16 bits, which costs accuracy",
        "caution",
        "`export --saturation-safe` writes a file whose products cannot (docs/onnx.md)",
    ),
}


def _gpu() -> Iterator[tuple[str, ...]]:
    import torch

    driver = _driver()
    yield ("driver", driver) if driver else ("driver", "none of NVIDIA's", "missing")
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    if torch.cuda.is_available():
        yield "torch", f"{build}, sees {torch.cuda.device_count()}"
    elif driver and not torch.version.cuda:
        yield "torch", f"{build}: it cannot use the GPU", "caution", "install torch of PyPI's index, which is for CUDA"
    elif driver:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else "the driver may be older than it needs"
        yield "torch", f"{build}: it sees no GPU", "caution", why
    else:
        yield "torch", build
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        sm = 10 * found.major + found.minor
        types = ", ".join(name for name, first in _GPU.items() if sm >= first) or "none"
        gib = found.total_memory / 2**30
        yield f"GPU {index}", f"{found.name}, sm {sm}, {gib:.0f} GiB; tensor cores: {types}"


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver."""

    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", file.read_text())
    except OSError:
        return None
    return found[1] if found else "of an unknown version"


def _folders() -> Iterator[tuple[str, ...]]:
    import torch
    from huggingface_hub import constants

    home = Path.home()
    places = {
        "weights of hubs": Path(constants.HF_HUB_CACHE),
        "torch.hub": Path(torch.hub.get_dir()),
        "Triton's kernels": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
    }
    for what, folder in places.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = f"{shutil.disk_usage(there).free / 2**30:.0f} GiB free"
        if os.access(there, os.W_OK):
            yield what, f"{folder}, {free}{'' if folder.exists() else ', not made yet'}"
        else:
            yield (
                what,
                f"{folder}, {free}",
                "caution",
                f"{there} cannot be written: set HF_HOME, TORCH_HOME or TRITON_CACHE_DIR",
            )


def _version(package: str) -> str | None:
    """The version of the distribution that a module comes from; None if it is not known."""
    there = filter(_is_there, _distributions().get(package, [package]))
    return next(map(importlib.metadata.version, there), None)


@cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


TOPICS: Mapping[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "versions": _versions,
    "engines": _engines,
    "extras": _extras,
    "CPU": _cpu,
    "operators": _operators,
    "GPU": _gpu,
    "cache folders": _folders,
}
