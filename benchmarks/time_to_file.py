"""Time from a float checkpoint to a file for OpenVINO, ours beside NNCF's (docs/results/time_to_file.md):

    python benchmarks/time_to_file.py --data-path DIR --model swin_tiny_patch4_window7_224 swin_base_patch4_window7_224

DIR has train, of which 80 pictures calibrate, and val, which is scored. Weights are timm's own initialisation unless
`--checkpoint` gives timm's state_dict of one model. Each run is a process of its own, NNCF's and ours in turns. NNCF's
run imports, builds timm's model, converts it, quantizes it for transformers and saves it. Ours is `calibrate`,
`export`, `verify` and `evaluate` as `quantize` calls them, with the times after each. CPU seconds are of the process
and its children, memory is the largest resident set of one process.
"""

import functools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CALIBRATED = 80
ABOUT = """From timm's float checkpoint to an int8 file for OpenVINO: `quantize` on 80 ImageNet pictures, scored on 128,
beside `nncf.quantize` on as many. Times until the end of each of our steps; NNCF's end with its saved file. The goals
of wall time are 1.0 of NNCF's until `export`, 1.3 until `verify` and 2.2 until `evaluate`, and 2 GB of memory.
`python benchmarks/time_to_file.py --data-path DIR --model NAME` writes a model's rows."""
STEPS = ("calibrate", "export", "verify", "evaluate")


def main() -> None:
    from pages import RESULTS, cpu, join_cells, read_table, save, script_parser, versions_here

    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--model", nargs="+", default=["swin_tiny_patch4_window7_224"])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=("nncf", "ours"), help="one run, in this process: prints its times as JSON")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    if args.run:
        run = run_nncf if args.run == "nncf" else run_ours
        return print(json.dumps(run(args.model[0], args.checkpoint, args.data_path, args.work)))
    head = ["model", "until", "wall s", "CPU s", "GB", "NNCF wall s", "NNCF CPU s", "wall ratio", "CPU ratio", "rounds"]
    before = read_table(RESULTS / "time_to_file.csv")  # rows of other models stay
    rows = [[row[key] for key in head] for row in before if row["model"] not in args.model]
    for name in args.model:
        found = {"nncf": [], "ours": []}
        with tempfile.TemporaryDirectory() as work:
            checkpoint = args.checkpoint or initialised(name, Path(work))
            for number in range(args.rounds):
                for who in found:
                    place = Path(work, f"{who}{number}")
                    words = ["--run", who, "--model", name, "--checkpoint", checkpoint, "--data-path", args.data_path]
                    command = [sys.executable, __file__, *map(str, words), "--work", str(place)]
                    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                    found[who].append(json.loads(output.splitlines()[-1]))
                    print(name, who, found[who][-1], flush=True)
        rows += [[*row, str(args.rounds)] for row in list_rows(name, found)]
    table = "\n".join([join_cells(head), join_cells("---" for _ in head), *map(join_cells, rows)])
    about = f"# Time to a file\n\n{ABOUT}\n\n{cpu()}; {versions_here()}."
    save(RESULTS / "time_to_file.md", f"{about}\n\n{table}\n")


def list_rows(name: str, found: dict[str, list[dict[str, list[float]]]]) -> list[list[str]]:
    """A row for each step of ours: medians, and the medians of the ratios within a round."""
    rows = []
    for step in STEPS:
        ours = [run[step] for run in found["ours"] if step in run]
        theirs = [run["save"] for run in found["nncf"]]
        medians = [median(column) for column in (*zip(*ours, strict=True), *list(zip(*theirs, strict=True))[:2])]
        ratios = [
            median(one[place] / other[place] for one, other in zip(ours, theirs, strict=True)) for place in (0, 1)
        ]
        rows.append([name, step, *(f"{value:.1f}" for value in medians), *(f"{ratio:.2f}" for ratio in ratios)])
    return rows


def initialised(name: str, folder: Path) -> Path:
    """timm's state_dict of a model as it is initialised."""
    import torch

    from swin_quant.base.compat import import_timm

    torch.manual_seed(0)
    torch.save(import_timm().create_model(name).state_dict(), folder / f"{name}.pth")
    return folder / f"{name}.pth"


def taken(start: float) -> list[float]:
    """Wall and CPU seconds until now, and the largest resident set in GB."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = sum(one.ru_utime + one.ru_stime for one in (own, children))
    return [time.perf_counter() - start, cpu, max(own.ru_maxrss, children.ru_maxrss) / 2**20]


def run_ours(name: str, checkpoint: Path, data: Path, work: Path) -> dict[str, list[float]]:
    start, found = time.perf_counter(), {}
    import swin_quant as sq
    from swin_quant.verbs import quantize

    for step in STEPS:
        verb = getattr(quantize, step)

        @functools.wraps(verb)  # a step is also written as a command, from its signature
        def timed(*args: object, step=step, verb=verb, **named: object) -> object:
            result = verb(*args, **named)
            found[step] = taken(start)
            return result

        setattr(quantize, step, timed)
    sq.quantize(checkpoint, data, "openvino", work)
    return found


def run_nncf(name: str, checkpoint: Path, data: Path, work: Path) -> dict[str, list[float]]:
    start = time.perf_counter()
    import nncf
    import openvino as ov
    import torch
    from PIL import Image

    from swin_quant.base.compat import import_timm  # where torchvision has no operators

    timm = import_timm()
    work.mkdir(parents=True)
    model = timm.create_model(name)
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    model.eval()
    prepare = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    files = sorted(path for path in (data / "train").rglob("*") if path.is_file())[:CALIBRATED]
    pictures = [prepare(Image.open(file).convert("RGB"))[None].numpy() for file in files]
    converted = ov.convert_model(model, example_input=torch.from_numpy(pictures[0]))
    converted.reshape([-1, *pictures[0].shape[1:]])
    quantized = nncf.quantize(
        converted, nncf.Dataset(pictures), subset_size=len(pictures), model_type=nncf.ModelType.TRANSFORMER
    )
    ov.save_model(quantized, work / "model.xml")
    return {"save": taken(start)}


if __name__ == "__main__":
    main()
