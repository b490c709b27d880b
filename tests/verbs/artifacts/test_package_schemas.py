"""The descriptions in a package for Triton and KServe, against the schemas of their own clients."""

import ast
import importlib.util
from pathlib import Path

import onnx
import pytest
import yaml
from google.protobuf import text_format
from onnx import TensorProto, helper

from swin_quant.exported import labels_in
from swin_quant.ship import collect_facts
from swin_quant.verbs.serve import load_service


def test_triton_s_configuration_is_one_of_its_schema(packaged):
    """Parsed with the messages of Triton's own client, then compared with the file."""
    written = (packaged / "models" / "the_means" / "config.pbtxt").read_text()
    config = text_format.Parse(written, triton_schema().ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("the_means", "onnxruntime", 32)
    ends = [(one.name, list(one.dims)) for one in (*config.input, *config.output)]
    assert ends == [("images", [3, 32, 32]), ("logits", [3])]
    assert (packaged / "models" / config.name / config.output[0].label_filename).is_file()
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert config.instance_group[0].count == 1 and config.instance_group[0].kind == 2  # KIND_CPU


@pytest.mark.parametrize("batch", [None, 4])
def test_serve_describes_the_model_as_its_package_does(exported, remade, batch):
    """With every output beside logits, float16 in, and a fixed batch."""
    model = onnx.load(exported)
    graph = model.graph
    graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    graph.node[0].input[0] = "wide"
    graph.initializer.append(helper.make_tensor("two", TensorProto.INT64, [1], [2]))
    graph.node.insert(0, helper.make_node("Cast", ["images"], ["wide"], to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
    graph.node.append(helper.make_node("TopK", ["probabilities", "two"], ["top_probabilities", "top_classes"], axis=1))
    for name, kind, width in (("probabilities", 1, 3), ("top_classes", 7, 2), ("top_probabilities", 1, 2)):
        graph.output.append(helper.make_tensor_value_info(name, kind, ["batch", width]))
    for value in (*graph.input, *graph.output) if batch else ():
        value.type.tensor_type.shape.dim[0].dim_value = batch
    artifact = remade(model)
    served = load_service(artifact, "onnxruntime").model
    assert served == collect_facts(artifact, labels_in(artifact)).served
    assert (served.name, served.batch, served.labels) == ("the_means", batch, ("cat", "dog", "fox"))
    assert (served.input.type, served.input.shape) == ("float16", (3, 32, 32))
    ends = [("logits", "FP32", (3,)), ("probabilities", "FP32", (3,)), ("top_classes", "INT64", (2,))]
    assert [(one.name, one.datatype, one.shape) for one in served.outputs[:3]] == ends


def place_of(package):
    """The folder of a package, found without an import: the package around its schema needs gRPC, or half a cluster's
    client."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"needs {package}")
    return Path(found.submodule_search_locations[0])


def triton_schema():
    """tritonclient's model_config_pb2."""
    file = place_of("tritonclient") / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kserve_schema():
    """{class: {key as written: its type}} of the models in KServe's client, which are generated from its CRD."""
    schema = {}
    for file in (place_of("kserve") / "models").glob("v1*.py"):
        for found in ast.walk(ast.parse(file.read_text())):
            if isinstance(found, ast.ClassDef):
                assigned = {one.targets[0].id: one.value for one in found.body if isinstance(one, ast.Assign)}
                types, written = (ast.literal_eval(assigned[name]) for name in ("openapi_types", "attribute_map"))
                schema[found.name] = {written[key]: kind for key, kind in types.items()}
    return schema


def strangers(value, kind, schema):
    """Keys and values below a value of `kind` that the schema does not know, or knows with another type."""
    if kind not in schema:  # Kubernetes' types: names, quantities
        plain = {"str": str, "int": int, "bool": bool, "float": float}.get(kind)
        return [] if plain is None or type(value) is plain else [(kind, value)]
    known = schema[kind]
    return [(kind, key) for key in value if key not in known] + [
        wrong for key, one in value.items() if key in known for wrong in strangers(one, known[key], schema)
    ]


def test_kserve_s_service_is_one_of_its_schema(packaged):
    schema = kserve_schema()
    service = yaml.safe_load((packaged / "kserve.yaml").read_text())
    assert strangers(service, "V1beta1InferenceService", schema) == []
    service["spec"]["predictor"]["model"] |= {"modelformat": {}, "runtime": 7}  # the check finds what is wrong
    assert strangers(service, "V1beta1InferenceService", schema) == [("V1beta1ModelSpec", "modelformat"), ("str", 7)]
