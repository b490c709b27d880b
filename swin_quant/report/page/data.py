"""The data of the page: a checkpoint's cards, its nodes with their values, pictures that INT8 classifies otherwise."""

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
    """One quantizer node; an unknown figure is None.

    `row`, `column`: its place in the picture of the network. `kind`: the type of its values when it is on, `int8` or
    `fp8`. `low`, `high`: the range in effect; for a weight with a range per row, the widest. `clipped`: percent of its
    values outside the range. `sqnr_db`: SQNR of its quantized values. `costs_db`: the rise of the logits' SQNR without
    it. `engines`: its type in each artifact.
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
    """The classes that a network finds most probable for a picture: names and percent, best first."""

    names: Sequence[str]
    percent: Sequence[float]


@dataclass(frozen=True)
class Disagreement:
    """A picture that the float and the quantized model classify differently; `thumbnail` is a JPEG in base64."""

    picture: str
    label: str
    thumbnail: str
    float_sees: Seen
    quantized_sees: Seen
    kl: float


@dataclass(frozen=True)
class PageData:
    """A checkpoint: its cards, and the nodes that its file and the statistics beside it describe.

    `missing`: why nodes or their values are not shown. The float model and the model under `policy` classify
    `otherwise` of `compared` pictures differently; `disagreements` are the worst of these.
    """

    title: str
    cards: Sequence[RunCard]
    nodes: Sequence[NodeSummary] = ()
    missing: str = ""
    compared: int = 0
    otherwise: int = 0
    policy: str = ""
    disagreements: Sequence[Disagreement] = ()
