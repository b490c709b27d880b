"""The policy within a search's limits that is fastest, or leaves the fewest nodes float; its file says why.

Layers of equal shapes take equal time on an engine. The time of a layer is the time of its kind: the file with all
layers of the kind left float is timed beside the whole. Its error is the layer's sensitivity.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swin_quant.base.errors import SwinQuantError, one_line
from swin_quant.base.files import atomic_write_bytes, finite, plain, read_journal, sha256_of
from swin_quant.base.progress import log
from swin_quant.cards.costs import FloatLayerRecord, TriedPolicies, TriedRecord
from swin_quant.quant.distance import Loss
from swin_quant.quant.policy import Policy, builtin_policies, load_policy
from swin_quant.quant.search import (
    Budget,
    SearchResult,
    TriedPolicy,
    Unit,
    Within,
    cheapest,
    fastest,
    front,
    in_order,
    prefix,
    within_time,
)
from swin_quant.verbs.policy_costs import PolicyCosts
from swin_quant.verbs.search_settings import FEW, SearchSettings

_STEPS = (0.0, 0.1, 0.25, 0.5)  # shares of the layers left float, to show the gain of more time
_FLOAT = "float"
_LESS = 0.5  # share of the divergence that the next choice may have when other pictures refuted a choice


def find_policy(measured: PolicyCosts) -> SearchResult:
    """Find the policy, and write it with the reasons to the file of the settings.

    Where the budget cannot be met, the policy is the best that was found.
    """
    settings = measured.settings
    timed, budget = settings.is_timed, settings.budget
    if not timed:
        log.info(
            "%s: its kernels do not run here, so no latency is measured. Among %s, search takes the policy within the "
            "budget that leaves the fewest nodes float",
            settings.engine,
            ", ".join(settings.backend.exporting.policies),
        )
    units = measured.units
    left_float = _chosen_and_shown(measured, units)
    tried = {name: measured.policy(off) for name, off in left_float.items()}
    for name in builtin_policies():
        if name in settings.backend.exporting.policies and measured.takes(load_policy(name)):
            tried.setdefault(name, load_policy(name))
    losses = {name: measured.loss(policy) for name, policy in tried.items()}
    costs = measured.costs(list(tried.values()))
    best = _best(settings, tried, losses, costs)
    while budget.allows(losses[best]) and (harder := _on_others(measured, tried[best], losses[best])):
        losses[best] = harder
        best = _best(settings, tried, losses, costs)
    losses[_FLOAT], costs[_FLOAT] = Loss(math.inf, 0.0, 100.0, 0.0), measured.float_cost
    names = sorted((name for name in losses if name in costs), key=costs.__getitem__)
    on_front = {names[index] for index in front([(losses[name].kl, costs[name]) for name in names])}
    counts = {name: measured.nodes_on(policy) for name, policy in tried.items()} | {_FLOAT: 0}
    candidates = [
        TriedPolicy(name, counts[name], losses[name], costs[name] if timed else None, name == best, name in on_front)
        for name in names
    ]
    met = budget.allows(losses[best]) and (settings.max_ms is None or costs[best] <= settings.max_ms)
    why = _why(measured, best, losses[best], costs[best])
    found = replace(tried[best], name=settings.file.stem, description=why)
    still = tuple(unit for unit in in_order(units) if unit.name in left_float.get(best, frozenset()))
    others = set(measured.nodes_off(tried[best])).difference(*(unit.nodes for unit in still))
    base = settings.start.name if best in left_float else best
    atomic_write_bytes(settings.file, _as_yaml(found, still, base, others))
    written = load_policy(str(settings.file))  # its nodes have another order, and `found_before` compares with the file
    if met and counts[best]:  # else `quantize` would take it for done when it is run again
        measured.journal.keep({settings.found: written.sha256}, str)
    log.info("policy: %s", settings.file)
    if not counts[best]:
        log.warning("%s: every layer stays float: this policy quantizes nothing", settings.limits)
    elif timed and costs[_FLOAT] <= costs[best]:
        log.warning(
            "float is as fast: %.3f ms on %s, %.3f with this policy: deploy it, or try another engine",
            costs[_FLOAT],
            settings.engine,
            costs[best],
        )
    cost = costs[best] - costs[measured.policy(frozenset()).name] if timed else None
    return SearchResult(written, settings.file, tuple(candidates), measured.pictures, met, still, cost)


def found_before(settings: SearchSettings) -> Policy | None:
    """The policy that an earlier search found for the same limits, checkpoint, pictures and engine, on a machine like
    this; None where there is none."""
    try:
        journal, policy = read_journal(settings.journal), load_policy(str(settings.file))
    except SwinQuantError:
        return None
    if journal.entries.get(settings.found) != policy.sha256:
        return None
    subject = plain(settings.subject(sha256_of(settings.checkpoint)))
    return policy if subject.items() <= journal.subject.items() else None


def search_record(settings: SearchSettings, result: SearchResult) -> TriedPolicies:
    """The result for the checkpoint's run card."""
    tried = [
        TriedRecord(
            policy=one.policy,
            nodes=one.nodes,
            loss=one.loss.record(),
            ms=one.ms,
            found=one.is_found,
            front=one.on_front,
        )
        for one in result.candidates
    ]
    left_float = [
        FloatLayerRecord(layer=unit.name, sqnr_db=finite(unit.sqnr_db), saved_ms=unit.saved_ms)
        for unit in result.left_float
    ]
    record = TriedPolicies(
        engine=settings.engine,
        batch=settings.batch,
        budget=settings.limits,
        met=result.met,
        pictures=result.pictures,
        tried=tried,
        left_float=left_float,
    )
    if result.cost_ms is not None:
        record["cost_ms"] = result.cost_ms
    return record


def _chosen_and_shown(measured: PolicyCosts, units: Sequence[Unit]) -> dict[str, frozenset[str]]:
    """Policy name -> the names of the units that it leaves float: a choice for the loss if that is limited, one for the
    time, then steps to show."""
    settings, found = measured.settings, list[frozenset[str]]()

    def milliseconds(off: frozenset[str]) -> float:
        policy = measured.policy(off)
        return measured.costs([policy])[policy.name]

    if settings.budget != Budget():
        found.append(_within_loss(measured, units))
    if settings.max_ms is not None:
        count = within_time(units, settings.max_ms, milliseconds)
        found.append(prefix(units, fastest(units) if count is None else count))
    found += [prefix(units, round(share * len(units))) for share in _STEPS]
    named: dict[str, frozenset[str]] = {}
    for off in found:
        named.setdefault(measured.policy(off).name, off)
    return named


def _within_loss(measured: PolicyCosts, units: Sequence[Unit], most: float = math.inf) -> frozenset[str]:
    """The units that stay float to keep the budget, and a divergence of at most `most`.

    A choice that other pictures refute is made again, with less divergence.
    """
    budget = measured.settings.budget

    def within(off: frozenset[str]) -> bool:
        loss = measured.loss(measured.policy(off))
        return loss.kl <= most and budget.allows(loss)

    def again(found: frozenset[str]) -> Within:
        loss = measured.loss(measured.policy(found))
        room = loss.kl * _room(budget, loss, measured.pictures)
        return lambda off: measured.loss(measured.policy(off)).kl <= room and within(off)

    found = cheapest(units, within, again)
    if found is None:
        return prefix(units, len(units))
    policy = measured.policy(found)
    loss = measured.loss(policy)
    harder = _on_others(measured, policy, loss)
    if harder is None or budget.allows(harder) or not units or len(found) == len(units):
        return found
    share = (budget.max_drop or 0.0) / harder.most_drop
    return _within_loss(measured, units, loss.kl * min(_LESS, share))


def _on_others(measured: PolicyCosts, policy: Policy, loss: Loss) -> Loss | None:
    """`loss` with the drop on other pictures, if that is larger; None if not, or if the drop is not limited.

    Among many policies the one wins whose few differing pictures cost least by chance: other pictures tell its worth.
    """
    if measured.settings.budget.max_drop is None:
        return None
    others = measured.loss_of_others(policy)
    if others is None or others.most_drop <= loss.most_drop:
        return None
    return replace(loss, drop=others.drop, drop_error=others.drop_error)


def _room(budget: Budget, loss: Loss, pictures: int) -> float:
    """The factor by which a policy's divergence may grow until its drop, in proportion, uses up the budget.

    The drop comes from the few pictures that differ, and dozens of choices by these fit them alone: after such a search
    1,024 pictures told a drop of 0.1 points where other pictures told 0.4. The divergence comes from all pictures.
    """
    if budget.max_drop is None:
        return math.inf
    return max(1.0, budget.max_drop / max(loss.most_drop, FEW / pictures))


def _best(
    settings: SearchSettings, tried: Mapping[str, Policy], losses: Mapping[str, Loss], costs: Mapping[str, float]
) -> str:
    """The fastest candidate within the budget; for `max_ms` alone, the nearest to float within that time.

    If no candidate keeps both limits: the nearest to float within the time; if none keeps the time: the fastest within
    the budget.
    """
    in_time = [name for name in tried if settings.max_ms is None or costs[name] <= settings.max_ms]
    allowed = [name for name in in_time if settings.budget.allows(losses[name])]
    if not in_time:
        return min([name for name in tried if settings.budget.allows(losses[name])] or tried, key=costs.__getitem__)
    if settings.budget == Budget() or not allowed:
        return min(in_time, key=lambda name: losses[name].kl)
    return min(allowed, key=costs.__getitem__)


def _why(measured: PolicyCosts, name: str, loss: Loss, cost: float) -> str:
    """The policy's description: engine, limits and figures."""
    settings = measured.settings
    split = f" of {settings.sampling.split}" if settings.sampling.split else ""
    others = ", and its drop on others" if settings.budget.max_drop is not None and measured.has_others else ""
    time = f"{cost:.3f} ms." if settings.is_timed else f"{cost:.0f} nodes stay float, and no latency was measured."
    return (
        f"Found for {settings.engine}, batch {settings.batch}: {settings.limits}. It is {name}. Measured on "
        f"{measured.pictures} pictures{split}{others}: {loss.figures}; {time}"
    )


def _as_yaml(policy: Policy, left_float: Sequence[Unit], base: str, others: Collection[str]) -> bytes:
    """The policy file. Comments tell why each of `left_float` stays float, and name the `others` that `base` leaves."""
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
