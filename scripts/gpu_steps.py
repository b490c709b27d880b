"""The steps of gpu_check.py as data, in the order in which they run: first what is wrong, then what is fast."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NETWORKS = ("swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224")
AHEAD = (*NETWORKS, "swinv2_tiny_patch4_window8_256", "swin_digits")  # of the tests of sizes, and of `align`
SIZES = "tests/backends/cuda/kernels/test_sizes.py"
FIRST = ("tests/gpu/test_cuda_engine.py", "tests/gpu/test_fusions.py", "tests/gpu/test_tiles.py")
ESSENTIALS = ("tests/gpu/test_ranks.py", "tests/gpu/test_arithmetic.py")  # test_ranks.py alone uses NCCL

# Seconds out of WHOLE that each step gets at least, whatever earlier steps take; they sum to less, and the rest is for
# steps that need more. `compile_ahead` has 572 kernels of 0.6 s (EPYC): 20 s on 16 cores; the rest is for launchers
# and for the start of its processes. A CPU compiles nothing ahead and tunes nothing; `compile` takes minutes there.
SECONDS = {
    "cuda": {
        "environment": 8, "compile_ahead": 50, "kernels": 40, "sizes": 26, "essentials": 15, "cuda_engine": 165,
        "train": 9, "calibrate": 8, "score": 8, "export": 4, "export_bfloat16": 4,
        "export_uint8": 4, "export_fp8": 4, "verify": 8, "evaluate": 8, "predict": 8,
        "align": 8, "tune": 10, "bench": 8, "finetune": 8, "torchrun": 8, "step_time": 7, "compile": 10,
        "tests": 8,
    },
    "cpu": {
        "environment": 8, "kernels": 15, "sizes": 10, "essentials": 18, "cuda_engine": 24, "train": 14,
        "calibrate": 12, "score": 12, "export": 8, "export_bfloat16": 6, "export_uint8": 6,
        "export_fp8": 6, "verify": 12, "evaluate": 20, "predict": 10, "align": 12,
        "bench": 14, "finetune": 14, "torchrun": 18, "step_time": 14, "compile": 65, "tests": 26,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The work of a device. `engine_batch` is one for all steps of small networks: kernels are compiled once."""

    models: tuple[str, ...]
    batch: int
    few: tuple[str, ...]
    epochs: int
    engine_batch: int


WORK = {
    "cuda": Sizes(NETWORKS, 64, (), 4, 96),
    "cpu": Sizes(("swin_digits",), 8, ("--set", "epoch_pictures=256"), 2, 8),
}
DIGITS = ("--cfg", "swin_digits", "--data-path", "digits")
EXPORTS = {  # policy, kind of the file, flags
    "export": ("cuda", "int8", ()),
    "export_bfloat16": ("cuda", "int8", ("--float-type", "bfloat16")),
    "export_uint8": ("cuda", "int8_uint8", ("--uint8-input",)),
    "export_fp8": ("cuda-fp8", "fp8", ()),
}


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


@dataclass
class Place:
    """Where the steps run. `work`: a folder for their files; `evidence`: for what is kept. `facts`: lines of
    gpu_environment.py; a line with "no ..." says why steps are skipped."""

    python: str
    device: str
    work: Path
    evidence: Path
    facts: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def sizes(self) -> Sizes:
        return WORK[self.device]

    @property
    def trained(self) -> Path:
        return self.work / "train/swin_micro_digits.pth"

    @property
    def calibrated(self) -> Path:
        return self.work / "calib/swin_micro_digits_calib.pth"

    def exported(self, name: str) -> Path:
        """The file that a step of EXPORTS writes."""
        return self.work / name / f"swin_micro_digits_{EXPORTS[name][1]}_cuda.safetensors"

    def lacks(self, what: str) -> str:
        """The line that says so, or ""."""
        return next((line for line in self.facts if line.startswith(f"no {what}")), "")

    def step(self, name: str, *command: object, needs: str = "", skipped: str = "") -> Step:
        least = SECONDS[self.device].get(name, 0)
        return Step(name, (self.python, *map(str, command)), least, tuple(needs.split()), skipped)

    def swin_quant(self, name: str, *command: object, needs: str = "", skipped: str = "") -> Step:
        return self.step(name, "-m", "swin_quant", *command, "--device", self.device, needs=needs, skipped=skipped)

    def pytest(self, name: str, *files: str, several: bool = False) -> Step:
        """With `several`, in several processes, where there is a GPU and pytest-xdist."""
        many = several and self.on_gpu and not self.lacks("pytest-x")
        processes = ("-n", os.cpu_count(), "--maxprocesses", 12) if many else ()
        return self.step(name, "-m", "pytest", "-m", "gpu", "-rA", "-p", "no:cacheprovider", *processes, *files)


def list_steps(place: Place) -> list[Step]:
    """Every step; the first one prints the facts about this machine."""
    groups = (what_is_wrong, accuracy, exports, deployed, finetuning)
    return [step for group in groups for step in group(place) if step.name in SECONDS[place.device]]


def what_is_wrong(place: Place) -> Iterator[Step]:
    """Facts, kernels and arithmetic; then the engine's times, the first that would be missed."""
    yield place.step("environment", "scripts/gpu_environment.py", place.device)
    # Each process compiles the kernels that it launches. These are compiled on all cores, with pytest-xdist or without.
    yield place.step("compile_ahead", "benchmarks/cuda_engine.py", "--only-compile", "--seconds", "{seconds}",
                     "--models", *AHEAD, "--batch", 8)  # fmt: skip
    yield place.pytest("kernels", "tests/backends/cuda", *FIRST, *_ignored(SIZES), several=True)
    yield place.pytest("sizes", SIZES, several=True)
    yield place.pytest("essentials", *ESSENTIALS)
    engine = () if place.on_gpu else ("--device", "cpu", "--models", "swin_digits", "--batch", 2)
    yield place.step("cuda_engine", "benchmarks/cuda_engine.py", "--seconds", "{seconds}", "--output", place.evidence,
                     *engine)  # fmt: skip


def accuracy(place: Place) -> Iterator[Step]:
    """A network trained on digits, calibrated, and scored under every policy."""
    sizes = place.sizes
    training = ("--data-path", "digits", "--recipe", "digits", *sizes.few, "--epochs", sizes.epochs)
    yield place.swin_quant("train", "train", "--cfg", "swin_digits", *training, "--output", place.trained.parent)
    yield place.swin_quant("calibrate", "calibrate", *DIGITS, "--checkpoint", place.trained, "--policy", "ft-mode1",
                           "--output", place.calibrated.parent, needs="train")  # fmt: skip
    yield place.swin_quant("score", "evaluate", *DIGITS, "--checkpoint", place.calibrated, "--policy", "ft-mode1",
                           "ft-mode2", "qdq", needs="calibrate")  # fmt: skip


def exports(place: Place) -> Iterator[Step]:
    """The calibrated network in every form of the CUDA engine."""
    for name, (policy, _, flags) in EXPORTS.items():
        yield place.step(name, "-m", "swin_quant", "export", place.calibrated, "--for", "cuda", "--policy", policy,
                         *flags, "--output", place.work / name, needs="calibrate",
                         skipped=place.lacks("float8") if name == "export_fp8" else "")  # fmt: skip


def deployed(place: Place) -> Iterator[Step]:
    """The commands that take an exported file."""
    int8, uint8, batch = place.exported("export"), place.exported("export_uint8"), place.sizes.engine_batch
    on_digits = ("--data-path", "digits", "--batch", batch)
    forms = [name for name in EXPORTS if not (name == "export_fp8" and place.lacks("float8"))]
    yield place.swin_quant("verify", "verify", int8, "--checkpoint", place.calibrated, *on_digits, "--pictures", batch,
                           needs="calibrate export")  # fmt: skip
    yield place.swin_quant("evaluate", "evaluate", *map(place.exported, forms), "--checkpoint", place.calibrated,
                           *on_digits, needs=" ".join(("calibrate", *forms)))  # fmt: skip
    yield place.swin_quant("predict", "predict", uint8, "docs/images/report.png", needs="export_uint8")
    yield place.swin_quant("align", "align", place.calibrated, int8, "--policy", "cuda", "--data-path", "digits",
                           "--pictures", 8, needs="calibrate export")  # fmt: skip
    yield place.step("tune", "tools/cuda/tune.py", int8, "--batch", batch, "--seconds", "{seconds}", "--machine",
                     place.work / "machine.yaml", needs="export")  # fmt: skip
    # The GPU needs no more threads, and in a dry run several would wait for each other on a busy CPU.
    yield place.swin_quant("bench", "evaluate", int8, "--no-accuracy", "--checkpoint", place.calibrated,
                           "--batch", batch, "--threads", 1, needs="calibrate export")  # fmt: skip


def finetuning(place: Place) -> Iterator[Step]:
    """Training with quantization, its memory and time; then the other tests, with all the time that is left."""
    sizes, work = place.sizes, place.work
    qat = (*DIGITS, *sizes.few, "--checkpoint", place.calibrated, "--teacher", place.trained, "--epochs", 1)
    yield place.swin_quant("finetune", "finetune", *qat, "--amax", "learned", "--amp-opt-level", "O1", "--output",
                           work / "qat", needs="train calibrate")  # fmt: skip
    yield place.step("torchrun", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 1, "-m",
                     "swin_quant", "finetune", *qat, "--output", work / "rank", "--device", place.device,
                     needs="train calibrate")  # fmt: skip
    yield place.step("step_time", "benchmarks/training.py", "step", "--models", sizes.models[0], "--batch", sizes.batch,
                     "--precision", "O0", "O1", "--output", place.evidence / "step_time.md")  # fmt: skip
    yield place.swin_quant("compile", "finetune", *qat, "--compile", "--output", work / "compile",
                           needs="train calibrate")  # fmt: skip
    yield place.pytest("tests", "tests/gpu", *_ignored(*FIRST, *ESSENTIALS))


def _ignored(*files: str) -> list[str]:
    return [f"--ignore={file}" for file in files]
