"""The policy of an export: the one that a target gets where the user names none, and those that it cannot run."""

from collections.abc import Sequence
from pathlib import Path

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import target_named, targets
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint.opened import open_checkpoint
from swin_quant.quant.policy import Policy, builtin_policies, described, is_builtin, load_policy, policy_from_dict


def check_policy(target: Backend, policy: Policy) -> None:
    """UsageError for a built-in policy of other targets where `target` runs its own alone, and for activations of bits
    that no file of `target` holds."""
    names, held = target.exporting.policies, target.exporting.activation_bits
    if target.exporting.only and is_builtin(policy) and policy.name not in names:
        raise UsageError(f"‹policy› {policy.name}: {target.name} runs {' and '.join(names)} alone")
    if held and policy.activation_bits.isdisjoint(held) and not policy.has_float8:
        wide, able = sorted(policy.activation_bits), [name for name, one in targets().items() if one.takes(policy)]
        remedy = f"; ‹backend› {' or '.join(able)} takes them" if able else ""
        raise UsageError(
            f"‹policy› {policy.name}: its activations have {' or '.join(map(str, wide))} bits, those in files for "
            f"{target.name} {' or '.join(map(str, held))}{remedy}"
        )


def policy_for(target: str, card: RunCard | None, checkpoint: str | Path | None = None, plain: bool = False) -> Policy:
    """The policy of a target where the user names none.

    The run card's policy stays, so that the export is the model that was scored, in three cases: the policy is the
    user's own, the model was trained under it, or the target takes it (FasterTransformer takes no other). Otherwise
    it is a policy of the target that was scored, or the target's best built-in one: calibration found the ranges of all
    nodes. A warning says that the card's results belong to another policy. A `checkpoint` whose ranges are older than
    zero points lacks one end of each range, and gets the best policy without zero points. `plain`: the best is that of
    a file without compiled operators.
    """
    backend = target_named(target)
    exports = backend.exporting
    best_first = exports.policies if plain or card is None else exports.policies_for(card.config)
    fitting = [name for name in best_first if name in builtin_policies()]
    own = policy_from_dict(card.policy, card.name) if card and card.policy else None
    is_ours = own is not None and is_builtin(own)
    if exports.only:
        if own is None or (is_ours and own.name not in fitting):
            has = f"the run card's is {own.name}" if own else "there is no run card"
            raise UsageError(f"‹backend› {target} needs the policy {' or '.join(fitting)}, {has}: give ‹policy›")
        return own
    offered = [load_policy(name) for name in fitting]
    if own is None or card is None:
        return _best(offered, target, checkpoint)
    if not is_ours:
        if own.name in builtin_policies():
            told = "policy %s is the run card's, not the built-in %s: ‹policy› %s takes that one"
            log.warning(told, described(own), own.name, own.name)
        return own
    scored = {result.policy_sha256: result.policy for result in card.measured() if result.policy}
    is_made = bool(card.training or card.calibration or card.results)
    fits = own.name in fitting and is_made or own.has_float8 and any(policy.has_float8 for policy in offered)
    if card.training and not fits:
        told = "policy %s stays, since the model was trained under it: %s runs %s best, see ‹policy›"
        log.warning(told, own.name, target, fitting[0])
    elif not fits and (measured := [policy for policy in offered if policy.sha256 in scored]):
        log.info("policy %s is exported: it was scored, and %s runs it", measured[0].name, target)
        return measured[0]
    elif not fits:
        best = _best(offered, target, checkpoint)
        if own.sha256 != best.sha256:
            what = "in float8" if own.has_float8 else f"not for {target}"
            told = "the file gets %s: score it by `evaluate` with ‹policy› %s, or keep the other by ‹policy› %s"
            log.warning(f"policy %s of the run card is %s: {told}", own.name, what, best.name, best.name, own.name)
        return best
    elif scored and own.sha256 not in scored:
        told = "policy %s of the run card is exported, though %s was scored: ‹policy› chooses"
        log.warning(told, own.name, listed(map(str, scored.values()), 3))
    elif own.name != fitting[0] and backend.load:  # a file for any engine has no best
        told = "policy %s is exported, as calibrated. %s runs %s best: score that one, then give ‹policy› %s"
        log.info(told, own.name, target, fitting[0], fitting[0])
    return own


def _best(fitting: Sequence[Policy], target: str, checkpoint: str | Path | None) -> Policy:
    best, *others = fitting
    opened = open_checkpoint(checkpoint) if checkpoint else None
    if not opened or not best.has_zero_points or opened.has_zero_points or not opened.is_calibrated:
        return best
    usable = next((policy for policy in others if not policy.has_zero_points), best)
    told = "policy %s: these ranges have no lower end for zero points; calibrate again for %s, which %s runs best"
    log.warning(told, usable.name, best.name, target)
    return usable
