"""Print the environment of scripts/gpu_check.sh: versions, GPU, and missing packages.

Exit code 1 if a package is missing that some steps fail without, 2 if nothing can run, without the device or a package
that everything imports. The line "made with" has what results depend on; lines that begin with "no" say what is left
out.

python scripts/gpu_environment.py cuda|cpu
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = "torch timm yacs termcolor numpy rich safetensors PIL yaml sklearn pytest hypothesis".split()
BY_ALL = {"torch", "timm", "yacs", "termcolor", "numpy", "rich", "yaml"}
SOME = {  # what a few steps need, and what is done without it
    "pytest-xdist": (("xdist",), "kernels of tests are compiled one after another"),
}
COMPILERS = ("gcc", "clang")
FLOAT8 = (8, 9)
SHOWN = ("torch", "triton", "timm", "numpy", "swin-quant")


def main(device: str) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if device == "cuda":
        missing += describe_triton()
    print(f"python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{name} {installed(name)}" for name in SHOWN))
    if missing:
        print(f"missing: {', '.join(missing)} (scripts/gpu_wheels.sh downloads packages as wheels)")
    for name, (modules, without) in SOME.items():
        if not all(map(importlib.util.find_spec, modules)):
            print(f"no {name} here: {without}")
    if BY_ALL.intersection(missing):
        return 2
    import torch

    gpu = "no GPU"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        gpu = torch.cuda.get_device_name()
        print(
            f"{gpu}, compute capability {major}.{minor}, CUDA {torch.version.cuda}, "
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        )
        if (major, minor) < FLOAT8:
            print(f"no float8: the GPU is of compute capability {major}.{minor}, tensor cores have it from 8.9 on")
    else:
        print("torch finds no GPU")
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,temperature.gpu", "--format=csv"])
    if device == "cuda" and not torch.cuda.is_available():
        return 2
    print(f"made with {device}, {gpu}, {', '.join(f'{name} {installed(name)}' for name in SHOWN)}")
    return int(bool(missing))


def describe_triton() -> list[str]:
    """Missing parts of Triton, and of the tools that build its launchers."""
    missing = [] if importlib.util.find_spec("triton") else ["triton"]
    compilers = [os.environ["CC"]] if "CC" in os.environ else COMPILERS
    if not any(map(shutil.which, compilers)):
        missing.append(f"a C compiler ({' or '.join(compilers)})")
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").is_file():
        missing.append("Python.h (of python3-dev)")
    return missing


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
