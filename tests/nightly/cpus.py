"""The arithmetic tests on imitated CPUs, each in a process of its own: `python tests/nightly/cpus.py [short|demo]`.

Libraries choose their kernels by the CPU, and kernels differ in their last bits and in saturation. A variable without
meaning for this machine changes nothing; a CPU that cannot be imitated here is named and skipped. `demo`: `swin-quant
demo` instead of the tests.
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
STANDIN = TESTS / "standin" / "older_cpu.c"
NOT_HERE = 77  # the stand-in's exit code if CPUID cannot be trapped

CPUS = {
    "AMD": {"CPU_VENDOR": "AuthenticAMD"},  # MKL accepts AUTO,STRICT there and ignores it
    "AMD without AVX-512": {"CPU_VENDOR": "AuthenticAMD", "OLDER_CPU": "avx2"},
    "no AVX-512, no VNNI": {"OLDER_CPU": "avx2"},
    "AVX-512 without VNNI": {"OLDER_CPU": "avx512"},
    "MKL not strict": {"MKL_CBWR": "OFF"},
    "MKL for any CPU": {"MKL_CBWR": "COMPATIBLE"},
    "MKL of AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch of AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN of AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN of AVX2 and VNNI": {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
    "oneDNN of AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "two threads": {"OMP_NUM_THREADS": "2"},
}
VERBS = ("test_calibrate", "test_evaluate", "artifacts/test_verify")
ARITHMETIC = ["quant", "models", "backends", "train", "score", "cli/test_ranks.py", *(f"verbs/{v}.py" for v in VERBS)]

SHORT_CPUS = ["AMD", "MKL for any CPU", "torch without vectors", "oneDNN of AVX2", "two threads"]
SHORT = [
    "quant/test_batch_invariance.py",
    "quant/test_calibration.py::test_batch_1_and_batch_32_count_the_same",
    "quant/test_calibration.py::test_an_overflow_names_the_first_module",
    "backends/onnx/test_export.py::test_every_level_of_every_node_is_fake_quant_s",
    "backends/fastertransformer/test_emulator.py::test_a_picture_s_features_do_not_depend_on_its_batch",
    "backends/test_onnx_engines.py::test_the_result_is_that_of_the_formulas",
]


# pytest's fault handler would replace the stand-in's
PYTEST = ["pytest", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-m", "not slow and not nightly"]


def run(name: str, command: list[str], library: str | None) -> tuple[bool, str]:
    """Whether `python -m command` succeeded or could not run on CPU `name`, and a message."""
    wanted = CPUS[name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | wanted
    if {"OLDER_CPU", "CPU_VENDOR"} & wanted.keys():
        if library is None:
            return True, "cannot be imitated here: no C compiler for Linux on x86-64"
        environment["LD_PRELOAD"] = library
    start = time.monotonic()
    whole = [sys.executable, "-m", *command]
    done = subprocess.run(whole, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    if done.returncode == NOT_HERE:
        return True, "cannot be imitated here: this CPU or its hypervisor does not let CPUID be trapped"
    said = "passed" if done.returncode == 0 else f"FAILED\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    return done.returncode == 0, f"{said} ({time.monotonic() - start:.0f} s)"


def build(folder: str) -> str | None:
    """The stand-in as a library; None if it cannot be compiled."""
    library = f"{folder}/older_cpu.so"
    command = ["cc", "-O1", "-shared", "-fPIC", str(STANDIN), "-o", library]
    try:
        return None if subprocess.run(command, capture_output=True).returncode else library
    except OSError:
        return None


def commands(form: str, folder: str) -> dict[str, list[str]]:
    """The commands to run, by CPU."""
    if form == "demo":
        return {name: ["swin_quant", "demo", "--output", f"{folder}/{name}"] for name in CPUS}
    names, tests = (SHORT_CPUS, SHORT) if form == "short" else (list(CPUS), ARITHMETIC)
    return {name: [*PYTEST, *(str(TESTS / test) for test in tests)] for name in names}


def main(form: str) -> int:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(int(os.environ.get("WORKERS", "2"))) as pool:
        library, wanted = build(folder), commands(form, folder)
        passed = True
        done = pool.map(lambda name: run(name, wanted[name], library), wanted)
        for name, (good, said) in zip(wanted, done, strict=True):
            variables = " ".join(f"{key}={value}" for key, value in CPUS[name].items())
            print(f"{name} ({variables}): {said}", flush=True)
            passed &= good
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or ["long"]))
