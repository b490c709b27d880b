"""The cost of the CUDA engine's arithmetic, and its distance from its reference: writes docs/results/cuda_accuracy.md.

    python benchmarks/cuda_accuracy.py --data-path DIR [--sections NAME ...] [--pictures 5000] [--train 20000]
    python benchmarks/cuda_accuracy.py --device cuda --data-path DIR [--models CFG=FILE ...] [--output FILE]

DIR is CIFAR-10 as zip files and maps. 80 training pictures calibrate, and other pictures are scored: by the float model
and, for each form of the engine, by its reference, which is fake-quant with the same ranges or the emulator of
FasterTransformer's kernels, and by the engine, which on a CPU runs the references of its kernels. Each run writes its
own sections of the page and keeps the others.

`--device cuda` scores the kernels and their reference on the GPU. It fails if top-1 differs by more than 0.02 points,
one picture and three standard errors, or if the noise against the float model differs by 1 dB. `--models` replaces the
float models of examples/checkpoints, and DIR is then their data: of `digits`, rotated and shifted copies
are scored. With `--models`, on a GPU, or with `--output`, it writes a page of its own.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cuda_files import (
    BFLOAT,
    BYTES,
    FAKE_QUANT,
    FLOAT,
    TORCH,
    calibrated,
    exported,
    forms,
    reference,
    runs,
    shown,
)
from cuda_judged import MOST_DB, WIDER_DB, Judged, judged, wrong
from pages import EXAMPLES, RESULTS, line_of, place, script_parser, versions_here

PAGE = RESULTS / "cuda_accuracy.md"
MODELS = [
    f"{EXAMPLES / name}.yaml={EXAMPLES / name}.safetensors" for name in ("swin_micro_cifar10", "swinv2_micro_cifar10")
]
JUDGED = (FLOAT, "cuda", "cuda-fp8", BFLOAT, BYTES, "ft-mode1", "ft-mode2")
SOFTMAX_FORMS = ("cuda, softmax half", "cuda, softmax int8")
TRACED = ("cuda", "cuda-fp8")  # forms whose difference from fake-quant is analysed
BATCH, COMPILING = 100, 120.0  # pictures; most seconds of compiling ahead
BESIDE = ("Δ", "±", "agree %", "SQNR dB")
COLUMNS = ("model", "form", "by", "acc@1", *(f"float: {one}" for one in BESIDE), *(f"pair: {one}" for one in BESIDE))
CHANGED = ("model", "form", "what", "acc@1", *BESIDE)
ENGINE = "the engine"
CLOSEST = f"{ENGINE}, float32"
HEAD = """# Accuracy of the CUDA engine's arithmetic

Micro Swins of examples/checkpoints, written by `python benchmarks/cuda_accuracy.py`; 80 training pictures calibrate.
*cuda*: the engine on a CPU, by the references that its kernels are tested against. The row above it has its reference
with the same ranges: *fake-quant*, or *FasterTransformer's emulator*. Δ and ± (paired standard error) are points of
top-1; agreement and SQNR are of the logits. They compare with the float model in torch first, then (*pair*) the
engine with its reference on the same pictures. 0.02 points are one picture of 5,000. The last section explains the
differences. Speed is not measured here.
"""
APART = """{} pictures of val, against plain fake-quant: the engine, and fake-quant that rounds one thing as the engine
does. *Float32*: instead of every half-precision value of the engine.

A difference in the last bit sends a value near a tie the other way, and moves the values behind it. Any change, even
of how sums are rounded, therefore ends in other logits, and pictures flip both ways. The float16 residual stream
makes nearly all of the difference in dB, and so does each other half-precision value alone: they do not add up, and
top-1 moves differently with each. With none of them the engine is as near to fake-quant as fake-quant is to itself
with sums in float64: nothing else differs.
"""


@dataclass(frozen=True)
class Section:
    """A section of the page, and its figures that are wrong."""

    title: str
    text: str
    wrong: list[str]


def rows_of(model: str, form: str, found: Judged) -> list[list[str]]:
    """A table line of the reference, unless another form has it, and one of the engine."""
    of = forms()[form]
    before = [model, form, of.equals, f"{found.before.acc1:.2f}", *beside(found.before), *[""] * 4]
    after = [model, form, "cuda", f"{found.engine.acc1:.2f}", *beside(found.engine), *beside(found.pair)]
    return [after] if of.options else [before, after]


def beside(score) -> list[str]:
    decibels = "equal" if score.sqnr_db is None else f"{score.sqnr_db:.1f}"
    return [f"{score.delta_acc1:+.2f}", f"{score.delta_acc1_se:.2f}", f"{score.agreement:.2f}", decibels]


@dataclass
class Scored:
    """Table lines, and figures that are wrong."""

    rows: list[list[str]]
    wrong: list[str]


def scored(given: tuple[Path, Path], args, split: str, count: int, wanted: tuple[str, ...]) -> Scored:
    """Score each form of a model on `count` pictures of a split, none of which calibrated."""
    import torch

    from swin_quant.backends.cuda.engine import load
    from swin_quant.score.engine import torch_engines
    from swin_quant.score.options import EngineOptions

    model, cfg, calibrating = calibrated(*given, args.data_path)
    name, device = cfg.MODEL.NAME, torch.device(args.device)
    batches = shown(cfg, args.data_path, split, count, calibrating, args.batch)
    made, found = Scored([], []), None
    with tempfile.TemporaryDirectory() as folder:
        files = {form: exported(model, cfg, form, folder) for form in wanted if runs(cfg, form)}
        if args.device == "cuda":
            compile_all(files.values(), args.batch)
        for form, file in files.items():
            start = time.perf_counter()
            try:
                before = reference(model, cfg, form, folder, device)
                float32 = next(iter(torch_engines(model, device, None).values()))
                found = judged(float32, before, load(file, EngineOptions(device=args.device)), batches, device)
            except Exception as error:  # one form's failure must not hide the other forms
                made.wrong.append(f"{name}, {form}: {type(error).__name__}: {str(error)[:300]}")
                print(made.wrong[-1], flush=True)
                continue
            lines = rows_of(name, form, found)
            made.rows += lines
            fault = wrong(found, WIDER_DB if form == BFLOAT else MOST_DB)
            made.wrong += [f"{name}, {form}: {fault}"] if fault else []
            print(*(" | ".join(line) for line in lines), f"{time.perf_counter() - start:.0f} s", sep="\n", flush=True)
    picture = [name, "", TORCH, f"{found.before.acc1 - found.before.delta_acc1:.2f}", *[""] * 8] if found else []
    return Scored([picture, *made.rows] if picture else [], made.wrong)


def compile_all(artifacts, batch: int) -> None:
    """Compile all artifacts' kernels for a batch, in several processes."""
    from cuda_tools import compile_ahead

    from swin_quant.backends.cuda.choose_fusions import fused_program
    from swin_quant.backends.cuda.engine import capability_here, machine_here
    from swin_quant.backends.cuda.export import LARGEST_BATCH
    from swin_quant.backends.cuda.file import read_network
    from swin_quant.backends.cuda.sessions import sizes

    size = next(size for size in sizes(LARGEST_BATCH) if size >= batch)
    specs = [read_network(artifact.file).spec for artifact in artifacts]
    launches = [one for spec in specs for one in fused_program(spec, size, machine_here()).launches]
    made = compile_ahead(((one, None) for one in launches), capability_here(), COMPILING)
    print(f"{made.done} kernels compiled, {len(made.refused)} refused, {made.left} left", flush=True)


def taken_apart(given: tuple[Path, Path], args) -> Iterator[tuple[list[str], str]]:
    """Compare the engine, and fake-quant with one thing changed, with fake-quant: table lines, and a summary."""
    import torch
    from cuda_rounding import CHANGES, SUMS, in_float32

    from swin_quant.backends.cuda.engine import load
    from swin_quant.data.loader import Batch
    from swin_quant.score.metrics import evaluate

    model, cfg, calibrating = calibrated(*given, args.data_path)
    name, cpu = cfg.MODEL.NAME, torch.device("cpu")
    batches = shown(cfg, args.data_path, "val", args.pictures, calibrating, BATCH)
    images, labels = (torch.cat([getattr(batch, what) for batch in batches]) for what in ("images", "labels"))

    def logits(run: Callable) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([run(part) for part in images.split(BATCH)])

    def engine(form: str) -> torch.Tensor:
        with tempfile.TemporaryDirectory() as folder:
            return logits(load(exported(model, cfg, form, folder)))

    for form in TRACED:
        with tempfile.TemporaryDirectory() as folder:
            run = reference(model, cfg, form, folder, cpu)
        found = {FAKE_QUANT: logits(run), ENGINE: engine(form)}
        for what, change in CHANGES.items():
            with change(model):
                found[what] = logits(run)
        with in_float32():
            found[CLOSEST] = engine(form)
        answers = {what: partial(lambda after, _: after, after) for what, after in found.items()}
        scores = evaluate(answers, [Batch(images, labels, [], [])], cpu)
        for what, score in scores.items():
            yield [name, form, what, f"{score.acc1:.2f}", *(beside(score) if what != FAKE_QUANT else [""] * 4)], ""
        sums = scores[SUMS]
        yield (
            [],
            f"* {name}, {form}: {scores[ENGINE].sqnr_db:.1f} dB between the engine and fake-quant, "
            f"{scores[CLOSEST].sqnr_db:.1f} with nothing in half, {sums.sqnr_db:.1f} between fake-quant and itself "
            f"with sums in float64, whose top-1 is {sums.delta_acc1:+.2f} ± {sums.delta_acc1_se:.2f} points from its "
            "own.",
        )


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [line_of(row) for row in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def section(args, title: str, text: str, split: str, count: int, wanted: tuple[str, ...]) -> Section:
    """Score all forms of every model on pictures of a split."""
    found = [scored(one, args, split, count, wanted) for one in models(args)]
    rows = [row for one in found for row in one.rows]
    return Section(title, f"{text}\n\n{table(COLUMNS, rows)}", [line for one in found for line in one.wrong])


def of_val(args) -> Section:
    return section(args, "Accuracy", f"{args.pictures} pictures of val.", "val", args.pictures, args.forms)


def of_train(args) -> Section:
    text = f"{args.train} training pictures that did not calibrate; the float models were trained on them."
    return section(args, "More pictures", text, "train", args.train, TRACED)


def of_softmax(args) -> Section:
    text = f"The form of policy `cuda` was chosen on {args.choose} training pictures that did not calibrate."
    return section(args, "Probabilities in int8 or half", text, "train", args.choose, SOFTMAX_FORMS)


def of_rounding(args) -> Section:
    found = [line for one in models(args) for line in taken_apart(one, args)]
    rows, texts = [cells for cells, _ in found if cells], [text for _, text in found if text]
    return Section(
        "What the difference is made of", "\n".join([APART.format(args.pictures), table(CHANGED, rows), "", *texts]), []
    )


SECTIONS = {"val": of_val, "train": of_train, "softmax": of_softmax, "rounding": of_rounding}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="of the page")
    parser.add_argument("--pictures", type=int, default=5000, help="of val")
    parser.add_argument("--train", type=int, default=20000, help="of train, that are scored")
    parser.add_argument("--choose", type=int, default=1000, help="of train, that softmax is chosen by")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="CFG=FILE", help="float models")
    parser.add_argument("--forms", nargs="+", choices=JUDGED, default=JUDGED, metavar="NAME")
    parser.add_argument("--batch", type=int, default=BATCH, help="of a GPU, where each size is compiled")
    parser.add_argument("--output", type=Path, help="a page of its own: that of a GPU, or of other models")
    args = parser.parse_args()
    if any("=" not in one for one in args.models):
        parser.error("--models: each is CFG=FILE")
    if args.device == "cuda" or args.models != MODELS or args.output:
        return one_page(args)
    wrong = []
    for name in args.sections:
        made = SECTIONS[name](args)
        place(PAGE, HEAD, made.title, made.text)
        wrong += made.wrong
    if wrong:
        sys.exit("\n".join(wrong))


def one_page(args) -> None:
    """Write a page for a GPU, or for other models. SystemExit with the differences, if there are any."""
    import torch

    from swin_quant.backends.cuda.engine import capability_here, check_gpu
    from swin_quant.base.errors import SwinQuantError

    where, skipped = "this CPU, by references", ""
    if args.device == "cuda":
        try:
            check_gpu()
        except SwinQuantError as error:
            sys.exit(f"cuda_accuracy.py: {error}: nothing was measured")
        where = torch.cuda.get_device_name()
        if capability_here() < 89:  # the first GPUs with float8
            args.forms = [form for form in args.forms if form != "cuda-fp8"]
            skipped = f" *cuda-fp8* was skipped: compute capability {capability_here() / 10} has no float8."
    found = [scored(one, args, "val", args.pictures, args.forms) for one in models(args)]
    page = "\n".join([
        f"# Accuracy of the CUDA engine on {where}\n",
        f"{versions_here()}; at most {args.pictures} pictures of val; columns of docs/results/cuda_accuracy.md. What "
        f"the engine stands for runs on that device, too.{skipped}\n",
        table(COLUMNS, [row for one in found for row in one.rows]),
        "",
    ])  # fmt: skip
    print(page)
    if args.output:
        args.output.write_text(page)
    if faults := [line for one in found for line in one.wrong]:
        sys.exit("\n".join(faults))


def models(args) -> list[tuple[Path, Path]]:
    """Config and weights of each model."""
    from swin_quant.config.load import find_config

    pairs = (one.partition("=") for one in args.models)
    return [(Path(find_config(cfg)), Path(file)) for cfg, _, file in pairs]


if __name__ == "__main__":
    main()
