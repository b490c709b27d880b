"""The CUDA engine's kernels under other versions of Triton than the pinned one, without a GPU.

    python scripts/triton_versions.py [VERSION ...]

By default the oldest supported version. Kernels are interpreted and compared with their references, and one of each
kind is compiled for every GPU. A version is installed into out/triton, not into the environment. Exit code 1 if a test
fails.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = "3.6.0"
TESTS = {
    "interpreted": ["tests/backends/cuda/kernels", "-m", "not slow"],
    "compiled": ["tests/backends/cuda/test_cross_compiled.py", "-k", "compile_fit_and_multiply"],
}


def main() -> None:
    passed = {
        f"triton {version}, {what}": run(version, words)
        for version in sys.argv[1:] or [OLDEST]
        for what, words in TESTS.items()
    }
    for what, (said, _) in passed.items():
        print(f"{what}: {said}")
    sys.exit(any(code for _, code in passed.values()))


def run(version: str, words: list[str]) -> tuple[str, int]:
    """The last line of these tests, and their exit code."""
    folder = ROOT / "out" / "triton" / version
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": f"{folder}.cache"}
    found = "import triton; print(triton.__version__)"
    imported = subprocess.run([sys.executable, "-c", found], env=env, check=True, capture_output=True, text=True).stdout
    if imported.strip() != version:
        raise SystemExit(f"triton {imported.strip()} was imported in place of {version}")
    command = [sys.executable, "-m", "pytest", "--color=no", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout)
    return done.stdout.strip().splitlines()[-1], done.returncode


if __name__ == "__main__":
    main()
