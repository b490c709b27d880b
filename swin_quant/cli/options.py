"""Options that several commands share: one word for one thing (`Words`: main.py's are older)."""

from __future__ import annotations

import argparse
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import UsageError, listed
from swin_quant.cli.flags import OneWay
from swin_quant.cli.numbers import whole
from swin_quant.config.outputs import OUTPUT_KINDS
from swin_quant.quant.names import AUTO, BY_BITS, CALIBRATORS, DEFAULT_PERCENTILE

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.quant.calibration import Method
    from swin_quant.quant.policy import Policy, Rule
    from swin_quant.tasks.passes import PassPlan

HUBS = ("timm:", "hf:")
# Options that only set a key of the config. An option that was not given leaves the key alone.
CONFIG_KEYS = {
    "data_path": "DATA.DATA_PATH",
    "zip": "DATA.ZIP_MODE",
    "cache_mode": "DATA.CACHE_MODE",
    "batch": "DATA.BATCH_SIZE",
    "workers": "DATA.NUM_WORKERS",
    "seed": "SEED",
    "checkpoint": "MODEL.RESUME",
    "output": "OUTPUT",
    "tag": "TAG",
    "output_kind": "MODEL.OUTPUT_KIND",
}


_OF_MODEL = {
    "weights": ("MODEL.WEIGHTS",),
    "img_size": ("DATA.IMG_SIZE",),
    "window": ("MODEL.SWIN.WINDOW_SIZE", "MODEL.SWINV2.WINDOW_SIZE"),
}


Words = Mapping[str, str]
"""Our flag -> what a front door of another tool calls it."""


def add_checkpoint(parser: argparse.ArgumentParser, meaning: str, head: bool = True, several: bool = False) -> None:
    """CHECKPOINT, or --checkpoint FILE; and what it is, where that is not to be had from itself.

    `several`: any number of them, and `checkpoint` is a list where they are given by place.
    """
    way: dict[str, Any] = {"action": OneWay, "dest": "checkpoint"}
    parser.add_argument(
        nargs="*" if several else "?", metavar="CHECKPOINT", default=argparse.SUPPRESS, help=meaning, **way
    )
    group = parser.add_argument_group("model")
    group.add_argument("--checkpoint", metavar="FILE", default=argparse.SUPPRESS, help="the same as a flag", **way)
    parser.set_defaults(checkpoint=None)
    add_config(group)
    if head:
        add_head(group)


def add_head(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replace-head", action="store_true", help="leave out a head of another number of classes")


def add_config(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument("--cfg", metavar="FILE",
                       help="YAML of the model, or a shipped one's name (default: the checkpoint says it)")  # fmt: skip
    group.add_argument("--weights", metavar="ema|raw|NAME",
                       help="which, of a file that holds several sets (default: as timm's loader)")  # fmt: skip
    group.add_argument("--img-size", type=whole, metavar="PIXELS", help="side of the pictures, if not the file's")
    group.add_argument("--window", type=whole, metavar="TOKENS",
                       help="side of the windows, if not the file's: positions are interpolated")  # fmt: skip
    group.add_argument("--opts", nargs="+", metavar="KEY VALUE", help="set keys of the config, as KEY VALUE pairs")


def add_output_kind(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument("--output-kind", choices=OUTPUT_KINDS,
                       help="what the model gives: logits, what its head reads, or the maps of its stages")  # fmt: skip


def add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if there is one"
    )
    group.add_argument("--seed", type=int, help="of the sample of pictures and of new weights (default: SEED, 0)")
    group.add_argument("--local_rank", "--local-rank", type=whole, help=argparse.SUPPRESS)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="DIR", help="folder of the results (default: output/<NAME>)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE",
                        help="print the result as JSON, or write it to FILE")  # fmt: skip


def add_data(parser: argparse.ArgumentParser, words: Words = {}, half: bool = True) -> None:  # noqa: B006
    """`half`: a half-precision baseline is scored, too."""
    group = parser.add_argument_group("pictures")
    group.add_argument(
        "--data-path", metavar="DIR", help="folder with train/ and val/, or their zips; digits, csv:FILE, ..."
    )
    group.add_argument(
        "--zip", action="store_true", default=None, help="zips and maps of DIR, though folders lie there"
    )
    group.add_argument("--cache-mode", choices=("no", "full", "part"), help="zip: keep no, all, or this rank's bytes")
    group.add_argument(words.get("--batch", "--batch"), type=whole, dest="batch", metavar="N",
                       help="pictures at a time, a rank (default: DATA.BATCH_SIZE)")  # fmt: skip
    group.add_argument("--workers", type=whole, metavar="N", help="processes that load pictures, at most")
    group.add_argument("--max-unreadable", type=float, default=0.01, metavar="SHARE",
                       help="end the run when more than this share is unreadable (default 0.01)")  # fmt: skip
    if half:
        group.add_argument("--half", default="auto", choices=("auto", "none", "float16", "bfloat16"),
                           help="half-precision baseline (default: float16 on a GPU, bfloat16 on a CPU)")  # fmt: skip


def add_original(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--float", dest="original", metavar="FILE",
                        help="the float checkpoint that QAT is compared with (default: looked for)")  # fmt: skip


def add_calibrator(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranges")
    by_bits = ", ".join(f"{name} from {bits} bits on" for bits, name in BY_BITS.items())
    group.add_argument("--calibrator", choices=(*CALIBRATORS, AUTO),
                       help=f"default: by a node's bits, {by_bits}; auto: node by node, by its cost")  # fmt: skip
    group.add_argument("--percentile", type=float, metavar="P",
                       help=f"means the percentile calibrator (default {DEFAULT_PERCENTILE})")  # fmt: skip
    group.add_argument("--exact-histogram", action="store_true", help="count every value, not a sample of each picture")


def add_passes(parser: argparse.ArgumentParser, automatic: bool = True) -> None:
    """`automatic`: where none is asked for, channels that stand out are evened out."""
    group = parser.add_argument_group("passes: what wins accuracy back, behind the calibration")
    group.add_argument("--passes", metavar="NAME|FILE", help=f"{', '.join(_recipes_of_passes())}, or a YAML file")
    if automatic:
        group.add_argument("--no-equalize", action="store_true",
                           help="leave channels that stand out as they are (without --passes)")  # fmt: skip


def _recipes_of_passes() -> list[str]:
    from swin_quant.base.shipped import shipped_files

    return [path.stem for path in shipped_files("passes")]


def passes_of(args: argparse.Namespace) -> PassPlan:
    """The passes that the options describe; main.py has no --no-equalize, and does nothing unasked."""
    from swin_quant.quant.passes.recipe import load_passes
    from swin_quant.tasks.passes import PassPlan

    if args.passes and getattr(args, "no_equalize", False):
        raise UsageError("--passes and --no-equalize: the recipe says whether to equalize: leave one of them out")
    if args.passes:
        return PassPlan.of(load_passes(args.passes), f" --passes {shlex.quote(args.passes)}")
    unasked = not getattr(args, "no_equalize", True)
    return PassPlan(automatic=unasked, words="" if unasked else " --no-equalize")


POLICY_CHANGES = ("--wprec", "--aprec", "--quant-per-tensor", "--narrow-range", "--off")
"""What changes a policy, beside --saturation-safe, which some commands have for their own policy, too."""


def add_policy(parser: argparse.ArgumentParser, unnamed: str | None = None) -> argparse._ArgumentGroup:
    """`unnamed`: which it is where none is named, for a command that takes one at a time."""
    group = parser.add_argument_group("policy: which nodes are quantized, and how")
    kinds = "built-in policies (`swin-quant policies` lists them) or YAML files"
    group.add_argument("--policy", nargs=1 if unnamed else "+", metavar="NAME|FILE",
                       help=f"one of the {kinds} (default: {unnamed})" if unnamed else kinds)  # fmt: skip
    group.add_argument("--wprec", type=whole, metavar="BITS", help="bits of weights, 2 to 8 (default: the policy's, 8)")
    group.add_argument(
        "--aprec", type=whole, metavar="BITS", help="bits of activations, 2 to 8 (default: the policy's, 8)"
    )
    group.add_argument("--quant-per-tensor", action="store_true", help="one range a weight, whatever the policy says")
    group.add_argument("--narrow-range", action="store_true", help="weights to -127..127 instead of -128..127")
    group.add_argument("--saturation-safe", action="store_true",
                       help="weights of 7 bits: exact products on CPUs without VNNI")  # fmt: skip
    group.add_argument("--off", nargs="+", metavar="NODES", help="nodes that stay float: names with * and ?, or roles")
    return group


def config_of(args: argparse.Namespace, keys: Mapping[str, str] = CONFIG_KEYS) -> CfgNode:
    """The config that the options describe: file (else what the checkpoint says), --opts, then options of their own.

    `keys`: the options that set keys, where not all of them do.
    """
    from swin_quant.checkpoint.identify import config_for, config_given
    from swin_quant.config import architecture

    args.checkpoint = found(args.checkpoint)
    given: Mapping[str, Any] = {key: getattr(args, option, None) for option, key in keys.items()}
    overrides = {key: value for key, value in given.items() if value is not None} | model_keys(args)
    opts = args.opts or ()
    if args.cfg:
        cfg = config_given(args.cfg, args.checkpoint, opts, overrides)
    elif args.checkpoint:
        if len(opts) % 2:
            raise UsageError(f"--opts takes pairs KEY VALUE, but got {len(opts)} words: {' '.join(opts)}")
        elsewhere = {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False}  # a card's are of another machine
        cfg = config_for(args.checkpoint, elsewhere | dict(zip(opts[::2], opts[1::2], strict=True)) | overrides)
    else:
        raise UsageError("no model: give a CHECKPOINT, or --cfg FILE")
    if getattr(args, "window", None) and "WINDOW_SIZE" not in architecture(cfg):
        raise UsageError(f"--window {args.window}: {cfg.MODEL.NAME} is no Swin, and has no windows of one size")
    if not 0 <= cfg.SEED < 2**32:
        raise UsageError(f"SEED (--seed) {cfg.SEED}: must be from 0 to {2**32 - 1}")
    return cfg


def model_keys(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say of the weights and of their size."""
    given = {key: getattr(args, option, None) for option, keys in _OF_MODEL.items() for key in keys}
    return {key: value for key, value in given.items() if value is not None}


def found(checkpoint: str | None) -> str | None:
    """The file behind a name of timm's or Hugging Face's hub, in a snapshot's folder, or of a part; else the path."""
    from swin_quant.checkpoint.sources import local_file

    named = checkpoint and (checkpoint.startswith(HUBS) or os.path.isdir(checkpoint) or "-of-" in checkpoint)
    return str(local_file(checkpoint)) if checkpoint and named else checkpoint


def method_of(args: argparse.Namespace) -> Method:
    """How the options say that ranges are found."""
    from swin_quant.quant.calibration import Method

    given = args.percentile is not None
    name = args.calibrator or ("percentile" if given else None)
    return Method(name, args.percentile if given else DEFAULT_PERCENTILE, args.exact_histogram)


def policies_of(args: argparse.Namespace) -> list[Policy]:
    """The policies that the options name, in order; empty if they name none.

    One that other options change gets a name of its own, so that its results are not taken for those of the original.
    """
    from swin_quant.quant.policies import load_policy

    names = list(args.policy or ())
    if "auto" in names:
        raise UsageError("--policy auto: `quantize` has it, and `search` finds it for a calibrated checkpoint")
    rules = _extra_rules(args)
    policies = [load_policy(name) for name in names]
    if rules and not policies:
        raise UsageError("options that change a policy need --policy")
    counted = Counter(policy.sha256 for policy in policies)
    if twice := [policy.name for policy in policies if counted[policy.sha256] > 1]:
        raise UsageError(f"--policy: {' and '.join(dict.fromkeys(twice))} is given twice, by its rules")
    if not rules:
        return policies
    changes = " ".join(_changes(args))
    nothing = load_policy("float")
    return [policy if policy.sha256 == nothing.sha256 else _changed(policy, rules, changes) for policy in policies]


def policy_of(args: argparse.Namespace) -> Policy | None:
    """The policy of a command that takes one; None for its own, which --saturation-safe may change in its place."""
    if args.saturation_safe and not args.policy and len(_changes(args)) == 1:
        return None
    policies = policies_of(args)
    return policies[0] if policies else None


def tell_bits(policies: Sequence[Policy]) -> None:
    """Say of policies of few bits what becomes of them. 7 bits are for export."""
    from swin_quant.base.progress import log

    if few := [policy.name for policy in policies if any(rule.bits and rule.bits < 7 for rule in policy.rules)]:
        log.info(
            "%s: fewer than 8 bits are simulated: ONNX files hold such weights in int8, no smaller and no faster ("
            "those of 4 bits in INT4 with `export --int4-weights`), and no such activations; FasterTransformer takes "
            "neither",
            listed(few),
        )


def _changed(policy: Policy, rules: list[Rule], changes: str) -> Policy:
    return replace(policy.and_then(*rules), name=f"{policy.name} {changes}")


def _changes(args: argparse.Namespace) -> list[str]:
    """What the options change in a policy, as words for its name."""
    words = [f"W{args.wprec}"] if args.wprec else []
    words += [f"A{args.aprec}"] if args.aprec else []
    words += ["per-tensor"] if args.quant_per_tensor else []
    words += ["narrow-range"] if args.narrow_range else []
    words += ["saturation-safe"] if args.saturation_safe else []
    return words + [f"-{selector}" for selector in args.off or ()]


def _extra_rules(args: argparse.Namespace) -> list[Rule]:
    from swin_quant.backends.saturation import SAFE_WEIGHTS
    from swin_quant.quant.policy import Rule

    if args.wprec and args.saturation_safe:
        raise UsageError("--wprec and --saturation-safe both set the bits of weights: give one of them")
    rules = []
    for flag, bits in (("--wprec", args.wprec), ("--aprec", args.aprec)):
        if bits is not None and not 2 <= bits <= 8:
            raise UsageError(f"{flag} {bits}: must be from 2 to 8")
    if args.wprec or args.quant_per_tensor or args.narrow_range:
        granularity = "per-tensor" if args.quant_per_tensor else None
        weights = ("role:gemm_weight",)
        rules.append(
            Rule(nodes=weights, bits=args.wprec, granularity=granularity, narrow_range=args.narrow_range or None)
        )
    if args.saturation_safe:
        rules.append(SAFE_WEIGHTS)
    if args.aprec:
        rules.append(Rule(nodes=("role:activation",), bits=args.aprec))
    if args.off:
        rules.append(Rule(disable=tuple(args.off)))
    return rules
