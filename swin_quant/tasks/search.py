"""The policy that loses no more than a budget at the least latency, found by measuring: a policy file that says why.

Error comes from `sensitivity`, latency from the engine itself: layers of equal shapes cost the same there, so one of
each kind of layer is exported with all of its kind left float, and timed beside the whole.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, finite
from swin_quant.base.journal import plain, read_journal
from swin_quant.base.progress import log
from swin_quant.cards.costs import FloatLayerRecord, TriedPolicies, TriedRecord
from swin_quant.cards.update import update
from swin_quant.quant.distance import Loss
from swin_quant.quant.policies import builtin_policies, load_policy
from swin_quant.quant.policy import Policy
from swin_quant.quant.search import (
    Budget,
    SearchResult,
    TriedPolicy,
    Unit,
    Within,
    cheapest,
    check_limit,
    fastest,
    front,
    in_order,
    prefix,
    within_time,
)
from swin_quant.tasks.measuring import Measuring
from swin_quant.tasks.policy_costs import Measured
from swin_quant.tasks.sensitivity import loss_record

_STEPS = (0.0, 0.1, 0.25, 0.5)  # shares of the layers left float, to show what more time buys
_FLOAT = "float"
_LEAST_DROP = 1e-6  # points: of less nobody has pictures enough
_LESS = 0.5  # of the divergence, at most, that a policy may have behind one that other pictures did not bear out
_FEW = 100  # pictures times points: where none of so many differs, the drop may still be that


@dataclass(frozen=True)
class PolicySearch:
    """What is asked for: a policy within `budget`, and within `max_ms` of a batch."""

    of: Measuring
    budget: Budget
    max_ms: float | None = None

    def __post_init__(self) -> None:
        if self.max_ms is None and self.budget == Budget():
            raise UsageError("no budget: give ‹max_drop›, ‹min_agreement›, ‹min_sqnr› or ‹max_ms›")
        check_limit("max_ms", self.max_ms)
        if self.max_ms is not None and not self.of.is_timed:
            raise UsageError(f"‹max_ms›: latency of {self.of.engine} is not measured here: leave it out")

    @property
    def limits(self) -> str:
        """The budget in words."""
        said = [str(self.budget)] if str(self.budget) else []
        return ", ".join([*said, f"at most {self.max_ms:g} ms"] if self.max_ms is not None else said)

    @property
    def flags(self) -> list[str]:
        """The budget as the command takes it."""
        given = {**asdict(self.budget), "max_ms": self.max_ms}
        return [f"--{key.replace('_', '-')} {float(value)!r}" for key, value in given.items() if value is not None]

    @property
    def found(self) -> str:
        """What the journal calls the result."""
        return f"found: {' '.join(self.flags)}"

    @property
    def place(self) -> Path:
        """Of the policy that is found; the journal lies beside it."""
        return self.of.folder / f"{self.of.name}.yaml"


def search(asked: PolicySearch) -> SearchResult:
    """Find the policy and write it, with the reasons, to `place`. Goes on where an earlier search was cut off.

    Where the budget cannot be met, the policy is the best that was found.
    """
    ensure_writable_dir(asked.of.folder)
    timed = asked.of.is_timed
    if not timed:
        log.info("%s: no latency is measured, its kernels do not run here: among %s that within the budget is taken "
                 "which leaves the fewest nodes float",
                 asked.of.engine, ", ".join(asked.of.backend.exporting.policies))  # fmt: skip
    bench = Measured(asked.of)
    units = bench.units
    drop = asked.budget.max_drop
    if drop and bench.pictures * drop < _FEW:
        log.warning("%d pictures hardly tell a drop of %g points: give %.0f or more (‹pictures›)",
                    bench.pictures, drop, math.ceil(_FEW / max(drop, _LEAST_DROP)))  # fmt: skip
    left_float = {bench.policy(off).name: off for off in _choose(asked, bench, units)}
    for share in _STEPS:
        some = prefix(units, round(share * len(units)))
        left_float.setdefault(bench.policy(some).name, some)
    tried = {name: bench.policy(off) for name, off in left_float.items()}
    for name in builtin_policies():
        if name in asked.of.backend.exporting.policies and bench.takes(load_policy(name)):
            tried.setdefault(name, load_policy(name))
    losses = {name: bench.loss(policy) for name, policy in tried.items()}
    costs = bench.costs(list(tried.values()))
    best = _best(asked, tried, losses, costs)
    while asked.budget.allows(losses[best]) and (harder := _on_others(asked, bench, tried[best], losses[best])):
        losses[best] = harder
        best = _best(asked, tried, losses, costs)
    losses[_FLOAT], costs[_FLOAT] = Loss(math.inf, 0.0, 100.0, 0.0), bench.float_cost
    names = sorted((name for name in losses if name in costs), key=costs.__getitem__)
    on_front = {names[index] for index in front([(losses[name].kl, costs[name]) for name in names])}
    counts = {name: bench.nodes_on(policy) for name, policy in tried.items()} | {_FLOAT: 0}
    candidates = [
        TriedPolicy(name, counts[name], losses[name], costs[name] if timed else None, name == best, name in on_front)
        for name in names
    ]
    met = asked.budget.allows(losses[best]) and (asked.max_ms is None or costs[best] <= asked.max_ms)
    why = _why(asked, losses[best], costs[best], best, bench)
    found = replace(tried[best], name=asked.place.stem, description=why)
    still = tuple(unit for unit in in_order(units) if unit.name in left_float.get(best, frozenset()))
    others = set(bench.nodes_off(tried[best])).difference(*(unit.nodes for unit in still))
    base = asked.of.start.name if best in left_float else best
    atomic_write_bytes(asked.place, _as_yaml(found, still, base, others))
    written = load_policy(str(asked.place))  # whose layers have another order: `found_before` compares with the file
    if met and counts[best]:  # else `quantize`, given again, would take it for what was asked for
        bench.journal.keep({asked.found: written.sha256}, str)
    log.info("policy: %s", asked.place)
    if not counts[best]:
        log.warning("%s: every layer stays float: this policy quantizes nothing", asked.limits)
    elif timed and costs[_FLOAT] <= costs[best]:
        log.warning("float is as fast: %.3f ms on %s, %.3f with this policy: deploy it, or try another engine",
                    costs[_FLOAT], asked.of.engine, costs[best])  # fmt: skip
    cost = costs[best] - costs[bench.policy(frozenset()).name] if timed else None
    result = SearchResult(written, asked.place, tuple(candidates), bench.pictures, met, still, cost)
    if bench.card_file:
        update(bench.card_file, bench.card, lambda card: card.with_search(search_record(asked, result)))
    return result


def found_before(asked: PolicySearch) -> Policy | None:
    """What an earlier search found for the same budget, checkpoint, pictures and engine, on a machine like this; else
    None."""
    try:
        journal, policy = read_journal(asked.of.journal), load_policy(str(asked.place))
    except SwinQuantError:
        return None
    if journal.entries.get(asked.found) != policy.sha256:
        return None
    return policy if plain(asked.of.subject).items() <= journal.subject.items() else None


def search_record(asked: PolicySearch, result: SearchResult) -> TriedPolicies:
    """For the checkpoint's run card."""
    tried = [
        TriedRecord(policy=one.policy, nodes=one.nodes, loss=loss_record(one.loss), ms=one.ms,
                    found=one.is_found, front=one.on_front)
        for one in result.candidates
    ]  # fmt: skip
    left_float = [
        FloatLayerRecord(layer=unit.name, sqnr_db=finite(unit.sqnr_db), saved_ms=unit.saved_ms)
        for unit in result.left_float
    ]
    record = TriedPolicies(engine=asked.of.engine, batch=asked.of.batch, budget=asked.limits, met=result.met,
                           pictures=result.pictures, tried=tried, left_float=left_float)  # fmt: skip
    if result.cost_ms is not None:
        record["cost_ms"] = result.cost_ms
    return record


def _choose(asked: PolicySearch, bench: Measured, units: Sequence[Unit]) -> list[frozenset[str]]:
    """The names of the units that stay float: for the loss, and for the time, where these are limited."""
    found = []
    if asked.budget != Budget():
        found.append(_within_loss(asked, bench, units))
    if asked.max_ms is not None:
        count = within_time(units, asked.max_ms, lambda off: bench.costs([bench.policy(off)])[bench.policy(off).name])
        found.append(prefix(units, fastest(units) if count is None else count))
    return found


def _within_loss(asked: PolicySearch, bench: Measured, units: Sequence[Unit], most: float = math.inf) -> frozenset[str]:
    """`most`: divergence. What other pictures do not bear out is searched for again, with less of it."""

    def within(off: frozenset[str]) -> bool:
        loss = bench.loss(bench.policy(off))
        return loss.kl <= most and asked.budget.allows(loss)

    def again(found: frozenset[str]) -> Within:
        loss = bench.loss(bench.policy(found))
        room = loss.kl * _room(asked.budget, loss, bench.pictures)
        return lambda off: bench.loss(bench.policy(off)).kl <= room and within(off)

    found = cheapest(units, within, again)
    if found is None:
        return prefix(units, len(units))
    policy = bench.policy(found)
    loss = bench.loss(policy)
    harder = _on_others(asked, bench, policy, loss)
    if harder is None or asked.budget.allows(harder) or not units or len(found) == len(units):
        return found
    share = (asked.budget.max_drop or 0.0) / harder.most_drop
    return _within_loss(asked, bench, units, loss.kl * min(_LESS, share))


def _on_others(asked: PolicySearch, bench: Measured, policy: Policy, loss: Loss) -> Loss | None:
    """`loss` with the drop of other pictures, where that is the larger; None where it is not, or is not asked
    for.

    Of many policies that is taken whose few differing pictures cost least: others tell what it is worth.
    """
    if asked.budget.max_drop is None:
        return None
    others = bench.loss_of_others(policy)
    if others is None or others.most_drop <= loss.most_drop:
        return None
    return replace(loss, drop=others.drop, drop_error=others.drop_error)


def _room(budget: Budget, loss: Loss, pictures: int) -> float:
    """How many times its divergence a policy may have so that its drop, in proportion, stays in the budget.

    The drop itself comes from the few pictures that differ. Dozens of choices by these are choices of what suits them:
    1,024 told a drop of 0.1 points behind such, where others told 0.4. The divergence comes from all pictures.
    """
    if budget.max_drop is None:
        return math.inf
    return max(1.0, budget.max_drop / max(loss.most_drop, _FEW / pictures))


def _best(
    asked: PolicySearch,
    tried: Mapping[str, Policy],
    losses: Mapping[str, Loss],
    costs: Mapping[str, float],
) -> str:
    """The fastest candidate within the budget; for `max_ms` alone, the nearest to float within that time.

    Where none is, the nearest to float of those that keep the time; if none keeps it, the fastest that keeps the rest.
    """
    in_time = [name for name in tried if asked.max_ms is None or costs[name] <= asked.max_ms]
    allowed = [name for name in in_time if asked.budget.allows(losses[name])]
    if not in_time:
        return min([name for name in tried if asked.budget.allows(losses[name])] or tried, key=costs.__getitem__)
    if asked.budget == Budget() or not allowed:
        return min(in_time, key=lambda name: losses[name].kl)
    return min(allowed, key=costs.__getitem__)


def _why(asked: PolicySearch, loss: Loss, cost: float, name: str, bench: Measured) -> str:
    of = asked.of
    split = f" of {of.sampling.split}" if of.sampling.split else ""
    others = ", the drop on others, too" if asked.budget.max_drop is not None and bench.has_others else ""
    return (
        f"Found for {of.engine}, batch {of.batch}: {asked.limits}. It is {name}. Measured on {bench.pictures} pictures"
        f"{split}{others}: {loss.figures}; "
        + (f"{cost:.3f} ms." if of.is_timed else f"{cost:.0f} nodes stay float, and no latency was measured.")
    )


def _as_yaml(policy: Policy, left_float: Sequence[Unit], base: str, others: Collection[str]) -> bytes:
    """The policy file; each layer that stays float with its reason as a comment, and below that the `others`, which
    the policy `base` leaves float."""
    import yaml

    def dumped(content: Any) -> str:
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)

    data = policy.to_dict()
    text = dumped({key: data[key] for key in ("name", "description")}) + "rules:\n"
    rules = data["rules"][:-1] if left_float else data["rules"]
    for rule in rules:
        text += "".join(f"  {line}\n" for line in dumped([rule]).splitlines())
    if left_float:
        text += "  - disable:\n"
    for unit in left_float:
        text += f"      # {unit.name}: {unit.sqnr_db:.1f} dB alone; int8 saves {unit.saved_ms:.4f} ms there\n"
        text += "".join(f"      - {node}\n" for node in unit.nodes)
    if others:
        text += f"# policy {one_line(base)} leaves these float:\n"
        alike = Counter(".".join("*" if word.isdecimal() else word for word in name.split(".")) for name in others)
        text += "".join(f"#   {nodes}: {count}\n" for nodes, count in sorted(alike.items()))
    return text.encode()
