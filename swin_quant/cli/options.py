"""Options that several commands share: one word for one thing (`Words`: main.py's are older)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import UsageError
from swin_quant.cli.flags import OneWay, options_from
from swin_quant.cli.numbers import whole
from swin_quant.cli.shared import PassOptions, PolicyOptions, RangeOptions, found, pass_recipes
from swin_quant.config.outputs import OUTPUT_KINDS
from swin_quant.quant.names import AUTO, BY_BITS, CALIBRATORS, DEFAULT_PERCENTILE

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.quant.calibration import Method
    from swin_quant.quant.policy import Policy
    from swin_quant.tasks.passes import PassPlan

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
    group.add_argument("--passes", metavar="NAME|FILE", help=pass_recipes())
    if automatic:
        group.add_argument("--no-equalize", action="store_true",
                           help="leave channels that stand out as they are (without --passes)")  # fmt: skip


def passes_of(args: argparse.Namespace) -> PassPlan:
    """The passes that the options describe."""
    return options_from(args, PassOptions).plan()


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


def method_of(args: argparse.Namespace) -> Method:
    """How the options say that ranges are found."""
    return options_from(args, RangeOptions).method()


def policies_of(args: argparse.Namespace) -> list[Policy]:
    """The policies that the options name, in order; empty if they name none."""
    return options_from(args, PolicyOptions).policies()


def policy_of(args: argparse.Namespace) -> Policy | None:
    """The policy of a command that takes one; None for its own, which --saturation-safe may change in its place."""
    return options_from(args, PolicyOptions).one()
