"""Training: float training and QAT in one loop, with snapshots, ranges, distillation."""
