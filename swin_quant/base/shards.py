"""Rows of many pictures as Parquet files, each written whole or not at all, shared among ranks, and resumed after an
interruption.

A shard's metadata has the `key` of its content: an existing shard with the same key is not computed again.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.base.reading import reading
from swin_quant.base.schema import checked

ROWS = 10_000
_KEY, _FACTS = b"swin_quant.of", b"swin_quant.facts"


@dataclass(frozen=True)
class Sharding:
    """The folder for shards, and the number of pictures in each. UsageError for no picture a shard."""

    folder: Path
    rows: int = ROWS

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UsageError(f"‹shard› {self.rows}: must be at least 1")


@dataclass(frozen=True)
class Shards:
    """The files `STEM-00000-of-00012.parquet` ... of `total` rows. `key`: a hash of all that they depend on."""

    how: Sharding
    stem: str
    total: int
    key: str

    def __post_init__(self) -> None:
        library("pyarrow", "data")
        ensure_writable_dir(self.how.folder)

    @property
    def files(self) -> list[Path]:
        count = -(-self.total // self.how.rows)
        return [self.how.folder / f"{self.stem}-{number:05d}-of-{count:05d}.parquet" for number in range(count)]

    def share(self, world: World) -> range:
        """This rank's shards, by number: each world.size-th."""
        return range(world.rank, len(self.files), world.size)

    def left(self, world: World) -> list[int]:
        """The missing shards of this rank. UsageError for a shard with another key."""
        mine = self.share(world)
        left = []
        for number, file in ((number, self.files[number]) for number in mine):
            if not file.exists():
                left.append(number)
                continue
            written = ""
            with suppress(SwinQuantError), reading(file, "shard"):
                found = _metadata(file)
                written = found.get(_KEY, b"").decode() if _FACTS in found else ""
            if written != self.key:
                raise UsageError(f"{file}: is not of this model, these pictures and options: choose another folder")
        if len(left) < len(mine):
            log.info("%d of %d shards are there already", len(mine) - len(left), len(mine))
        return left

    def places(self, number: int) -> range:
        """The rows, of `total`, in a shard."""
        return range(number * self.how.rows, min(self.total, (number + 1) * self.how.rows))

    def write(
        self, number: int, rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, Any]], facts: Any
    ) -> None:
        """Write a shard: its rows by pyarrow types of `columns`, and plain data on the whole shard."""
        pyarrow: Any = library("pyarrow", "data")
        from pyarrow import parquet

        schema = pyarrow.schema(list(columns), metadata={_KEY: self.key.encode(), _FACTS: json.dumps(facts).encode()})
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), sink)
        atomic_write_bytes(self.files[number], sink.getvalue().to_pybytes())
        log.info("%s: %d pictures", self.files[number].name, len(rows))

    def facts(self, number: int, kind: Any) -> Any:
        """The `facts` of a shard that was written: plain data of a `kind` (`schema.checked`)."""
        file = self.files[number]
        with reading(file, "shard"):
            return checked(kind, json.loads(_metadata(file)[_FACTS]), str(file), "its facts")


def _metadata(file: Path) -> dict[bytes, bytes]:
    from pyarrow import parquet

    return parquet.read_schema(file).metadata or {}
