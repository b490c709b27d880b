"""The search on layers with known error and time: its pictures, its journal, and the noise of timing."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from swin_quant.base.files import Journal, sha256_of
from swin_quant.config import find_config, load_config
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import Sampling
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.distance import Loss
from swin_quant.quant.policy import Rule, load_policy, named_nodes
from swin_quant.quant.search import Budget, Unit
from swin_quant.score.candidate import Timing
from swin_quant.verbs.policy_costs import PolicyCosts, beyond_chance
from swin_quant.verbs.policy_search import find_policy, found_before
from swin_quant.verbs.search_settings import SearchedNetwork, SearchPictures, SearchSettings


class Known:
    """Costs of layers whose errors and milliseconds add up: 1 ms with all of them in int8."""

    units = (
        *(Unit(f"dear{i}", (f"dear{i}.x",), 0.2, 0.05) for i in range(3)),
        Unit("slow", ("slow.x",), 0.5, 1.0),
        *(Unit(f"good{i}", (f"good{i}.x",), 0.001, 0.05) for i in range(6)),
    )
    pictures, float_cost, has_others = 8, 3.0, False

    def __init__(self, settings):
        self.settings, self.journal = settings, self
        self.off = {}

    def keep(self, *_):
        pass

    def policy(self, off):
        disabled = load_policy("onnxruntime").and_then(Rule(disable=tuple(sorted(off))))
        found = replace(disabled, name=f"less {sorted(off)}")
        self.off[found.name] = off
        return found

    def takes(self, policy):
        return False

    def nodes_off(self, policy):
        return ["blocks.0.softmax", "blocks.1.softmax", *(f"{name}.x" for name in self.off[policy.name])]

    def nodes_on(self, policy):
        return len(self.units) - len(self.off[policy.name])

    def loss(self, policy):
        left = sum(unit.error for unit in self.units if unit.name not in self.off[policy.name])
        return Loss(-10 * math.log10(max(left, 1e-9)), left, 99.0, 0.0)

    def loss_of_others(self, policy):
        return None

    def costs(self, policies):
        return {p.name: 1 + sum(u.saved_ms for u in self.units if u.name in self.off[p.name]) for p in policies}


@pytest.fixture
def asked(tmp_path):
    """asked(setting=...) -> settings of a search on ONNX Runtime."""
    pytest.importorskip("onnxruntime")
    network = SearchedNetwork.of_config(load_config(find_config("swin_digits")))
    return lambda **how: SearchSettings(network, str(tmp_path / "x.pth"), "onnxruntime", tmp_path, **how)


def test_with_both_limits_the_most_that_the_time_allows_is_tried_too(asked):
    """Within the loss, 2 layers stay float, one of which takes a millisecond; the time allows 3 others."""
    found = find_policy(Known(asked(budget=Budget(min_sqnr=-10 * math.log10(0.45)), max_ms=1.2)))
    assert not found.met and {unit.name for unit in found.left_float} == {"dear0", "dear1", "dear2"}
    text = found.file.read_text()
    assert all(f"# dear{i}: " in text for i in range(3))
    assert text.endswith("# policy onnxruntime leaves these float:\n#   blocks.*.softmax: 2\n")


def test_a_drop_next_to_nothing_is_a_budget_like_any(asked, caplog):
    assert find_policy(Known(asked(budget=Budget(max_drop=1e-310, min_sqnr=-10 * math.log10(0.45))))).met
    asked(budget=Budget(max_drop=1e-310)).tell_if_few(8)
    assert "8 pictures hardly tell" in caplog.text


class Flattering(Known):
    """Policies lose nothing on the pictures by which they are chosen, and half of the error on others."""

    has_others = True

    def loss(self, policy):
        return replace(super().loss(policy), drop=0.01)

    def loss_of_others(self, policy):
        loss = super().loss(policy)
        return replace(loss, drop=loss.kl / 2)


@pytest.mark.parametrize("limit", [0.2, 0.26, 0.05])
def test_a_drop_that_other_pictures_do_not_bear_out_is_searched_for_again(asked, limit):
    found = find_policy(Flattering(asked(budget=Budget(max_drop=limit))))
    off = {unit.name for unit in found.left_float}
    left = sum(unit.error for unit in Known.units if unit.name not in off)
    assert found.met and 0 < found.found.nodes and left / 2 <= limit
    assert found.found.loss.drop == pytest.approx(max(0.01, left / 2))
    assert "and its drop on others" in " ".join(found.file.read_text().split())


def test_a_rival_whose_ranges_are_not_there_is_left_out(tiny_model, use_policy):
    """It needs lower ends, which other tools do not write."""
    model = use_policy(tiny_model("swin", DEPTHS=[1, 1], NUM_HEADS=[1, 2]), "qdq")
    calibrate(model, [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))])
    for node in named_nodes(model).values():
        node.bounds = None
    costs = object.__new__(PolicyCosts)
    costs.model, costs.file = model, "x.pth"
    costs.subject, costs.settings = SimpleNamespace(card=None), SimpleNamespace(is_timed=True)
    assert costs.takes(load_policy("qdq")) and not costs.takes(load_policy("onnxruntime"))


def test_pictures_of_several_sizes_are_measured_one_by_one(tmp_path):
    cfg = load_config(find_config("swin_digits"), overrides={"TEST.SHAPE": "shorter", "DATA.DATA_PATH": str(tmp_path)})
    (tmp_path / "val").mkdir()
    for name, width in (("a", 40), ("b", 60)):
        Image.new("RGB", (width, 40)).save(tmp_path / "val" / f"{name}.png")
    found = SearchPictures.drawn(PictureSet.of_config(cfg, "val"), Sampling(2, "val"), Preprocess.from_config(cfg))
    assert len({tuple(images.shape) for images in found.batches}) == 2


@pytest.mark.parametrize("total, others", [(9, 4), (7, 3), (4, 0)])
def test_what_confirms_is_none_of_what_chose(tmp_path, total, others):
    cfg = load_config(find_config("swin_digits"), overrides={"DATA.DATA_PATH": str(tmp_path)})
    (tmp_path / "val").mkdir()
    for level in range(total):
        Image.new("RGB", (28, 28), (20 * level,) * 3).save(tmp_path / "val" / f"{level}.png")
    found = SearchPictures.drawn(PictureSet.of_config(cfg, "val"), Sampling(4, "val"), Preprocess.from_config(cfg))
    again = torch.cat(found.others()) if others else torch.zeros(0)
    assert (found.others is None) is (others == 0) and len(again) == others
    levels = [{round(one.mean().item(), 3) for one in images} for images in (torch.cat(found.batches), again)]
    assert len(levels[0]) == 4 and len(levels[1]) == others and not levels[0] & levels[1]


def test_limits_are_written_alike_whatever_numbers_they_are(asked):
    flags = [asked(budget=Budget(max_drop=one)).flags for one in (1, 1.0, np.float64(1))]
    assert flags == [["--max-drop 1.0"]] * 3


@pytest.mark.parametrize("found", [[-1000.0, 5.0], [1.0, 0.0], [True, 2.0]])
def test_milliseconds_that_nothing_takes_are_measured_anew(tmp_path, caplog, found):
    (tmp_path / "x.json").write_text(json.dumps({"subject": {}, "entries": {"ms of all and none": found, "ms a": -1}}))
    costs = object.__new__(PolicyCosts)
    costs.timer, costs.journal = SimpleNamespace(extremes=lambda: (2.0, 3.0)), Journal(tmp_path / "x.json", {})
    costs.settings = SimpleNamespace(start=load_policy("qdq"))
    assert (costs.base_ms, costs.float_ms) == (2.0, 3.0) and "; measured anew" in caplog.text
    assert costs._known_ms(load_policy("qdq").sha256) == 2.0
    assert costs._known_ms("a") is None and json.loads((tmp_path / "x.json").read_text())["entries"]["ms a"] == -1


def test_layers_of_another_model_are_measured_anew(tmp_path, monkeypatch, caplog):
    entries = {"layers alone": {"fc1": {"nodes": ["no such node"], "error": 0.1}}}
    (tmp_path / "x.json").write_text(json.dumps({"subject": {}, "entries": entries}))
    costs = object.__new__(PolicyCosts)
    costs.model, costs.journal = torch.nn.Linear(1, 1), Journal(tmp_path / "x.json", {})
    monkeypatch.setattr(costs, "_alone", dict, raising=False)
    assert costs.layers == {} and "must be of this model's nodes; measured anew" in caplog.text


def test_what_was_found_by_other_timing_is_not_taken_for_what_is_asked_for(asked, tmp_path):
    (tmp_path / "x.pth").write_bytes(b"")
    settings = asked(budget=Budget(max_drop=1), pictures=SearchPictures([], ["a.png"]))
    policy, subject = load_policy("qdq"), settings.subject(sha256_of(tmp_path / "x.pth"))
    settings.file.write_text(json.dumps(policy.to_dict()))
    Journal(settings.journal, subject).keep({settings.found: policy.sha256}, str)
    assert found_before(settings) == policy
    for other in ({"rounds": 9}, {"seconds": 2.0}):
        assert found_before(replace(settings, **other)) is None
    journal = json.loads(settings.journal.read_text())
    del journal["subject"]["timing"]  # older journals have none
    settings.journal.write_text(json.dumps(journal))
    assert found_before(settings) is None and Journal(settings.journal, subject).found == 0


def timing(*rounds):
    return Timing("x", 1, rounds=[[ms] for ms in rounds])


@pytest.mark.parametrize(
    "rounds, ratio",
    [((1.1, 1.3, 1.2), 1.1), ((0.9, 0.8, 0.95), 0.8), ((1.1, 0.9, 1.3), 1.0), ((1.0, 1.0, 1.0), 1.0)],
)
def test_rounds_that_do_not_agree_tell_nothing(rounds, ratio):
    assert beyond_chance(timing(*rounds), timing(1.0, 1.0, 1.0)) == ratio


def test_best_rounds_that_say_otherwise_than_each_pair_tell_nothing():
    assert beyond_chance(timing(1.1, 2.2, 3.3), timing(1.0, 2.0, 3.0)) == pytest.approx(1.1)
    assert beyond_chance(timing(4.1, 2.2, 3.3), timing(4.0, 2.0, 3.0)) == pytest.approx(1.1)
    assert beyond_chance(timing(0.9, 2.2, 3.3), timing(0.8, 2.0, 0.7)) > 1
    assert beyond_chance(timing(0.9, 2.2, 3.3), timing(1.8, 0.5, 3.0)) == 1
