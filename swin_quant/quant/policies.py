"""Find policies: the built-in ones under configs/policies/, and the user's YAML files."""

from collections import defaultdict
from collections.abc import Iterable

from swin_quant.base.files import shipped_files
from swin_quant.base.yaml_file import read_yaml, shipped_or_file
from swin_quant.quant.policy import Policy, policy_from_dict


def builtin_policies() -> list[str]:
    """Names of the shipped policies."""
    return [path.stem for path in shipped_files("policies")]


def load_policy(name_or_path: str) -> Policy:
    """A built-in policy by name, or a policy from a YAML file. UsageError names the file and what is wrong."""
    path = shipped_or_file(name_or_path, shipped_files("policies"), "policy")
    return policy_from_dict(read_yaml(path, "policy"), str(path))


def is_builtin(policy: Policy) -> bool:
    """Whether a policy is the built-in one with its name."""
    return policy.name in builtin_policies() and load_policy(policy.name).sha256 == policy.sha256


def described(policy: Policy) -> str:
    """A policy's name, with a part of its hash if a different built-in policy has the same name."""
    is_other = policy.name in builtin_policies() and not is_builtin(policy)
    return _other(policy.name, policy.sha256) if is_other else policy.name


def told_apart(policies: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """Distinct names for the policies (name, SHA-256 or None).

    If several share a name, each shows a part of its hash, except the built-in one and one with unknown rules.
    """
    policies, of_name = list(policies), defaultdict(set)
    for name, sha256 in policies:
        of_name[name].add(sha256)
    ours = {name: load_policy(name).sha256 for name in builtin_policies() if len(of_name[name]) > 1}
    return {
        (name, sha256): name if len(of_name[name]) == 1 or sha256 in (None, ours.get(name)) else _other(name, sha256)
        for name, sha256 in policies
    }


def _other(name: str, sha256: str) -> str:
    return f"{name} (mine {sha256[:6]})"
