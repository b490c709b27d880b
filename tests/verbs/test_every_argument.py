"""Whatever a verb takes in Python reaches the step that it is for: each argument, and each field of a group of
arguments, is set to a value that is not its default and is found again there. A new one has to be named here."""

import importlib
import inspect
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from commands import Reached
from torch import nn

import swin_quant as sq
from swin_quant.data.picture_set import PictureSet
from swin_quant.loading import ModelFile
from swin_quant.train.run import Qat, Training

NAMES = "calibrate evaluate finetune export verify search sensitivity predict train".split()
VERBS = {name: importlib.import_module(f"swin_quant.verbs.{name}") for name in NAMES}


@pytest.fixture(scope="module")
def file(micro, pictures, tmp_path_factory):
    """A calibrated checkpoint whose config, own.yaml, has a value of its own for all that a set of pictures can say."""
    folder = tmp_path_factory.mktemp("start")
    reading = {"ZIP_MODE": False, "CACHE_MODE": "part", "BATCH_SIZE": 7, "NUM_WORKERS": 5, "UPRIGHT": False}
    config = yaml.safe_load((micro / "swin.yaml").read_text())
    config["DATA"] |= reading
    (folder / "own.yaml").write_text(yaml.safe_dump(config | {"SEED": 9}))
    model = sq.load(micro / "swin.pth", config=folder / "own.yaml")
    calibrated = sq.calibrate(model, sq.pictures(pictures, "train", 8), "qdq", passes=[])
    return calibrated.save(folder / "swin_micro_calib.pth")


@pytest.fixture(scope="module")
def exported(file):
    return sq.export(file, "onnxruntime", file.parent / "onnx")


def names_of(verb):
    return {*inspect.signature(getattr(sq, verb)).parameters}


SETS = {
    "high": {"seed": 3, "upright": True, "workers": 1, "max_unreadable": 0.5, "zip_mode": True, "cache_mode": "full"},
    "zero": {"seed": 0, "upright": False, "workers": 0, "max_unreadable": 0.0, "zip_mode": False, "cache_mode": "no"},
}


@pytest.mark.parametrize("values", SETS)
@pytest.mark.parametrize("verb", ["calibrate", "evaluate", "verify"])
def test_pictures_are_opened_as_the_set_says(verb, values, file, pictures, heard, request):
    own = SETS[values] | {"split": "train", "count": 5, "batch": 2, "classes": 3}
    opened = heard(PictureSet, "open", ends=True)
    subject = request.getfixturevalue("exported") if verb == "verify" else sq.load(file)
    for given in ({"path": str(pictures), **own}, {"images": (str(pictures / "val"),), "batch": 2}):
        with pytest.raises(Reached):
            getattr(sq, verb)(subject, PictureSet(**given))
        reached = opened.pop()["self"]
        assert {name: getattr(reached, name) for name in given} == given
    assert {*own, "path", "images"} == {one.name for one in fields(PictureSet)}


@pytest.mark.parametrize("values", SETS)
def test_training_reads_pictures_as_the_set_says(values, file, pictures, tmp_path, heard):
    calls = heard(VERBS["finetune"], "run_training", ends=True)
    given = {"path": str(pictures), "batch": 2, **SETS[values]}
    with pytest.raises(Reached):
        sq.finetune(file, PictureSet(**given), tmp_path / "out")
    cfg, request = calls[0]["cfg"], calls[0]["request"]
    assert request.max_unreadable == given.pop("max_unreadable")
    keys = {"path": "DATA_PATH", "batch": "BATCH_SIZE", "workers": "NUM_WORKERS"}
    assert {name: cfg.SEED if name == "seed" else cfg.DATA[keys.get(name, name.upper())] for name in given} == given


def test_calibrate(model, pictures, tmp_path):
    asked = {"percentile": 99.5, "exact": True, "augment": True, "folder": tmp_path / "kept"}
    passes = [{"name": "bias_correction"}]
    sq.calibrate(model, sq.pictures(pictures, "train", 8), "qdq", method="percentile", passes=passes, **asked)
    record = model.card.calibration
    assert (record["percentile"], record["exact"], record["augment"]) == (99.5, True, True)
    assert (record["method"], model.policy.name) == ("percentile", "qdq")
    assert [one["name"] for one in record["passes"]] == ["bias_correction"]
    assert names_of("calibrate") == {"model", "pictures", "policy", "method", "passes", *asked}


def test_evaluate_of_a_checkpoint(file, micro, pictures, heard):
    baseline = heard(VERBS["evaluate"], "open_baseline")
    how = {"original": micro / "swin.pth", "batch_size": 2}
    found = sq.evaluate(sq.load(file), sq.pictures(pictures, "val"), ["ft-mode1", "qdq"], half="bfloat16", **how)
    rows = [(one.precision, one.policy) for one in found.results]
    assert rows == [("float32", None), ("bfloat16", None), ("int8", "ft-mode1"), ("int8", "qdq")]
    assert {one.batch_size for one in found.results} == {2}
    assert Path(baseline[0]["original"]) == micro / "swin.pth"


def test_evaluate_of_an_artifact(exported, micro, val, heard):
    scored = heard(VERBS["evaluate"], "score_artifacts", ends=True)
    asked = {"half": "float16", "original": micro / "swin.pth", "engine": "openvino", "threads": 3}
    asked |= {"float_type": "bfloat16", "extension": ("mine.so",)}
    for more in ({}, {"own_float": False}, {"no_accuracy": True}):
        with pytest.raises(Reached):
            sq.evaluate(exported, val, batch_size=2, **asked | more)
    scoring, other, third = (call["scoring"] for call in scored)
    options = scoring.options
    assert (options.threads, options.float_type, options.extensions) == (3, "bfloat16", ("mine.so",))
    assert (scoring.half, scoring.engines) == ("float16", ("openvino",))
    assert (scoring.original, scoring.pictures.batch) == (str(micro / "swin.pth"), 2)
    assert (other.own_float, third.own_float, scoring.timed, third.timed) == (False, True, None, 2)
    assert names_of("evaluate") == {"model", "pictures", "policies", "own_float", "no_accuracy", "batch_size", *asked}


def test_verify(exported, file, val, heard):
    loaded = heard(VERBS["verify"], "load_engines", ends=True)
    origin, devices = (heard(VERBS["verify"], name) for name in ("find_checkpoint", "world_on"))
    asked = {"checkpoint": file, "threads": 3, "float_type": "bfloat16", "extension": ("mine.so",), "device": "auto"}
    with pytest.raises(Reached):
        sq.verify(exported, val, "openvino", **asked)
    (call,) = loaded
    options = call["options"]
    assert (options.threads, options.float_type, options.extensions) == (3, "bfloat16", ("mine.so",))
    assert list(call["names"]) == ["openvino"] and origin[0]["file"] == file
    assert devices[0]["device"] == "auto"
    assert names_of("verify") == {"artifact", "pictures", "engine", *asked}


OPTIONS = {
    "float_type": ("tensorrt", "float16"),
    "batch": ("executorch", 3),
    "sm": ("fastertransformer", 75),
    "fix_gelu_bias": ("fastertransformer", True),
    "check": ("fastertransformer", True),
    "opset": ("onnx", 19),
    "int4_weights": ("onnx", True),
    "replace": ("onnx", ("roll",)),
    "plugin": ("onnx", ("roll=mine::Roll",)),
    "plain": ("openvino", True),
    "npu": ("onnx", True),
    "uint8_input": ("cuda", True),
    "softmax": ("onnxruntime", True),
    "top_k": ("openvino", 2),
    "labels": ("onnxruntime", ("cat", "dog", "fox")),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_an_export_reach_its_backend(name, file, tmp_path, heard):
    written = heard(VERBS["export"].ExportTarget, "write", ends=True)
    backend, value = OPTIONS[name]
    policy = "ft-mode1" if backend == "fastertransformer" else None
    for model in (file, sq.load(file)):
        with pytest.raises(Reached):
            sq.export(model, backend, tmp_path / "made", policy, **{name: value})
        target = written.pop()["self"]
        assert getattr(target.options, name) == value and target.backend.name == backend


def test_further_arguments_of_export(file, tmp_path, heard):
    verb, folder = VERBS["export"], tmp_path / "made"
    (tmp_path / "names.txt").write_text("cat\ndog\nfox\n")
    written = heard(verb.ExportTarget, "write", ends=True)
    asked = {"precision": "float"}, {"policy": "qdq"}, {"saturation_safe": True}, {"labels": tmp_path / "names.txt"}
    for model in (file, sq.load(file)):
        for options in asked:
            with pytest.raises(Reached):
                sq.export(model, "onnxruntime", folder, **options)
        floats, by_policy, safe, named = (call["self"] for call in written)
        assert (floats.precision, safe.saturation_safe) == ("float", True)
        assert (written[1]["used"].name, by_policy.precision, written[1]["folder"]) == ("qdq", "int8", folder)
        assert named.options.labels == ("cat", "dog", "fox")
        written.clear()
    with pytest.raises(sq.UsageError, match="nothing.*: means nothing to backend onnx"):
        sq.export(file, "onnx", folder, nothing=3)
    tuned = heard(verb, "write_fastest", ends=True)
    with pytest.raises(Reached):
        sq.export(file, "openvino", folder, tune=True)
    assert tuned[0]["target"].backend.name == "openvino"
    more = {"model", "backend", "folder", "tune", "options", "compared", "build"}
    assert names_of("export") == {*OPTIONS, *more, *(name for one in asked for name in one)}


def test_an_export_is_compared_where_it_is_asked_for(tensors, tmp_path, heard):
    compared = heard(VERBS["export"], "beside_fake_quant")
    model = sq.wrap(nn.Sequential(nn.Flatten(), nn.Linear(3072, 3)), 32)
    sq.calibrate(model, tensors("train"), "qdq", passes=[])
    for number, options in enumerate([{}, {"compared": False}]):
        sq.export(model, "onnxruntime", tmp_path / str(number), **options)
        assert len(compared) == 1


RECIPE = {
    "lr": (2e-4, "optimizer.lr"),
    "schedule": ("constant", "schedule.name"),
    "drop_path": ("0.3", "augment.drop_path"),
    "freeze_stages": (1, "freeze_stages"),
    "accumulation_steps": (2, "accumulation_steps"),
    "use_checkpoint": (True, "memory.checkpointing"),
    "compile": (True, "compile"),
    "amp_opt_level": ("O2", "precision"),
    "fsdp": (True, "memory.fsdp"),
    "offload": (True, "memory.offload"),
}
QAT = {
    "distill_weight": (0.5, "distill.weight"),
    "temperature": (2.0, "distill.temperature"),
    "distill_compat": ("ft", "distill.compat"),
}


@pytest.mark.parametrize("way", [{"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}])
def test_finetune_trains_as_it_is_asked_to(file, micro, pictures, tmp_path, heard, way):
    calls, devices = heard(VERBS["finetune"], "run_training", ends=True), heard(VERBS["finetune"], "world_on")
    more = {"recipe": "micro_w4a4", "set": ("ema=0.5",)}
    recipe = Training(**more, **{name: value for name, (value, _) in RECIPE.items()})
    qat = Qat(str(file.with_name("own.yaml")), **{name: value for name, (value, _) in QAT.items()})
    config = yaml.safe_load(file.with_name("own.yaml").read_text())
    config["MODEL"]["NAME"] = "another"
    (tmp_path / "another.yaml").write_text(yaml.safe_dump(config))
    asked = {**way, "epochs": 3, "teacher": micro / "swin.pth", "amax": "learned"}
    asked |= {"original": micro / "swin.pth", "changes": {"optimizer.momentum": 0.4}, "batch_size": 2, "device": "auto"}
    how = {"qat": qat, "config": tmp_path / "another.yaml"}
    with pytest.raises(Reached):
        sq.finetune(file, pictures, tmp_path / "out", recipe, "ft-mode1", **how, **asked)
    cfg, used, request = (calls[0][name] for name in ("cfg", "recipe", "request"))

    for given, key in (RECIPE | QAT).values():
        assert attrgetter(key)(used) == (float(given) if key == "augment.drop_path" else given), key
    assert (used.name, used.ema, used.epochs, used.amax.mode) == ("micro_w4a4", 0.5, 3, "learned")
    assert (used.optimizer.momentum, used.batch_size, used.schedule.warmup_epochs) == (0.4, 2, 0)
    assert (request.folder, request.resume, request.overwrite) == (tmp_path / "out", *way.values())
    assert (request.teacher, request.original) == (str(micro / "swin.pth"),) * 2
    assert request.teacher_cfg.SEED == 9 and cfg.MODEL.NAME == "another" and cfg.DATA.DATA_PATH == str(pictures)
    assert (calls[0]["policy"].name, devices[0]["device"]) == ("ft-mode1", "auto")
    assert {*RECIPE, *more} == {one.name for one in fields(Training)}
    assert {*QAT, "teacher_cfg"} == {one.name for one in fields(Qat)}
    known = {"model", "pictures", "folder", "recipe", "policy", *how, *asked}
    assert names_of("finetune") == known | {"distill", "half", "no_eval", "score_pictures"}


def test_finetune_scores_as_it_is_asked_to(file, pictures, tmp_path):
    how = {"epochs": 1, "batch_size": 4, "changes": {"augment.crop": "padded"}}
    asked = {"half": "bfloat16", "score_pictures": 3}
    scored = sq.finetune(file, pictures, tmp_path / "scored", distill=True, **how, **asked)
    assert {(one.precision, one.pictures) for one in scored.evaluation.results} >= {("bfloat16", 3)}
    assert scored.load().card.training["recipe"]["distill"]["weight"] == 1.0
    assert not sq.finetune(file, pictures, tmp_path / "not", no_eval=True, **how).evaluation.results


def test_arguments_for_pictures_on_disk_are_refused_for_batches(model, file, tensors):
    with pytest.raises(sq.UsageError, match="augment: .*pictures"):
        sq.calibrate(model, tensors("train"), augment=True)
    with pytest.raises(sq.UsageError, match="batch_size: .*batches"):
        sq.evaluate(sq.load(file), tensors("val"), batch_size=2)


def test_search(model, pictures, tmp_path, heard, monkeypatch):
    verb = VERBS["search"]
    sq.calibrate(model, sq.pictures(pictures, "train", 8), "qdq", passes=[])
    timed, written = heard(verb, "Timer"), heard(verb, "write_found", ends=True)
    read = heard(verb, "read_sample")
    monkeypatch.setattr(verb, "measure_layers", lambda *_: [])
    budget, given = sq.Budget(min_sqnr=1.0), sq.pictures(pictures, "val", 5)
    asked = {"budget": budget, "batch": 3, "threads": 2, "float_type": "float32"}
    with pytest.raises(Reached):
        sq.search(model, given, "onnxruntime", tmp_path / "found", "cpu", **asked)
    (timer,), (found,) = timed, written
    assert (timer["engine"], timer["policy"].name, timer["batch"]) == ("onnxruntime", "cpu", 3)
    assert (timer["options"].threads, timer["options"].float_type) == (2, "float32")
    assert (found["budget"], Path(found["folder"])) == (budget, tmp_path / "found") and read[0]["pictures"] == given
    assert names_of("search") == {"model", "pictures", "engine", "folder", "policy", *asked}


def test_sensitivity(model, pictures, heard):
    sq.calibrate(model, sq.pictures(pictures, "train", 8), "qdq", passes=[])
    read, given = heard(VERBS["sensitivity"], "read_sample"), sq.pictures(pictures, "val", 3)
    found = sq.sensitivity(model, given, "ft-mode1", kind=("role", "profile"), top=2)
    assert (found.record["policy"], found.kinds, found.top) == ("ft-mode1", ("role", "profile"), 2)
    assert read[0]["pictures"] == given and found.record["pictures"] == 3
    assert names_of("sensitivity") == {"model", "pictures", "policy", "kind", "top"}


def test_predict(file, exported, pictures, tmp_path, heard):
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n")
    loads, runs, inferred = (heard(VERBS["predict"], name) for name in ("load_engines", "engine_under", "infer"))
    asked = {"threads": 2, "float_type": "float32", "extension": (), "device": "cpu"}
    given = PictureSet(images=(str(pictures / "val"),), batch=3, workers=1, max_unreadable=0.25)
    found = sq.predict(exported, given, 2, "onnxruntime", labels=tmp_path / "names.txt", **asked)
    artifact, engines, options = loads[0].values()
    assert (artifact.file, engines) == (exported.file, ["onnxruntime"])
    assert {name: getattr(options, f"{name}s" if name == "extension" else name) for name in asked} == asked
    how = inferred[0]["how"]
    assert (how.batch, how.workers, how.max_unreadable) == (3, 1, 0.25)
    assert all(len(best) == 2 and {one.name for one in best} < {"one", "two", "three"} for best in found.values())
    sq.predict(file, given, policy="ft-mode1")
    assert [one.name for one in list(runs[0].values())[2]] == ["ft-mode1"]
    assert names_of("predict") == {"model", "images", "top", "engine", "policy", "labels", *asked}


@pytest.mark.parametrize("way", [{"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}])
def test_train_trains_as_it_is_asked_to(micro, pictures, tmp_path, heard, way):
    verb = VERBS["train"]
    calls = heard(verb, "run_training", ends=True)
    training = Training(**{name: value for name, (value, _) in RECIPE.items()})
    model = ModelFile(str(micro / "swin.pth"), cfg=str(micro / "swin.yaml"))
    asked = {**way, "epochs": 3}
    with pytest.raises(Reached):
        verb.train(model, PictureSet(str(pictures), batch=2), tmp_path / "out", training, **asked)
    cfg, recipe, request = (calls[0][name] for name in ("cfg", "recipe", "request"))
    assert (recipe.optimizer.lr, recipe.epochs, recipe.batch_size, recipe.compile) == (2e-4, 3, 2, True)
    assert (request.folder, request.resume, request.overwrite) == (tmp_path / "out", *way.values())
    assert cfg.DATA.DATA_PATH == str(pictures)
    known = {"model", "pictures", "folder", "training", *asked, "half", "no_eval"}
    assert {*inspect.signature(verb.train).parameters} == known
