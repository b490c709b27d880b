"""The steps of gpu_check.py as data, in the order in which they run: first what is wrong, then what is fast."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

TABLES = "cuda_engine.json"
NETWORKS = ("swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224")
AHEAD = (*NETWORKS, "swinv2_tiny_patch4_window8_256", "swin_digits")  # of the tests of sizes, and of `align`
FORMS = ("cuda", "cuda-fp8", "cuda, bfloat16", "cuda, uint8", "ft-mode1", "ft-mode2")
SIZES = ("tests/backends/cuda/kernels/test_sizes.py", "tests/backends/cuda/kernels/test_wide_sizes.py")
FIRST = ("tests/gpu/test_cuda_engine.py", "tests/gpu/test_fusions.py", "tests/gpu/test_tiles.py")
ESSENTIALS = ("tests/gpu/test_ranks.py", "tests/gpu/test_arithmetic.py")  # test_ranks.py alone uses NCCL

# Seconds out of WHOLE that each step gets at least, whatever earlier steps take; they sum to less, and the rest is for
# steps that need more. `compile_ahead` has 572 kernels of 0.6 s (EPYC): 20 s on 16 cores; the rest is for launchers
# and for the start of its processes. A CPU compiles nothing ahead and tunes nothing; `compile` takes minutes there.
SECONDS = {
    "cuda": {
        "environment": 8, "compile_ahead": 50, "kernels": 40, "sizes": 26, "essentials": 15, "cuda_engine": 165,
        "train": 9, "train_v2": 9, "calibrate": 8, "score": 8, "accuracy": 36, "export": 4, "export_bfloat16": 4,
        "export_uint8": 4, "export_fp8": 4, "verify": 8, "evaluate": 8, "logits": 7, "predict": 8, "serve": 9,
        "align": 8, "tune": 10, "bench": 8, "finetune": 8, "torchrun": 8, "memory": 7, "step_time": 7, "compile": 10,
        "tests": 8,
    },
    "cpu": {
        "environment": 8, "kernels": 15, "sizes": 10, "essentials": 18, "cuda_engine": 24, "train": 14, "train_v2": 16,
        "calibrate": 12, "score": 12, "accuracy": 40, "export": 8, "export_bfloat16": 6, "export_uint8": 6,
        "export_fp8": 6, "verify": 12, "evaluate": 20, "logits": 10, "predict": 10, "serve": 15, "align": 12,
        "bench": 14, "finetune": 14, "torchrun": 18, "memory": 9, "step_time": 14, "compile": 65, "tests": 26,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """`command`, in which {seconds} are those that the step's own limit leaves it. `needs`: the steps whose files it
    reads. `skipped`: why this machine cannot run it."""

    name: str
    command: tuple[str, ...]
    least: int
    needs: tuple[str, ...] = ()
    skipped: str = ""

    def within(self, limit: int) -> list[str]:
        """The command for a limit of seconds."""
        return [word.replace("{seconds}", str(max(limit - 15, limit * 3 // 4))) for word in self.command]

    def is_unfinished(self, evidence: Path) -> bool:
        """Whether its results list what it did not reach."""
        if self.name != "cuda_engine" or not (evidence / TABLES).is_file():
            return False
        try:
            return bool(json.loads((evidence / TABLES).read_text(encoding="utf-8"))["not_reached"])
        except (ValueError, TypeError, KeyError):
            return True


@dataclass
class Place:
    """Where the steps run. `work`: a folder for their files; `evidence`: for what is kept; `pictures`: CIFAR-10, or
    None. `facts`: lines of gpu_environment.py; a line with "no ..." says why steps are skipped."""

    python: str
    device: str
    work: Path
    evidence: Path
    pictures: "Path | None"
    facts: list[str] = field(default_factory=list)

    def lacks(self, what: str) -> str:
        """The line that says so, or ""."""
        return next((line for line in self.facts if line.startswith(f"no {what}")), "")


def steps_of(place: Place) -> list[Step]:
    """Every step; the first one prints the facts about this machine."""
    device, work, least = place.device, place.work, SECONDS[place.device]
    on_gpu, steps = device == "cuda", []

    def step(name: str, *command: object, needs: str = "", skipped: str = "") -> None:
        if name in least:
            words = (place.python, *map(str, command))
            steps.append(Step(name, words, least[name], tuple(needs.split()), skipped))

    def swin_quant(name: str, *command: object, needs: str = "", skipped: str = "") -> None:
        step(name, "-m", "swin_quant", *command, "--device", device, needs=needs, skipped=skipped)

    def pytest(name: str, *files: str, several: bool = False) -> None:
        many = (
            ("-n", os.cpu_count(), "--maxprocesses", 12) if several and on_gpu and not place.lacks("pytest-x") else ()
        )
        step(name, "-m", "pytest", "-m", "gpu", "-rA", "-p", "no:cacheprovider", *many, *files)

    def ignored(*files: str) -> list[str]:
        return [f"--ignore={file}" for file in files]

    step("environment", "scripts/gpu_environment.py", device)
    # Each process compiles the kernels that it launches. These are compiled on all cores, with pytest-xdist or without.
    step("compile_ahead", "benchmarks/cuda_engine.py", "--only-compile", "--seconds", "{seconds}", "--models", *AHEAD,
         "--batch", 8)  # fmt: skip
    pytest("kernels", "tests/backends/cuda", *FIRST, *ignored(*SIZES), several=True)
    pytest("sizes", *SIZES, several=True)
    pytest("essentials", *ESSENTIALS)
    engine = () if on_gpu else ("--device", "cpu", "--models", "swin_digits", "--batch", 2)
    step("cuda_engine", "benchmarks/cuda_engine.py", "--seconds", "{seconds}", "--output", place.evidence, *engine)

    models, batch = (NETWORKS, 64) if on_gpu else (("swin_digits",), 8)
    few, epochs, scored = ((), 4, 5000) if on_gpu else (("--set", "epoch_pictures=256"), 2, 64)
    engine_batch = 96 if on_gpu else 8  # one for all steps of small networks: kernels are compiled once
    digits = ("--cfg", "swin_digits", "--data-path", "digits")
    trained, trained_v2 = (
        work / name / f"{model}_micro_digits.pth" for name, model in (("train", "swin"), ("train_v2", "swinv2"))
    )
    calibrated = work / "calib/swin_micro_digits_calib.pth"
    training = ("--data-path", "digits", "--recipe", "digits", *few, "--epochs", epochs)
    swin_quant("train", "train", "--cfg", "swin_digits", *training, "--output", trained.parent)
    elsewhere = f"it is for accuracy on the digits, which is scored on {place.pictures}" if place.pictures else ""
    swin_quant("train_v2", "train", "--cfg", "swinv2_digits", *training, "--output", trained_v2.parent,
               skipped=elsewhere)  # fmt: skip
    swin_quant("calibrate", "calibrate", *digits, "--checkpoint", trained, "--policy", "ft-mode1", "--output",
               calibrated.parent, needs="train")  # fmt: skip
    swin_quant("score", "evaluate", *digits, "--checkpoint", calibrated, "--policy", "ft-mode1", "ft-mode2", "qdq",
               needs="calibrate")  # fmt: skip
    own = ("digits", "--models", f"swin_digits={trained}", f"swinv2_digits={trained_v2}")
    # Later steps reuse the kernels that it compiles in parallel.
    step("accuracy", "benchmarks/cuda_accuracy.py", "--device", device, "--data-path",
         *((place.pictures,) if place.pictures else own), "--pictures", scored, "--batch", engine_batch, "--forms",
         *FORMS, "--output", place.evidence / "cuda_accuracy.md",
         needs="" if place.pictures else "train train_v2")  # fmt: skip

    no_float8 = place.lacks("float8")
    made = {
        "export": ("cuda", "int8", ()),
        "export_bfloat16": ("cuda", "int8", ("--float-type", "bfloat16")),
        "export_uint8": ("cuda", "int8_uint8", ("--uint8-input",)),
        "export_fp8": ("cuda-fp8", "fp8", ()),
    }
    files = {name: work / name / f"swin_micro_digits_{kind}_cuda.safetensors" for name, (_, kind, _) in made.items()}
    for name, (policy, _, flags) in made.items():
        step(name, "-m", "swin_quant", "export", calibrated, "--for", "cuda", "--policy", policy, *flags, "--output",
             work / name, needs="calibrate", skipped=no_float8 if name == "export_fp8" else "")  # fmt: skip
    if no_float8:
        del files["export_fp8"]
    deployed, uint8 = files["export"], files["export_uint8"]
    on_digits = ("--data-path", "digits", "--batch", engine_batch)
    swin_quant("verify", "verify", deployed, "--checkpoint", calibrated, *on_digits, "--pictures", engine_batch,
               needs="calibrate export")  # fmt: skip
    swin_quant("evaluate", "evaluate", *files.values(), "--checkpoint", calibrated, *on_digits,
               needs=" ".join(("calibrate", *files)))  # fmt: skip
    swin_quant("logits", "predict", deployed, *on_digits, "--logits", work / "logits", needs="export")
    swin_quant("predict", "predict", uint8, "docs/images/report.png", needs="export_uint8")
    # One picture at a time, with the kernels that `predict` has compiled.
    step("serve", "benchmarks/serve.py", uint8, "--clients", 2, "--seconds", 1, "--hanging", 1, "--max-batch", 1,
         needs="export_uint8", skipped=place.lacks("server"))  # fmt: skip
    swin_quant("align", "align", calibrated, deployed, "--policy", "cuda", "--data-path", "digits", "--pictures", 8,
               needs="calibrate export")  # fmt: skip
    step("tune", "-m", "swin_quant", "cuda", "tune", deployed, "--batch", engine_batch, "--seconds", "{seconds}",
         needs="export")  # fmt: skip
    # The GPU needs no more threads, and in a dry run several would wait for each other on a busy CPU.
    swin_quant("bench", "bench", deployed, "--checkpoint", calibrated, "--batch", engine_batch, "--rounds", 2,
               "--seconds", 0.2, "--threads", 1, needs="calibrate export")  # fmt: skip
    qat = (*digits, *few, "--checkpoint", calibrated, "--teacher", trained, "--epochs", 1)
    swin_quant("finetune", "finetune", *qat, "--amax", "learned", "--amp-opt-level", "O1", "--output", work / "qat",
               needs="train calibrate")  # fmt: skip
    step("torchrun", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 1, "-m", "swin_quant",
         "finetune", *qat, "--output", work / "rank", "--device", device, needs="train calibrate")  # fmt: skip
    step("memory", "benchmarks/memory.py", "--device", device, "--models", *models, "--batch", batch, "--output",
         place.evidence / "memory.md")  # fmt: skip
    step("step_time", "benchmarks/qat_step.py", "--models", models[0], "--batch", batch, "--precision", "O0", "O1",
         "--output", place.evidence / "step_time.md")  # fmt: skip
    swin_quant("compile", "finetune", *qat, "--compile", "--output", work / "compile", needs="train calibrate")
    pytest("tests", "tests/gpu", *ignored(*FIRST, *ESSENTIALS))  # last, with all the time that is left
    return steps
