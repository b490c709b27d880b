"""swin-quant policies."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.backends.registry import targets
from swin_quant.cli import options
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "List the built-in policies: what each is for, and the backends that take it."
EXAMPLES = """examples:
  swin-quant policies
  swin-quant nodes --cfg swin_tiny_patch4_window7_224 --policy qdq       (which nodes a policy enables)

A policy of your own is a YAML file like those in configs/policies; --policy takes its path."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)


def run(args: argparse.Namespace, world: World) -> None:
    import json

    from swin_quant.quant.policies import builtin_policies, load_policy

    taken = {name: [target for target, backend in targets().items() if name in backend.exporting.policies]
             for name in builtin_policies()}  # fmt: skip
    policies = [load_policy(name) for name in builtin_policies()]
    if args.json:
        put(args.json, json.dumps([{**policy.to_dict(), "for": taken[policy.name]} for policy in policies], indent=2))
    if args.json == "-" or not world.is_main:
        return
    for policy in policies:
        print(policy.name + (f"  (for {', '.join(taken[policy.name])})" if taken[policy.name] else ""))
        print(f"    {' '.join(policy.description.split())}")
