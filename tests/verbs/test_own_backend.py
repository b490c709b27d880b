"""A backend of another package exports, is verified, scored and timed without a change to our files."""

import csv
from pathlib import Path

import pytest

from swin_quant.backends.open_artifact import open_artifact


@pytest.fixture
def toy(install):
    install("toy = toy_backend:BACKEND")


@pytest.fixture
def files(toy, run, own, tmp_path):
    """A calibrated checkpoint, and its export for the toy backend in the same folder."""
    done = run("export", "--checkpoint", own, "--for", "toy", "--check", "--output", tmp_path)
    assert done.code == 0 and "check: toy against torch fake-quant" in done.err, done.err
    assert f"next: swin-quant verify {done.out.strip()}" in done.err
    return own, Path(done.out.strip())


def test_an_installed_backend_exports_is_verified_and_scored(files, run, pictures):
    _, file = files
    assert open_artifact(file).record["backend"] == "toy"
    flags = ("--data-path", pictures, "--device", "cpu")
    assert run("verify", file, *flags).code == 0
    run("evaluate", file, "--half", "none", *flags).ok()
    card = open_artifact(file).card
    assert card.verification[0]["engine"] == "toy" and card.verification[0]["passed"]
    assert [(result["engine"], result["precision"]) for result in card.results] == [
        ("torch", "float32"),
        ("toy", "float32"),
        ("toy", "int8"),
    ]


@pytest.mark.slow
def test_an_installed_backend_is_timed_beside_its_own_float_baseline(files, run, tmp_path):
    checkpoint, _ = files
    words = ("--batch", 1, "--rounds", 1, "--seconds", 0.001, "--threads", 1, "--output", tmp_path)
    run("bench", checkpoint, "--engine", "toy", *words).ok()
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [row["candidate"] for row in rows] == ["torch float32", "toy float32", "toy int8 qdq"]
    assert rows[2]["baseline"] == "toy float32" and float(rows[2]["p50_ms"]) > 0


def test_it_refuses_what_its_descriptor_does_not_take(toy, run, calibrated, tmp_path):
    words = ("export", "--checkpoint", calibrated, "--output", tmp_path, "--for")
    assert "--opset: means nothing to --for toy" in run(*words, "toy", "--opset", 20).error(2)
    assert "--saturation-safe: means nothing to --for toy" in run(*words, "toy", "--saturation-safe").error(2)
    assert "did you mean toy?" in run(*words, "tooy").error(2)
