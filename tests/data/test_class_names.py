"""Classes of data and of a model are matched by name; mismatches are refused with both lists."""

import logging
import random

import pytest

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError
from swin_quant.data.class_names import fit, get_english_names, in_order, list_wnids, stated
from swin_quant.data.sources import open_pictures
from tests.helpers.refusals import refused

PETS = ["cat", "dog", "fox"]


class Listed:
    """Labels without pictures: one a class, in order."""

    def __init__(self, class_names):
        self.class_names, self.labels = class_names, list(range(len(class_names)))


def labels(model, data, classes=None):
    """The new labels for 0, 1, ... of `data`."""
    pictures = Listed(data)
    fit(pictures, classes or len(model), model, "data: val")
    return pictures.labels


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        (PETS, PETS, [0, 1, 2]),
        (["fox", "cat", "dog"], PETS, [1, 2, 0]),
        (PETS, ["fox"], [2]),
        (PETS, ["DOG", "Cat", "fox"], [1, 0, 2]),
        (["red fox", "Grey Wolf"], ["Red_Fox", "grey_wolf"], [0, 1]),
        (["Polish", "polish"], ["polish", "Polish"], [1, 0]),
        (PETS, ["0", "1", "2"], [0, 1, 2]),
        (PETS, ["1", "2", "3"], [0, 1, 2]),
        (["0", "1", "2"], PETS, [0, 1, 2]),
        (["1", "10", "2"], ["1", "2", "10"], [0, 2, 1]),
    ],
    ids=str,
)
def test_labels_are_those_of_the_model_of_that_name(model, data, expected):
    assert labels(model, data) == expected


@pytest.mark.parametrize(
    ("model", "data", "warned"),
    [
        ("0 1 2", "cat dog fox", "the names of the model are numbers: cat is taken for 0 of the model"),
        ("cat dog fox", "1 2 3", "the names of the data are numbers: 1 is taken for cat of the model"),
        ("0 1 2", "0 1 2", None),
        ("0 1 2", "1 2 3", None),
        ("cat dog fox", "fox", None),
    ],
)
def test_numbers_on_one_side_are_matched_by_position_with_a_warning(model, data, warned, caplog):
    labels(model.split(), data.split())
    told = [f"data: val: classes are matched by position, since {warned}"] if warned else []
    assert [record.getMessage() for record in caplog.records] == told


@pytest.mark.parametrize(("classes", "named"), [(10, True), (1000, False)])
def test_a_model_of_numbered_classes_has_their_numbers_unless_it_may_be_imagenets(classes, named):
    numbers = list(map(str, range(classes)))
    assert stated(numbers, classes) == (numbers if named else [])


@pytest.mark.parametrize(
    ("data", "there", "model"),
    [
        (["cat", "dog", "wolf"], "wolf", "fox"),
        (["cat", "dog", "fox", "wolf"], "wolf", "none"),
        (["cat", "Cat"], "cat, Cat", "dog, fox"),
        ([f"c{n:02}" for n in range(30)], "c00, c01, c02, c03 and 26 more", "cat, dog, fox"),
        (["cat", "dog", "a\x1b[31m\n"], r"a\x1b[31m\n", "fox"),
    ],
    ids=["one", "more", "twice", "many", "escape"],
)
def test_a_difference_is_refused_with_both_lists(data, there, model):
    both = f"data: val has other classes than the model: {there} there alone, {model} in the model"
    assert len(refused(lambda: labels(PETS, data), both)) < 400


def test_without_names_the_number_counts():
    assert labels([], PETS, 3) == [0, 1, 2]
    refused(lambda: labels([], PETS, 4), "has 3 classes, but MODEL.NUM_CLASSES is 4")


@pytest.mark.parametrize("classes", [1000, 11221, 11821, 21841, 21842, 21843, 12])
def test_imagenets_lists_are_timms(classes):
    """They are read as files; timm's own code says which number of classes has which list."""
    data = import_timm().data
    subset = data.infer_imagenet_subset({"num_classes": classes})
    known = data.ImageNetInfo(subset) if subset else None
    assert list_wnids(classes) == (tuple(known.label_names()) if known else None)
    assert [get_english_names(name) for name in list_wnids(classes) or ()] == (
        known.label_descriptions() if known else []
    )


@pytest.mark.parametrize("wnids_are", ["model's", "data's"])
def test_imagenets_wnids_are_its_english_names(imagenet, wnids_are):
    """A head in any order; two classes are called crane, and only their usual place distinguishes them."""
    english = [get_english_names(wnid) for wnid in imagenet]
    order = list(range(1000))
    random.Random(0).shuffle(order)
    cranes = [place for place in order if english[place] == "crane"]
    part = [place for place in range(1000) if place not in cranes]
    model, data = (imagenet, english) if wnids_are == "model's" else (english, imagenet)
    assert labels([model[place] for place in order], [data[place] for place in part]) == [order.index(p) for p in part]
    if wnids_are == "data's":
        assert labels(model, data) == list(range(1000))
    first = {name.split(",")[0]: place for place, name in enumerate(english)}
    assert labels(imagenet, ["tench", "Golden_Retriever"]) == [first["tench"], first["golden retriever"]]


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        ("1 10 2 3 4 5 6 7 8 9", "1 2 3 4 5 6 7 8 9 10"),
        ("0 1 10 2 3 4 5 6 7 8 9", "0 1 2 3 4 5 6 7 8 9 10"),
        ("02 01 00", "00 01 02"),
        ("2 10 30", "10 2 30"),  # numbers that do not count classes
        ("1 2 10 b", "1 10 2 b"),
        ("fox cat 10", "10 cat fox"),
    ],
)
def test_folders_that_count_are_in_the_order_of_numbers(names, ordered):
    assert in_order(names.split()) == ordered.split()


@pytest.fixture
def splits(tmp_path, files):
    """splits(train, val) -> a data path with one folder a class, or tables of names."""

    def make(train, val, table=False):
        for split, names in (("train", train), ("val", val)):
            lines = []
            for (file, data), name in zip(files.items(), names, strict=False):
                path = tmp_path / ("pictures" if table else split) / name / f"{split}_{file.split('/')[1]}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                lines.append(f"{path.relative_to(tmp_path)},{name}\n")
            if table:
                (tmp_path / f"{split}.csv").write_text("".join(lines))
        return str(tmp_path)

    return make


@pytest.mark.parametrize("table", [False, True], ids=["folders", "tables"])
def test_train_and_val_are_compared_where_nobody_names_the_model(splits, caplog, table):
    caplog.set_level(logging.INFO, "swin_quant")
    path = splits(PETS, ["cat", "dog", "aardvark"], table)
    with pytest.raises(SwinQuantError, match="other classes than train: aardvark there alone, fox in train alone"):
        open_pictures(path, "val", num_classes=3)
    assert open_pictures(path, "train", num_classes=3).labels == [0, 1, 2]
    named = open_pictures(path, "val", num_classes=3, class_names=["dog", "aardvark", "cat"])
    found = {name.split("/")[-2]: label for name, label in zip(named.names, named.labels, strict=True)}
    assert found == {"dog": 0, "aardvark": 1, "cat": 2}
    assert "another order than the model's" in caplog.text
