"""The one loop that runs pictures through engines, which scoring, verifying and predicting read; how far two are
apart: maps and embeddings have no accuracy, but SQNR and cosine.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import track
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers, load_batches
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks
from swin_quant.quant.distance import decibels
from swin_quant.quant.outputs import Output, rows
from swin_quant.score.engine import Engine, Run, now

BATCH = 32  # pictures at a time, where nobody says
CPU = torch.device("cpu")
_PAUSE = 0.002  # seconds in which the threads of the last engine stop to spin: else they slow down the next one


class EngineOutput(NamedTuple):
    """An engine's logits for a batch, float32 [B, classes] on its device, and the wall time of the forward pass.

    `output` is the unchanged output; `logits` are its `rows`, also for embeddings and maps.
    """

    logits: Tensor
    seconds: float
    output: Output


def run_engines(
    engines: Mapping[str, Run], batches: Iterable[Batch], device: torch.device, collective: bool = False
) -> Iterator[tuple[Batch, dict[str, EngineOutput]]]:
    """Yield every batch that has pictures, with the outputs of all engines for it.

    `collective`: ranks wait for each other in a forward pass, so a batch without pictures is run as well.
    Raises SwinQuantError for logits that are NaN or infinite, naming the engine.
    """
    with torch.inference_mode():
        for batch in batches:
            images = batch.images.to(device)
            if len(images):
                yield batch, {name: _run(name, engine, images) for name, engine in engines.items()}
            elif collective:
                for engine in engines.values():
                    engine(images)


def read_batches(
    pictures: Pictures,
    preprocess: Preprocess,
    indices: Sequence[int],
    how: PictureSet,
    title: str,
    ranks: int = 1,
    total: int | None = None,
) -> tuple[Iterator[Batch], UnreadableLimit]:
    """The readable pictures at these indices in batches, read as the set says, and the count of the unreadable ones.

    The batches raise SwinQuantError if too many of `total` (those of all `ranks`; None: the indices) are unreadable.
    """
    limit = UnreadableLimit(total or len(indices), how.max_unreadable)
    parts = chunks(indices, (how.batch or BATCH) if preprocess.is_square else 1)
    loaded = load_batches(pictures, preprocess, parts, default_workers(how.workers, ranks, len(indices)))
    return limit.watched(track(loaded, title, len(parts), "batches")), limit


@dataclass(frozen=True)
class Inferred:
    """The outputs of each engine for N readable pictures, batch by batch; their names, and labels int64 [N]."""

    names: list[str]
    labels: Tensor
    outputs: dict[str, list[Output]]
    unreadable: list[str]

    @property
    def logits(self) -> dict[str, Tensor]:
        """float32 [N, classes] of each engine; for other outputs their `rows`, if all have one size."""
        return {key: torch.cat([rows(part) for part in parts]) for key, parts in self.outputs.items()}


def infer(
    engines: Mapping[str, Engine],
    pictures: Pictures,
    preprocess: Preprocess,
    classes: int | None,
    how: PictureSet = PictureSet(),
    device: torch.device = CPU,
) -> Inferred:
    """Run every engine on the same pictures, all of them or `how.count` spread evenly, and keep the outputs.

    Raises SwinQuantError if a larger share than `how.max_unreadable`, or every picture, cannot be read, and for logits
    that are not finite or not [B, classes], naming the engine; `classes` None accepts any output.
    """
    how = replace(how, batch=largest_batch(how.batch or BATCH, engines))
    chosen, title = evenly(len(pictures), how.count), f"running {listed(engines, 2)}"
    loaded, limit = read_batches(pictures, preprocess, chosen, how, title)
    found = infer_batches(engines, loaded, classes, device, lambda batch: [pictures.names[i] for i in batch.indices])
    return replace(found, unreadable=limit.names)


def infer_batches(
    engines: Mapping[str, Run],
    batches: Iterable[Batch],
    classes: int | None,
    device: torch.device = CPU,
    named: Callable[[Batch], list[str]] | None = None,
) -> Inferred:
    """`infer` on batches; `named` gives the names of their pictures, None: a hash of their values. UsageError for no
    batch."""
    names: list[str] = []
    labels: list[Tensor] = []
    outputs: dict[str, list[Output]] = {key: [] for key in engines}
    for batch, found in run_engines(engines, batches, device):
        hashes = (hashlib.sha256(image.numpy(force=True).tobytes()).hexdigest() for image in batch.images)
        names += named(batch) if named else hashes
        labels.append(batch.labels)
        for key, one in found.items():
            if classes is None and not isinstance(one.output, Tensor):
                outputs[key].append([part.float().cpu() for part in one.output])
                continue
            shape, expected = list(one.logits.shape), [len(batch.indices), classes or one.logits.shape[-1]]
            if shape != expected:
                raise SwinQuantError(f"{key}: logits are {shape}, not [{expected[0]}, {classes}]: another model's")
            outputs[key].append(one.logits.cpu())
    if not labels:
        raise UsageError("pictures: there is no batch")
    return Inferred(names, torch.cat(labels), outputs, [])


def largest_batch(wanted: int, engines: Mapping[str, Engine]) -> int:
    """The batch that is wanted, or the smallest limit of an engine below it."""
    return min([wanted, *(engine.max_batch for engine in engines.values() if engine.max_batch)])


def evenly(total: int, count: int | None) -> list[int]:
    """`count` indices below `total`, as far apart as they can be, so that sorted classes all occur."""
    if count is None or count >= total:
        return list(range(total))
    return [index * total // count for index in range(count)]


def _run(name: str, engine: Run, images: Tensor) -> EngineOutput:
    time.sleep(_PAUSE)
    start = now(images.device)
    output = engine(images)
    seconds = now(images.device) - start
    logits = rows(output).float()
    if not logits.isfinite().all():
        raise SwinQuantError(f"engine {name}: logits hold NaN or infinity for {len(images)} pictures")
    return EngineOutput(logits, seconds, output)


INT8_LEVELS = 127


def difference(logits: Tensor, reference: Tensor) -> dict[str, Any]:
    """Mean and largest |Δ| of logits [N, classes], the reference's int8 step, top-1 agreement in percent, SQNR in dB.

    The step is amax / 127 of the reference's logits: the resolution of int8 over their range.
    """
    logits, reference = logits.double(), reference.double()
    delta = (logits - reference).abs()
    signal, noise = reference.square().sum().item(), delta.square().sum().item()
    return {
        "mean": delta.mean().item(),
        "max": delta.max().item(),
        "step": reference.abs().max().item() / INT8_LEVELS,
        "agreement": 100 * (logits.argmax(1) == reference.argmax(1)).double().mean().item(),
        "sqnr_db": _sqnr(signal, noise),
    }


class OutputDifference:
    """`difference` for embeddings or maps, which have no classes, summed batch by batch; no batch is kept.

    The mean cosine between a picture's values and the reference's replaces the agreement. Differences and step are in
    units of the reference's mean magnitude, since embeddings and maps have any scale.
    """

    def __init__(self) -> None:
        self.size = self.values = self.signal = self.noise = self.total = self.largest = self.top = self.cosines = 0.0
        self.pictures = 0

    def add(self, found: Output, reference: Output) -> None:
        one, other = rows(found).double(), rows(reference).double()
        delta = (one - other).abs()
        self.values += delta.numel()
        self.total += delta.sum().item()
        self.size += other.abs().sum().item()
        self.largest, self.top = max(self.largest, delta.max().item()), max(self.top, other.abs().max().item())
        self.signal += other.square().sum().item()
        self.noise += delta.square().sum().item()
        self.cosines += F.cosine_similarity(one, other).sum().item()
        self.pictures += len(one)

    def figures(self) -> dict[str, Any]:
        unit = self.size / self.values or 1.0
        return {
            "mean": self.total / self.values / unit,
            "max": self.largest / unit,
            "step": self.top / INT8_LEVELS / unit,
            "agreement": None,
            "sqnr_db": _sqnr(self.signal, self.noise),
            "cosine": self.cosines / self.pictures,
        }


def compare_batches(found: Sequence[Output], reference: Sequence[Output]) -> dict[str, Any]:
    """The figures of `OutputDifference` for two lists of batches."""
    sums = OutputDifference()
    for one, other in zip(found, reference, strict=True):
        sums.add(one, other)
    return sums.figures()


def _sqnr(signal: float, noise: float) -> float | None:
    """The SQNR in dB; None if there is no error."""
    return decibels(signal, noise) if signal and noise else None


@dataclass(frozen=True)
class FeatureScore:
    """An engine against float32: SQNR in dB (None if equal), and the mean cosine over pictures.

    `output`: the name of the output that was compared; None: all of them together.
    """

    engine: str
    precision: str
    policy: str | None
    pictures: int
    sqnr_db: float | None
    cosine: float
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.subject}: {self.figures}"

    @property
    def subject(self) -> str:
        """The engine, and the output."""
        engine = " ".join(filter(None, (self.engine, self.precision, self.policy)))
        return f"{engine}, {self.output}" if self.output else engine

    @property
    def figures(self) -> str:
        sqnr = "equal" if self.sqnr_db is None else f"SQNR {self.sqnr_db:.2f} dB"
        return f"{sqnr}, cosine {self.cosine:.6f}, beside float32 on {self.pictures} pictures"


def compare_engines(
    engines: Mapping[str, Engine],
    source: PictureSet | Iterable[Any],
    prepared: Prepared,
    names: Sequence[str],
    world: World,
) -> list[FeatureScore]:
    """The scores of all engines against the first, the float reference: of all outputs together, then of each, if there
    are several `names`; labels are not needed.

    UsageError on several ranks, without a picture, and if the first engine is not float32.
    """
    if world.size > 1:
        raise UsageError("features are scored in one process: start it without torchrun")
    first, *others = engines
    if engines[first].precision != "float32":
        raise UsageError("outputs are compared with the original float model, which is not found: give ‹float› FILE")
    if isinstance(source, PictureSet):
        source, known = source.with_default_split("val"), prepared.known
        opened = source.open()
        title = f"comparing {', '.join(engines)}"
        loaded, _ = read_batches(opened, known, sorted(source.indices(opened)), source, title)
    else:
        loaded = batches(source, False, prepared)
    parts = [None, *(names if len(names) > 1 else ())]
    sums = {(part, key): OutputDifference() for part in parts for key in others}
    for _, found in run_engines(engines, loaded, world.device):
        for (part, key), one in sums.items():
            pair = found[key].output, found[first].output
            one.add(*(pair if part is None else (output[names.index(part)] for output in pair)))
    if others and not sums[None, others[0]].pictures:
        raise UsageError("pictures: there is no batch to compare with")
    scores = []
    for (part, key), one in sums.items():
        engine, figures = engines[key], one.figures()
        how = (engine.name, engine.precision, engine.policy, one.pictures, figures["sqnr_db"], figures["cosine"])
        scores.append(FeatureScore(*how, output=part))
    return scores
