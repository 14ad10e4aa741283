"""Muon's update of a matrix in float64, through the singular value decomposition.

The Newton-Schulz iteration x' = a x + b (x x^T) x + c (x x^T)^2 x keeps singular vectors and maps each singular
value s to a s + b s^3 + c s^5. So it is computed here on the singular values alone: no product of it is shared
with the program that it is compared with.
"""

import math

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7
TABLES = ("embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def takes(optimizer, name, param):
    """Whether Muon updates the tensor, rather than AdamW."""
    matrix = param.dim() == 2 and min(param.shape) > 1
    return optimizer["kind"] == "muon" and matrix and name not in TABLES


def iterated(values, steps):
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values


def orthogonal(matrix, steps):
    """The matrix divided by its norm, after `steps` iterations."""
    u, s, vh = torch.linalg.svd(matrix / max(float(matrix.norm()), LEAST_NORM), full_matrices=False)
    return u @ (iterated(s, steps)[:, None] * vh)


def factor(optimizer, shape):
    rows, columns = shape
    if optimizer["muon_scale"] == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def given(optimizer, key, fallback):
    value = optimizer.get(key)
    return optimizer[fallback] if value is None else value


def weight_decay(optimizer, name, param):
    """Of any tensor under either optimizer."""
    if param.dim() < 2:
        return 0.0
    if takes(optimizer, name, param):
        return given(optimizer, "muon_weight_decay", "weight_decay")
    return optimizer["weight_decay"]


def muon(param, grad, m, optimizer, lr, decay):
    """The new parameter. lr: of the schedule, whose peak is optimizer.lr."""
    momentum = optimizer["muon_momentum"]
    if lr > 0:
        lr = lr * given(optimizer, "muon_lr", "lr") / optimizer["lr"]
    m = momentum * m + (1 - momentum) * grad
    ahead = momentum * m + (1 - momentum) * grad
    step = orthogonal(ahead, optimizer["muon_ns_steps"]) * factor(optimizer, param.shape)
    return param * (1 - lr * decay) - lr * step
