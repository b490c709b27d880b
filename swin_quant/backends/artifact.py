"""An artifact: the file that will be deployed, the files that belong to it, and its run card beside it.

The card is written last: an artifact without one was never finished. Its hash vouches for the file.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import compute_sha256, one_at_a_time, require_file
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.cards.card import RunCard, made_now
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import ArtifactRecord
from swin_quant.config.outputs import LOGITS
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.classifier import Classifier
from swin_quant.quant.policy import apply_policy, dequantize, enabled_nodes, policy_from_dict, quantize, refuse_blocks
from swin_quant.quant.quantizer import Quantizer, Setting, named_nodes
from swin_quant.score.engine import HALF_TYPES, get_precision


@dataclass(frozen=True)
class Artifact:
    """A main file and its card; `card.artifact` describes the file, `card.checkpoint` its source."""

    file: Path
    card: RunCard

    @property
    def record(self) -> ArtifactRecord:
        """The card's record of the artifact. SwinQuantError for the card of a checkpoint."""
        if self.card.artifact is None:
            raise SwinQuantError(
                f"{card_path(self.file)}: is the card of a checkpoint, not of an exported artifact: run `swin-quant "
                "export`, and give the file that it writes; in Python sq.load(FILE) opens a checkpoint"
            )
        return self.card.artifact

    @property
    def preprocess(self) -> Preprocess:
        """How a picture becomes its input; errors name the card."""
        try:
            return Preprocess.from_dict(self.card.preprocess)
        except SwinQuantError as error:
            raise SwinQuantError(f"{card_path(self.file)}: {error}") from error


def finish_artifact(
    file: Path, card: RunCard, backend: str, precision: str, options: Mapping[str, Any], others: Sequence[Path] = ()
) -> Artifact:
    """Write the run card of `file` and of the `others` beside it.

    `card` is the checkpoint's; its results are not copied. The log says where the file of another policy is replaced.
    """
    record = ArtifactRecord(
        backend=backend,
        file=file.name,
        sha256=compute_sha256(file),
        precision=precision,
        options=dict(options),
        others=[{"file": other.name, "sha256": compute_sha256(other)} for other in others],
    )
    card = replace(card, artifact=record, results=[], **made_now())
    with one_at_a_time(file.parent):  # else a measurement of the replaced file could overwrite the new card
        with contextlib.suppress(SwinQuantError):  # there is none, or it is damaged
            before = RunCard.read(card_path(file)).policy
            if before and card.policy and before.get("rules") != card.policy.get("rules"):
                log.info("%s replaces the file of policy %s", file, before["name"])
        card.write(card_path(file))
    return Artifact(file, card)


@reads("artifact")
def read_artifact(path: str | Path) -> Artifact:
    """The artifact at `path`. SwinQuantError without a card, with another file's card, or if a file was changed."""
    file = Path(path)
    require_file(file, "artifact")
    if not card_path(file).is_file():
        why = f"has no run card {card_path(file).name}: it is no artifact, or its export did not finish"
        raise SwinQuantError(f"{file}: {why}: name what `export` wrote, or export again")
    artifact = Artifact(file, RunCard.read(card_path(file)))
    if artifact.record["file"] != file.name:
        raise SwinQuantError(f"{card_path(file)}: is the run card of {artifact.record['file']}, not of {file.name}")
    for record in (artifact.record, *artifact.record["others"]):
        part = file.with_name(record["file"])
        if not part.is_file():
            raise SwinQuantError(f"{part}: is missing: it belongs to {file.name}; export again")
        if compute_sha256(part) != record["sha256"]:
            raise SwinQuantError(f"{part}: is not the file of its run card {card_path(file).name}: one was replaced")
    return artifact


def refuse_card(artifact: Artifact, key: str, inside: Any) -> NoReturn:
    """SwinQuantError: the card's `key` is not what the hashed file says, `inside`."""
    said = f"{key} contradicts {artifact.file.name}, which says {inside!s:.120}"
    raise SwinQuantError(f"{card_path(artifact.file)}: {said}: the card was changed: export again")


class Details(Mapping[str, Any]):
    """The facts `known`, and from one late call of `find`: `gemms` (product -> type), `int8_gemms`, `all_gemms`."""

    def __init__(self, known: Mapping[str, Any], find: Callable[[], Mapping[str, str]]) -> None:
        self._known, self._find = dict(known), find

    @cached_property
    def _all(self) -> dict[str, Any]:
        gemms = dict(self._find())
        types = Counter(gemms.values())
        return self._known | {"int8_gemms": types["int8"], "all_gemms": types.total(), "gemms": gemms}

    def __getitem__(self, key: str) -> Any:
        return self._all[key] if key in ("int8_gemms", "all_gemms", "gemms") else self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def get_policy_name(artifact: Artifact) -> str | None:
    """The name of the policy under which an artifact was exported; None for a float artifact."""
    if artifact.record["precision"] in ("float32", *HALF_TYPES) or artifact.card.policy is None:
        return None
    return artifact.card.policy["name"]


def apply_card_policy(model: Classifier, card: RunCard, precision: str) -> str:
    """Apply the card's policy and return its name; with precision float, turn every node off and return "float".

    SwinQuantError for a card without a policy, UsageError for a policy that quantizes no node.
    """
    for node in named_nodes(model).values():
        node.setting = Setting()
    if precision == "float":
        return precision
    if card.policy is None:
        raise SwinQuantError(f"{card.name}: its run card names no policy: calibrate it with `swin-quant calibrate`")
    apply_policy(model, policy_from_dict(card.policy, f"the run card of {card.name}"))
    if not enabled_nodes(model):
        raise UsageError(f"{card.name}: its policy quantizes no node: export it with precision float")
    return str(card.policy["name"])


def apply_for_engine(
    model: Classifier, card: RunCard, precision: str, engine: str, faults: Mapping[str, Callable[[Quantizer], bool]]
) -> str:
    """Apply the card's policy as `apply_card_policy`, and return the precision: of the nodes, or float32 without any.

    `faults`: what `engine` has not, in words -> whether a node wants it. UsageError for such nodes, by name, for nodes
    without a range, and for weights in blocks.
    """
    apply_card_policy(model, card, precision)
    quantize(model)  # refuses nodes without a range
    dequantize(model)
    refuse_blocks(model, engine)
    nodes = enabled_nodes(model)
    for fault, is_wanted in faults.items():
        if wrong := [name for name, node in nodes.items() if is_wanted(node)]:
            raise UsageError(f"{card.name}: {engine} has no {fault}: {listed(wrong, 3)}: choose another ‹policy›")
    return get_precision(model) if nodes else "float32"


def file_stem(model: Classifier, card: RunCard, precision: str) -> str:
    """`<NAME>[_embedding]_<int8|w4a8|fp32>`."""
    kind = "" if model.output_kind == LOGITS else f"_{model.output_kind}"
    return f"{card.name}{kind}_{'fp32' if precision == 'float32' else precision.lower()}"
