"""The records of what quantization costs: node by node, and under the policies that a search tried."""

from typing import Annotated, NotRequired, TypedDict

from swin_quant.base.schema import within


class LossRecord(TypedDict):
    """Logits beside the float model's (`quant.distance.Loss`): SQNR in dB (None if equal), divergence (KL) in nats,
    top-1 agreement in percent, expected drop of top-1 in points, and its standard error.
    """

    sqnr_db: float | None
    kl: Annotated[float, within(least=0)]
    agreement: Annotated[float, within(least=0, most=100)]
    drop: Annotated[float, within(least=-100, most=100)]
    drop_error: NotRequired[Annotated[float, within(least=0)]]


class GroupRecord(TypedDict):
    """A node, or those of a layer, block, stage or role: the loss with only them quantized, and with all but them."""

    kind: str
    name: str
    nodes: int
    alone: LossRecord
    without: LossRecord


class SensitivityRecord(TypedDict):
    """The cost of each node under a policy. `profile`: block -> SQNR of its output in dB. `forwards`: passes."""

    policy: str
    policy_sha256: str
    pictures: int
    pictures_sha256: str | None
    overall: LossRecord
    groups: list[GroupRecord]
    profile: dict[str, float | None]
    forwards: float


class TriedRecord(TypedDict):
    """A policy that a search measured: its loss, and the milliseconds of a batch; None if the engine is emulated.

    `front`: no other policy with this loss or less is faster; on an emulated engine, none leaves fewer nodes float.
    """

    policy: str
    nodes: int
    loss: LossRecord
    ms: float | None
    found: bool
    front: bool


class FloatLayerRecord(TypedDict):
    """A layer that a search left float: SQNR in dB with only it quantized (None if equal), and the milliseconds of a
    batch that its quantization would save.
    """

    layer: str
    sqnr_db: float | None
    saved_ms: float


class TriedPolicies(TypedDict):
    """The policies that `search` measured on an engine. `pictures`: the number on which losses were measured.

    `left_float`: the layers that the policy it found leaves float; they cost `cost_ms` milliseconds a batch more than
    with all layers quantized. `policy_sha256`: of the policy that was found.
    """

    engine: str
    batch: int
    budget: str
    met: bool
    pictures: int
    tried: list[TriedRecord]
    left_float: NotRequired[list[FloatLayerRecord]]
    cost_ms: NotRequired[float]
    policy_sha256: NotRequired[str]
