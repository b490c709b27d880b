"""The metadata in an exported ONNX file: preprocessing, class names, and the run card that it was made from."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swin_quant.backends.artifact import Artifact, refuse_card
from swin_quant.backends.onnx_reader.file import PREPROCESS, open_onnx
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import compute_data_sha256
from swin_quant.base.schema import checked
from swin_quant.cards.card import RunCard, without_paths

if TYPE_CHECKING:
    from onnx import ModelProto

PREFIX = "swin_quant."
NAME = PREFIX + "name"
LABELS = PREFIX + "labels"
POLICY = PREFIX + "policy"
OPTIONS = PREFIX + "options"
PRECISION = PREFIX + "precision"
CARD_SHA256 = PREFIX + "run_card_sha256"
CHECKPOINT_SHA256 = PREFIX + "checkpoint_sha256"


def card_sha256(card: RunCard) -> str:
    """The SHA-256 of a card's checkpoint part: without artifact, measurements, versions and date."""
    later = ("schema", "artifact", "results", "verification", "versions", "created")
    content = {key: value for key, value in without_paths(card).items() if key not in later}
    return compute_data_sha256(content)


def write(
    model: "ModelProto",
    card: RunCard,
    precision: str,
    options: Mapping[str, Any],
    labels: Sequence[str] | None = None,
) -> None:
    """Set the metadata of `model`, which was made from the checkpoint of `card`."""
    entries = {
        NAME: card.name,
        PREPROCESS: json.dumps(card.preprocess),
        POLICY: json.dumps(card.policy),
        PRECISION: precision,
        OPTIONS: json.dumps(dict(options)),
        CARD_SHA256: card_sha256(card),
    }
    if card.checkpoint:
        entries[CHECKPOINT_SHA256] = card.checkpoint["sha256"]
    if labels is not None:
        entries[LABELS] = json.dumps(list(labels))
    for key, value in entries.items():
        model.metadata_props.add(key=key, value=value)


def read_labels(artifact: Artifact) -> list[str]:
    """The class names in an artifact's file; empty if it has none."""
    try:
        names = json.loads(open_onnx(artifact.file).metadata.get(LABELS, "[]"))
    except (ValueError, RecursionError):
        names = None
    return checked(list[str], names, str(artifact.file), f"its metadata {LABELS}")


def check_card(artifact: Artifact) -> None:
    """SwinQuantError where a run card contradicts its file: on the input, the output or the precision."""
    file = open_onnx(artifact.file).metadata
    try:
        preprocess, options = (json.loads(file.get(key, "{}")) for key in (PREPROCESS, OPTIONS))
    except (ValueError, RecursionError):
        raise SwinQuantError(f"{artifact.file}: its metadata is no JSON: export again") from None
    options = checked(dict[str, Any], options, str(artifact.file), OPTIONS)
    inside = {f"artifact.options.{key}": value for key, value in options.items()}
    own = {f"artifact.options.{key}": value for key, value in artifact.record["options"].items()}
    inside |= {"preprocess": preprocess} if PREPROCESS in file else {}
    inside |= {"artifact.precision": file[PRECISION]} if PRECISION in file else {}
    own |= {"preprocess": artifact.card.preprocess, "artifact.precision": artifact.record["precision"]}
    for key, value in inside.items():
        if own.get(key) != value:
            refuse_card(artifact, key, value)
