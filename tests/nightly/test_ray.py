"""The examples for Ray on a local cluster: a service in two replicas, and a job that is continued."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from shown import ROOT

from swin_quant.cli import main

FOLDER = ROOT / "examples" / "cluster"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")]

# In another process: Ray leaves threads behind, and a process with threads must not fork.
DRIVER = """
import json, runpy, socket, sys, time, urllib.request
from pathlib import Path
import ray
from ray import serve

folder, artifact, pictures, out = sys.argv[1:]
ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)

job = runpy.run_path(folder + "/ray_data.py")["main"]
job(artifact, pictures + "/first", out)
Path(out, "cut_off.parquet").write_bytes(b"PAR1 half a file")
job(artifact, pictures, out)

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
serve.start(http_options={"host": "127.0.0.1", "port": port})
sys.argv = ["ray_serve.py", artifact]
serve.run(runpy.run_path(folder + "/ray_serve.py")["app"], route_prefix="/")
(status,) = serve.status().applications.values()

def ask(place, body=None):
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{place}", body)
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

files = sorted(Path(pictures).rglob("*.png"))
answers = {file.name: ask("predict", file.read_bytes()) for file in files for _ in range(4)}
counts = set()
for _ in range(30):
    text = ask("metrics")[1]
    counts.add(sum(float(line.rpartition(" ")[2]) for line in text.splitlines()
                   if line.startswith('swin_quant_requests_total{route="predict"')))
print(json.dumps({
    "answers": answers, "counts": sorted(counts), "ready": ask("v2/health/ready")[0],
    "replicas": status.deployments["classifier"].replica_states,
}))
serve.shutdown()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def found(_exports, pictures, tmp_path_factory):
    """The driver's output, the folder of the job's answers, and `predict`'s answers to the same pictures."""
    folder, environment = tmp_path_factory.mktemp("ray"), os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    broken = folder / "pictures"
    (broken / "first").mkdir(parents=True)
    for number, file in enumerate(sorted((pictures / "val").rglob("*.png"))):
        place = broken / ("first" if number < 4 else "") / f"{number}.png"
        place.write_bytes(b"no picture" if number == 3 else file.read_bytes())
    words = [FOLDER, _exports.onnx, broken, folder / "answers"]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, words)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["predict", str(_exports.onnx), str(broken), "--json", str(folder / "ours.json"), "--quiet"]) == 0
    answers = json.loads((folder / "ours.json").read_text())["pictures"]
    ours = {Path(one["picture"]).name: one["classes"] for one in answers}
    return done.stdout.splitlines(), folder / "answers", ours


def test_a_job_answers_every_picture_once_and_goes_on(found):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines, folder, ours = found
    assert [line for line in lines if line.endswith("are left")] == [
        "4 of 4 pictures are left",
        "3 of 7 pictures are left",
    ]
    assert not (folder / "cut_off.parquet").exists()
    rows = [row for file in folder.glob("*.parquet") for row in parquet.read_table(file).to_pylist()]
    assert sorted(Path(row["picture"]).name for row in rows) == [f"{number}.png" for number in range(7)]
    for row in rows:
        name = Path(row["picture"]).name
        if name == "3.png":
            assert row["classes"] is None and "not a picture" in row["unreadable"]
            continue
        assert row["unreadable"] is None and row["classes"][0] == ours[name][0]["index"]
        assert row["probabilities"] == pytest.approx([one["probability"] for one in ours[name]], abs=0.02)


def test_two_replicas_answer_as_one_service_does(found):
    lines, _, ours = found
    told = json.loads(next(line for line in lines if line.startswith("{")))
    assert told["replicas"] == {"RUNNING": 2} and told["ready"] == 200
    for name, (status, text) in told["answers"].items():
        answer = json.loads(text)
        if name == "3.png":
            assert (status, set(answer)) == (400, {"error"})
            continue
        assert status == 200 and answer["classes"][0]["index"] == ours[name][0]["index"]
        expected = pytest.approx([one["probability"] for one in ours[name]], abs=0.02)
        assert [one["probability"] for one in answer["classes"]] == expected
    assert len(told["counts"]) == 2 and sum(told["counts"]) == 4 * 7, "both have answered, nothing twice"
