"""Attacked parsers of pictures and data sets."""

import contextlib
import functools
import importlib.util
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from parser_inputs import Files, Parser, encoded
from PIL import Image

from swin_quant.data.archives import ZipPictures
from swin_quant.data.class_names import list_wnids
from swin_quant.data.pictures import UnreadablePicture, decode
from swin_quant.data.sources import open_pictures
from swin_quant.score.scoring import class_names


def picture(kind: str, mode: str, seed: int = 0, **options) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (24, 32, 4), dtype=np.uint8)
    grey = mode.startswith("I;16")
    image = Image.fromarray(noise[..., 0].astype(np.uint16) * 257) if grey else Image.fromarray(noise).convert(mode)
    return encoded(kind, lambda kind, file, **more: image.save(file, kind, **more), **options)


def pictures(*kinds: tuple) -> list[Files]:
    return [{"x": picture(kind, mode, **(more[0] if more else {}))} for kind, mode, *more in kinds]


PNGS = [("PNG", "RGB"), ("PNG", "I;16"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "1")]
JPEGS = [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("JPEG", "RGB", {"progressive": True})]
OTHERS = [("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB"), ("TIFF", "L", {"compression": "tiff_lzw"}), ("TIFF", "I;16"),
          ("WEBP", "RGB"), ("PPM", "RGB"), ("PPM", "L")]  # fmt: skip
RARE = [("AVIF", "RGB"), ("TGA", "RGB"), ("TGA", "RGBA", {"rle": True}),
        ("PCX", "P"), ("QOI", "RGB"), ("SGI", "RGB", {"rle": True}), ("XBM", "1")]  # fmt: skip


def see(folder: Path) -> None:
    decode((folder / "x").read_bytes(), "x")


def archives() -> list[Files]:
    found = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for number in range(4):
                archive.writestr(f"c{number % 3}/{number}.png", picture("PNG", "RGB", number))
        lines = "".join(f"c{number % 3}/{number}.png\t{number % 3}\n" for number in range(4))
        found.append({"val.zip": buffer.getvalue(), "val_map.txt": lines.encode(), "classes.txt": b"cat\ndog\nfox\n"})
    return found


def read_archive(folder: Path) -> None:
    opened = ZipPictures(folder, "val", 3)
    for index in range(min(len(opened), 8)):
        with contextlib.suppress(UnreadablePicture):
            opened.read(index)


def tables() -> list[Files]:
    files = {f"c{number}.png": picture("PNG", "RGB", number) for number in range(3)}
    texts = ("path,label\nc0.png,0\nc1.png,2\n", "c0.png\tcat\nc1.png\tdog\nc2.png\tfox\n",
             '"label";"split";"file_name"\r\n0;val;"c2.png"\r\n1;train;c1.png\r\n')  # fmt: skip
    return [{"val.csv": text.encode(), **files} for text in texts]


def shards() -> list[Files]:
    made = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            for number in range(3):
                key = ("" if form == tarfile.USTAR_FORMAT else "x" * 120 + "/") + f"{number:04d}"
                for name, data in ((f"{key}.png", picture("PNG", "L", number)), (f"{key}.cls", str(number).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        made.append({"val-0000.tar": buffer.getvalue(), "classes.txt": b"cat\ndog\nfox\n"})
    return made


def cifars() -> list[Files]:
    ten = b"".join(bytes([label]) + bytes(range(256)) * 12 for label in (0, 9, 3))
    hundred = b"".join(bytes([1, label]) + bytes(range(256)) * 12 for label in (0, 99))
    return [{"test_batch.bin": ten, "batches.meta.txt": b"a\n" * 10}, {"test.bin": hundred}]


def pickled_cifars() -> list[Files]:
    batch = {b"labels": [0, 9], b"data": np.arange(6144, dtype=np.uint8).reshape(2, 3072)}
    meta = pickle.dumps({"label_names": [f"c{number}" for number in range(10)]}, protocol=2)
    return [{"test_batch": pickle.dumps(batch, protocol=version), "batches.meta": meta} for version in (2, 4)]


def parquets() -> list[Files]:
    import pyarrow
    import pyarrow.parquet

    note = json.dumps({"info": {"features": {"label": {"names": ["cat", "dog", "fox"]}}}})
    stored = pyarrow.array([picture("PNG", "L", number) for number in range(3)])
    by_number = {"image": stored, "label": pyarrow.array(["cat", "dog", "fox"]).dictionary_encode()}
    by_prefix = {"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}}
    plain = pyarrow.table({"image": stored, "label": [0, 1, 2]})
    images = [{"bytes": picture("PNG", "L", number), "path": f"{number}.png"} for number in range(3)]
    table = pyarrow.table({"image": images, "label": [0, 1, 2]}).replace_schema_metadata({"huggingface": note})
    return [
        {"val.parquet": encoded(content, pyarrow.parquet.write_table, row_group_size=2, **how)}
        for content, how in (
            (table, {"compression": "none"}), (table, {"compression": "snappy"}), (plain, by_prefix),
            (pyarrow.table(by_number), {"compression": "zstd", "data_page_version": "2.0"}),
        )
    ]  # fmt: skip


def validations() -> list[Files]:
    """Labels of the flat validation folder, in each form; one picture, since only labels are read."""
    jpeg = {"ILSVRC2012_val_00000001.JPEG": picture("JPEG", "L")}
    wnids = list_wnids(1000)
    ids = "\n".join(f"{wnid} {number} name" for number, wnid in enumerate(reversed(wnids), 1)).encode()
    texts = (
        {"val.txt": b"ILSVRC2012_val_00000001.JPEG 7\n", "synset_words.txt": "\n".join(wnids).encode()},
        {"LOC_val_solution.csv": f"ImageId,PredictionString\nILSVRC2012_val_00000001,{wnids[3]} 1 2 3 4\n".encode()},
        {"imagenet_2012_validation_synset_labels.txt": wnids[5].encode()},
        {"ILSVRC2012_validation_ground_truth.txt": b"490\n", "map_clsloc.txt": ids},
    )
    return [{**jpeg, **files} for files in texts]


def read_data_set(kind: str, folder: Path, classes: int | None = 3) -> None:
    opened = open_pictures(f"{kind}:{folder}", "val", num_classes=classes)
    for index in range(min(len(opened), 8)):
        with contextlib.suppress(UnreadablePicture):
            opened.read(index)


def labels() -> list[Files]:
    return [{"x.txt": text.encode()} for text in ("cat\ndog\nfox\n", "\ufeffchat\n\nchien\r\nrenard é")]


has_pyarrow = importlib.util.find_spec("pyarrow") is not None
PICTURE_PARSERS = (
    Parser("zip and map", archives, read_archive),
    Parser("table of pictures", tables, lambda folder: read_data_set("csv", folder, None)),
    Parser("tar shards", shards, functools.partial(read_data_set, "wds")),
    Parser("CIFAR", cifars, lambda folder: read_data_set("cifar", folder, None)),
    Parser("CIFAR, pickled", pickled_cifars, lambda folder: read_data_set("cifar-python", folder, None)),
    Parser("ILSVRC labels", validations, lambda folder: read_data_set("ilsvrc", folder, 1000)),
    *([Parser("Parquet", parquets, functools.partial(read_data_set, "parquet"))] if has_pyarrow else []),
    Parser("class names", labels, lambda folder: class_names(3, str(folder / "x.txt"))),
    Parser("PNG", lambda: pictures(*PNGS), see),
    Parser("JPEG", lambda: pictures(*JPEGS), see),
    Parser("other pictures", lambda: pictures(*OTHERS), see),
    Parser("rare pictures", lambda: pictures(*RARE), see),
)
