"""CIFAR's binary batches, written here record by record."""

import pickle

import numpy as np
import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.sources import open_pictures
from tests.helpers.refusals import refused


def batch(path, pictures, labels, before=()):
    planes = (np.asarray(picture).transpose(2, 0, 1).tobytes() for picture in pictures)
    path.write_bytes(b"".join(bytes([*before, label]) + data for label, data in zip(labels, planes, strict=True)))


@pytest.fixture
def cifar10(tmp_path, folders):
    root = tmp_path / "cifar" / "cifar-10-batches-bin"
    root.mkdir(parents=True)
    pictures = [folders.read(index) for index in range(6)]
    batch(root / "test_batch.bin", pictures, folders.labels)
    for number in range(1, 6):
        both = slice(number - 1, number + 1)
        batch(root / f"data_batch_{number}.bin", pictures[both], folders.labels[both])
    (root / "batches.meta.txt").write_text("\n".join(f"class {n}" for n in range(10)))
    return root


def test_batches_give_the_pictures_of_the_folders(cifar10, alike):
    for place in (str(cifar10), str(cifar10.parent), f"cifar:{cifar10}"):
        alike(open_pictures(place, "val", num_classes=10))
        alike(open_pictures(place, "test", num_classes=10))
        alike(open_pictures(place, "train", num_classes=10), [0, 1, 1, 2, 2, 3, 3, 4, 4, 5])
    pictures = open_pictures(str(cifar10), "train")
    assert pictures.names[3] == "data_batch_2.bin/00001" and pictures.class_names[9] == "class 9"


def test_cifar100_has_its_fine_labels(tmp_path, folders, alike):
    batch(tmp_path / "test.bin", [folders.read(index) for index in range(6)], folders.labels, before=[19])
    pictures = open_pictures(str(tmp_path), "val", num_classes=100)
    alike(pictures)
    assert pictures.class_names[:2] == ["0", "1"]


def test_what_is_wrong_with_a_batch_is_named(cifar10):
    file = cifar10 / "test_batch.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(SwinQuantError, match=r"test_batch\.bin: 18437 bytes are not records of 3073: it is cut off"):
        open_pictures(str(cifar10), "val")
    file.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    refused(lambda: open_pictures(str(cifar10), "val"), "test_batch.bin, record 1: label 10 is outside 0 to 9")
    file.write_bytes(b"")
    refused(lambda: open_pictures(str(cifar10), "val"), "test_batch.bin: is empty")
    (cifar10 / "data_batch_3.bin").unlink()
    refused(lambda: open_pictures(str(cifar10), "train"), "data_batch_3.bin: no such batch")


def theirs(labels: list[int], pixels: bytes) -> bytes:
    """A batch as python 2 wrote it, protocol 2: strings are BINSTRING, lists of BININT1."""
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(K\x00tR(K\x01T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    return b"\x80\x02}q\x01(U\x0bbatch_labelU\x04testU\x06labelsq\x02](" + numbers + b"eU\x04data" + array + b"u."


@pytest.fixture
def pickled(tmp_path, folders):
    root = tmp_path / "py" / "cifar-10-batches-py"
    root.mkdir(parents=True)
    pixels = np.stack([np.asarray(folders.read(index)).transpose(2, 0, 1).ravel() for index in range(6)])
    (root / "test_batch").write_bytes(theirs(folders.labels, pixels.tobytes()))
    for number in range(1, 6):  # as python 3 would write them
        part = {b"labels": folders.labels[number - 1 : number + 1], b"data": pixels[number - 1 : number + 1]}
        (root / f"data_batch_{number}").write_bytes(pickle.dumps(part, protocol=2 if number % 2 else 4))
    (root / "batches.meta").write_bytes(pickle.dumps({"num": 9, "label_names": [f"class {n}" for n in range(10)]}, 2))
    return root


def test_pickled_batches_give_the_pictures_of_the_folders(pickled, alike):
    for place in (str(pickled), str(pickled.parent), f"cifar-python:{pickled}"):
        alike(open_pictures(place, "val", num_classes=10))
        alike(open_pictures(place, "train", num_classes=10), [0, 1, 1, 2, 2, 3, 3, 4, 4, 5])
    assert open_pictures(str(pickled), "val").class_names[9] == "class 9"


def test_no_pickle_is_ever_run(pickled, tmp_path):
    flag = tmp_path / "run"
    for evil in (f"cos\nsystem\n(S'touch {flag}'\ntR.".encode(), b"", b"\x80\x02T\xff\xff\xff\x7fx", b"\x80\x04\x95"):
        (pickled / "test_batch").write_bytes(evil)
        with pytest.raises(SwinQuantError, match=r"test_batch: (not a readable batch of CIFAR|0 bytes of pictures)"):
            open_pictures(str(pickled), "val", num_classes=10)
    (pickled / "test_batch").write_bytes(theirs([1, 2], bytes(3072)))
    refused(lambda: open_pictures(str(pickled), "val", num_classes=10), "3072 bytes of pictures, but 2 labels")
    (pickled / "test_batch").write_bytes(theirs([1, 10], bytes(6144)))
    refused(lambda: open_pictures(str(pickled), "val", num_classes=10), "record 1: label 10 is outside 0 to 9")
    assert not flag.exists()
