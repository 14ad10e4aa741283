"""What a step costs at least: its FLOPs at the rate that a GPU sustains, and AdamW at the speed of its memory.

Counted is what no exact implementation can leave out: block rows through the layers, rows of nonzero weight
through the head twice forth and back, every teacher position once, the context's features and keys, visible
pairs of query and key, and every byte of the optimizer once. The formula is explained in docs/performance.md.
"""
import math

from made_up import BLOCK, DRAFTER_LAYERS

FLOPS, BYTES = 700e12, 4.24e12  # a second; measured on an H200: bf16 products at length, copies
ADAMW_BYTES = 30  # gradient, master weight and both moments read (fp32); the last three and bf16 weights written


def parameters(model):
    """(of the layers, of the layers' keys and values, of fc)."""
    hidden, width = model["hidden"], model["heads"] * model["head_dim"]
    key_value = 2 * hidden * model["kv_heads"] * model["head_dim"]
    layer = 2 * hidden * width + key_value + 3 * hidden * model["intermediate"]
    return DRAFTER_LAYERS * layer, DRAFTER_LAYERS * key_value, len(model["layer_ids"]) * hidden * hidden


def distinct_positions(rows, tokens):
    """Expected number of teacher positions that `rows` uniform draws touch."""
    return tokens * (1 - math.exp(-rows / tokens))


def floor_milliseconds(model, anchors, tokens, document_tokens, rows=None):
    """rows: of nonzero weight; default: all but the anchors themselves."""
    layers, key_value, fc = parameters(model)
    block_rows = anchors * BLOCK
    rows = rows or anchors * (BLOCK - 1)
    head = (2 * rows + distinct_positions(rows, tokens)) * 2 * model["hidden"] * model["vocab"]
    context = tokens * (4 * fc + 6 * key_value)  # fc's input needs no gradient
    pairs = block_rows * (document_tokens / 2 + BLOCK)
    attention = 3.5 * 4 * pairs * model["heads"] * model["head_dim"] * DRAFTER_LAYERS
    flops = 6 * layers * block_rows + head + context + attention
    return 1e3 * (flops / FLOPS + ADAMW_BYTES * (layers + fc) / BYTES)
