"""What a step costs at least: its FLOPs at the rate that a GPU sustains, and AdamW at the speed of its memory.

Counted is what no exact implementation can leave out: block rows through the layers, rows of nonzero weight
through the head twice forth and back, every teacher position once, the context's features and keys, visible
pairs of query and key, and every byte of the optimizer once. The formula is explained in docs/performance.md.

    python3 benchmarks/step_floor.py    # of v4, every token supervised, and of its mix
"""
import math
import random
import statistics

import made_up
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


def floor_milliseconds(model, anchors, tokens, document_tokens, rows=None, distinct=None):
    """rows: of nonzero weight; default: all but the anchors themselves. distinct: teacher positions among them."""
    layers, key_value, fc = parameters(model)
    block_rows = anchors * BLOCK
    rows = rows or anchors * (BLOCK - 1)
    distinct = distinct or distinct_positions(rows, tokens)
    head = (2 * rows + distinct) * 2 * model["hidden"] * model["vocab"]
    context = tokens * (4 * fc + 6 * key_value)  # fc's input needs no gradient
    pairs = block_rows * (document_tokens / 2 + BLOCK)
    attention = 3.5 * 4 * pairs * model["heads"] * model["head_dim"] * DRAFTER_LAYERS
    flops = 6 * layers * block_rows + head + context + attention
    return 1e3 * (flops / FLOPS + ADAMW_BYTES * (layers + fc) / BYTES)


def drawn(documents, anchors, seed=0):
    """Of one draw of anchors from (tokens, mask) documents of a row: anchors, rows of nonzero weight, distinct positions
    among them, mean context."""
    masks = [[1] * tokens if mask is None else list(mask) for tokens, mask in documents]
    valid = [(d, t) for d, mask in enumerate(masks) for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]
    chosen = random.Random(seed).sample(valid, min(anchors, len(valid)))
    slots = [(d, t + k) for d, t in chosen for k in range(1, BLOCK) if t + k < len(masks[d]) and masks[d][t + k]]
    return len(chosen), len(slots), len(set(slots)), sum(t for _, t in chosen) / len(chosen)


def floor_of_rows(model, rows, anchors):
    """Mean over packed rows, each a list of (tokens, mask), of what its documents and one draw of anchors make necessary."""
    floors = []
    for row in rows:
        blocks, slots, distinct, context = drawn(row, anchors)
        floors.append(floor_milliseconds(model, blocks, sum(tokens for tokens, _ in row), 2 * context, slots, distinct))
    return statistics.mean(floors)


def main():
    model, tokens = made_up.MODELS["v4"], 8192
    for anchors in (512, 1024, 2048, 3072, 8192):
        print(f"{anchors} anchors, every token supervised: {floor_milliseconds(model, anchors, tokens, tokens // 4):.1f} ms")
    for kind, documents in (("mix", made_up.mixed_documents(tokens)), ("few", made_up.few_documents(tokens))):
        rows = made_up.rows_of(documents, tokens)
        means = [statistics.mean(values) for values in zip(*(drawn(row, 1024) for row in rows))]
        print(f"1024 anchors, {kind}: {floor_of_rows(model, rows, 1024):.1f} ms; anchors, rows of nonzero weight, distinct teacher "
              f"positions, mean context: {', '.join(f'{value:.0f}' for value in means)}")


if __name__ == "__main__":
    main()
