"""Run this package's model on pictures; requirements.txt names all that it needs."""

import argparse
import ctypes
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

if sys.version_info < (3, 9):  # noqa: UP036 (the folder runs where this project is not installed)
    sys.exit("this package needs Python 3.9 or newer")
HERE = Path(__file__).resolve().parent
ABOUT = json.loads((HERE / "package.json").read_text()) if (HERE / "package.json").is_file() else {}
for needed in ABOUT.get("files", ["package.json"]):
    if needed.startswith(("model", "preprocess.", "package.")) and not (HERE / needed).is_file():
        sys.exit(f"error: {needed} is not in {HERE}: copy the whole package")
INSTALL = f"pip install -r {HERE / 'requirements.txt'}"
sys.path.insert(0, str(HERE))
try:
    import numpy as np
    from preprocess import preprocess
except ModuleNotFoundError as absent:
    sys.exit(f"error: {absent.name} is not installed: {INSTALL}")
LABELS = (HERE / ABOUT["labels"]).read_text(encoding="utf-8").splitlines() if ABOUT["labels"] else []
MODEL, INPUT = str(HERE / ABOUT["model"]), ABOUT["input"]["name"]
OWN = [output for output in ABOUT["outputs"] if output["name"] not in ABOUT["extras"]]
OUTPUTS = [output["name"] for output in OWN]


def refuse_wrong(engine, version):
    """End with a line where this release of an engine does not read the model, or computes something else of it."""
    number = [int(part) for part in version.split("-")[0].split(".")[:2]]
    for rule in ABOUT["releases"][engine].split(","):
        other = [int(part) for part in rule[2:].split(".")[:2]]
        if number < other if rule.startswith(">=") else number == other:
            sys.exit(f"{engine} {version} does not run this model: pip install '{engine}{ABOUT['releases'][engine]}'")


def onnxruntime(threads):
    """A function from one batch to a list: logits, an embedding, or maps."""
    import onnxruntime

    refuse_wrong("onnxruntime", onnxruntime.__version__)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads or 0
    for key, value in ABOUT["session"].items():
        settings.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(MODEL, settings, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(OUTPUTS, {INPUT: batch})


def openvino(threads):
    """The same; what is not int8 runs in float32, where OpenVINO's own choice is bfloat16 on many CPUs."""
    import openvino

    refuse_wrong("openvino", openvino.__version__)
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    settings |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}  # else what meets int8 weights alone is rounded to int8, too
    settings |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
    core = openvino.Core()
    model = with_operators(core, Path(openvino.__file__).parent) if "operators" in ABOUT else core.read_model(MODEL)
    graphs = {}  # the latest batch's shape -> its graph

    def run(batch):
        if batch.shape not in graphs:
            graphs.clear()
            fixed = model.clone()
            fixed.reshape(list(batch.shape))
            graphs[batch.shape] = compiled(core, fixed, settings)
        found = graphs[batch.shape]([batch])
        return [found[name].copy() for name in OUTPUTS]

    return run


def compiled(core, model, settings):
    """The model, compiled; releases up to 2024.0 do not know the last of the settings, or no value that says no."""
    try:
        return core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        if "DYNAMIC_QUANTIZATION_GROUP_SIZE" not in str(error):
            raise
        known = {key: value for key, value in settings.items() if key != "DYNAMIC_QUANTIZATION_GROUP_SIZE"}
        return core.compile_model(model, "CPU", known)


def with_operators(core, package):
    """The model with compiled operators, which is faster; the plain one where their library does not load."""
    import openvino

    folder, made_for = HERE / ABOUT["operators"], ABOUT["operators_for"].split("-")[0]
    library = folder / "libswin_quant_plugins.so"
    try:
        ours = ABOUT["files"][f"{folder.name}/{library.name}"]
        if not library.is_file():
            raise OSError(f"{library} is not there")
        if hashlib.sha256(library.read_bytes()).hexdigest() == ours:
            if openvino.__version__.split("-")[0] != made_for:  # it would end the process
                raise OSError(f"its operators are for OpenVINO {made_for}")
        for needed in package.glob("libs/libopenvino_onnx_frontend.so*"):  # wherever it was when the library was built
            ctypes.CDLL(str(needed))
        core.add_extension(str(library))
        return core.read_model(folder / "model.onnx")
    except (OSError, RuntimeError) as error:
        why, remedy = str(error).strip().splitlines()[-1], f"`sh {folder}/build.sh {folder}` builds its operators"
        if not (folder / "build.sh").is_file():
            why, remedy = f"{folder} is not there", "copy the whole package"
        print(f"the plain model runs, slower: {why}: {remedy}", file=sys.stderr)
        return core.read_model(MODEL)


def executorch(threads):
    """The same, for an ExecuTorch program, whose runtime takes torch's tensors."""
    import executorch.extension.pybindings.portable_lib as library
    import torch
    from executorch.runtime import Runtime
    from executorch.version import __version__

    refuse_wrong("executorch", __version__)
    if threads:
        library._unsafe_reset_threadpool(threads)
    forward = Runtime.get().load_program(MODEL).load_method("forward")
    return lambda batch: [output.numpy() for output in forward.execute((torch.from_numpy(batch),))]


ENGINES = {"onnxruntime": onnxruntime, "openvino": openvino}
if ABOUT["engine"] == "executorch":
    ENGINES = {"executorch": executorch}


def pixels(file):
    """The model's input; the program ends with a line for a picture that cannot be read."""
    try:
        return preprocess(file)
    except (OSError, ValueError, SyntaxError) as error:  # as Pillow's readers raise
        sys.exit(f"error: {file}: {str(error).strip() or 'cannot be read'}")


def infer(run, files):
    """Output -> a list of float32, one a picture; a fixed batch is filled up with zeros."""
    size = ABOUT["batch"] or 1
    step = 1 if -1 in ABOUT["input"]["shape"] else size  # pictures that keep their sizes do not share a batch
    found = {name: [] for name in OUTPUTS}
    for start in range(0, len(files), step):
        batch = np.stack([pixels(file) for file in files[start : start + step]])
        padded = np.concatenate([batch, np.zeros((size - len(batch), *batch.shape[1:]), batch.dtype)])
        for rows, output in zip(found.values(), run(padded)):  # noqa: B905 (Python 3.9 has no strict)
            rows += list(np.asarray(output, np.float32)[: len(batch)])
    return found


def save(file, found):
    """One output as FILE.npy, [N, ...]; maps as FILE.npz by name, NAME_0, NAME_1, ... where their sizes differ."""
    if len(found) == 1 and len(OWN[0]["shape"]) == 1:
        return np.save(file, np.stack(found[OUTPUTS[0]]))
    arrays = {}
    for name, rows in found.items():
        alike = len({row.shape for row in rows}) == 1
        arrays.update({name: np.stack(rows)} if alike else {f"{name}_{i}": row for i, row in enumerate(rows)})
    return np.savez(file, **arrays)


def best(logits, count):
    """The most probable classes: [(probability, index, name)], best first."""
    exponents = np.exp(logits.astype(np.float64) - logits.max())
    shares = exponents / exponents.sum()
    return [(float(shares[i]), int(i), LABELS[i] if LABELS else str(i)) for i in np.argsort(-shares)[:count]]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="+", metavar="PICTURE")
    installed = [name for name in ENGINES if importlib.util.find_spec(name)]
    own = next((name for name in (ABOUT["engine"], *installed) if name in installed), ABOUT["engine"])
    parser.add_argument("--engine", choices=tuple(ENGINES), default=own, help=f"default here: {own}")
    parser.add_argument("--top", type=int, default=5, help="classes a picture")
    parser.add_argument("--threads", type=int, help="of the engine")
    parser.add_argument("--save", metavar="FILE", help="write the outputs to FILE.npy, maps to FILE.npz")
    args = parser.parse_args()
    if args.engine not in installed:
        sys.exit(f"error: {args.engine} is not installed: {INSTALL}")
    if missing := [file for file in args.pictures if not Path(file).is_file()]:  # said before the engine loads
        is_folder = Path(missing[0]).is_dir()
        sys.exit(f"error: {missing[0]}: {'is a folder: name the pictures in it' if is_folder else 'no such file'}")
    outputs = infer(ENGINES[args.engine](args.threads), args.pictures)
    if args.save:
        save(args.save, outputs)
    if OUTPUTS != ["logits"]:
        for i, file in enumerate(args.pictures):
            shown = [f"{name} {list(rows[i].shape)}" for name, rows in outputs.items()]
            print(f"{file}: " + ", ".join(shown) + ("" if args.save else ": --save writes them to a file"))
        return
    for file, logits in zip(args.pictures, outputs["logits"]):  # noqa: B905 (Python 3.9 has no strict)
        print(f"{file}: " + ", ".join(f"{name} {share:.1%}" for share, _, name in best(logits, args.top)))


if __name__ == "__main__":
    main()
