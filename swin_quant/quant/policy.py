"""Policies: which nodes are quantized, in which format, with how many bits and at which granularity, as data.

A policy is an ordered list of rules, in a built-in file of configs/policies/ or a user's YAML file. A rule names nodes
by selectors to `enable` or `disable`, and may set `format`, `bits`, `granularity`, `narrow_range`, `symmetric` and a
fixed `amax` for the nodes that it enables and for its `nodes`; later rules override earlier ones. A selector is a glob
over the dotted node name (`*.mlp.fc2._aftergemm_quantizer`) or a role (`role:gemm_weight`; `role:activation` is every
other role). This generalises FasterTransformer's int8-mode, a fixed list of patterns to switch off (docs/reference,
section 1.5).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, NotRequired, TypedDict

from torch import nn

from swin_quant.base.errors import SwinQuantError, UsageError, is_command, listed
from swin_quant.base.files import compute_data_sha256, shipped_files
from swin_quant.base.schema import Must, allow, checked, plain, within
from swin_quant.base.yaml_file import read_yaml, shipped_or_file
from swin_quant.quant.fake_quant import FORMATS, FP8, TINY_AMAX
from swin_quant.quant.quantizer import Quantizer, Role, Setting, State, named_nodes

_SELECTING = ("enable", "disable", "nodes")
_SETTING = ("format", "bits", "granularity", "block", "narrow_range", "symmetric", "amax")
BLOCKS = (16, 32, 64, 128, 256)  # sizes that engines have kernels for
_LONGEST_SELECTOR = 300  # characters; a glob of megabytes takes seconds to compile
ROLES = {role.value: frozenset({role}) for role in Role}
ROLES["activation"] = frozenset(Role) - {Role.GEMM_WEIGHT}
ROLES["gemm_input"] |= {Role.ONE_SIDED_INPUT}
ROLES["matmul_input"] |= {Role.SOFTMAX_OUTPUT}
Selector = Annotated[
    str,
    Must(
        lambda text: len(text) <= _LONGEST_SELECTOR, f"of at most {_LONGEST_SELECTOR} characters: no node's is longer"
    ),
    Must(
        lambda text: not text.startswith("role:") or text.removeprefix("role:") in ROLES,
        f"a role that there is: {', '.join(ROLES)}",
    ),
]


@dataclass(frozen=True)
class Rule:
    """One step of a policy. None keeps the value of earlier rules; `nodes` stay enabled or disabled.

    `amax` replaces the calibrated range, for values whose ends are known for all pictures.
    """

    enable: tuple[Selector, ...] = ()
    disable: tuple[Selector, ...] = ()
    nodes: tuple[Selector, ...] = ()
    bits: Annotated[int, within(least=2, most=16)] | None = None
    granularity: Annotated[str, allow(("per-tensor", "per-channel"))] | None = None
    block: Annotated[int, allow(BLOCKS)] | None = None
    narrow_range: bool | None = None
    symmetric: bool | None = None
    format: Annotated[str, allow(FORMATS)] | None = None
    amax: Annotated[float, within(above=TINY_AMAX)] | None = None

    @property
    def is_about_weights(self) -> bool:
        """Whether all that it selects are weights."""
        return all(one.endswith((Role.GEMM_WEIGHT.value, "._weight_quantizer")) for one in self.enable + self.nodes)


class _Content(TypedDict):
    name: Annotated[str, Must(bool, "a text")]
    rules: Annotated[list[Any], Must(bool, "a list with at least one rule")]
    description: NotRequired[str]


@dataclass(frozen=True)
class Policy:
    """A named list of rules; `sha256` distinguishes policies with one name."""

    name: str
    rules: tuple[Rule, ...]
    description: str = ""

    def __repr__(self) -> str:
        count = len(self.rules)
        return f"policy {self.name}, {count} rule{'s' * (count != 1)}"

    @property
    def sha256(self) -> str:
        """SHA-256 of the rules, in hexadecimal."""
        return compute_data_sha256(self.to_dict()["rules"])

    @property
    def activation_bits(self) -> set[int]:
        """The bits that rules give to activations: 8 where none says others. Overridden ones count, too."""
        said = {rule.bits for rule in self.rules if rule.bits and not rule.is_about_weights}
        return said or {8}

    @property
    def has_zero_points(self) -> bool:
        """Whether a rule gives activations a zero point."""
        return any(rule.symmetric is False for rule in self.rules)

    @property
    def has_float8(self) -> bool:
        """Whether a rule sets float8."""
        return any(rule.format == FP8 for rule in self.rules)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in a policy file; `policy_from_dict` reads it back."""
        rules = [{key: v for key, v in plain(asdict(rule)).items() if v not in (None, [])} for rule in self.rules]
        return {"name": self.name, "description": self.description, "rules": rules}

    def and_then(self, *rules: Rule) -> "Policy":
        """This policy with more rules after its own."""
        return replace(self, rules=self.rules + rules)

    def on(self, *selectors: str) -> "Policy":
        """This policy with the selected nodes enabled; its name lists them."""
        return self._with(Rule(enable=selectors), *(f"+{selector}" for selector in selectors))

    def off(self, *selectors: str) -> "Policy":
        """This policy with the selected nodes disabled."""
        return self._with(Rule(disable=selectors), *(f"-{selector}" for selector in selectors))

    def bits(self, selector: str, bits: int) -> "Policy":
        """This policy with `bits` for the selected nodes: 2 to 8, for activations up to 16."""
        return self._with(Rule(nodes=(selector,), bits=bits), f"{selector}={bits}")

    def format(self, selector: str, format: str) -> "Policy":
        """This policy with the format `int8` or `fp8` for the selected nodes."""
        return self._with(Rule(nodes=(selector,), format=format), f"{selector}={format}")

    def granularity(self, selector: str, granularity: str) -> "Policy":
        """This policy with ranges `per-tensor` or `per-channel` for the selected weights."""
        return self._with(Rule(nodes=(selector,), granularity=granularity), f"{selector}={granularity}")

    def narrow_range(self, *selectors: str) -> "Policy":
        """This policy with -127 instead of -128 as the smallest level of the selected nodes."""
        return self._with(Rule(nodes=selectors, narrow_range=True), *(f"{selector}=narrow" for selector in selectors))

    def asymmetric(self, *selectors: str) -> "Policy":
        """This policy with a zero point for the selected activations."""
        return self._with(Rule(nodes=selectors, symmetric=False), *(f"{selector}=asymmetric" for selector in selectors))

    def _with(self, rule: Rule, *words: str) -> "Policy":
        changed = replace(self.and_then(rule), name=" ".join((self.name, *words)))
        return policy_from_dict(changed.to_dict(), f"policy {changed.name}")


def policy_from_dict(data: Any, source: str) -> Policy:
    """Check plain data and make a Policy. UsageError names `source` and the key."""
    content: _Content = checked(_Content, data, source, error=UsageError)
    rules: list[Rule] = []
    for number, given in enumerate(content["rules"], 1):
        where = f"{source}: rule {number}"
        if isinstance(given, Mapping):  # a single selector stands for a list
            given = {key: [v] if key in _SELECTING and isinstance(v, str) else v for key, v in given.items()}
        rule: Rule = checked(Rule, given, where, error=UsageError)
        if not (rule.enable or rule.disable or rule.nodes):
            raise UsageError(f"{where} names no node: give it {', '.join(_SELECTING)}")
        if not rule.enable and not rule.nodes and any(getattr(rule, key) is not None for key in _SETTING):
            raise UsageError(f"{where}: {', '.join(_SETTING)} are for enable and nodes")
        rules.append(rule)
    return Policy(content["name"], tuple(rules), content.get("description", "").strip())


def decide(policy: Policy, roles: Mapping[str, Role]) -> dict[str, Setting]:
    """The setting of every node, from the nodes' roles by name.

    UsageError for a selector that names no node, and for a node that one rule both enables and disables.
    """
    settings = {name: Setting() for name in roles}
    there = {key for key, kinds in ROLES.items() if kinds & set(roles.values())}
    # A policy that fits the model may also name absent roles.
    fits = any(f"role:{key}" in rule.enable for key in there for rule in policy.rules)
    for i, rule in enumerate(policy.rules, 1):
        is_own = not rule.disable or f" -{' -'.join(rule.disable)}" not in policy.name  # else ‹off› added it
        where = f"policy {policy.name}: rule {i}" if is_own else "‹off›"
        on, off = (_matches(selectors, roles, where, fits) for selectors in (rule.enable, rule.disable))
        named = _matches(rule.nodes, roles, where, may_lack=True)
        if both := [name for name in on if name in off]:
            raise UsageError(f"{where} both enables and disables {listed(both, 3)}: make it two rules or narrow one")
        weights = [name for name in on | named if roles[name] is Role.GEMM_WEIGHT]
        others = [name for name in on | named if roles[name] is not Role.GEMM_WEIGHT]
        if rule.granularity == "per-channel" and others:
            raise UsageError(f"{where}: per-channel is for weights, not for {listed(others, 3)}")
        if rule.symmetric is False and weights:
            raise UsageError(f"{where}: zero points are for activations, not for {listed(weights, 3)}")
        fields = {key: getattr(rule, key) for key in _SETTING}
        changes: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
        settings |= {name: replace(settings[name], **changes) for name in on | named}
        settings |= {name: replace(settings[name], enabled=True) for name in on}
        settings |= {name: replace(settings[name], enabled=False) for name in off}
    for name, setting in settings.items():
        if clash := _clash(setting, roles[name]):
            raise UsageError(f"policy {policy.name}: {name}: {clash}")
    return settings


def _clash(setting: Setting, role: Role) -> str | None:
    """The conflict within a node's setting, in words, or None."""
    if setting.format == FP8:
        if setting.bits != 8:
            return f"format fp8 has 8 bits, not {setting.bits}: give it format int8, or leave bits out"
        if not setting.symmetric:
            return "format fp8 has no zero point: give it format int8, or symmetric: true"
        if setting.narrow_range:
            return "format fp8 has no narrow range: give it format int8, or leave narrow_range out"
        if setting.block is not None:
            return "format fp8 has no blocks: give it format int8, or leave block out"
    if setting.block is not None and (role is not Role.GEMM_WEIGHT or setting.granularity != "per-channel"):
        return "blocks are parts of the rows of weights: give it granularity per-channel, or leave block out"
    if setting.bits > 8 and role is Role.GEMM_WEIGHT:
        return f"weights have at most 8 bits, not {setting.bits}: only activations have 16"
    if setting.amax is not None and (role is Role.GEMM_WEIGHT or not setting.symmetric):
        return "a fixed amax is for activations without a zero point: leave it out"
    return None


def _matches(
    selectors: Sequence[str], roles: Mapping[str, Role], where: str, may_lack: bool = False
) -> dict[str, None]:
    """Names that any selector matches, in model order.

    A model may lack a role: one without attention has no matmul inputs. That is an error only if the other selectors
    name nothing either and the model has no role that the policy enables, unless `may_lack` allows it.
    """
    found: set[str] = set()
    absent = ""
    for selector in checked(list[Selector], list(selectors), where, "selectors", error=UsageError):
        if selector.startswith("role:"):
            names = {name for name, role in roles.items() if role in ROLES[selector.removeprefix("role:")]}
        else:
            names = {name for name in roles if fnmatchcase(name, selector)}
        absent = absent if names else selector
        if not names and not selector.startswith("role:"):
            break
        found |= names
    if absent and not (absent.startswith("role:") and (found or may_lack)):
        starts, (first, dot, rest) = sorted({name.partition(".")[0] for name in roles}), absent.partition(".")
        near = (f"{start}{dot}{rest}" for start in get_close_matches(first, starts))
        meant = next((one for one in near if any(fnmatchcase(name, one) for name in roles)), None)
        told = f"whose nodes are in {listed(starts, 5)}: `swin-quant show CHECKPOINT` lists them"
        told = "names no node of this model" + (f"; did you mean {meant}?" if meant else f", {told}")
        raise UsageError(f"{where}: selector {absent!r} {told}")
    return {name: None for name in roles if name in found}


def settings_for(model: nn.Module, policy: Policy) -> dict[str, Setting]:
    """The setting of every node of `model` under `policy`; nothing changes."""
    return decide(policy, {name: node.role for name, node in named_nodes(model).items()})


def apply_policy(model: nn.Module, policy: Policy) -> None:
    """Set every node of `model` as `policy` decides, with all states off."""
    apply_settings(model, settings_for(model, policy))


def apply_settings(model: nn.Module, settings: Mapping[str, Setting]) -> None:
    """Set every node as `settings` say, with all states off. Ranges do not change."""
    for name, node in named_nodes(model).items():
        node.state, node.setting = State.OFF, settings[name]


def refuse_blocks(model: nn.Module, who: str) -> None:
    """UsageError if weights have ranges for blocks of rows, which `who` does not support."""
    if names := [name for name, node in enabled_nodes(model).items() if node.setting.block]:
        raise UsageError(
            f"{who}: takes no weights in blocks, which the policy has at {listed(names, 3)}: leave block out"
        )


def enabled_nodes(model: nn.Module) -> dict[str, Quantizer]:
    """The nodes that the model's policy enables."""
    return {name: node for name, node in named_nodes(model).items() if node.setting.enabled}


def quantize(model: nn.Module) -> None:
    """Let every enabled node quantize. SwinQuantError, with names, if one has no range; then nothing changes."""
    nodes = enabled_nodes(model)
    if missing := [name for name, node in nodes.items() if node.amax is None]:
        raise SwinQuantError(
            f"{len(missing)} of {len(nodes)} enabled nodes have no range (amax): {listed(missing, 3)}; "
            "the model is not calibrated for this policy: run `swin-quant calibrate`, in Python sq.calibrate"
        )
    if missing := [name for name, node in nodes.items() if not node.setting.symmetric and node.bounds is None]:
        raise SwinQuantError(
            f"{len(missing)} of {len(nodes)} enabled nodes have no lower end, which a zero point needs: "
            f"{listed(missing, 3)}; calibrate the model again, or choose a policy without zero points"
        )
    for node in nodes.values():
        node.state = State.QUANTIZE


@contextmanager
def quantizing(model: nn.Module) -> Iterator[None]:
    """Inside the context, enabled nodes quantize; afterwards all are off. SwinQuantError as in `quantize`."""
    quantize(model)
    try:
        yield
    finally:
        dequantize(model)


def dequantize(model: nn.Module) -> None:
    """Switch every node off: the float model."""
    for node in named_nodes(model).values():
        node.state = State.OFF


def builtin_policies() -> list[str]:
    """Names of the shipped policies."""
    return [path.stem for path in shipped_files("policies")]


def policy_with_bits(weights: int, activations: int) -> str:
    """How one asks for a policy with these bits."""
    if is_command():
        return f"‹policy› qdq ‹wprec› {weights} ‹aprec› {activations}"
    return f'sq.policy("qdq").bits("role:gemm_weight", {weights}).bits("role:activation", {activations})'


def load_policy(name_or_path: str | Policy) -> Policy:
    """A built-in policy by name, one from a YAML file, or the policy itself. UsageError names the file and fault."""
    if isinstance(name_or_path, Policy):
        return name_or_path
    bits = re.fullmatch("w([2-8])a([2-8])", name_or_path, re.IGNORECASE)
    if bits and name_or_path not in builtin_policies():
        raise UsageError(f"no policy {name_or_path!r}: give {policy_with_bits(int(bits[1]), int(bits[2]))}")
    path = shipped_or_file(name_or_path, shipped_files("policies"), "policy")
    return policy_from_dict(read_yaml(path, "policy"), str(path))


def is_builtin(policy: Policy) -> bool:
    """Whether a policy is the built-in one with its name."""
    return policy.name in builtin_policies() and load_policy(policy.name).sha256 == policy.sha256


def described(policy: Policy) -> str:
    """A policy's name, with a part of its hash if a different built-in policy has the same name."""
    is_other = policy.name in builtin_policies() and not is_builtin(policy)
    return f"{policy.name} (mine {policy.sha256[:6]})" if is_other else policy.name


def told_apart(policies: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """Distinct names for the policies (name, SHA-256 or None).

    If several share a name, each shows a part of its hash, except the built-in one and one with unknown rules.
    """
    policies, hashes = list(policies), defaultdict(set)
    for name, sha256 in policies:
        hashes[name].add(sha256)
    ours = {name: load_policy(name).sha256 for name in builtin_policies() if len(hashes[name]) > 1}
    return {
        (name, sha256): f"{name} (mine {sha256[:6]})"
        if len(hashes[name]) > 1 and sha256 and sha256 != ours.get(name)
        else name
        for name, sha256 in policies
    }
