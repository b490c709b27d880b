"""The artifact of a wrapped module is compared with fake-quant, then kept or deleted; latency and `align` of such."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from vnni import exact_int8

import swin_quant as sq
from swin_quant.backends.backend import Backend
from swin_quant.verbs import export_compared
from swin_quant.verbs.export_compared import input_amax, likenesses


class Net(nn.Module):
    """Two outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.again, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        maps = self.again(torch.relu(self.stem(x)))
        return {"maps": maps, "vector": self.head(maps.mean((2, 3)))}


@pytest.fixture
def images():
    return torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model(images):
    return sq.calibrate(sq.wrap(Net(), 8, name="mine"), [images], "cpu", passes=[])


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", "swin_quant")
    lines = ("compared: ", "not compared with ")
    return lambda: [one.getMessage() for one in caplog.records if any(line in one.getMessage() for line in lines)]


@pytest.fixture
def noisy(monkeypatch):
    """OpenVINO with added errors, in proportion to the largest value of one output."""
    load = export_compared.engine_loader

    def break_it(share, **details):
        def loader(name):
            def broken(artifact, options):
                engine = load(name)(artifact, options)

                def run(images):
                    maps, vector = engine.run(images)
                    noise = torch.randn(vector.shape, generator=torch.Generator().manual_seed(2))
                    return [maps, vector + share * vector.abs().max() * noise]

                return replace(engine, run=run, details={**engine.details, **details})

            return broken

        monkeypatch.setattr(export_compared, "engine_loader", loader)

    return break_it


@exact_int8
def test_it_is_compared_on_what_calibrated_it_and_its_card_says_so(model, images, tmp_path, said):
    made = sq.export(model, "openvino", tmp_path)
    (line,) = said()
    assert line.startswith("compared: openvino ") and line.endswith(" on 16 inputs that calibrated it")
    (record,) = made.card.verification
    assert record["passed"] and record["agreement"] is None and record["pictures"] == 16
    assert sq.artifact(made.file).card.verification == [record]
    found, wanted = made.load()(images[:16]), model(images[:16])
    rows = [torch.cat([one.flatten(1).double() for one in part.values()], dim=1) for part in (found, wanted)]
    cosine = nn.functional.cosine_similarity(*rows).mean().item()
    assert record["cosine"] == pytest.approx(cosine, abs=1e-6)


@pytest.mark.nightly
def test_without_examples_noise_in_the_calibrated_range_is_compared(model, images, tmp_path, said):
    model.save(tmp_path / "mine_calib.pth")
    again = sq.load(tmp_path / "mine_calib.pth", Net())
    assert input_amax(again.module) == pytest.approx(float(images.abs().max()), rel=0.5)
    sq.export(again, "onnxruntime", tmp_path)
    assert said()[0].endswith(f" on 16 inputs of seeded noise up to {input_amax(again.module):.3g}, as calibrated")


@exact_int8
def test_an_engine_that_computes_something_else_leaves_nothing_behind(model, tmp_path, noisy):
    noisy(0.2)
    says = r"is not kept: openvino .* dB, fake-quant .* dB SQNR \(vector\)"
    with pytest.raises(sq.SwinQuantError, match=says) as found:
        sq.export(model, "openvino", tmp_path)
    assert "\n" not in str(found.value) and "compared False keeps it" in str(found.value)
    assert {file.suffix for file in tmp_path.iterdir()} == {".pth", ".json", ".npz"}
    assert not list(tmp_path.glob("*.onnx*")) and len(list(tmp_path.glob("*.json"))) == 1
    assert sq.export(model, "openvino", tmp_path, compared=False).file.exists()


def test_on_a_cpu_that_saturates_the_way_to_a_file_that_is_right_is_said(model, tmp_path, noisy, caplog):
    noisy(0.2, caution="this CPU has no VNNI")
    made = sq.export(model, "openvino", tmp_path)
    assert made.file.exists() and made.card.verification[0]["passed"] is False
    (line,) = (one.getMessage() for one in caplog.records if "is not to be deployed on this CPU" in one.getMessage())
    assert "SQNR (vector)" in line and line.endswith("saturation_safe makes a file whose products cannot")


def test_on_a_cpu_that_saturates_a_small_loss_passes_as_in_verify(model, images, tmp_path, noisy, said, caplog):
    noisy(0.01, caution="this CPU has no VNNI")
    made = sq.export(model, "onnxruntime", tmp_path)
    assert said()[0].endswith("; its int8 products saturate on this CPU") and "is not to be" not in caplog.text
    (here,) = made.card.verification
    (verified,) = (one for one in sq.verify(made, [images]).records if one["tolerance"] is not None)
    assert (here["passed"], here["tolerance"]) == (verified["passed"], verified["tolerance"]) == (True, 0.02)


def test_without_an_engine_a_line_says_that_it_was_not_compared(model, tmp_path, said, monkeypatch):
    sq.export(model, "tensorrt", tmp_path, "qdq", float_type="float32")
    assert said()[0].endswith("not compared with fake-quant: tensorrt builds its engine from this file")
    monkeypatch.setattr(Backend, "is_installed", property(lambda backend: backend.name != "openvino"))
    made = sq.export(model, "openvino", tmp_path)
    assert "not compared with fake-quant: engine openvino is not installed" in said()[1]
    assert made.file.exists() and not made.card.verification


def test_a_likeness_leaves_what_chance_does():
    exact = torch.ones(100, 8)  # sampling error of 800 values: 10 log10(1 + 2 sqrt(2 / 800)) = 0.41 dB
    for error, spare in ((0.1, 3.41), (0.1 * 10 ** (3.3 / 20), 0.11), (0.1 * 10 ** (3.5 / 20), -0.09)):
        (row,) = likenesses(["x"], [exact + error], [exact - 0.1], [exact], 60.0)
        assert row.fake_quant_db == pytest.approx(20, abs=1e-4) and row.spare_db == pytest.approx(spare, abs=0.01)
    (equal,) = likenesses(["x"], [exact], [exact], [exact], 60.0)
    assert equal.fake_quant_db == 60 and equal.spare_db > 0
    (few,) = likenesses(["x"], [exact[:1, :1] + 0.1], [exact[:1, :1] - 0.1], [exact[:1, :1]], 60.0)
    assert few.spare_db > 8
    (lost,) = likenesses(["x"], [exact * torch.nan], [exact - 0.1], [exact], 60.0)
    assert not lost.spare_db >= 0


@pytest.mark.nightly
def test_artifacts_are_timed_beside_each_other_and_aligned_with_their_model(model, images, tmp_path, run):
    quantized, plain = (sq.export(model, "onnxruntime", tmp_path, precision=what) for what in ("int8", "float"))
    words = [plain.file, quantized.file, "--no-accuracy", "--batch", 2, "--threads", 1, "--json"]
    rows = json.loads(run("evaluate", *words).ok().out)
    assert {row["subject"] for row in rows} == {f"{one.file} on onnxruntime" for one in (plain, quantized)}
    assert all(row["batch"] == 2 and row["ms"] > 0 for row in rows)
    for found in (sq.align(model, quantized, [images]), sq.align(model, str(quantized.file), [images])):
        assert {"stem", "again", "head", "map.0", "map.1"} <= {row.name for row in found.rows} and found.first is None
        assert all(row.sqnr_db > 30 for row in found.rows)
