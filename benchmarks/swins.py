"""Take other publishers' networks with random weights from their forward pass to files on engines.

    python benchmarks/swins.py [NAME ...] [--engines [openvino onnxruntime]] [--work DIR]
        [--output docs/results/swins.md]

Each is wrapped, calibrated (policy qdq, no pass) on seeded noise, exported, and run on other noise. Most need
transformers. Rows in --work are not made again, and rows of networks that are not named stay in the page. Without
names: all micro networks. `networks.py` has the configurations, also those at full size, which take minutes and up to
20 GB.
"""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from networks import FULL, NETWORKS, built, is_there
from pages import place, read_table, script_parser
from sweep import sqnr
from torch import Tensor

import swin_quant as sq
from swin_quant.base.cpu import reproducible
from swin_quant.base.errors import first_line
from swin_quant.base.files import atomic_write_bytes

HEADING = "# Swin wherever it lives, and other networks of transformers\n"
ABOUT = (
    "{what}, of random seeded weights. Parity: the "
    "largest difference between the float model here and the publisher's forward pass, over the largest output. SQNR "
    "in dB, against float: fake quantization, and files on engines (policy qdq, no pass; empty: not measured). Written "
    "by `python benchmarks/swins.py --output docs/results/swins.md`.\n\n"
)
ALL = NETWORKS | FULL
TITLES = {"Networks": ("Micro networks", NETWORKS), "Full size": ("Networks as their publishers size them", FULL)}
COLUMNS = ("network", "input", "parity", "int8", "multiplications %", "fake-quant", "OpenVINO", "ONNX Runtime", "said")
ENGINES = ("openvino", "onnxruntime")


def main() -> None:
    reproducible()
    logging.disable(logging.WARNING)
    parser = script_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--work", type=Path, default=Path("out/swins"))
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES), help="none: no files")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = stored(args.output) if args.output else {}
    for name in args.names or [name for name in NETWORKS if is_there(name)]:
        start = time.monotonic()
        rows[name] = kept(name, args.work, args.engines)
        print(*rows[name], f"{time.monotonic() - start:.0f} s", sep=" | ", flush=True)
    if args.output:
        for title, (what, networks) in TITLES.items():
            if found := [rows[name] for name in networks if name in rows]:
                ordered = [COLUMNS, ["---"] * len(COLUMNS), *found]
                table = "".join(f"| {' | '.join(cells)} |\n" for cells in ordered)
                place(args.output, HEADING, title, ABOUT.format(what=what) + table)


def stored(page: Path) -> dict[str, list[str]]:
    """The cells of each network that the page has."""
    rows = read_table(page.with_suffix(".csv"))
    return {row["network"]: [row[key] for key in COLUMNS] for row in rows if row["table"] in TITLES}


def kept(name: str, work: Path, engines: list[str]) -> list[str]:
    """The cells of one network, from the working folder, or made and stored there."""
    folder = work / name.replace(" ", "_")
    file = folder.with_suffix(".json")
    if not file.exists():
        atomic_write_bytes(file, json.dumps(row(name, folder, engines)).encode())
    cells: list[str] = json.loads(file.read_text())
    return cells


def row(name: str, folder: Path, engines: list[str]) -> list[str]:
    """The cells of one network, as far as it comes; the last one holds the error."""
    network = ALL[name]
    cells = [name, "x".join(map(str, network.shape))]
    try:
        cells += _cells(name, folder, engines)
    except Exception as error:  # any error is a result
        logging.debug(name, exc_info=True)
        cells = [*cells, *[""] * (len(COLUMNS) - len(cells) - 1)]
        line = first_line(error).replace(f"{folder}/", "")
        cells.append(f"{type(error).__name__}: {line[:160]}".replace("|", "/"))
    return cells


def _cells(name: str, folder: Path, engines: list[str]) -> Iterator[str]:
    network, module = ALL[name], built(name)
    seeded = torch.Generator().manual_seed(1)
    calibration, judged = torch.randn(2 * network.count, *network.shape, generator=seeded).split(network.count)
    judged = network.given(judged)
    taken = judged if network.others else network.shape
    model = sq.wrap(module, taken, name=folder.name, output=network.output)
    with torch.inference_mode():
        given = module(**judged) if network.others else module(judged)
        exact = _flat(model.module(model.prepared(judged)))
    theirs = _flat([_at(given, name) for name in model.module.output_names] or getattr(given, "logits", given))
    yield f"{float((exact - theirs).abs().max() / theirs.abs().max()):.0e}"
    sq.calibrate(model, [network.given(calibration)], "qdq", passes=[])
    covered: dict[str, Any] = model.card.calibration["coverage"]
    yield f"{covered['quantized']} of {covered['products']}"
    yield f"{100 * covered['share']:.1f}"
    with torch.inference_mode():
        yield f"{sqnr(_flat(model(judged)), exact):.1f}"
    for engine in ENGINES:
        if engine not in engines:
            yield ""
            continue
        artifact = sq.export(model, engine, folder / engine)
        yield f"{sqnr(_flat(artifact.load(threads=1)(judged)), exact):.1f}"
    yield ", ".join(f"{count} {kind}" for kind, count in covered["left"].items())


def _at(given: Any, name: str) -> Tensor:
    """The tensor `name` in a publisher's output, which may be a dataclass of tuples: `hidden_states.0`."""
    for word in name.split("."):
        if not isinstance(given, Tensor):
            given = given[int(word)] if word.isdigit() else given[word]
    return given


def _flat(output: Any) -> Tensor:
    """Every tensor of an output in one [B, ...]."""
    if isinstance(output, dict):
        output = list(output.values())
    tensors = output if isinstance(output, list | tuple) else [output]
    return torch.cat([torch.as_tensor(one).flatten(1) for one in tensors], 1)


if __name__ == "__main__":
    main()
