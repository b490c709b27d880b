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

_LABELS, _OPTIONS, _PRECISION = "swin_quant.labels", "swin_quant.options", "swin_quant.precision"


def card_sha256(card: RunCard) -> str:
    """The SHA-256 of a card's checkpoint part: without artifact, measurements, versions and date."""
    later = ("schema", "artifact", "results", "verification", "versions", "created")
    return compute_data_sha256({key: value for key, value in without_paths(card).items() if key not in later})


def write(
    model: "ModelProto", card: RunCard, precision: str, options: Mapping[str, Any], labels: Sequence[str] | None = None
) -> None:
    """Set the metadata of `model`, which was made from the checkpoint of `card`."""
    entries = {
        "swin_quant.name": card.name,
        PREPROCESS: json.dumps(card.preprocess),
        "swin_quant.policy": json.dumps(card.policy),
        _PRECISION: precision,
        _OPTIONS: json.dumps(dict(options)),
        "swin_quant.run_card_sha256": card_sha256(card),
    }
    if card.checkpoint:
        entries["swin_quant.checkpoint_sha256"] = card.checkpoint["sha256"]
    if labels is not None:
        entries[_LABELS] = json.dumps(list(labels))
    for key, value in entries.items():
        model.metadata_props.add(key=key, value=value)


def read_labels(artifact: Artifact) -> list[str]:
    """The class names in an artifact's file; empty if it has none."""
    try:
        names = json.loads(open_onnx(artifact.file).metadata.get(_LABELS, "[]"))
    except (ValueError, RecursionError):
        names = None
    return checked(list[str], names, str(artifact.file), f"its metadata {_LABELS}")


def check_card(artifact: Artifact) -> None:
    """SwinQuantError where a run card contradicts its file: on the input, the output or the precision."""
    file, record = open_onnx(artifact.file).metadata, artifact.record
    try:
        preprocess, options = (json.loads(file.get(key, "{}")) for key in (PREPROCESS, _OPTIONS))
    except (ValueError, RecursionError):
        raise SwinQuantError(f"{artifact.file}: its metadata is no JSON: export again") from None
    said = [(f"artifact.options.{key}", value, record["options"].get(key))
            for key, value in checked(dict[str, Any], options, str(artifact.file), _OPTIONS).items()]  # fmt: skip
    if PREPROCESS in file:
        said.append(("preprocess", preprocess, artifact.card.preprocess))
    if _PRECISION in file:
        said.append(("artifact.precision", file[_PRECISION], record["precision"]))
    for key, inside, own in said:
        if inside != own:
            refuse_card(artifact, key, inside)
