"""States as float8: e4m3 codes with a scale for each token and plane, the last hidden state left as it is.

The scale is the largest magnitude of the plane at that token over 448, the largest code; codes are the nearest.
quantise() is for tensors and needs torch, quantise_bits() does the same with numpy.
"""

import numpy as np

from dtrain_tools.shards import Float8
from dtrain_tools.tensor_file import E4M3_VALUES, bf16_to_float, e4m3_to_float

LARGEST = 448.0
LEVELS = E4M3_VALUES[:127]                    # magnitudes of codes, ascending
MIDDLES = (LEVELS[1:].astype(np.float64) + LEVELS[:-1]) / 2


def quantise(states):
    """bf16 tensor [n, L, H] -> codes uint8 [n, L, H], scales fp32 [n, L], tensors."""
    import torch
    values = states.float()
    scales = values.abs().amax(dim=2) / LARGEST
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (values / scales[:, :, None]).to(torch.float8_e4m3fn).view(torch.uint8), scales


def quantise_bits(states, layers):
    """uint16 bf16 bits [n, P, H], of which the first `layers` planes become codes. -> Float8"""
    values = bf16_to_float(states[:, :layers])
    scales = np.abs(values).max(axis=2) / np.float32(LARGEST)
    scales = np.where(scales > 0, scales, np.float32(1))
    values /= scales[:, :, None]
    magnitude = np.abs(values).astype(np.float64)
    codes = np.searchsorted(MIDDLES, magnitude).astype(np.uint8)
    tie = MIDDLES[np.minimum(codes, len(MIDDLES) - 1)] == magnitude  # between this code and the next: to the even one
    codes += (tie & (codes & 1 == 1)).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 7
    return Float8(codes, scales, states[:, layers] if states.shape[1] > layers else None)


def dequantise(states):
    """Float8 -> fp32 [n, P, H]."""
    values = e4m3_to_float(states.codes) * states.scales[:, :, None]
    if states.last is None:
        return values
    return np.concatenate([values, bf16_to_float(states.last)[:, None]], axis=1)
