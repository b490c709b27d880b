"""Run packages on Pythons, each in an empty environment with its requirements: a section of docs/results/releases.md.

python benchmarks/package_pythons.py PYTHON ... [--work out/package_pythons] [--output docs/results/releases.md]
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from pages import EXAMPLES, place, script_parser
from releases import HEAD, OLDEST, PAGE, PICTURES


def tried(interpreters: Sequence[str], work: Path) -> Iterator[str]:
    """The lines of a table: each engine's package on each Python, in an empty environment with its requirements."""
    from PIL import Image

    import swin_quant as sq
    from swin_quant.score.bench import noise

    weights = EXAMPLES / "swin_micro_cifar10.safetensors"
    model = sq.calibrate(sq.load(weights), [noise(PICTURES, (3, 32, 32)).images], "qdq", method="max", passes=[])
    picture, environment = work / "grey.png", work / "environment"
    Image.new("RGB", (50, 40), "grey").save(picture)
    for engine in OLDEST:
        sq.package(sq.export(model, engine, work / engine), work / f"{engine}_package", overwrite=True)
    yield from ("Python | installed | `infer.py`", "--- | --- | ---")
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=bare)
    for interpreter, engine in ((one, engine) for one in interpreters for engine in OLDEST):
        package, python = work / f"{engine}_package", environment / "bin" / "python"
        run([interpreter, "-m", "venv", "--clear", environment]).check_returncode()
        done = run([python, "-m", "pip", "install", "-q", "-r", package / "requirements.txt"])
        if not done.returncode:
            done = run([python, package / "infer.py", picture])
        listed = run([python, "-m", "pip", "freeze"]).stdout.split()
        named = ", ".join(one for one in listed if one.startswith((engine + "==", "numpy", "pillow")))
        text = done.stdout + (done.stderr if done.returncode else "")
        said = (text.strip().splitlines() or ["nothing"])[-1].rpartition("/")[2]
        version = run([python, "-V"]).stdout.split()[-1]
        yield f"{version} | {named} | {'' if not done.returncode else 'fails: '}{said}"
        shutil.rmtree(environment)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("pythons", nargs="+", help="interpreters")
    parser.add_argument("--work", type=Path, default=Path("out/package_pythons"))
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    place(args.output, HEAD, "packages on Pythons", "\n".join(tried(args.pythons, args.work)))


if __name__ == "__main__":
    main()
