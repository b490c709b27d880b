"""A detector's and a segmenter's figure before and after quantization: mAP and mIoU by torchmetrics, engines included.

    python benchmarks/tasks.py CIFAR10 [--steps 400] [--pictures 400] [--output docs/results/swins.md]

Pictures are dim noise with one to three of CIFAR-10's objects in them. timm's Swin, with the weights of
examples/checkpoints at another size of picture, stays as it is; on its maps a head for boxes (a class and four
distances in each cell, as in FCOS) and one for pixels are trained. Each network is wrapped and calibrated
whole, under the policy that a wrapped module gets by default. Needs torchmetrics and pycocotools.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pages import EXAMPLES, cpu, line_of, place, script_parser
from swins import HEADING
from torch import Tensor, nn

import swin_quant as sq
from swin_quant.base.compat import import_timm, import_torchvision
from swin_quant.base.cpu import reproducible
from swin_quant.data.sources import open_pictures
from swin_quant.verbs.calibrate import WRAPPED

SIDE, CELL, CLASSES = 64, 8, 10
CHECKPOINT = EXAMPLES / "swin_micro_cifar10.safetensors"
ENGINES = ("openvino", "onnxruntime")


class Scenes:
    """Pictures [B, 3, SIDE, SIDE] composed of the objects of a split, with their boxes, classes and masks."""

    def __init__(self, place: str, split: str, objects: int) -> None:
        pictures = open_pictures(place, split)
        chosen = np.random.default_rng(0).permutation(len(pictures))[:objects]
        self.objects = torch.stack(
            [torch.tensor(np.asarray(pictures.read(int(one), False))).permute(2, 0, 1) / 255 for one in chosen]
        )
        self.labels = torch.tensor([pictures.labels[int(one)] for one in chosen])

    def drawn(self, count: int, seed: int) -> tuple[Tensor, list[dict[str, Tensor]], Tensor]:
        seeded = np.random.default_rng(seed)
        images = torch.tensor(seeded.random((count, 3, SIDE, SIDE), dtype=np.float32)) * 0.3
        masks = torch.full((count, SIDE, SIDE), CLASSES)
        targets = []
        for image, mask in zip(images, masks, strict=True):
            boxes, labels = [], []
            for quarter in seeded.permutation(4)[: seeded.integers(1, 4)]:  # one in each quarter, at most
                side = int(seeded.integers(22, SIDE // 2 + 1))
                left, top = (
                    int(seeded.integers(0, SIDE // 2 - side + 1)) + SIDE // 2 * part for part in divmod(int(quarter), 2)
                )
                index = int(seeded.integers(len(self.objects)))
                patch = F.interpolate(self.objects[index][None], size=side, mode="bilinear", antialias=True)[0]
                image[:, top : top + side, left : left + side] = patch
                mask[top : top + side, left : left + side] = self.labels[index]
                boxes.append([left, top, left + side, top + side])
                labels.append(int(self.labels[index]))
            targets.append({"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)})
        return (images - 0.47) / 0.25, targets, masks


class Backbone(nn.Module):
    """timm's Swin: its first map, [B, 32, SIDE / 2, SIDE / 2], and the other three joined, [B, 448, cells]."""

    def __init__(self) -> None:
        super().__init__()
        from safetensors.torch import load_file

        timm = import_timm()
        sizes = {"patch_size": 2, "embed_dim": 32, "depths": (2, 2, 6, 2), "num_heads": (1, 2, 4, 8), "window_size": 4}
        self.swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=SIDE, num_classes=CLASSES, **sizes)
        given = timm.models.swin_transformer.checkpoint_filter_fn(load_file(CHECKPOINT), self.swin)
        missing, _ = self.swin.load_state_dict(given, strict=False)
        assert all("relative_position_index" in key or "attn_mask" in key for key in missing), missing
        self.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        first, fine, same, coarse = self.swin.forward_intermediates(images, intermediates_only=True)
        size = SIDE // CELL
        return first, torch.cat([F.avg_pool2d(fine, 2), same, F.interpolate(coarse, size=(size, size))], 1)


def neck() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(448), nn.Conv2d(448, 128, 1), nn.ReLU())


class Detector(nn.Module):
    """logits [B, cells, CLASSES] and boxes [B, cells, 4]: corners in pixels."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone, self.neck = backbone, neck()
        self.tower = nn.Conv2d(128, 128, 3, padding=1)
        self.kinds, self.sides = nn.Conv2d(128, CLASSES, 3, padding=1), nn.Conv2d(128, 4, 3, padding=1)
        nn.init.constant_(self.kinds.bias, -3.0)  # most cells are empty
        centres = (torch.arange(SIDE // CELL) + 0.5) * CELL
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        self.register_buffer("centres", torch.stack([x.flatten(), y.flatten()], 1), persistent=False)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.heads(*self.backbone(images))

    def heads(self, first: Tensor, joined: Tensor) -> dict[str, Tensor]:
        found = F.relu(self.tower(self.neck(joined)))
        sides = CELL * F.softplus(self.sides(found)).flatten(2).transpose(1, 2)
        corners = torch.cat([self.centres - sides[..., :2], self.centres + sides[..., 2:]], -1)
        return {"logits": self.kinds(found).flatten(2).transpose(1, 2), "boxes": corners}


class Segmenter(nn.Module):
    """logits [B, CLASSES + 1, SIDE, SIDE]."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone, self.neck = backbone, neck()
        self.fine, self.head = nn.Conv2d(32, 32, 1), nn.Conv2d(128 + 32, CLASSES + 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.heads(*self.backbone(images))

    def heads(self, first: Tensor, joined: Tensor) -> Tensor:
        coarse = F.interpolate(self.neck(joined), size=(SIDE // 2, SIDE // 2), mode="bilinear")
        found = self.head(torch.cat([coarse, F.relu(self.fine(first))], 1))
        return F.interpolate(found, size=(SIDE, SIDE), mode="bilinear")


def detector_loss(found: Mapping[str, Tensor], targets: list[dict[str, Tensor]], centres: Tensor) -> Tensor:
    """Focal loss of classes, and 1 - GIoU of the boxes of cells inside the middle of an object."""
    from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

    wanted, boxes = torch.zeros_like(found["logits"]), torch.zeros_like(found["boxes"])
    for row, target in enumerate(targets):
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            middle, size = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
            inside = ((centres - middle).abs() < 0.3 * size).all(1)
            wanted[row, inside] = F.one_hot(label, CLASSES).float()
            boxes[row, inside] = box
    full = wanted.sum(-1) > 0
    classes = sigmoid_focal_loss(found["logits"], wanted, reduction="sum") / full.sum()
    loss: Tensor = classes + generalized_box_iou_loss(found["boxes"][full], boxes[full], reduction="mean")
    return loss


def trained(scenes: Scenes, steps: int, count: int = 800, batch: int = 16) -> tuple[Detector, Segmenter]:
    backbone = Backbone()
    detector, segmenter = Detector(backbone), Segmenter(backbone)
    images, targets, masks = scenes.drawn(count, 0)
    with torch.inference_mode():
        maps = [torch.cat(one) for one in zip(*map(backbone, images.split(batch)), strict=True)]
    maps = [one.clone() for one in maps]
    print("maps are made", flush=True)
    parts = [one for part in (detector, segmenter) for one in part.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parts, lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    seeded, start = np.random.default_rng(1), time.monotonic()
    for step in range(steps):
        chosen = seeded.integers(0, count, batch)
        first, joined = (one[chosen] for one in maps)
        of_boxes = detector_loss(detector.heads(first, joined), [targets[one] for one in chosen], detector.centres)
        loss = of_boxes + F.cross_entropy(segmenter.heads(first, joined), masks[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss):.3f}, {time.monotonic() - start:.0f} s", flush=True)
    return detector.eval(), segmenter.eval()


def boxes_of(found: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The best boxes of each picture, overlapping ones of a class removed."""
    from torchvision.ops import box_iou

    rows = []
    for logits, boxes in zip(found["logits"], found["boxes"], strict=True):
        scores, labels = torch.as_tensor(logits).sigmoid().max(1)
        boxes = torch.as_tensor(boxes)
        covers = (box_iou(boxes, boxes) > 0.5) & (labels[:, None] == labels)
        kept: list[int] = []  # greedily: torchvision's compiled nms does not load beside a CPU's torch
        for one in scores.argsort(descending=True).tolist():
            if not covers[one, kept].any():
                kept.append(one)
        rows.append({"boxes": boxes[kept[:20]], "scores": scores[kept[:20]], "labels": labels[kept[:20]]})
    return rows


def mean_precision(found: Mapping[str, Tensor], targets: list[dict[str, Tensor]], masks: Tensor) -> str:
    """COCO's mAP in percent, and that at an overlap of half."""
    from torchmetrics.detection import MeanAveragePrecision

    metric = MeanAveragePrecision()
    metric.update(boxes_of(found), targets)
    result = metric.compute()
    return f"{100 * float(result['map']):.1f} ({100 * float(result['map_50']):.1f})"


def mean_overlap(found: Tensor, targets: list[dict[str, Tensor]], masks: Tensor) -> str:
    from torchmetrics.classification import MulticlassJaccardIndex

    return f"{100 * float(MulticlassJaccardIndex(CLASSES + 1)(torch.as_tensor(found).argmax(1), masks)):.1f}"


def row(name: str, module: nn.Module, figure: Callable[..., str], scenes: Mapping[str, Any], work: Path) -> str:
    """A row of the table: float, fake-quant and each engine."""
    images, targets, masks = scenes["judged"]
    outputs = ("logits", "boxes") if name == "detector" else None
    model = sq.wrap(module, SIDE, name=name, output=outputs)
    with torch.inference_mode():
        cells = [name, figure(module(images), targets, masks)]
        sq.calibrate(model, scenes["calibrating"][0].split(16))
        covered: Any = model.card.calibration["coverage"] if model.card.calibration else {}
        cells.append(f"{covered['quantized']} of {covered['products']}, {100 * covered['share']:.1f} %")
        cells.append(figure(model(images), targets, masks))
        for engine in ENGINES:
            run = sq.export(model, engine, work / engine).load(threads=1)
            cells.append(figure(run(images), targets, masks))
    return line_of(cells)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("place", metavar="CIFAR10")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--work", type=Path, default=Path("out/tasks"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    reproducible()
    torch.manual_seed(0)
    import_torchvision()
    training = Scenes(args.place, "train", 8000)
    detector, segmenter = trained(training, args.steps)
    scenes = {"calibrating": training.drawn(64, 1), "judged": Scenes(args.place, "val", 4000).drawn(args.pictures, 2)}
    lines = [
        "| task | float32 | int8 | fake-quant | OpenVINO | ONNX Runtime |\n|---|---|---|---|---|---|",
        row("detector", detector, mean_precision, scenes, args.work),
        row("segmenter", segmenter, mean_overlap, scenes, args.work),
    ]
    print("\n".join(lines))
    if args.output:
        about = (
            f"A detector's mAP (at an overlap of half) and a segmenter's mIoU in percent, by torchmetrics, "
            f"on {args.pictures} pictures composed of CIFAR-10's objects; products in int8 and their share of the "
            f"multiplications. Heads trained here for {args.steps} steps on the micro Swin of `examples/checkpoints`; "
            f"policy {WRAPPED}; {cpu()}. Written by `python benchmarks/tasks.py CIFAR10 --steps {args.steps} "
            f"--pictures {args.pictures} --output docs/results/swins.md`.\n\n"
        )
        place(args.output, HEADING, "Tasks", about + "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
