"""What the page shows of a checkpoint, as plain data: its nodes, their values, and pictures seen otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swin_quant.cards.card import RunCard


@dataclass(frozen=True)
class Bins:
    """How often a node's values lie in equal bins from `low` to `high`."""

    low: float
    high: float
    counts: Sequence[int]


@dataclass(frozen=True)
class NodeSummary:
    """One quantizer node. What is not known is None.

    `row` and `column`: where it stands in the picture of the network. `kind`: what its values are when it is on, `int8`
    or `fp8`. `low`, `high`: the range in effect (of a weight with a range per row: the widest). `clipped`: percent of
    its values beyond that. `sqnr_db`: what the grid keeps of its own values. `costs_db`: by how much the logits' SQNR
    rises without it. `engines`: what it is in each artifact.
    """

    name: str
    row: str
    column: str
    role: str
    on: bool
    kind: str
    bits: int
    grid: str
    amax: float | None
    low: float | None
    high: float | None
    clipped: float | None
    sqnr_db: float | None
    costs_db: float | None
    engines: Mapping[str, str] = field(default_factory=dict)
    bins: Bins | None = None


@dataclass(frozen=True)
class Seen:
    """What a network takes a picture for: names and percent, best first."""

    names: Sequence[str]
    percent: Sequence[float]


@dataclass(frozen=True)
class Disagreement:
    """A picture that float and the quantized model see differently; `thumbnail` is a JPEG in base64."""

    picture: str
    label: str
    thumbnail: str
    float_sees: Seen
    quantized_sees: Seen
    kl: float


@dataclass(frozen=True)
class PageData:
    """A checkpoint: the cards that speak of it, and what its own file and the statistics beside it tell.

    `missing`: why nodes or their values are not shown. Of `compared` pictures, float and the model under `policy` name
    `otherwise` differently; `disagreements` are the worst of those.
    """

    title: str
    cards: Sequence[RunCard]
    nodes: Sequence[NodeSummary] = ()
    missing: str = ""
    compared: int = 0
    otherwise: int = 0
    policy: str = ""
    disagreements: Sequence[Disagreement] = ()
