"""Take other publishers' models from `wrap` to files on engines, one after another, for `any_model.py sweep`.

The models are in `sweep_models.py`. Each runs in a process of its own with a time limit. Each row is a JSON file in the
working folder, and is not made again.
"""

import importlib.util
import json
import logging
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from cpu_rivals import nncf_quantized
from pages import line_of
from PIL import Image
from sweep_models import built, everything
from torch import Tensor, nn

import swin_quant as sq
from swin_quant.base.errors import first_line
from swin_quant.base.files import atomic_write_bytes
from swin_quant.score.candidate import milliseconds

CALIBRATION, JUDGED = 8, 8  # pictures
ENGINES = ("openvino", "onnxruntime")
ROUNDS = 8  # calls of each file, at least
BEHIND = 3.0  # dB below fake-quant that mean wrong arithmetic
_PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum"))
_MOVES = frozenset("Transpose Reshape Squeeze Unsqueeze Slice Split Gather Expand Flatten Identity MaxPool Pad".split())


@dataclass
class Swept:
    """The result of one model. `error`: its stage and its line; SQNR in dB, against float."""

    model: str
    side: int = 0
    quantized: int = 0
    products: int = 0
    share: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    unsaid: int = 0  # float products in the OpenVINO file that the card omits
    fake: float | None = None
    openvino: float | None = None
    onnxruntime: float | None = None
    nncf: float | None = None
    times: float | None = None  # latency of our file over NNCF's, on OpenVINO
    seconds: float = 0.0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.error

    @property
    def behind(self) -> float:
        """How far the worse engine is below fake-quant."""
        found = [one for one in (self.openvino, self.onnxruntime) if one is not None]
        return max((self.fake or 0.0) - min(found), 0.0) if found else 0.0

    @property
    def badness(self) -> tuple:
        """Sort key: errors first, then engines that are behind, then the least SQNR."""
        return not self.error, self.behind <= BEHIND, self.fake or 0.0


def sweep(models: list[str], work: Path, data_path: str | None, limit: float) -> list[Swept]:
    """The rows of `models` (default: all); those in `work` are kept."""
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in models or everything():
        file = _file(model, work)
        if not file.exists():
            _limited(model, file, data_path, limit)
        rows.append(Swept(**json.loads(file.read_text())))
        print(_row(rows[-1]), flush=True)
    return rows


def time_again(rows: list[Swept], work: Path) -> None:
    """Take the times of rows again whose files are still in the working folder, once the machine is quiet."""
    for row in rows:
        folder = _file(row.model, work).with_suffix("")
        ours, theirs = [*(folder / "openvino").glob("*.onnx")], folder / "nncf.xml"
        if row.times is None or not ours or not theirs.exists():
            continue
        images = torch.randn(1, 3, row.side, row.side, generator=torch.Generator().manual_seed(1))
        row.times = _times(*(_infer(file, images) for file in (*ours, theirs)), images)
        atomic_write_bytes(_file(row.model, work), json.dumps(asdict(row), indent=1).encode())
        print(_row(row), flush=True)


def _file(model: str, work: Path) -> Path:
    """The row of a model; its artifacts are in the folder of this name."""
    return work / f"{model.replace(':', '_').replace('/', '_')}.json"


def _limited(model: str, file: Path, data_path: str | None, limit: float) -> None:
    """Write the row of a model, as far as it comes within the time limit."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(Swept(model, error="start: did not end"))))
    context = multiprocessing.get_context("spawn")  # a fork of a process with an engine's threads would wait for ever
    process = context.Process(target=_child, args=(model, part, data_path))
    process.start()
    process.join(limit)
    process.kill()  # no effect if it has ended
    process.join()
    part.replace(file)


def markdown(rows: list[Swept]) -> str:
    """The counts, and the table, worst first."""
    return "\n".join([*_counts(rows), "", *_table(sorted(rows, key=lambda row: row.badness)), ""])


def _counts(rows: list[Swept]) -> Iterator[str]:
    whole = [row for row in rows if row.is_whole]
    behind = [row.model for row in whole if row.behind > BEHIND]
    beside = [row for row in rows if row.nncf is not None]
    above = [row for row in beside if row.openvino is not None and row.openvino > row.nncf]
    yield f"- The whole way: {len(whole)} of {len(rows)}; errors: {len(rows) - len(whole)}."
    unsaid = [row.model for row in whole if row.unsaid]
    yield f"- Float in the OpenVINO file, and not counted by the run card: products of {_some(unsaid)} models."
    low = [row.model for row in whole if row.share < 0.5]
    yield f"- Under half of the multiplications in int8, as the card says: {_some(low)}."
    yield f"- An engine more than {BEHIND:g} dB below fake-quant: {_some(behind)}."
    if beside:
        took = sum(row.is_whole for row in beside)
        yield f"- NNCF takes {len(beside)}: {took} go the whole way, {len(above)} are above NNCF on OpenVINO."
    if timed := [row for row in rows if row.times is not None]:
        fast = sum(row.times <= 1 for row in timed)
        yield f"- Latency on OpenVINO, of {len(timed)}: {fast} not above NNCF's."
    if absent := set(everything()) - {row.model for row in rows}:
        yield f"- Not measured: {_some(sorted(absent))}."


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "0"


def _table(rows: list[Swept]) -> Iterator[str]:
    yield "| model | side | int8 | MACs % | fake-quant | OpenVINO | ONNX Runtime | NNCF | time | s | error |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    yield from map(_row, rows)


def _row(row: Swept) -> str:
    decibels = ("" if one is None else f"{one:.1f}" for one in (row.fake, row.openvino, row.onnxruntime, row.nncf))
    share = f"{100 * row.share:.1f}" if row.products else ""
    counts = f"{row.quantized} of {row.products}" if row.products else ""
    times = "" if row.times is None else f"{row.times:.2f}"
    cells = (
        row.model,
        row.side or "",
        counts,
        share,
        *decibels,
        times,
        f"{row.seconds:.0f}",
        row.error.replace("|", "/"),
    )
    return line_of(cells)


def _child(model: str, part: Path, data_path: str | None) -> None:
    """Write the row of one model, first before each stage, so that a killed process leaves its stage."""
    log = os.open(part.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.disable(logging.INFO)
    start, row, stage = time.monotonic(), Swept(model), "build"

    def write(error: str = "") -> None:
        row.error, row.seconds = error, time.monotonic() - start
        atomic_write_bytes(part, json.dumps(asdict(row), indent=1).encode())

    write(f"{stage}: did not end")
    try:
        module, row.side = built(model)
        calibration, judged = _pictures(row.side, data_path).split([CALIBRATION, JUDGED])
        with torch.inference_mode():
            reference = _flat(module(judged))
        for stage in _stages(row, module, calibration, judged, reference, part.with_suffix("")):
            write(f"{stage}: did not end")
        write()
    except Exception as error:  # any error is a result
        logging.exception(stage)
        write(f"{stage}: {type(error).__name__}: {first_line(error)[:200]}")
        if stage == "build":
            return
    if importlib.util.find_spec("nncf"):
        _beside_nncf(row, module, calibration, judged, reference, part.with_suffix(""))
        write(row.error)


def _stages(
    row: Swept, module: nn.Module, calibration: Tensor, judged: Tensor, reference: Tensor, folder: Path
) -> Iterator[str]:
    """Fill the row, naming each stage before it starts."""
    yield "wrap"
    model = sq.wrap(module, row.side, name=folder.name)
    yield "calibrate"
    sq.calibrate(model, [calibration])
    covered: dict[str, Any] = model.card.calibration["coverage"]
    row.quantized, row.products = covered["quantized"], covered["products"]
    row.share, row.left = covered["share"], covered["left"]
    yield "fake-quant"
    with torch.inference_mode():
        row.fake = sqnr(_flat(model(judged)), reference)
    for engine in ENGINES:
        yield f"export for {engine}"
        artifact = sq.export(model, engine, folder / engine, compared=False)  # this run judges by itself
        if engine == "openvino":
            row.unsaid = max(_float_products(artifact.file) - sum(row.left.values()), 0)
        yield engine
        setattr(row, engine, sqnr(_flat(artifact.load(threads=1)(judged)), reference))


def _pictures(side: int, data_path: str | None) -> Tensor:
    """Normalised pictures [CALIBRATION + JUDGED, 3, side, side]: seeded ones from the folder, else noise."""
    count = CALIBRATION + JUDGED
    if not data_path:
        return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))
    files = sorted(Path(data_path).rglob("*.JPEG"))
    chosen_on = random.Random(0).sample(files, count)  # the default policy was chosen on these pictures
    files = random.Random(1).sample(sorted({*files}.difference(chosen_on)), count)
    pixels = [np.asarray(Image.open(file).convert("RGB").resize((side, side))) for file in files]
    return (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255 - 0.45) / 0.225


def _beside_nncf(
    row: Swept, module: nn.Module, calibration: Tensor, judged: Tensor, reference: Tensor, folder: Path
) -> None:
    """SQNR of NNCF's default on OpenVINO, from the module itself, and our latency over its, if it takes the module."""
    import openvino

    folder.mkdir(parents=True, exist_ok=True)
    kinds = [type(layer) for layer in module.modules()]
    convolutional = kinds.count(nn.Conv2d) > kinds.count(nn.Linear)
    try:
        model = openvino.convert_model(module, example_input=calibration[:2])
        file = nncf_quantized(model, calibration, folder / "nncf.xml", convolutional)
        row.nncf = sqnr(_flat(_infer(file, judged)(judged)), reference)
        if row.is_whole:
            row.times = _times(
                *(_infer(one, judged[:1]) for one in (*(folder / "openvino").glob("*.onnx"), file)), judged[:1]
            )
    except Exception:  # another tool's failure is not this one's fault
        logging.exception("NNCF")


def _infer(file: Path, images: Tensor) -> Callable[[Tensor], list[Any]]:
    """A file on OpenVINO for latency: one thread, one stream, fixed shapes, float32 beside int8."""
    import openvino

    core = openvino.Core()
    model = core.read_model(str(file))
    model.reshape(list(images.shape))
    settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": 1,
                "INFERENCE_PRECISION_HINT": "f32"}  # fmt: skip
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def run(given: Tensor) -> list[Any]:
        request.infer([given.numpy()], share_inputs=True)
        return [one.data.copy() for one in request.output_tensors]

    return run


def _times(ours: Callable, theirs: Callable, images: Tensor) -> float:
    """The median ratio of two latencies, call after call in turn: other programs then slow down both alike."""
    ratios, start = [], time.monotonic()
    while len(ratios) < ROUNDS or time.monotonic() - start < 1 and len(ratios) < 20 * ROUNDS:
        ratios.append(milliseconds(ours, images) / milliseconds(theirs, images))
    return statistics.median(ratios[len(ratios) // 4 :])  # without the warm-up


def _float_products(file: Path) -> int:
    """Float products of activations in an ONNX file, without those whose two factors are dequantized."""
    graph = onnx.load(str(file), load_external_data=False).graph
    source = {name: node for node in graph.node for name in node.output}
    depending = {one.name for one in graph.input}
    for node in graph.node:  # in order of computation
        if node.op_type != "Shape" and depending & {*node.input}:
            depending.update(node.output)

    def is_dequantized(name: str) -> bool:
        node = source.get(name)
        if node is not None and node.op_type == "Concat":
            return all(map(is_dequantized, node.input))
        if node is not None and node.op_type in _MOVES:
            return is_dequantized(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    products = [node for node in graph.node if node.op_type in _PRODUCTS and depending & {*node.output}]
    return sum(not all(map(is_dequantized, node.input[:2])) for node in products)


def sqnr(given: Tensor, reference: Tensor) -> float:
    """Signal to noise of an output in dB. FloatingPointError for NaN or infinity."""
    if not given.isfinite().all():
        raise FloatingPointError("gives NaN or infinity")
    noise = float((given.double() - reference.double()).square().sum())
    return 10 * math.log10(float(reference.double().square().sum()) / max(noise, 1e-30))


def _flat(output: Any) -> Tensor:
    """Every tensor of an output in one [B, ...]."""
    if isinstance(output, dict):
        output = [output["logits"]] if "logits" in output else list(output.values())
    tensors = output if isinstance(output, list | tuple) else [output]
    return torch.cat([torch.as_tensor(one).flatten(1) for one in tensors], 1)
