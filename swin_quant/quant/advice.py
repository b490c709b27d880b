"""Advice after a calibration, as data: each rule looks at the findings and may yield a sentence.

No rule runs the model. A rule's limit was measured, or its comment gives the reason.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swin_quant.base.errors import listed
from swin_quant.config.outputs import LOGITS, say
from swin_quant.quant.calibration import Calibration, Method
from swin_quant.quant.check import RUIN_DB, Check
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.outlier_channels import LOST_DB, OutlierChannels
from swin_quant.quant.quantizer import Quantizer, Role
from swin_quant.quant.ranges import MOST, get_range, methods_for, sample_uncertainty, search
from swin_quant.quant.statistics import Statistics

CLIPPED = 0.001  # share of a node's values on equal steps: ten times what the percentile calibrator clips
CLIPPED_DB = 3.0  # how much more SQNR of the node's own values another method must keep: half of the error
UNCERTAINTY = 0.1  # relative, between samples: two micro models are below it from 32 pictures on
FEW = 8  # pictures: fewer make a bootstrap useless; 2 cost these models 15 dB, 8 to 80 less than 1
ENOUGH = 32
FEW_BITS = 4
_BY_OUTPUT = {"range_search", "reconstruct", "distill"}  # passes that choose activation ranges by a unit's output


@dataclass(frozen=True)
class Advice:
    """A sentence from the rule `kind`, and the nodes or layers that it is about. `warns`: something is already
    wrong."""

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


def _alike(f: Findings) -> Iterator[Advice]:
    peaks = [each for name, each in f.calibration.peaks.items() if each[-1] > 0]
    if f.calibration.pictures > 1 and peaks and all(each[0] == each[-1] for each in peaks):
        text = f"{f.calibration.pictures} pictures gave every node the same largest value: the pictures are all alike"
        yield Advice("alike", text, (), True)


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


def clipped_share(statistics: Statistics, amax: float) -> float:
    """The share of values with a magnitude above `amax`; values are taken as spread evenly inside their bin."""
    position = amax / statistics.width
    inside = int(position)
    counts = statistics.counts
    if inside >= len(counts) or amax >= statistics.largest:
        return 0.0
    beyond = counts[inside:].sum() - counts[inside] * (position - inside)
    return float(beyond / max(counts.sum(), 1))


def _clipped(f: Findings) -> Iterator[Advice]:
    """Ranges that clip more than another method's, at a loss for the node's own values.

    Not after passes that measured units' outputs, which count for more. Equal steps gain by clipping a few values;
    float8's steps get no finer, so any clipped share may be the whole loss.
    """
    if _BY_OUTPUT & set(f.passes):
        return
    no_better = {name for name, sqnr in f.check.others.items() if sqnr <= f.check.sqnr_db} if f.check else set()
    methods = [method for method in methods_for(f.enabled.values()) if method not in no_better]
    shares: dict[str, float] = {}
    better: Counter[str] = Counter()
    for name, node in f.enabled.items():
        statistics = f.calibration.statistics.get(name)
        if statistics is None or not (node.setting.symmetric or statistics.sides):
            continue
        own, bounded = get_range(node), not node.setting.symmetric
        low, high = own.ends_on(node)
        sides = zip(statistics.both_sides(), (-low, high), strict=True) if bounded else [(statistics, own.amax)]
        beyond = sum(clipped_share(side, end) * side.counts.sum() for side, end in sides)
        share = float(beyond / max(statistics.counts.sum(), 1))
        if share <= (0.0 if node.setting.format == FP8 else CLIPPED):
            continue
        kept: dict[str, float] = {}
        for method in methods:
            other = search(method, statistics, node, f.method.percentile, bounded)
            ends = other.ends_on(node)
            if ends[1] - ends[0] > high - low:
                kept[method] = other.sqnr_db(statistics, node)
        best = max(kept, key=kept.__getitem__, default=None)
        if best and kept[best] > own.sqnr_db(statistics, node) + CLIPPED_DB:
            shares[name] = share
            better[best] += 1
    if shares:
        worst = sorted(shares, key=shares.__getitem__, reverse=True)
        which = better.most_common(1)[0][0]
        percent = 100 * shares[worst[0]]
        most = f"{percent:.1f} %" if percent >= 0.1 else f"{percent:.2g} %"  # one decimal would round it to 0
        text = (
            f"clipping in {_counted(worst, 'range')}: up to {most} of their nodes' values: {listed(worst, 2)}; "
            f"‹calibrator› {which} clips less and is nearer to float"
        )
        yield Advice("clipped", text, tuple(worst))


def _outliers(f: Findings) -> Iterator[Advice]:
    keep_float = "`swin-quant sensitivity` says what they cost, ‹off› keeps them float"
    curable = sorted((one for one in f.outlier_channels if one.cure), key=lambda one: -one.times)
    if curable:
        first = curable[0]
        # A residual stream has dozens.
        few = " and ".join(first.cure) if len(first.cure) <= 3 else listed(first.cure, 2)
        where = f"between {few}" if len(first.cure) > 1 else f"inside {first.cure[0]}"
        cure = f"the pass equalize, which did not run, could reduce them {where}: ‹passes› equalize"
        if first.tried:
            cure = f"the pass equalize was tried {where} and gained nothing: {keep_float}"
        most = f"the largest in {first.place} ({first.times:.0f} times the median)"
        text = f"outlier channels in {_counted(curable, 'place')}, {most}: {cure}"
        yield Advice("outliers", text, tuple(one.place for one in curable))
    # No exchange can rescale these; first those that cost the rest of their tensor most.
    rest = sorted((one for one in f.outlier_channels if not one.cure), key=lambda one: (one.rest_db, -one.times))
    if not rest:
        return
    first, lost = rest[0], [one for one in rest if one.rest_db < LOST_DB]
    which = f"channel {first.channels[0]}" if len(first.channels) == 1 else f"{len(first.channels)} channels"
    kept = f", where the others keep {first.rest_db:.1f} dB of SQNR" if first.rest_db < math.inf else ""
    more = f" (next: {listed([one.place for one in rest[1:]], 2)})" if len(rest) > 1 else ""
    remedy = keep_float
    roles = {f.nodes[one.place].role for one in lost or rest if one.place in f.nodes}
    if Role.GEMM_WEIGHT in roles or any(node.role is Role.GEMM_OUTPUT for node in f.enabled.values()):
        finer = (
            "‹policy› qdq or cpu rounds no results of products, has a range for each row of weights, and evens out more"
        )
        less = "; ft-mode2 rounds fewer results" if f.policy == "ft-mode1" and Role.GEMM_OUTPUT in roles else ""
        remedy = f"{finer}{less}; `swin-quant search` finds what to keep float"
    text = (
        f"outlier channels in {_counted(rest, 'tensor')} that equalize cannot reduce, the largest {which} of "
        f"{first.place} ({first.times:.0f} times most others){kept}{more}: {remedy}"
    )
    yield Advice("outliers-uncured", text, tuple(one.place for one in rest), warns=bool(lost))


def _sample(f: Findings) -> Iterator[Advice]:
    pictures = f.calibration.pictures
    peaks = {name: each for name, each in f.calibration.peaks.items() if name in f.enabled}
    if pictures < FEW:
        few = f"{pictures} picture{'s are' if pictures > 1 else ' is'}"
        text = f"{few} too few to tell how far ranges would differ with others: give {ENOUGH} or more (‹pictures›)"
        yield Advice("sample", text)
    if not FEW <= pictures <= MOST or not peaks:
        return
    uncertainty, power = sample_uncertainty(peaks, {name: get_range(f.nodes[name]).amax for name in peaks})
    if uncertainty > UNCERTAINTY:
        wanted = 2 ** math.ceil(math.log2(pictures * (uncertainty / UNCERTAINTY) ** (1 / power)))
        yield Advice(
            "sample",
            f"{pictures} pictures are few: drawn anew, one range in ten would differ by {100 * uncertainty:.0f} % or "
            f"more; about {wanted} would bring that below {100 * UNCERTAINTY:.0f} % (‹pictures›)",
        )


def _few_bits(f: Findings) -> Iterator[Advice]:
    bits = min((node.setting.bits for node in f.enabled.values()), default=8)
    in_blocks = any(node.setting.block for node in f.enabled.values())  # blocks, which the recipe does not take
    if bits <= FEW_BITS and not in_blocks and not {*f.passes, *f.taken_back} - {"equalize"}:
        yield Advice("passes", f"{bits} bits: ‹passes› fast wins some of the loss back, see docs/passes.md")


def _counted(things: Sequence[object], one: str) -> str:
    return f"{len(things)} {one}{'s' if len(things) > 1 else ''}"


Rule = Callable[[Findings], Iterator[Advice]]
RULES: tuple[Rule, ...] = (_dead, _alike, _beyond_half, _signal, _clipped, _outliers, _sample, _few_bits)
