"""Our files on the releases of ONNX Runtime and OpenVINO that people run: writes docs/results/releases.md and .csv.

    python benchmarks/releases.py [--form short] [--engines openvino] [--only 2024.0] [--work out/releases]

Micro models of examples/checkpoints, exported in every form; each release is installed into a folder of its own (`pip
install --target`), runs every file in a process without this package or torch, and is deleted. The reference is the
same file on the installed ONNX Runtime with optimizations off. Rows lie in the working folder and are not made again.
`--form short`: the oldest, the middle and the newest release, V1's default files. `python -S benchmarks/releases.py
judge` is the process of a release. It takes an hour on two cores.
"""

import csv
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # not of `pages`, whose imports the process of a release does not see
PAGE = ROOT / "docs" / "results" / "releases.md"
MODELS = {"V1": "swin", "V2": "swinv2", "ViT": "vit", "ResNet": "resnet"}
FORMS = {  # form -> backend and options of `export`
    "float": ("onnx", {"precision": "float"}),
    "cpu": ("openvino", {"policy": "cpu", "plain": True}),
    "onnxruntime": ("onnxruntime", {"policy": "onnxruntime"}),
    "qdq": ("onnx", {"policy": "qdq"}),
}
OLDEST = {"onnxruntime": "1.16", "openvino": "2023.2"}  # the minor releases of three years ago
NEEDS = ("numpy<2", "packaging", "openvino-telemetry")  # all that the releases import
INTEGER_OPERATORS = ("QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv", "ConvInteger")
PICTURES, BATCH = 16, 4
AT_ONCE = 3  # releases: most of their time is that of downloads
SECONDS = 900  # the longest that a release may take
FLOAT_LIMIT, INT8_LIMIT = 60.0, 25.0  # dB below which a file computes something else


@dataclass(frozen=True)
class Kind:
    """One file of the matrix. `batch`: None for any; `weights`: column, tensor or none; `what`: logits or maps."""

    model: str
    form: str
    opset: int = 17
    batch: int | None = None
    weights: str = "column"
    what: str = "logits"
    operators: bool = False

    @property
    def is_default(self) -> bool:
        """Whether it is what `export` writes unless something else is asked for, but for its batch."""
        return (self.opset, self.what) == (17, "logits") and self.weights != "tensor" and not self.operators

    @property
    def name(self) -> str:
        return "_".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True)
class Row(Kind):
    """A file on a release: its distance from the reference in dB, or the error's first line.

    `int8`: how many products the engine's own graph has in integers.
    """

    engine: str = ""
    release: str = ""
    db: float | None = None
    int8: int | None = None
    error: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.db is not None and self.db < (FLOAT_LIMIT if self.form == "float" else INT8_LIMIT)

    @property
    def is_int8(self) -> bool:
        """Whether it is a plain int8 classifier of the default opset."""
        return self.form != "float" and self.what == "logits" and self.opset == 17 and not self.operators


COLUMNS = {  # title -> the rows of a column
    "float, opset 17": lambda row: row.form == "float" and row.opset == 17 and row.what == "logits",
    "int8, any batch": lambda row: row.is_int8 and row.batch is None and row.weights == "column",
    "one scale a tensor": lambda row: row.is_int8 and row.weights == "tensor",
    f"batch {BATCH}": lambda row: row.is_int8 and row.batch == BATCH,
    "operators": lambda row: row.operators,
    "maps": lambda row: row.what == "maps",
    "opset 18": lambda row: row.opset == 18,
    "opset 19": lambda row: row.opset == 19,
    "opset 20": lambda row: row.opset == 20,
}


def kinds(models: Sequence[str]) -> Iterator[Kind]:
    """Every kind of file: each option beside the default ones, not every combination."""
    for model in models:
        for form in FORMS:
            base = Kind(model, form, weights="none" if form == "float" else "column")
            yield from (base, replace(base, batch=BATCH))
            if form in ("float", "qdq") and model == "V1":
                yield from (replace(base, opset=opset) for opset in (18, 19, 20))
            elif form == "qdq":
                yield replace(base, opset=20)
            if form != "float":
                yield replace(base, weights="tensor")
            if form in ("float", "qdq") and model in ("V1", "V2"):
                yield replace(base, what="maps")
        if model in ("V1", "V2"):
            yield Kind(model, "cpu", operators=True)


def write_files(wanted: Sequence[Kind], folder: Path) -> None:
    """Export each kind into `folder`, with its reference beside it; pictures are seeded noise."""
    import numpy as np
    import onnxruntime
    from measuring import noise

    import swin_quant as sq
    from swin_quant.backends.openvino.engine import without_functions
    from swin_quant.quant.policy import Rule, load_policy

    @functools.cache
    def calibrated(name: str, output_kind: str | None) -> sq.Model:
        weights = ROOT / "examples" / "checkpoints" / f"{name}_micro_cifar10.safetensors"
        model = sq.load(weights, output_kind=output_kind)
        pictures = noise(PICTURES, (3, model.preprocess.size, model.preprocess.size))
        return sq.calibrate(model, [pictures], "qdq", method="max", passes=[])

    per_tensor = Rule(nodes=("role:gemm_weight",), granularity="per-tensor")
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain.log_severity_level = 4
    folder.mkdir(parents=True, exist_ok=True)
    for kind in wanted:
        file, reference = folder / f"{kind.name}.onnx", folder / f"{kind.name}.npy"
        backend, options = FORMS[kind.form]
        options = options | {"opset": kind.opset, "batch": kind.batch}
        if kind.weights == "tensor":
            options["policy"] = load_policy(options["policy"]).and_then(per_tensor)
        if kind.operators:
            options = {"opset": kind.opset, "policy": "cpu"}
        model = calibrated(MODELS[kind.model], "features" if kind.what == "maps" else None)
        images = noise(PICTURES, (3, model.preprocess.size, model.preprocess.size)).numpy()
        np.save(folder / f"{kind.model}.npy", images)
        made = sq.export(model, backend, folder / kind.name, **options).file
        file.write_bytes(without_functions(made))  # as a package gives it to servers
        shutil.rmtree(made.parent)
        session = onnxruntime.InferenceSession(str(file), plain, providers=["CPUExecutionProvider"])
        np.save(reference, in_batches(lambda batch, run=session: run.run(None, {"images": batch}), images, kind.batch))
        print(kind.name, flush=True)


def in_batches(run, images, batch: int | None):
    """All outputs of all pictures in one row of numbers."""
    import numpy as np

    size = batch or len(images)
    found = [run(images[start : start + size]) for start in range(0, len(images), size)]
    return np.concatenate([np.concatenate(parts).ravel() for parts in zip(*found, strict=True)])


def judge(engine: str, packages: str, folder: str, names: Sequence[str]) -> None:
    """Run files on the engine in `packages`; a line of JSON each: the outputs' distance from the reference in dB."""
    sys.path.insert(0, packages)
    import numpy as np

    for name in names:
        images = np.load(Path(folder, name.partition("_")[0] + ".npy"))
        file, batch = str(Path(folder, name + ".onnx")), re.search(r"_\d\d_(\d+|None)_", name).group(1)
        try:
            run, int8 = {"onnxruntime": _onnxruntime, "openvino": _openvino}[engine](file, packages)
            found = in_batches(run, images, None if batch == "None" else int(batch)).astype(np.float64)
            exact = np.load(Path(folder, name + ".npy")).astype(np.float64)
            noise = float(np.square(found - exact).sum()) if np.isfinite(found).all() else math.inf
            db = 10 * math.log10(float(np.square(exact).sum()) / max(noise, 1e-30)) if noise < math.inf else -math.inf
            said = {"name": name, "db": max(min(round(db, 1), 140.0), -100.0), "int8": int8}
        except Exception as error:
            said = {"name": name, "error": one_line(str(error).replace(file, "the file")) or type(error).__name__}
        print(json.dumps(said), flush=True)


def one_line(text: str) -> str:
    """The telling line of an engine's error, at most 240 characters, without paths of its sources' machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"nsupported|not (supported|implement)|nvalid|ailed|expected", line)]
    line = (telling[-1:] or lines or [""])[0]
    line = re.sub(r"(failed:)/\S+:\d+ .*?\) (?=[A-Z])", r"\1 ", line)
    return line if len(line) <= 240 else re.sub(r"(?<=\. )[^.]*$", "", line[:240]).rstrip()


def _onnxruntime(file: str, folder: str):
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 4
    settings.optimized_model_filepath = folder + "/optimized.onnx"
    session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    graph = Path(settings.optimized_model_filepath).read_bytes()  # op_type is field 4: no package reads it here
    int8 = sum(graph.count(bytes([0x22, len(name)]) + name.encode()) for name in INTEGER_OPERATORS)
    return lambda batch: session.run(None, {"images": batch}), int8


def _openvino(file: str, folder: str):
    import openvino

    core = getattr(openvino, "Core", None) or __import__("openvino.runtime").runtime.Core
    core = core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    try:
        compiled = core.compile_model(core.read_model(file), "CPU", settings)
    except RuntimeError as error:
        if "DYNAMIC_QUANTIZATION" not in str(error):
            raise
        del settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"]  # releases of before 2024
        compiled = core.compile_model(core.read_model(file), "CPU", settings)
    facts = [layer.get_rt_info() for layer in compiled.get_runtime_model().get_ordered_ops()]
    texts = [[str(getattr(one[key], "value", one[key])) for key in ("layerType", "runtimePrecision")] for one in facts]
    products = [kind in ("FullyConnected", "MatMul", "Convolution") and type_.lower() for kind, type_ in texts]
    int8 = products.count("i8") + products.count("u8")
    return lambda batch: [compiled([batch])[port].copy() for port in compiled.outputs], int8


def releases(engine: str) -> list[str]:
    """The latest patch of every minor release of the last three years on the package index, oldest first."""
    said = subprocess.run([sys.executable, "-m", "pip", "index", "versions", engine], capture_output=True, text=True)
    (listed,) = re.findall(r"Available versions: (.*)", said.stdout)
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for number in (tuple(map(int, version.split("."))) for version in listed.split(", ")):
        found[number[:2]] = max(found.get(number[:2], ()), number)
    oldest = tuple(map(int, OLDEST[engine].split(".")))
    return [".".join(map(str, found[minor])) for minor in sorted(found) if minor >= oldest]


def try_release(engine: str, release: str, wanted: Sequence[Kind], files: Path, packages: Path) -> list[Row]:
    """The rows of a release, which is installed into `packages` and deleted."""
    pip = [sys.executable, "-m", "pip", "install", *"-qq --no-deps --no-cache-dir --no-compile --target".split()]
    shutil.rmtree(packages, ignore_errors=True)
    subprocess.run([*pip, packages, f"{engine}=={release}", *NEEDS], check=True, stdout=subprocess.DEVNULL)
    try:
        said, left = {}, [kind.name for kind in wanted]
        while left:
            for line in _run_judge(engine, packages, files, left):
                said[line["name"]] = line
            left = [name for name in left if name not in said]
            if left:  # what ended it is the first without an answer
                said[left[0]] = {"name": left[0], "error": "the process crashed"}
                left = left[1:]
    finally:
        shutil.rmtree(packages, ignore_errors=True)
    results = [{key: value for key, value in said[kind.name].items() if key != "name"} for kind in wanted]
    made = zip(wanted, results, strict=True)
    return [Row(**asdict(kind), engine=engine, release=release, **result) for kind, result in made]


def _run_judge(engine: str, packages: Path, files: Path, names: Sequence[str]) -> list[dict]:
    python = getattr(sys, "_base_executable", sys.executable)  # -S: nothing of this environment is seen
    command = [python, "-S", __file__, "judge", engine, str(packages), str(files), *names]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode()
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"name"')]


def page(rows: Sequence[Row], where: Path) -> None:
    """Write the tables, an engine a section, and all rows beside them."""
    from pages import cpu, place

    with where.with_suffix(".csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [one.name for one in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    for engine in dict.fromkeys(row.engine for row in rows):
        ours = [row for row in rows if row.engine == engine]
        lines = [" | ".join(("release", *COLUMNS, "integer")), " | ".join(["---"] * (len(COLUMNS) + 2))]
        for release in dict.fromkeys(row.release for row in ours):
            these = [row for row in ours if row.release == release]
            cells = [_cell([row for row in these if chosen(row)]) for chosen in COLUMNS.values()]
            lines.append(" | ".join((release, *cells, _integer(these))))
        said: dict[str, list[str]] = {}
        for row in ours:
            error = row.error.partition(" failed at ")[0].rpartition(">': ")[2]
            said.setdefault(error, []).append(row.release)
        errors = [f"- {', '.join(dict.fromkeys(found))}: `{error}`" for error, found in said.items() if error]
        refused = ["", "Refused with:", "", *errors] if errors else []
        place(where, f"{engine}, {cpu()}", "\n".join([*lines, *refused]))


def _cell(rows: Sequence[Row]) -> str:
    read = [row for row in rows if row.db is not None]
    if not read:
        return "refused" if rows else "-"
    worst = min(read, key=lambda row: row.db - (FLOAT_LIMIT if row.form == "float" else INT8_LIMIT))
    text = f"**{worst.db:.1f}**" if worst.is_wrong else f"{worst.db:.1f}"
    refused = len(rows) - len(read)
    return f"{text}, {refused} of {len(rows)} refused" if refused else text


def _integer(rows: Sequence[Row]) -> str:
    ours = ("onnxruntime", "V1", "onnxruntime", "column")  # OpenVINO's layers are not products: their numbers differ
    found = {
        row.batch: row.int8 for row in rows if row.is_int8 and (row.engine, row.model, row.form, row.weights) == ours
    }
    return ", ".join(str(count) for count in found.values() if count is not None) or "-"


def main() -> None:
    from pages import script_parser

    parser = script_parser(__doc__)
    parser.add_argument("--form", choices=("whole", "short"), default="whole")
    parser.add_argument("--engines", nargs="+", choices=tuple(OLDEST), default=tuple(OLDEST))
    parser.add_argument("--only", nargs="+", help="of the releases that were not tried yet these alone")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page; its rows go beside it as .csv")
    parser.add_argument("--work", type=Path, default=Path("out/releases"))
    args = parser.parse_args()
    wanted = list(kinds(MODELS)) if args.form == "whole" else [kind for kind in kinds(["V1"]) if kind.is_default]
    if absent := [kind for kind in wanted if not (args.work / "files" / f"{kind.name}.npy").exists()]:
        write_files(absent, args.work / "files")
    rows: list[Row] = []
    for engine in args.engines:
        found = releases(engine)
        chosen = [found[0], found[len(found) // 2], found[-1]] if args.form == "short" else found
        kept = {release: args.work / f"{args.form}_{engine}_{release}.json" for release in chosen}
        tried = [one for one in chosen if kept[one].exists() or one in (args.only or chosen)]

        def list_rows(release: str, engine=engine, kept=kept) -> list[Row]:
            if not kept[release].exists():
                packages = args.work / f"packages_{engine}_{release}"
                made = try_release(engine, release, wanted, args.work / "files", packages)
                kept[release].write_text(json.dumps([asdict(row) for row in made], indent=1))
            return [Row(**row) for row in json.loads(kept[release].read_text())]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for release, these in zip(tried, pool.map(list_rows, tried), strict=True):
                refused, wrong = sum(bool(row.error) for row in these), sum(row.is_wrong for row in these)
                print(f"{engine} {release}: {len(these)} files, {refused} refused, {wrong} wrong", flush=True)
                rows += these
    page(rows, args.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["judge"]:
        judge(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        main()
