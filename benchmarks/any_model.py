"""The cost and gain of W8A8 for models of any architecture: writes tables of docs/results/any_model.md.

    python benchmarks/any_model.py accuracy examples/checkpoints/{resnet,convnext,mobilenetv3,vit}_micro*.safetensors
        --data-path CIFAR10 --zip [--work DIR] [--pictures 80] [--output docs/results/any_model.md]
    python benchmarks/any_model.py latency timm:resnet50 [timm:deit_small_patch16_224 ...] [--rounds 5]   (quiet)
    python benchmarks/any_model.py sweep [timm:NAME tv:NAME hf:TYPE FILE.py:NAME ...] [--data-path PICTURES]
        [--work DIR] [--limit 240] [--time-again] [--output docs/results/sweep.md]

accuracy: a float checkpoint with its run card is calibrated once on training pictures. All rows are scored on all
pictures of val, with deltas, paired standard errors, agreement and SQNR against float32.
latency: random weights at full size, one interleaved run a model (`benchmarks/cpu_engines.py`), beside ONNX Runtime's
own quantization and, if installed, NNCF. Files in --work are not made again, so `--rounds 1 --seconds 0.1` beforehand
leaves only the timing to the quiet machine. Each table replaces the one with its title in the page; the title of times
names the CPU.
sweep: every test model and family of timm and 25 models each of torchvision and transformers, from `wrap` to
files on engines (`benchmarks/sweep.py`), or the named models; FILE.py:NAME is a function that returns a module and
the side of its pictures. Rows in --work are not made again.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from pages import cpu, line_of, place, save, script_parser
from sweep import markdown, sweep, time_again

from swin_quant.base.cpu import reproducible
from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.cli import main as swin_quant

POLICIES = ("cpu", "qdq", "onnxruntime", "tensorrt")
FILES = (("openvino", "cpu"), ("openvino", "qdq"), ("onnxruntime", "onnxruntime"), ("onnxruntime", "qdq"))
HEADING = (
    "# W8A8 of models of timm\n\nAccuracy: trained micro models, top-1 in %, deltas in points against float32 with "
    "their paired standard errors, agreement of top-1 and SQNR of logits with float32; torch simulates, engines run "
    "files. Latency: random weights at full size, one interleaved run a model. Written by "
    "`python benchmarks/any_model.py accuracy` and `latency`.\n"
)
SWEEP = (
    "# Models of timm, torchvision and transformers, the whole way\n\nEach is wrapped, calibrated by default (policy "
    "qdq-unsigned, which was chosen on other pictures) on 8 pictures, exported, and run on 8 others. Weights are "
    "random, seeded and disturbed; SQNR of the output in dB, against float; NNCF: its default, on OpenVINO, from the "
    "module itself. Time: the latency of our file over NNCF's, batch 1, one thread, calls in turn in one process. A "
    "model that takes more than {limit:g} s is ended. Worst first. Written by `python benchmarks/any_model.py sweep "
    "--data-path DIR --limit {limit:g} --output docs/results/sweep.md` on {cpu}, {date}.\n\n"
)


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("accuracy", "latency", "sweep"))
    parser.add_argument("models", nargs="*", metavar="CHECKPOINT|timm:NAME|tv:NAME|hf:TYPE|FILE.py:NAME")
    parser.add_argument("--data-path", help="for accuracy; for sweep: a folder of JPEGs, else noise")
    parser.add_argument("--zip", action="store_true")
    parser.add_argument("--pictures", type=int, default=80, help="to calibrate on")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="for latency")
    parser.add_argument("--rounds", type=int, default=5, help="for latency")
    parser.add_argument("--seconds", type=float, default=1.0, help="for latency: of each candidate in a round")
    parser.add_argument("--limit", type=float, default=240.0, help="for sweep: seconds a model")
    parser.add_argument("--time-again", action="store_true", help="for sweep: the latency of files in --work")
    parser.add_argument("--work", type=Path, default=Path("out/any_model"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.what == "accuracy" and not args.data_path:
        parser.error("accuracy needs --data-path")
    if args.what == "sweep":
        rows = sweep(args.models, args.work / "sweep", args.data_path, args.limit)
        if args.time_again:
            time_again(rows, args.work / "sweep")
        head = SWEEP.format(limit=args.limit, cpu=cpu(), date=time.strftime("%F"))
        print(text := head + markdown(rows))
        if args.output:
            save(args.output, text)
        return
    if not args.models:
        parser.error(f"{args.what} needs models")
    for model in args.models:
        text = table(model, args) if args.what == "accuracy" else latency(model, args)
        print(text)
        if args.output:
            title = f"{args.what.capitalize()} of {Path(model).stem}"
            place(args.output, HEADING, f"{title} on {cpu()}" if args.what == "latency" else title, text)


def latency(model: str, args: argparse.Namespace) -> str:
    """Markdown of one model on CPU engines."""
    folder = args.work / model.replace(":", "_")
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "latency.md"
    script = Path(__file__).with_name("cpu_engines.py")
    how = ["--rounds", str(args.rounds), "--seconds", str(args.seconds), "--batch", *map(str, args.batch)]
    words = [sys.executable, str(script), "--model", model, "--work", str(folder), *how, "--output", str(page)]
    subprocess.run(words, check=True)
    return page.read_text().partition("\n\n")[2].partition("\n\n")[2]  # without its own heading


def table(checkpoint: str, args: argparse.Namespace) -> str:
    """Markdown of one checkpoint: float, the simulated policies, and files on their engines."""
    folder = args.work / Path(checkpoint).stem
    data = ["--data-path", args.data_path, *(["--zip"] if args.zip else [])]
    asked = ["--policy", *POLICIES, "--pictures", str(args.pictures), "--half", "none", "--output", str(folder)]
    _run("calibrate", checkpoint, *asked, *data)
    (calibrated,) = folder.glob("*_calib.json")
    results = list(RunCard.read(calibrated).results)
    for backend, policy in FILES:
        place = folder / f"{backend}_{policy}"
        _run(
            "export", str(calibrated.with_suffix(".pth")), "--for", backend, "--policy", policy, "--output", str(place)
        )
        (file,) = place.glob("*.onnx")
        _run("evaluate", str(file), *data, "--half", "none")
        card = RunCard.read(file.with_suffix(".json"))
        results += [result for result in card.results if result["engine"] == backend]
    rows = [Result.of(result) for result in results]
    lines = [f"{rows[0].pictures} pictures", ""]
    lines += ["| engine | precision | policy | top-1 | delta | agree % | SQNR dB |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, rows), ""])


def _row(result: Result) -> str:
    delta = "" if result.delta_acc1 is None else f"{result.delta_acc1:+.2f} ± {result.delta_acc1_se or 0:.2f}"
    agreement, sqnr = (f"{x:.{digits}f}" if x else "" for x, digits in ((result.agreement, 2), (result.sqnr_db, 1)))
    cells = (result.engine, result.precision, result.policy or "", f"{result.acc1:.2f}", delta, agreement, sqnr)
    return line_of(cells)


def _run(*words: str) -> None:
    if code := swin_quant(list(words)):
        raise SwinQuantError(f"swin-quant {' '.join(words)} ended with {code}")


if __name__ == "__main__":
    main()
