"""Options that the commands on artifacts share: engines and how they run, and pictures without labels."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.backends.registry import engines
from swin_quant.base.errors import UsageError
from swin_quant.cli.numbers import whole
from swin_quant.cli.options import CONFIG_KEYS
from swin_quant.score.options import EngineOptions

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.base.shards import Sharding
    from swin_quant.data.pictures import Pictures

DEFAULT_BATCH = 32


def add_engines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument("--engine", nargs="+", metavar="NAME", dest="engines",
                       help=f"{', '.join(engines())} (default: what it is exported for, else all)")  # fmt: skip
    group.add_argument("--threads", type=whole, metavar="N", help="of an engine (default: its own choice)")
    group.add_argument("--extension", nargs="+", metavar="FILE",
                       help="openvino: libraries with operators of your own (docs/custom_operators.md)")  # fmt: skip
    group.add_argument("--float-type", choices=("float32", "bfloat16", "float16"),
                       help="of what is not int8, for engines that choose it (default float32)")  # fmt: skip


def add_pictures(parser: argparse.ArgumentParser, workers: bool = True) -> None:
    """`workers`: other processes may load them."""
    group = parser.add_argument_group("pictures")
    group.add_argument(
        "--data-path", metavar="DIR", help="folder of pictures, or with val/ or its zip; digits, csv:FILE, ..."
    )
    group.add_argument("--images", nargs="+", metavar="PLACE", help="instead: files, folders, 'patterns'")
    group.add_argument("--zip", action="store_true", help="the zip of the split, even where a folder lies beside it")
    group.add_argument("--split", default="val", help="of --data-path (default val)")
    group.add_argument("--max-unreadable", type=float, default=0.01, metavar="SHARE",
                       help="end the run when more than this share is unreadable (default 0.01)")  # fmt: skip
    add_loading(group, workers)


def add_loading(group: argparse._ArgumentGroup, workers: bool = True) -> None:
    group.add_argument("--batch", type=whole, default=DEFAULT_BATCH, metavar="N",
                       help=f"pictures at a time (default {DEFAULT_BATCH})")  # fmt: skip
    if workers:
        group.add_argument("--workers", type=whole, default=8, metavar="N",
                           help="processes that load pictures, at most")  # fmt: skip


def add_shard(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--shard", type=whole, metavar="N", help="pictures a Parquet file (default 10000)")


def sharding_of(args: argparse.Namespace, folder: str) -> Sharding:
    """Parquet files in `folder`, of --shard pictures each."""
    from swin_quant.base.shards import ROWS, Sharding

    return Sharding(Path(folder), ROWS if args.shard is None else args.shard)


def engine_options(args: argparse.Namespace, world: World) -> EngineOptions:
    """How the options say that engines are run."""
    return EngineOptions(
        threads=args.threads,
        float_type=args.float_type,
        device=world.device.type,
        extensions=tuple(getattr(args, "extension", None) or ()),
    )


def overrides_of(args: argparse.Namespace) -> Mapping[str, Any]:
    """Keys of the config that options set. The data path in a card is of another machine, so it is not a default."""
    elsewhere = {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False}
    given = {key: getattr(args, option, None) for option, key in CONFIG_KEYS.items() if option != "checkpoint"}
    return elsewhere | {key: value for key, value in given.items() if value is not None}


def pictures_of(args: argparse.Namespace) -> Pictures:
    """The pictures that the options name; labels are not needed. UsageError for none, or for both kinds."""
    from swin_quant.data.named import NamedPictures
    from swin_quant.data.sources import open_pictures

    if bool(args.data_path) == bool(args.images):
        raise UsageError("no pictures: give --data-path DIR or --images PLACE ..." if not args.data_path
                         else "--data-path and --images both name the pictures: give one of them")  # fmt: skip
    if args.images:
        return NamedPictures(args.images)
    return open_pictures(args.data_path, args.split, zip_mode=args.zip, cache_mode="no")
