"""Probabilities and their order against NumPy; whose names classes get."""

import numpy as np
import pytest
import torch

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.score.top_classes import class_names, top_classes


def test_the_best_classes_against_numpy():
    logits = torch.randn(4, 9) * 3
    exponents = np.exp(logits.double().numpy())
    probabilities = exponents / exponents.sum(1, keepdims=True)
    for row, guesses in zip(probabilities, top_classes(logits, [f"n{i}" for i in range(9)]), strict=True):
        order = np.argsort(-row)[:5]
        assert [guess.index for guess in guesses] == order.tolist()
        assert [guess.name for guess in guesses] == [f"n{i}" for i in order]
        assert [guess.probability for guess in guesses] == pytest.approx(row[order].tolist())


def test_large_logits_and_few_classes():
    ((best, second),) = top_classes(torch.tensor([[500.0, -500.0]]), ["a", "b"])
    assert (best.name, best.probability, second.probability) == ("a", 1.0, 0.0)


def test_names_of_imagenet_by_the_number_of_classes():
    names = class_names(1000)
    assert names[0].startswith("tench") and "tiger cat" in names[282] and len(names) == 1000
    assert len(class_names(21841)) == 21841
    assert class_names(3) == ["0", "1", "2"]


def test_a_file_comes_before_what_the_artifact_carries_and_that_before_imagenet(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffKatze\r\nHündin\r\n\r\n".encode())
    assert class_names(2, str(path), ["a", "b"]) == ["Katze", "Hündin"]
    assert class_names(2, None, ["a", "b"]) == ["a", "b"]
    assert class_names(1000, None, ["a", "b"])[0].startswith("tench")


def test_a_file_that_is_not_one_of_names(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SwinQuantError, match="labels.txt: is no list of class names: it is not UTF-8 text"):
        class_names(2, str(path))
    path.write_text("only")
    with pytest.raises(UsageError, match="labels.txt: has 1 names, the model 2 classes"):
        class_names(2, str(path))
    with pytest.raises(SwinQuantError, match="gone.txt: the list of class names cannot be read"):
        class_names(2, str(tmp_path / "gone.txt"))
