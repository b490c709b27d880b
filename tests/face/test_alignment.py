"""`sq.align` in memory, and pictures of any kind by `sq.pictures`."""

import pytest
import torch

import swin_quant as sq


@pytest.fixture
def model(micro):
    return sq.load(micro / "swin.pth", config=micro / "swin.yaml")


def test_models_artifacts_and_dumps_are_sides(model, micro, tmp_path):
    other = sq.load(micro / "swin.pth", config=micro / "swin.yaml")
    other.module.head.weight.data *= 1.5
    found = sq.align(model, other, [torch.randn(2, 3, 32, 32)])
    assert isinstance(found, sq.Alignment) and found.first.name == "head" and found.pictures == 2
    assert "first divergence: forward/head" in str(found) and "<table>" in found._repr_html_()
    sq.calibrate(other, [torch.randn(4, 3, 32, 32)], "qdq")
    quantized = sq.align(model, other, [torch.randn(2, 3, 32, 32)], below=-100.0)
    assert quantized.first is None and quantized.rows[-1].sqnr_db < 60


def test_artifacts_and_places_are_compared_on_the_device_that_is_asked_for(model, micro, monkeypatch):
    for looks in ("torch.cuda.is_available", "torch.cuda.device_count"):
        monkeypatch.setattr(looks, lambda: 0)
    images = [torch.randn(2, 3, 32, 32)]
    assert sq.align(model, micro / "swin.pth", images, device="cpu").first is None
    with pytest.raises(sq.UsageError, match="device cuda: .* has no GPU"):
        sq.align(model, micro / "swin.pth", images, device="cuda")


def test_a_table_of_pictures_serves_as_a_folder_does(model, pictures, tmp_path):
    names = ("cat", "dog", "fox")
    rows = [f"{file},{names.index(file.parent.name)}\n" for file in sorted((pictures / "val").rglob("*.png"))]
    (tmp_path / "mine.csv").write_text("".join(rows))
    for place in (f"csv:{tmp_path}/mine.csv", tmp_path / "mine.csv"):
        table, folder = (
            sq.evaluate(model, each, half="none") for each in (sq.pictures(place), sq.pictures(pictures, "val"))
        )
        assert [row.acc1 for row in table.results] == [row.acc1 for row in folder.results]
        assert table.results[0].pictures == 7
    assert sq.align(model, model, sq.pictures(tmp_path / "mine.csv", count=3)).pictures == 3
