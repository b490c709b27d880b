"""The policies of a verb: built-in ones by name, files, and changes of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swin_quant.backends.saturation import SAFE_WEIGHTS
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.progress import tell_once
from swin_quant.quant import AUTO
from swin_quant.quant.policy import Policy, Rule, load_policy


@dataclass(frozen=True)
class PolicyChoice:
    """Policies by name, and changes that each of them gets.

    Args:
        policy: what is quantized: names (see `swin-quant show policies`) or YAML files
        wprec: bits of weights, 2 to 8 (default: the policy's)
        aprec: bits of activations, 2 to 8 (default: the policy's)
        quant_per_tensor: one range for a whole weight, not one for each channel
        narrow_range: round weights to -127..127, not to -128..127
        saturation_safe: weights of 7 bits: exact products on CPUs without VNNI
        off: nodes that stay float: names with * and ?, or roles
    """

    policy: tuple[str, ...] = ()
    wprec: int | None = None
    aprec: int | None = None
    quant_per_tensor: bool = False
    narrow_range: bool = False
    saturation_safe: bool = False
    off: tuple[str, ...] = ()

    def load(self) -> list[Policy]:
        """The policies, in order; none if none is named.

        Returns:
            Each named policy with the changes; a policy that is changed has a name of its own, since its results are
            not the original's.

        Raises:
            UsageError: A change without a policy, a policy twice, or values that are impossible.
        """
        if AUTO in self.policy:
            raise UsageError("‹policy› auto: `quantize` has it, and `search` finds it for a calibrated checkpoint")
        rules, policies = self._rules(), [load_policy(name) for name in self.policy]
        if rules and not policies:
            raise UsageError("‹policy›: name the policy that ‹off›, ‹wprec› or the like changes, as ‹policy› qdq")
        counted = Counter(policy.sha256 for policy in policies)
        if twice := [policy.name for policy in policies if counted[policy.sha256] > 1]:
            raise UsageError(f"‹policy›: {' and '.join(dict.fromkeys(twice))} is given twice, by its rules")
        words = {f"W{self.wprec}": self.wprec, f"A{self.aprec}": self.aprec, "per-tensor": self.quant_per_tensor}
        words |= {"narrow-range": self.narrow_range, "saturation-safe": self.saturation_safe}
        named = " ".join([word for word, is_given in words.items() if is_given] + [f"-{one}" for one in self.off])
        changed = [replace(one.and_then(*rules), name=f"{one.name} {named}") if rules else one for one in policies]
        nothing = load_policy("float").sha256
        return [one if one.sha256 == nothing else new for one, new in zip(policies, changed, strict=True)]

    def _rules(self) -> list[Rule]:
        if self.wprec and self.saturation_safe:
            raise UsageError("‹wprec› and ‹saturation_safe› both set the bits of weights: give one of them")
        for flag, bits in (("‹wprec›", self.wprec), ("‹aprec›", self.aprec)):
            if bits is not None and not 2 <= bits <= 8:
                raise UsageError(f"{flag} {bits}: must be from 2 to 8")
        rules = []
        if self.wprec or self.quant_per_tensor or self.narrow_range:
            kind, narrow = "per-tensor" if self.quant_per_tensor else None, self.narrow_range or None
            rules.append(Rule(nodes=("role:gemm_weight",), bits=self.wprec, granularity=kind, narrow_range=narrow))
        if self.saturation_safe:
            rules.append(SAFE_WEIGHTS)
        if self.aprec:
            rules.append(Rule(nodes=("role:activation",), bits=self.aprec))
        if self.off:
            rules.append(Rule(disable=self.off))
        return rules


Policies = str | Policy | PolicyChoice | Sequence[str | Policy] | None


def policy(name_or_path: str) -> Policy:
    """A built-in policy by name, or one from a YAML file.

    Raises:
        UsageError: It names the file, and what is wrong in it.
    """
    return load_policy(name_or_path)


def policies_from(given: Policies) -> list[Policy]:
    """The policies that a verb was given, loaded; none for None."""
    if given is None:
        return []
    if isinstance(given, PolicyChoice):
        return given.load()
    found = [given] if isinstance(given, str | Policy) else given
    if not isinstance(found, list | tuple) or not all(isinstance(one, str | Policy) for one in found):
        names = "a name, a file, a policy, or a list of them, behind the pictures"
        raise UsageError(f"policy: is a {type(given).__name__}: give {names}")
    return [load_policy(one) for one in found]


def one_policy(given: Policies) -> Policy | None:
    """The policy of a verb that takes one; None if none is named. UsageError for several."""
    policies = policies_from(given)
    if len(policies) > 1:
        raise UsageError(f"‹policy› {' '.join(one.name for one in policies)}: give one")
    return policies[0] if policies else None


def tell_bits(policies: Sequence[Policy]) -> None:
    """Say of policies with few bits what runs them. 7 bits are for export."""
    if few := [policy.name for policy in policies if any(rule.bits and rule.bits < 7 for rule in policy.rules)]:
        told = "%s: fewer than 8 bits are simulated: ONNX files store such weights as int8 (4 bits also as INT4, by "
        told += "`export --int4-weights`) and refuse such activations; FasterTransformer refuses both"
        tell_once(told % listed(few))
