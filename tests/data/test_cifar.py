"""CIFAR's binary batches, written here record by record."""

import numpy as np
import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.sources import open_pictures


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
        batch(
            root / f"data_batch_{number}.bin",
            pictures[number - 1 : number + 1],
            folders.labels[number - 1 : number + 1],
        )
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
    with pytest.raises(SwinQuantError, match=r"test_batch\.bin, record 1: label 10 is outside 0 to 9"):
        open_pictures(str(cifar10), "val")
    file.write_bytes(b"")
    with pytest.raises(SwinQuantError, match=r"test_batch\.bin: is empty"):
        open_pictures(str(cifar10), "val")
    (cifar10 / "data_batch_3.bin").unlink()
    with pytest.raises(SwinQuantError, match=r"data_batch_3\.bin: no such batch"):
        open_pictures(str(cifar10), "train")


def test_pickles_are_refused_unread(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(SwinQuantError, match="data_batch_1: CIFAR's python version is of pickles, .* binary version"):
        open_pictures(str(tmp_path), "train", num_classes=10)
