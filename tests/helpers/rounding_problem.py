"""A problem for rounding weights: weights, and the inputs' covariance."""

import torch


def problem(seed, rows=5, columns=12, mixing=1.0):
    """float64 weight [rows, columns] and a covariance of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = randn(3 * columns, columns) @ (torch.eye(columns) + mixing * randn(columns, columns))
    hessian = inputs.T @ inputs / len(inputs)
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    return randn(rows, columns), hessian
