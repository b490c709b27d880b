"""Names of timm and Hugging Face: from a cache, a snapshot or the test's own hub; no network is needed."""

import hashlib
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save

import swin_quant as sq
from swin_quant.base.errors import UsageError
from swin_quant.checkpoint import load_float, open_checkpoint
from swin_quant.checkpoint.identify import config_for
from swin_quant.checkpoint.sources import local_file
from swin_quant.cli import main
from swin_quant.models import build_model
from tests.helpers.refusals import refused
from tests.helpers.settings import small_config

TIMM = "swin_tiny_patch4_window7_224.ms_in1k"
REVISION = "0123456789" * 4


def model(kind="swin"):
    return build_model(small_config(kind))


def weights(made=None):
    """Weights as timm and transformers write them: without tables."""
    tables = ("relative_position_index", "attn_mask", "relative_coords_table")
    return save({key: value for key, value in (made or model()).state_dict().items() if not key.endswith(tables)})


def snapshot(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def cached(cache, repository, files):
    """Put a repository into the cache, in the layout of the hub's client."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    return snapshot(folder / "snapshots" / REVISION, files)


PREPARED = {"input_size": [3, 32, 32], "crop_pct": 0.95, "crop_mode": "center", "interpolation": "bilinear"}
PRETRAINED = PREPARED | {"mean": [0.5] * 3, "std": [0.25] * 3}


def test_a_name_of_timm_comes_from_the_cache_with_its_preparation(cache):
    config = {"architecture": "swin_tiny_patch4_window7_224", "num_classes": 10, "pretrained_cfg": PRETRAINED}
    folder = cached(cache, f"timm/{TIMM}", {"model.safetensors": weights(), "config.json": config})
    for name in (f"timm:{TIMM}", "timm:swin_tiny_patch4_window7_224", f"hf:timm/{TIMM}"):
        assert local_file(name) == folder / "model.safetensors"
    cfg = config_for(f"timm:{TIMM}")
    assert (cfg.DATA.IMG_SIZE, cfg.TEST.CROP, cfg.TEST.CROP_RATIO) == (32, True, 0.95)
    assert (cfg.DATA.INTERPOLATION, cfg.DATA.MEAN, cfg.DATA.STD) == ("bilinear", [0.5] * 3, [0.25] * 3)
    assert cfg.MODEL.NAME == TIMM
    assert config_for(f"timm:{TIMM}", {"TEST.CROP_RATIO": 0.9}).TEST.CROP_RATIO == 0.9, "the user's word is last"
    assert load_float(build_model(cfg), f"timm:{TIMM}").path == folder / "model.safetensors"


def test_a_repository_of_transformers_says_what_its_tensors_do_not(cache, caplog):
    caplog.set_level(logging.INFO, "swin_quant")
    config = {"model_type": "swinv2", "image_size": 32, "window_size": 4, "pretrained_window_sizes": [6, 6]}
    processor = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    files = {"config.json": config, "preprocessor_config.json": processor}
    cached(cache, "me/mine", files | {"model.safetensors": weights(model(kind="swinv2"))})
    cfg = config_for("hf:me/mine")
    assert cfg.MODEL.SWINV2.WINDOW_SIZE == 4 and cfg.MODEL.SWINV2.PRETRAINED_WINDOW_SIZES == [6, 6]
    assert (cfg.DATA.IMG_SIZE, cfg.TEST.CROP, cfg.DATA.INTERPOLATION) == (32, False, "bilinear")
    assert cfg.DATA.MEAN == [0.5] * 3 and cfg.MODEL.NAME == "mine"
    assert "the configuration is its own" in caplog.text and "guess" not in caplog.text


def test_a_folder_is_a_snapshot_and_commands_and_python_take_its_names(cache, tmp_path):
    files = {"config.json": {"model_type": "swin", "image_size": 32}, "model.safetensors": weights()}
    folder = cached(cache, "me/mine", files)
    for name in ("hf:me/mine", folder, str(folder), f"hf:{folder}", f"timm:{folder}"):
        assert local_file(name) == folder / "model.safetensors"
    for name in ("hf:me/mine", str(folder)):
        assert main(["show", name, "--policy", "qdq", "--quiet"]) == 0
        loaded = sq.load(name)
        written, images = sq.load(loaded.save(tmp_path / "mine.pth")), torch.randn(2, 3, 32, 32)
        assert torch.equal(loaded(images), written(images)) and loaded.config.DATA.IMG_SIZE == 32
    assert config_for(snapshot(tmp_path / "my-swin", files)).MODEL.NAME == "my-swin"
    (folder / "model.safetensors").unlink()
    refused(lambda: open_checkpoint(folder).weights(), "is a directory: give the checkpoint file")


PARTS = ("model-00001-of-00002", "model-00002-of-00002")


def in_parts(folder, ending="safetensors", made=None):
    """A snapshot with weights in two files; returns its index."""
    snapshot(folder, {"config.json": {"model_type": "swin", "image_size": 32}})
    state = list((made or model()).state_dict().items())
    halves = dict(zip((f"{name}.{ending}" for name in PARTS), (dict(state[:9]), dict(state[9:])), strict=True))
    for name, half in halves.items():
        (folder / name).write_bytes(save(half)) if ending == "safetensors" else torch.save(half, folder / name)
    index = folder / f"model.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {k: n for n, half in halves.items() for k in half}}))
    return index


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_weights_in_parts_are_read_by_any_of_their_names(tmp_path, ending):
    made = model()
    index = in_parts(tmp_path / "my-swin", ending, made)
    given = [index, index.with_name(f"{PARTS[0]}.{ending}"), index.with_name(f"{PARTS[1]}.{ending}")]
    for checkpoint in [*given, index.parent] if ending == "safetensors" else given:
        read = open_checkpoint(checkpoint).weights()
        assert read.source.path == index
        assert all(torch.equal(read.state[key], value) for key, value in made.state_dict().items())
    images = torch.randn(2, 3, 32, 32)
    loaded = sq.load(given[1])
    assert torch.equal(loaded(images), sq.load(index)(images))
    expected = loaded(images)
    assert torch.equal(expected, sq.load(loaded.save(tmp_path / "whole.pth"))(images))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("absent", f"names {PARTS[1]}.safetensors, which must lie beside it"),
        ("../x.safetensors", "no weights in its own folder"),
        ("/etc/passwd", "no weights in its own folder"),
        ("swapped", "holds other tensors than model.safetensors.index.json says"),
        ("many", "files, more than the "),
        ("empty", "its weight_map must name a file for each tensor"),
    ],
)
def test_an_index_is_not_believed(tmp_path, fault, words):
    index = in_parts(tmp_path / "my-swin")
    places = json.loads(index.read_text())["weight_map"]
    if fault == "absent":
        index.with_name(f"{PARTS[1]}.safetensors").unlink()
    elif fault == "swapped":
        places["norm.weight"] = f"{PARTS[0]}.safetensors"
    elif fault == "many":
        places |= {f"x{number}": f"x{number}.bin" for number in range(5000)}
    else:
        places = {} if fault == "empty" else places | {"norm.weight": fault}
    index.write_text(json.dumps({"weight_map": places}))
    refused(lambda: open_checkpoint(index.parent).weights(), words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:resnet5000", "timm has no weights by that name; it has resnet"),
        ("timm:swin_tinny", "timm has no weights by that name; it has swin"),
        ("timm:swin_tiny_patch4_window7_224.mine", f"it has {TIMM}, "),
        ("timm:", "timm has no weights by that name"),
        ("hf:../../etc/passwd", "is no name of a repository, which is owner/name"),
        ("hf:", "is no name of a repository"),
    ],
)
def test_a_name_of_nothing(name, words):
    assert refused(lambda: local_file(name), words, kind=UsageError).startswith(name)


@pytest.mark.parametrize("name", [f"timm:{TIMM}", "hf:microsoft/swin-tiny-patch4-window7-224", "hf:me/mine@v2"])
def test_without_network_and_cache_the_error_says_what_to_do(name, cache):
    message = refused(lambda: config_for(name), "HF_HOME", "snapshot")
    assert message.startswith(f"{name}: is not in the cache {cache}, and huggingface.co cannot be reached")


@pytest.fixture
def hub(monkeypatch):
    """A hub: repository -> file -> bytes, or the status and code of a refusal."""
    repositories = {}

    class Hub(BaseHTTPRequestHandler):
        def answer(self, body):
            owner, name, _, _, *path = self.path.strip("/").split("/")
            files = repositories.get(f"{owner}/{name}", (404, "RepoNotFound"))
            content = files.get("/".join(path), (404, "EntryNotFound")) if isinstance(files, dict) else files
            found = isinstance(content, bytes)
            self.send_response(200 if found else content[0])
            if found:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            else:
                self.send_header("X-Error-Code", content[1])
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("Content-Length", str(len(content) if found else 0))
            self.end_headers()
            if body and found:
                self.wfile.write(content)

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    constants, address = huggingface_hub.constants, f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield repositories
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_not_cached_is_downloaded_once(hub, cache, monkeypatch):
    config = json.dumps({"model_type": "swin", "image_size": 32}).encode()
    hub["me/mine"] = {"model.safetensors": weights(), "config.json": config}
    file = local_file("hf:me/mine")
    assert cache in file.parents and config_for(file).DATA.IMG_SIZE == 32
    hub.clear()
    assert local_file("hf:me/mine") == file


CODES = ("RepoNotFound", "RevisionNotFound", "GatedRepo")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        *(((404 if "NotFound" in code else 403, code), "huggingface.co refuses me/mine (") for code in CODES),
        ({}, "me/mine has none of model.safetensors, pytorch_model.bin"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, refusal, words):
    hub["me/mine"] = refusal
    assert refused(lambda: local_file("hf:me/mine@v2"), words).startswith("hf:me/mine@v2: ")
