import logging
from io import BytesIO

import pytest
import torch

from swin_quant.train.snapshot import Snapshots
from tests.helpers.refusals import refused


def content(number):
    return {"model": {"w": torch.full((1000,), float(number))}, "position": {"total": number}}


def test_the_newest_are_kept_beside_the_best(tmp_path):
    snapshots = Snapshots(tmp_path / "snapshots", keep=2)
    assert snapshots.newest() is None
    for number in (1, 20, 300):
        snapshots.save(number, content(number))
    like = content(0)["model"]
    assert snapshots.best(like, 7) is None
    snapshots.save_best({**content(7), "epoch": 7})
    assert [path.name for path in snapshots.newest_first()] == ["step_000000300.pt", "step_000000020.pt"]
    assert snapshots.newest()["position"]["total"] == 300
    assert torch.equal(snapshots.best(like, 7)["w"], torch.full((1000,), 7.0))
    snapshots.clear()
    assert list(snapshots.folder.iterdir()) == []


def flipped(data):
    """One bit in the middle of the weights."""
    data = bytearray(data)
    data[len(data) // 2] ^= 1
    return data


def foreign(_):
    torch.save({"weights": torch.ones(3)}, file := BytesIO())
    return file.getvalue()


@pytest.mark.parametrize("damage", [lambda data: data[:-500], flipped, lambda data: b"", foreign])
def test_a_damaged_newest_gives_way_to_the_one_before_with_a_warning(tmp_path, caplog, damage):
    snapshots = Snapshots(tmp_path, keep=3)
    for number in (1, 2):
        snapshots.save(number, content(number))
    first, second = snapshots.newest_first()
    first.write_bytes(damage(first.read_bytes()))
    with caplog.at_level(logging.WARNING, "swin_quant"):
        assert snapshots.newest()["position"]["total"] == 1
    assert "step_000000002.pt is damaged" in caplog.text
    second.write_bytes(damage(second.read_bytes()))
    refused(lambda: snapshots.newest(), "no snapshot can be read")


def test_the_best_weights_of_another_model_or_a_later_epoch_are_passed_over(tmp_path, caplog):
    snapshots = Snapshots(tmp_path)
    like = {"w": torch.ones(3)}
    for model in (None, {"v": torch.ones(3)}, {"w": torch.ones(4)}, {"w": 3}):
        snapshots.save_best({"model": model, "epoch": 1})
        assert snapshots.best(like, 1) is None
    assert caplog.text.count("best.pt is damaged and is passed over") == 4
    snapshots.save_best({"model": like, "epoch": 5})
    assert snapshots.best(like, 3) is None and "is of epoch 5, not 3" in caplog.text


def test_nothing_in_a_snapshot_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    torch.save({"format": "swin-quant/snapshot/1", "evil": Evil()}, tmp_path / "step_000000001.pt")
    refused(lambda: Snapshots(tmp_path).newest())
    assert not (tmp_path / "made").exists()
