"""The plot of a training: what stands in it, by the text of an SVG."""

import re

import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.train.plot import draw
from swin_quant.train.record import EPOCHS, STEPS

pytest.importorskip("matplotlib")


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """All texts of the plot of four epochs that differ by a tenth of a point, and what stands beside them."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    (tmp_path / STEPS).write_text("total,loss\n1,0.9\n2,0.8\n")
    rows = "".join(f"{epoch},{epoch},0.8,0.7,{80 + epoch / 40},0.01\n" for epoch in range(1, 5))
    (tmp_path / EPOCHS).write_text(f"epoch,total,train_loss,val_loss,acc1,amax_drift\n{rows}")

    def drawn(**keys):
        return re.findall(r"<text[^>]*>([^<]*)</text>", draw(tmp_path, "svg", **keys).read_text())

    return drawn


def test_a_plot_is_an_svg_or_a_png_and_one_of_tables_that_are_gone_an_error_in_one_line(tmp_path, texts):
    for form, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        path = draw(tmp_path, form)
        assert path.name == f"training.{form}" and path.read_bytes().startswith(start)
    with pytest.raises(SwinQuantError, match="steps.csv: the table cannot be read: No such file"):
        draw(tmp_path / "away")


def test_the_models_to_compare_with_are_named_as_lines(texts):
    found = texts(title="swin_micro", levels={"float": 82.06, "PTQ": 75.5})
    assert {"swin_micro", "float 82.06", "PTQ 75.50"} <= set(found)


def test_chance_is_no_cliff_and_epochs_are_whole(texts):
    """Figures 0.075 points apart are drawn on an axis of two points; the axis of a drift of one size begins at zero."""
    found = texts()
    numbers = [float(text.replace("−", "-")) for text in found if re.fullmatch(r"[−\d.]+", text)]
    points = sorted(number for number in numbers if 70 < number < 90)
    assert points[-1] - points[0] >= 1.5
    assert {"1", "2", "3", "4"} <= set(found) and "1.5" not in found
