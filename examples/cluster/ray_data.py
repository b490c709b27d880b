"""Predict the classes of very many pictures on a Ray cluster, into Parquet files.

    python examples/cluster/ray_data.py out/my_int8.onnx PICTURES answers

PICTURES is a folder, `answers` a folder of Parquet files: picture, classes (the five most probable, best first),
probabilities, unreadable (the reason, else null). An interrupted job goes on without repeating finished pictures.
Needs `pip install -c constraints.txt -e '.[ray]'`; artifact and pictures at the same paths on every node.
"""

import sys
from pathlib import Path

import pyarrow
import ray
from pyarrow import parquet

COPIES, THREADS, BATCH = 2, 1, 32  # engines, their threads, pictures at a time


class Classifier:
    """An engine in a separate process."""

    def __init__(self, artifact: str) -> None:
        import swin_quant as sq

        opened = sq.artifact(artifact)
        self.engine = opened.load(threads=THREADS)
        self.preprocess = sq.Preprocess.from_dict(opened.card.preprocess)

    def __call__(self, files: pyarrow.Table) -> pyarrow.Table:
        import torch

        from swin_quant.data.pictures import UnreadablePicture, decode

        images, flaws = [], []
        for path, data in zip(files["path"].to_pylist(), files["bytes"].to_pylist(), strict=True):
            try:
                images.append(self.preprocess(decode(data, path)))
                flaws.append(None)
            except UnreadablePicture as error:
                flaws.append(str(error))
        if images:
            with torch.inference_mode():
                logits = self.engine(torch.stack(images))
            best = logits.double().softmax(1).topk(min(5, logits.shape[1]))
            answers = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows = [(None, None) if flaw else next(answers) for flaw in flaws]
        return pyarrow.table(
            {
                "picture": files["path"],
                "classes": pyarrow.array([row[0] for row in rows], pyarrow.list_(pyarrow.int32())),
                "probabilities": pyarrow.array([row[1] for row in rows], pyarrow.list_(pyarrow.float32())),
                "unreadable": pyarrow.array(flaws, pyarrow.string()),
            }
        )


def answered(folder: Path) -> set[str]:
    """Pictures that an earlier job has finished. A file that it had not finished is removed."""
    found: set[str] = set()
    for file in folder.glob("*.parquet"):
        try:
            found.update(parquet.read_table(file, columns=["picture"])["picture"].to_pylist())
        except pyarrow.ArrowInvalid:
            file.unlink()
    return found


def main(artifact: str, pictures: str, answers: str) -> None:
    from swin_quant.data.pictures import is_picture

    files = {str(file.resolve()) for file in Path(pictures).rglob("*") if is_picture(file.name)}
    left = sorted(files - answered(Path(answers)))
    print(f"{len(left)} of {len(files)} pictures are left", flush=True)
    if left:
        ray.data.read_binary_files(left, include_paths=True).map_batches(
            Classifier,
            fn_constructor_args=[str(Path(artifact).resolve())],
            batch_format="pyarrow",
            batch_size=BATCH,
            num_cpus=THREADS,
            compute=ray.data.ActorPoolStrategy(size=COPIES),
        ).write_parquet(str(Path(answers).resolve()))


if __name__ == "__main__":
    main(*sys.argv[1:])
