"""The service of `swin-quant serve` on a Ray cluster, in two replicas, each with an engine and batches of its own.

    python examples/cluster/ray_serve.py out/my_int8.onnx
    curl --data-binary @cat.jpg localhost:8000/predict

Needs `pip install -c constraints.txt -e '.[ray,serve]'`, and the artifact with its run card at the same path on every
node. docs/shipping.md describes a request; Ray's proxy sets the limits of what a client may send and how long it may
take. /metrics are those of the replica that answers; Ray has its own for all.
"""

import sys
from pathlib import Path

from ray import serve

ARTIFACT = str(Path(sys.argv[1] if len(sys.argv) > 1 else "out/my_int8.onnx").resolve())


def build():
    """Called in each replica, where the engine is loaded."""
    import swin_quant as sq

    return sq.app(ARTIFACT, threads=2)


deployment = serve.deployment(
    serve.ingress(build)(), name="classifier", num_replicas=2, ray_actor_options={"num_cpus": 2}
)
app = deployment.bind()

if __name__ == "__main__":
    serve.run(app, route_prefix="/", blocking=True)
