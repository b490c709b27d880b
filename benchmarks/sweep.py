"""Take other publishers' models from `wrap` to files on engines, beside NNCF: sections of docs/results/any_model.md.

    python benchmarks/sweep.py models [timm:NAME tv:NAME hf:TYPE FILE.py:NAME ...] [--data-path PICTURES] [--limit 240]
    python benchmarks/sweep.py networks [NAME ...] [--limit 1800]

models: every test model and family of timm, and 25 models each of torchvision and transformers, calibrated by default
on 8 pictures. Without --data-path, a folder of JPEGs, pictures are noise. FILE.py:NAME is a function that returns a
module and the side of its pictures.
networks: those of networks.py, a Swin in each of SWINS, with inputs of their own; policy qdq without a pass.
Weights are random and seeded. Each model runs in a process of its own; its row, a JSON file in --work, stays.
"""

import importlib.util
import json
import logging
import math
import multiprocessing
import os
import random
import runpy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import networks
import numpy as np
import torch
from cpu_rivals import compile_file, nncf_quantized
from pages import RESULTS, cpu, join_cells, place, script_parser
from PIL import Image
from torch import Tensor, nn

import swin_quant as sq
from swin_quant.base.compat import import_timm, import_torchvision
from swin_quant.base.cpu import reproducible
from swin_quant.base.errors import first_line
from swin_quant.base.files import atomic_write_bytes

CALIBRATION, JUDGED = 8, 8  # pictures
ENGINES = ("openvino", "onnxruntime")
ROUNDS = 8  # calls of each file, at least
BEHIND = 3.0  # dB below fake-quant that mean wrong arithmetic
SIDE = 128  # if the model takes it: more pixels only cost time
TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_small mobilenet_v3_large regnet_x_400mf regnet_y_400mf resnet18 resnet50
    resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16
    wide_resnet50_2
""".split()
# The smallest model of each timm module, except giants, as in tests/checkpoint/test_timm_families.py.
TIMM = """
    halonet_h1 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 cpubone_nano crossvit_tiny_240 csatv2
    cs3darknet_focus_s cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small
    efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0
    vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hardcorenas_b
    hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto inception_v3 lcnetv2_small
    levit_128s lowformer_b0 poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny nest_tiny
    nextvit_small nfnet_l0 pit_ti_224 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50
    resnest14d resnetv2_18 resnetv2_50x1_bit rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1
    skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window16_256 swinv2_cr_tiny_224
    tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small visformer_tiny vit_tiny_r_s16_p8_224
    vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224
""".split()
# Models of transformers by type, with what is smaller than in its default configuration.
_SMALL = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys("beit clip_vision_model data2vec-vision deit dinov2".split(), _SMALL),
    **dict.fromkeys("cvt levit mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt segformer swiftformer".split(), {}),
    **dict.fromkeys(("convnext", "convnextv2"), {"depths": [1, 1, 3, 1], "hidden_sizes": [48, 96, 192, 384]}),
    "bit": {"depths": [1, 1, 1, 1], "hidden_sizes": [128, 256, 512, 1024]},
    "depth_anything": {"depth_estimation_type": "metric", "max_depth": 10},  # "relative" gives zeros here
    "dpt": _SMALL
    | {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [48, 96, 192, 192], "fusion_hidden_size": 64},
    "efficientnet": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "focalnet": {"embed_dim": 48, "depths": [1, 1, 2, 1]},
    "regnet": {"depths": [1, 1, 2, 1], "hidden_sizes": [64, 128, 256, 512], "groups_width": 32},
    "resnet": {"depths": [1, 1, 2, 1]},
    "swin": {"depths": [1, 1, 2, 1], "embed_dim": 48, "window_size": 4},
    "swinv2": {"depths": [1, 1, 2, 1], "embed_dim": 48},
}


@dataclass
class Swept:
    """The result of one model. `error`: its stage and its line; SQNR in dB, against float."""

    model: str
    side: int = 0
    parity: float | None = None  # of networks: difference from the publisher's forward pass
    quantized: int = 0
    products: int = 0
    share: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    fake: float | None = None
    openvino: float | None = None
    onnxruntime: float | None = None
    nncf: float | None = None
    times: float | None = None  # latency of our file over NNCF's, on OpenVINO
    seconds: float = 0.0
    error: str = ""

    @property
    def behind(self) -> float:
        """How far the worse engine is below fake-quant."""
        found = [one for one in (self.openvino, self.onnxruntime) if one is not None]
        return max((self.fake or 0.0) - min(found), 0.0) if found else 0.0


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("models", "networks"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--data-path", help="for models: a folder of JPEGs, else noise")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a model")
    parser.add_argument("--work", type=Path, default=Path("out/sweep"))
    parser.add_argument("--output", type=Path, default=RESULTS / "any_model.md")
    args = parser.parse_args()
    if args.what == "models":
        rows = sweep(args.names or everything(), args.work, args.data_path, args.limit)
        # Errors first, then engines that are behind, then the least SQNR
        rows.sort(key=lambda row: (not row.error, row.behind <= BEHIND, row.fake or 0.0))
        ran = f"- At most {args.limit:g} s a model; on {cpu()}, {time.strftime('%F')}."
        text = "\n".join([*_table(rows), "", *_counts(rows), ran, ""])
        place(args.output, "Sweep of models, the whole way", text)
        return
    names = args.names or [name for name in networks.NETWORKS if networks.is_there(name)]
    rows = sweep([f"net:{name}" for name in names], args.work, None, args.limit)
    place(args.output, "Networks with a Swin inside, and others", "\n".join(_table(rows)) + "\n")


def sweep(models: list[str], work: Path, data_path: str | None, limit: float) -> list[Swept]:
    """The rows of `models`; those in `work` are kept."""
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    context = multiprocessing.get_context("spawn")  # a fork of a process with an engine's threads would wait for ever
    for model in models:
        file = work / f"{model.replace(':', '_').replace('/', '_')}.json"  # artifacts are in the folder of this name
        if not file.exists():  # its row is written as far as it comes within the time limit
            part = file.with_suffix(".part")
            part.write_text(json.dumps(asdict(Swept(model, error="start: did not end"))))
            process = context.Process(target=_child, args=(model, part, data_path))
            process.start()
            process.join(limit)
            process.kill()  # no effect if it has ended
            process.join()
            part.replace(file)
        rows.append(Swept(**json.loads(file.read_text())))
        print(_row(rows[-1]), flush=True)
    return rows


def _counts(rows: list[Swept]) -> Iterator[str]:
    whole = [row for row in rows if not row.error]
    behind = [row.model for row in whole if row.behind > BEHIND]
    beside = [row for row in rows if row.nncf is not None]
    above = [row for row in beside if row.openvino is not None and row.openvino > row.nncf]
    yield f"- The whole way: {len(whole)} of {len(rows)}; errors: {len(rows) - len(whole)}."
    low = [row.model for row in whole if row.share < 0.5]
    yield f"- Under half of the multiplications in int8, as the card says: {len(low)} {', '.join(low)}".rstrip() + "."
    yield f"- An engine more than {BEHIND:g} dB below fake-quant: {len(behind)} {', '.join(behind)}".rstrip() + "."
    if beside:
        took = sum(not row.error for row in beside)
        yield f"- NNCF takes {len(beside)}: {took} go the whole way, {len(above)} are above NNCF on OpenVINO."
    if timed := [row for row in rows if row.times is not None]:
        fast = sum(row.times <= 1 for row in timed)
        yield f"- Latency on OpenVINO, of {len(timed)}: {fast} not above NNCF's."


def _table(rows: list[Swept]) -> Iterator[str]:
    yield "| model | side | parity | int8 | MACs % | fake-quant | OpenVINO | ONNX Runtime | NNCF | time | s | error |"
    yield "|---" * 12 + "|"
    yield from map(_row, rows)


def _row(row: Swept) -> str:
    decibels = ("" if one is None else f"{one:.1f}" for one in (row.fake, row.openvino, row.onnxruntime, row.nncf))
    share = f"{100 * row.share:.1f}" if row.products else ""
    counts = f"{row.quantized} of {row.products}" if row.products else ""
    times = "" if row.times is None else f"{row.times:.2f}"
    parity = "" if row.parity is None else f"{row.parity:.0e}"
    cells = [row.model, row.side or "", parity, counts, share, *decibels, times, f"{row.seconds:.0f}"]
    return join_cells([*cells, row.error.replace("|", "/")])


def _child(model: str, part: Path, data_path: str | None) -> None:
    """Write the row of one model, first before each stage, so that a killed process leaves its stage."""
    log = os.open(part.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.disable(logging.INFO)
    start, row, stage = time.monotonic(), Swept(model), "build"

    def write(error: str = "") -> None:
        row.error, row.seconds = error, time.monotonic() - start
        atomic_write_bytes(part, json.dumps(asdict(row), indent=1).encode())

    write(f"{stage}: did not end")
    try:
        if model.startswith("net:"):
            for stage in _network_stages(row, model.removeprefix("net:"), part.with_suffix("")):
                write(f"{stage}: did not end")
            write()
            return
        module, row.side = built(model)
        calibration, judged = _pictures(row.side, data_path).split([CALIBRATION, JUDGED])
        with torch.inference_mode():
            reference = _flat(module(judged))
        write("wrap: did not end")
        stage = "wrap"
        wrapped = sq.wrap(module, row.side, name=part.stem)
        for stage in _calibrated_stages(row, wrapped, [calibration], judged, reference, part.with_suffix("")):
            write(f"{stage}: did not end")
        write()
    except Exception as error:  # any error is a result
        logging.exception(stage)
        write(f"{stage}: {type(error).__name__}: {first_line(error)[:200]}")
        if stage == "build" or model.startswith("net:"):
            return
    if importlib.util.find_spec("nncf"):
        _beside_nncf(row, module, calibration, judged, reference, part.with_suffix(""))
        write(row.error)


def _calibrated_stages(
    row: Swept,
    model: Any,
    batches: list,
    judged: Any,
    reference: Tensor,
    folder: Path,
    policy: Any = None,
    passes: Any = None,
) -> Iterator[str]:
    yield "calibrate"
    sq.calibrate(model, batches, policy, passes=passes)
    covered: dict[str, Any] = model.card.calibration["coverage"]
    row.quantized, row.products = covered["quantized"], covered["products"]
    row.share, row.left = covered["share"], covered["left"]
    yield "fake-quant"
    with torch.inference_mode():
        row.fake = sqnr(_flat(model(judged)), reference)
    for engine in ENGINES:
        yield f"export for {engine}"
        artifact = sq.export(model, engine, folder / engine, compared=False)  # this run judges by itself
        yield engine
        setattr(row, engine, sqnr(_flat(artifact.load(threads=1)(judged)), reference))


def _network_stages(row: Swept, name: str, folder: Path) -> Iterator[str]:
    """Fill the row of a network of networks.py, naming each stage before it starts."""
    network, module = (networks.NETWORKS | networks.FULL)[name], networks.built(name)
    row.side, seeded = network.shape[-1], torch.Generator().manual_seed(1)
    calibration, judged = torch.randn(2 * network.count, *network.shape, generator=seeded).split(network.count)
    judged = network.given(judged)
    yield "wrap"
    model = sq.wrap(module, judged if network.others else network.shape, name=folder.name, output=network.output)
    with torch.inference_mode():
        given = module(**judged) if network.others else module(judged)
        reference = _flat(model.module(model.prepared(judged)))
    theirs = _flat([_at(given, key) for key in model.module.output_names] or getattr(given, "logits", given))
    row.parity = float((reference - theirs).abs().max() / theirs.abs().max())
    yield from _calibrated_stages(row, model, [network.given(calibration)], judged, reference, folder, "qdq", [])


def _at(given: Any, name: str) -> Tensor:
    """The tensor `name` in a publisher's output, which may be a dataclass of tuples: `hidden_states.0`."""
    for word in name.split("."):
        if not isinstance(given, Tensor):
            given = given[int(word)] if word.isdigit() else given[word]
    return given


def _pictures(side: int, data_path: str | None) -> Tensor:
    """Normalised pictures [CALIBRATION + JUDGED, 3, side, side]: seeded ones from the folder, else noise."""
    count = CALIBRATION + JUDGED
    if not data_path:
        return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))
    files = sorted(Path(data_path).rglob("*.JPEG"))
    chosen_on = random.Random(0).sample(files, count)  # the default policy was chosen on these pictures
    files = random.Random(1).sample(sorted({*files}.difference(chosen_on)), count)
    pixels = [np.asarray(Image.open(file).convert("RGB").resize((side, side))) for file in files]
    return (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255 - 0.45) / 0.225


def _beside_nncf(
    row: Swept, module: nn.Module, calibration: Tensor, judged: Tensor, reference: Tensor, folder: Path
) -> None:
    """SQNR of NNCF's default on OpenVINO, from the module itself, and our latency over its, if it takes the module."""
    import openvino

    folder.mkdir(parents=True, exist_ok=True)
    kinds = [type(layer) for layer in module.modules()]
    convolutional = kinds.count(nn.Conv2d) > kinds.count(nn.Linear)
    try:
        model = openvino.convert_model(module, example_input=calibration[:2])
        file = nncf_quantized(model, calibration, folder / "nncf.xml", convolutional)
        row.nncf = sqnr(_flat(compile_file(file, judged.shape, 1, "f32")(judged)), reference)
        if not row.error:
            files, image = (*(folder / "openvino").glob("*.onnx"), file), judged[:1]
            row.times = _times(*(compile_file(one, image.shape, 1, "f32") for one in files), image)
    except Exception:  # another tool's failure is not this one's fault
        logging.exception("NNCF")


def _times(ours: Callable, theirs: Callable, images: Tensor) -> float:
    """The median ratio of the CPU time of two files, call after call in turn: other programs hardly change it."""
    ratios, start = [], time.process_time()
    while len(ratios) < ROUNDS or time.process_time() - start < 1 and len(ratios) < 20 * ROUNDS:
        before = time.process_time()
        ours(images)
        middle = time.process_time()
        theirs(images)
        ratios.append((middle - before) / (time.process_time() - middle))
    return statistics.median(ratios[len(ratios) // 4 :])  # without the warm-up


def sqnr(given: Tensor, reference: Tensor) -> float:
    """Signal to noise of an output in dB. FloatingPointError for NaN or infinity."""
    if not given.isfinite().all():
        raise FloatingPointError("gives NaN or infinity")
    noise = float((given.double() - reference.double()).square().sum())
    return 10 * math.log10(float(reference.double().square().sum()) / max(noise, 1e-30))


def _flat(output: Any) -> Tensor:
    """Every tensor of an output in one [B, ...]."""
    if isinstance(output, dict):
        output = [output["logits"]] if "logits" in output else list(output.values())
    tensors = output if isinstance(output, list | tuple) else [output]
    return torch.cat([torch.as_tensor(one).flatten(1) for one in tensors], 1)


def everything() -> list[str]:
    """Every `timm:test_*`, one model of each family of timm, torchvision's and those of transformers."""
    names = {"timm": (*import_timm().list_models("test_*"), *TIMM), "tv": TORCHVISION, "hf": TRANSFORMERS}
    return [f"{source}:{name}" for source, models in names.items() for name in models]


def built(name: str) -> tuple[nn.Module, int]:
    """The model, and the side of its pictures.

    Weights are random and seeded, disturbed so that no zero or one hides a fault.
    """
    torch.manual_seed(0)
    if ".py:" in name:
        file, function = name.rsplit(":", 1)
        return runpy.run_path(file)[function]()
    if name.startswith("hf:"):
        module, own = _build_transformers(name.removeprefix("hf:"))
    elif name.startswith("tv:"):
        own = 299 if "inception" in name else 224
        extra = {"init_weights": False} if name in ("tv:googlenet", "tv:inception_v3") else {}
        module = import_torchvision().models.get_model(name.removeprefix("tv:"), weights=None, **extra).eval()
    else:
        timm = import_timm()
        module = timm.create_model(name.removeprefix("timm:")).eval()
        own = module.pretrained_cfg["input_size"][-1]
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.02 * torch.randn_like(value))
        for key, value in module.named_buffers():
            if key.endswith("running_var"):
                value.uniform_(0.5, 2)
        try:
            module(torch.randn(2, 3, SIDE, SIDE))
        except Exception:  # any error means that it does not take them
            return module, own
    return module, min(own, SIDE)


def _build_transformers(kind: str) -> tuple[nn.Module, int]:
    """A model of transformers that ends in a task where it has one, and the side of its pictures."""
    import_torchvision()  # transformers imports it, if it is there
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    for key, value in {"image_size": SIDE, "num_labels": 100, "architectures": [], **TRANSFORMERS[kind]}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    tasks = ("ImageClassification", "DepthEstimation", "SemanticSegmentation")
    heads = [getattr(transformers, f"AutoModelFor{task}") for task in tasks]
    made = next((head for head in heads if type(config) in head._model_mapping), transformers.AutoModel)
    return made.from_config(config).eval(), 126 if kind == "depth_anything" else SIDE


if __name__ == "__main__":
    main()
