"""The predictions of every engine for every picture, saved in Parquet files during scoring.

Each file has its sums beside it. An interrupted run goes on after the existing files, and scores are sums over files in
order: any number of ranks gives the same.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Annotated, Any, TypedDict

from swin_quant.base.distributed import World, gather
from swin_quant.base.files import sha256_of_data, write_json
from swin_quant.base.progress import log
from swin_quant.base.schema import Must, counted, within
from swin_quant.base.shards import Sharding, Shards
from swin_quant.data.loader import Batch, UnreadableLimit
from swin_quant.data.pictures import Pictures
from swin_quant.score.engine import Engine
from swin_quant.score.metrics import Score, Sums, likeliest, scores_of, tally
from swin_quant.score.run_engines import EngineOutput

SCHEMA = "swin-quant/answer-shards/1"
TOP = 5
_FIELDS = len(fields(Sums))


class _FileRecord(TypedDict):
    """The record of a file: the fields of each engine's `Sums`, none below zero, and the names of unreadable ones."""

    sums: dict[str, Annotated[list[Annotated[float, within(least=0)]], counted(_FIELDS, _FIELDS)]]
    unreadable: list[str]


@dataclass(frozen=True)
class PredictionFolder:
    """A folder of saved predictions. `subject`: plain data that identifies the run, above all by hashes."""

    how: Sharding
    subject: Mapping[str, Any]

    def about(self, more: Mapping[str, Any]) -> "PredictionFolder":
        return replace(self, subject={**self.subject, **more})


def unique_names(keys: Iterable[str]) -> dict[str, str]:
    """Names of engines or files for another machine: without folders, a number behind a name that occurred before."""
    seen: Counter[str] = Counter()
    called = {}
    for key in keys:
        name = PurePath(key).name or key
        seen[name] += 1
        called[key] = f"{name} ({seen[name]})" if seen[name] > 1 else name
    return called


def score_and_save(
    engines: Mapping[str, Engine],
    pictures: Pictures,
    load: Callable[[Sequence[int]], Iterator[Batch]],
    limit: UnreadableLimit,
    world: World,
    save_to: PredictionFolder,
) -> dict[str, Score]:
    """Scores of all pictures, and `answers-00000-of-00012.parquet` ... with `answers.json`, which names them.

    Columns: picture, label, unreadable (the reason, else null), and one for each engine under its unique name: the five
    most probable classes, best first. Every rank computes each world.size-th file. UsageError for another run's files.
    """
    keys = list(engines)
    engines = {name: engines[key] for key, name in unique_names(keys).items()}
    described = {
        key: [one.name, one.precision, one.policy, one.policy_sha256, one.weights] for key, one in engines.items()
    }
    subject = {**save_to.subject, "engines": described}
    shards = Shards(save_to.how, "answers", len(pictures), sha256_of_data(subject))
    for number in shards.left(world):
        _score_file(shards, number, engines, pictures, load, world)
    kind = Annotated[_FileRecord, Must(lambda facts: facts["sums"].keys() == engines.keys(), "sums of these engines")]
    found = [{"number": number, **shards.facts(number, kind)} for number in shards.share(world)]
    every = sorted(gather(found), key=lambda one: one["number"])
    totals = [[sum(values) for values in zip(*(one["sums"][key] for one in every), strict=True)] for key in engines]
    if world.is_main:
        manifest = save_to.how.folder / "answers.json"
        files = [file.name for file in shards.files]
        unreadable = sum(len(one["unreadable"]) for one in every)
        write_json(manifest, {"schema": SCHEMA, **subject, "unreadable": unreadable, "files": files})
        log.info("answers to each picture: %s", manifest)
    limit.count([name for one in every for name in one["unreadable"]])
    return scores_of(keys, totals)


def _score_file(
    shards: Shards,
    number: int,
    engines: Mapping[str, Engine],
    pictures: Pictures,
    load: Callable[[Sequence[int]], Iterator[Batch]],
    world: World,
) -> None:
    places = shards.places(number)
    rows = {place: {"picture": pictures.names[place], "label": pictures.labels[place]} for place in places}

    def watch(batch: Batch, outputs: Mapping[str, EngineOutput]) -> None:
        for key, output in outputs.items():
            for place, best in zip(batch.indices, likeliest(output.logits, TOP), strict=True):
                rows[place][key] = [{"index": index, "probability": share} for index, share in best]

    sums = tally(engines, load(list(rows)), world.device, watch=watch)
    first = next(iter(engines))
    lost = [place for place, row in rows.items() if first not in row]
    for place in lost:
        rows[place]["unreadable"] = pictures.flaw(place) or "could not be read"
    facts = {
        "sums": {key: list(vars(one).values()) for key, one in sums.items()},
        "unreadable": [pictures.names[place] for place in lost],
    }
    shards.write(number, list(rows.values()), _columns(engines), facts)


def _columns(engines: Mapping[str, Engine]) -> list[tuple[str, Any]]:
    import pyarrow

    classes = pyarrow.list_(pyarrow.struct([("index", pyarrow.int32()), ("probability", pyarrow.float32())]))
    plain = [("picture", pyarrow.string()), ("label", pyarrow.int32()), ("unreadable", pyarrow.string())]
    return [*plain, *((key, classes) for key in engines)]
