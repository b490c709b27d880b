"""Advice after a calibration, as data: each rule looks at the findings and may yield a sentence.

No rule runs the model. A rule's limit was measured, or its comment gives the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swin_quant.base.errors import listed
from swin_quant.config.outputs import LOGITS, say
from swin_quant.quant.calibration import Calibration, Method
from swin_quant.quant.check import RUIN_DB, Check
from swin_quant.quant.passes.equalize import OutlierChannels
from swin_quant.quant.quantizer import Quantizer, Role

FEW, ENOUGH = 8, 32  # pictures: 2 cost two micro models 15 dB, 8 to 80 less than 1; ranges differ by 10 % up to 32
FEW_BITS = 4


@dataclass(frozen=True)
class Advice:
    """A sentence from the rule `kind`, and the nodes or layers that it is about. `warns`: something is wrong."""

    kind: str
    text: str
    nodes: tuple[str, ...] = ()
    warns: bool = False


@dataclass(frozen=True)
class Findings:
    """The results of a calibration: nodes under `policy` by name, their statistics, the range method, the cost of
    ranges, the names of the `passes` that were kept and that were `taken_back`, and the remaining outlier channels."""

    nodes: Mapping[str, Quantizer]
    calibration: Calibration
    method: Method
    policy: str
    check: Check | None = None
    passes: Sequence[str] = ()
    taken_back: Sequence[str] = ()
    outlier_channels: Sequence[OutlierChannels] = ()

    @property
    def enabled(self) -> dict[str, Quantizer]:
        return {name: node for name, node in self.nodes.items() if node.setting.enabled}


def advise(findings: Findings) -> list[Advice]:
    """All advice, in the order of RULES."""
    return [advice for rule in RULES for advice in rule(findings)]


def _dead(f: Findings) -> Iterator[Advice]:
    if dead := f.calibration.dead:
        text = f"{len(dead)} nodes saw only zeros (a branch that does nothing): {listed(dead, 2)}"
        yield Advice("dead", text, tuple(dead), True)


def _beyond_half(f: Findings) -> Iterator[Advice]:
    if beyond := f.calibration.beyond_half:
        largest = f.calibration.largest
        worst = max(beyond, key=largest.__getitem__)
        most = f"{worst} most, with {largest[worst]:.4g}: a float16 engine overflows there"
        text = f"{len(beyond)} nodes exceed the largest float16 (65504), {most}"
        yield Advice("beyond-half", text, tuple(beyond), True)


def _signal(f: Findings) -> Iterator[Advice]:
    check = f.check
    if check is None or not (check.better or check.sqnr_db < RUIN_DB):
        return
    figures = format_figures(check)
    if not check.better:
        remedy = "more bits, fewer nodes, or `swin-quant finetune`"
        yield Advice("signal", f"{f.policy} loses the signal by any calibrator: {figures}; give it {remedy}", (), True)
        return
    where = f"at fault: {listed(check.at_fault, 3)}" if check.at_fault else "all nodes have a part in it"
    on = [node for node in f.enabled.values() if node.role is not Role.GEMM_WEIGHT]
    methods = "+".join(sorted({f.method.for_bits(node.setting.bits) for node in on}))
    text = f"calibrator {methods} loses the signal under {f.policy}: {figures}; {where}"
    yield Advice("signal", text, tuple(check.at_fault), True)
    others = ", ".join(f"{name} {sqnr:.1f}" for name, sqnr in check.others.items() if name != check.better)
    also = f" ({others})" if others else ""
    best = check.others[check.better]
    text = f"‹calibrator› {check.better} does better there, {best:.1f} dB{also}: calibrate with it"
    yield Advice("calibrator", text, (), True)


def format_figures(check: Check) -> str:
    """A check's figures in words."""
    agreement = f", top-1 agreement {check.agreement:.0f} %" if check.of == LOGITS else ""
    return (
        f"SQNR of the {say(check.of)} {check.sqnr_db:.1f} dB{agreement} with float on {check.pictures} of the pictures"
    )


def _outliers(f: Findings) -> Iterator[Advice]:
    places = sorted(f.outlier_channels, key=lambda one: -one.times)
    if not places:
        return
    first = places[0]
    # A residual stream has dozens.
    few = " and ".join(first.cure) if len(first.cure) <= 3 else listed(first.cure, 2)
    where = f"between {few}" if len(first.cure) > 1 else f"inside {first.cure[0]}"
    cure = f"the pass equalize, which did not run, could reduce them {where}: ‹passes› equalize"
    if "equalize" in {*f.passes, *f.taken_back}:
        keep_float = "`swin-quant sensitivity` says what they cost, ‹off› keeps them float"
        cure = f"the pass equalize was tried {where} and gained nothing: {keep_float}"
    counted = f"{len(places)} place{'s' if len(places) > 1 else ''}"
    most = f"the largest in {first.place} ({first.times:.0f} times the median)"
    text = f"outlier channels in {counted}, {most}: {cure}"
    yield Advice("outliers", text, tuple(one.place for one in places))


def _sample(f: Findings) -> Iterator[Advice]:
    pictures = f.calibration.pictures
    if pictures < FEW:
        few = f"{pictures} picture{'s are' if pictures > 1 else ' is'} too few to tell how far ranges would differ with"
        yield Advice("sample", f"{few} others: give {ENOUGH} or more (‹pictures›)")


def _few_bits(f: Findings) -> Iterator[Advice]:
    bits = min((node.setting.bits for node in f.enabled.values()), default=8)
    in_blocks = any(node.setting.block for node in f.enabled.values())  # blocks, which the recipe does not take
    if bits <= FEW_BITS and not in_blocks and not {*f.passes, *f.taken_back} - {"equalize"}:
        yield Advice("passes", f"{bits} bits: ‹passes› fast wins some of the loss back, see docs/passes.md")


Rule = Callable[[Findings], Iterator[Advice]]
RULES: tuple[Rule, ...] = (_dead, _beyond_half, _signal, _outliers, _sample, _few_bits)
