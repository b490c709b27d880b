"""List the built-in policies: the purpose of each, and the backends that take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swin_quant.backends.registry import targets
from swin_quant.cli import shared
from swin_quant.cli.output import tell
from swin_quant.report.table import NARROW, folded, screen_width

if TYPE_CHECKING:
    from swin_quant.quant.policy import Policy

EXAMPLES = """examples:
  swin-quant policies
  swin-quant nodes --cfg swin_tiny_patch4_window7_224 --policy qdq       (which nodes a policy enables)

A policy of your own is a YAML file like those in configs/policies; --policy takes its path."""

_INDENT = " " * 4


@dataclass(frozen=True)
class PoliciesOptions:
    """How the list is printed."""

    json: shared.Json = None


def policy(name_or_path: str) -> Policy:
    """A built-in policy by name, or one from a YAML file; UsageError names the file and what is wrong in it."""
    from swin_quant.quant.policy import Policy, load_policy
    from swin_quant.report.nodes import policy_html

    Policy.html = policy_html  # `quant` lies below `report`, and does not import it
    return load_policy(name_or_path)


def run(options: PoliciesOptions) -> None:
    from swin_quant.quant.policy import builtin_policies, load_policy

    policies = {name: load_policy(name) for name in builtin_policies()}
    taken = {
        name: [one for one, backend in targets().items() if name in backend.exporting.policies] for name in policies
    }
    room = screen_width(NARROW) - len(_INDENT)

    def show() -> None:
        for name, policy in policies.items():
            print(name + (f"  (for {', '.join(taken[name])})" if taken[name] else ""))
            for line in folded(" ".join(policy.description.split()), room):
                print(_INDENT + line)

    tell(options.json, show, [{**policy.to_dict(), "for": taken[name]} for name, policy in policies.items()])
