#!/usr/bin/env python3
"""Times one optimizer step of dtrain and the same step in PyTorch, on the same cores, in one run.

    python3 benchmarks/cpu_step.py --dtrain build/dtrain [--anchors 64] [--threads 2]

Needs torch, numpy, h5py, safetensors. The PyTorch step does the same work in the way a careful user
would write it: only rows of nonzero weight enter the vocabulary products, teacher rows once per distinct
position, one fused scaled_dot_product_attention with a dense mask a layer, torch's fused AdamW.
Steps of the two alternate in blocks, so that a drifting machine hits both; the medians are compared.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import h5py
import numpy as np

HIDDEN, VOCAB, LAYERS, FEATURES, BLOCK = 576, 49152, 5, 5, 8
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 9, 3, 64, 1536
TOKENS, DOCUMENTS = 2048, 4


def to_bf16(values):
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_target(folder, rng):
    from safetensors.numpy import save_file

    folder.mkdir()
    config = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=HIDDEN,
                  vocab_size=VOCAB, num_hidden_layers=30, num_attention_heads=HEADS,
                  num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate_size=INTERMEDIATE,
                  rms_norm_eps=1e-5, rope_theta=100000.0, max_position_embeddings=8192,
                  tie_word_embeddings=True, eos_token_id=2, bos_token_id=1)
    (folder / "config.json").write_text(json.dumps(config))
    embed = rng.standard_normal((VOCAB, HIDDEN), np.float32) * 0.05
    save_file({"embed_tokens.weight": embed, "norm.weight": np.ones(HIDDEN, np.float32)},
              str(folder / "head.safetensors"))
    return embed


def write_shard(path, rng):
    """`DOCUMENTS` documents that fill one row of TOKENS tokens; everything supervised."""
    length = TOKENS // DOCUMENTS
    ids = rng.integers(3, VOCAB, TOKENS, np.int32)
    hidden = to_bf16(rng.standard_normal((TOKENS, FEATURES + 1, HIDDEN), np.float32))
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "dtrain-features", "format_version": 1,
                           "target_model": "random", "hidden_size": HIDDEN, "vocab_size": VOCAB,
                           "target_layer_ids": np.array([1, 8, 14, 20, 26], np.int32),
                           "dtype": "bfloat16", "last_hidden": "pre_norm"})
        file["doc_offsets"] = np.arange(0, TOKENS + 1, length, dtype=np.int64)
        file["input_ids"] = ids
        file["loss_mask"] = np.ones(TOKENS, np.uint8)
        file["hidden_states"] = hidden
        file["doc_id"] = np.arange(1, DOCUMENTS + 1, dtype=np.uint64)
    return ids, hidden


def write_config(folder, anchors, steps, threads):
    text = f"""
run: {{dir: run, epochs: {steps}, max_steps: {steps}, device: cpu, compute: fp32}}
target: {{path: target}}
data: {{train: [train.h5], seq_len: {TOKENS}, rows_per_step: 1}}
drafter: {{kind: dflash, layers: {LAYERS}, block_size: {BLOCK}, mask_token_id: 0}}
anchors: {{max_anchors: {anchors}, per: row}}
loss: {{kl: 1.0, slot_decay_gamma: 4.0}}
optimizer: {{lr: 1.0e-4}}
checkpoint: {{every: 0}}
parallel: {{threads: {threads}}}
log: {{every: 1000, tensorboard: false}}
"""
    (folder / "config.yaml").write_text(text)


def dtrain_seconds(binary, folder, environment):
    """Seconds of every step but the first two, from metrics.jsonl."""
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    subprocess.run([binary, "--config", str(folder / "config.yaml")], check=True, env=environment,
                   stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open(folder / "run" / "metrics.jsonl")]
    return [line["seconds"] for line in lines if "loss" in line][2:]


def start_weights(model):
    """The model, with matrices as a run begins with them."""
    import torch
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.02)
    return model


def build_torch(embed, threads):
    import torch
    from torch import nn
    from torch.nn import functional as f

    torch.set_num_threads(threads)

    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return f.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = Norm(HIDDEN), Norm(HIDDEN)
            self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
            self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_DIM, bias=False)
            self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
            self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)
            self.gate_up = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
            self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

        def forward(self, x, context, mask, rope_x, rope_all):
            n = self.norm1(x)
            q = rotate(self.q_norm(self.q(n).view(-1, HEADS, HEAD_DIM)), *rope_x)
            kv = torch.cat([self.kv(context), self.kv(n)])
            k, v = kv.view(-1, 2, KV_HEADS, HEAD_DIM).unbind(1)
            k = rotate(self.k_norm(k), *rope_all)
            out = f.scaled_dot_product_attention(q.transpose(0, 1)[None], k.transpose(0, 1)[None],
                                                 v.transpose(0, 1)[None], attn_mask=mask,
                                                 enable_gqa=True)
            x = x + self.o(out[0].transpose(0, 1).reshape(x.shape[0], -1))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
            return x + self.down(f.silu(gate) * up)

    class Drafter(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(FEATURES * HIDDEN, HIDDEN, bias=False)
            self.hidden_norm, self.norm = Norm(HIDDEN), Norm(HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

        def forward(self, x, features, mask, rope_x, rope_all):
            context = self.hidden_norm(self.fc(features))
            for layer in self.layers:
                x = layer(x, context, mask, rope_x, rope_all)
            return self.norm(x)

    def rotate(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    return start_weights(Drafter()), torch.from_numpy(embed)


def torch_step(model, head, ids, hidden, anchors, optimizer, seed):
    import torch
    from torch.nn import functional as f

    length = TOKENS // DOCUMENTS
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(TOKENS) % length
    valid = torch.nonzero(position < length - 1)[:, 0]
    anchor = valid[torch.randperm(len(valid), generator=generator)[:anchors]].sort().values
    slot = torch.arange(BLOCK)
    rows = anchor[:, None] + slot  # [A, B]
    tokens = torch.zeros(anchors, BLOCK, dtype=torch.long)
    tokens[:, 0] = ids[anchor]
    x = head[tokens.view(-1)]
    features = hidden[:, :FEATURES].reshape(TOKENS, -1)
    block_position = (position[anchor][:, None] + slot).view(-1)

    def rope(positions):
        inverse = 100000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = positions[:, None, None] * inverse
        return angle.cos(), angle.sin()

    start = anchor - position[anchor]
    kv = torch.arange(TOKENS)
    context_mask = (kv >= start[:, None]) & (kv < anchor[:, None])
    own = torch.eye(anchors, dtype=torch.bool)
    mask = torch.cat([context_mask.repeat_interleave(BLOCK, 0),
                      own.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)], dim=1)
    out = model(x, features, mask, rope(block_position),
                rope(torch.cat([position, block_position])))

    scored = (slot > 0) & (position[anchor][:, None] + slot < length)
    teacher_position = (rows - 1)[scored]
    distinct, inverse = teacher_position.unique(return_inverse=True)
    with torch.no_grad():
        teacher = f.rms_norm(hidden[distinct, FEATURES], (HIDDEN,), None, 1e-5) @ head.T
        log_p = teacher.log_softmax(-1)
    log_q = (out.view(anchors, BLOCK, -1)[scored] @ head.T).log_softmax(-1)
    weight = torch.exp(-(slot - 1) / 4.0).expand(anchors, BLOCK)[scored]
    kl = f.kl_div(log_q, log_p[inverse], reduction="none", log_target=True).sum(-1)
    loss = (weight * kl).sum() / weight.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def torch_seconds(embed, ids, hidden, anchors, steps, threads):
    import torch

    model, head = build_torch(embed, threads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    planes = torch.from_numpy(from_bf16(hidden))
    token_ids = torch.from_numpy(ids.astype(np.int64))
    seconds = []
    for step in range(steps):
        begin = time.perf_counter()
        torch_step(model, head, token_ids, planes, anchors, optimizer, step)
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", required=True)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        embed = write_target(folder / "target", rng)
        ids, hidden = write_shard(folder / "train.h5", rng)
        write_config(folder, arguments.anchors, arguments.steps, arguments.threads)
        for _ in range(arguments.rounds):
            ours += dtrain_seconds(os.path.abspath(arguments.dtrain), folder, dict(os.environ))
            theirs += torch_seconds(embed, ids, hidden, arguments.anchors, arguments.steps,
                                    arguments.threads)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"anchors {arguments.anchors} of {BLOCK}, {TOKENS} tokens, hidden {HIDDEN}, {LAYERS} "
          f"layers, vocabulary {VOCAB}, {arguments.threads} threads")
    print(f"dtrain  median {a:.3f} s  min {min(ours):.3f}  max {max(ours):.3f}")
    print(f"PyTorch median {b:.3f} s  min {min(theirs):.3f}  max {max(theirs):.3f}")
    print(f"ratio dtrain / PyTorch {a / b:.3f}")


if __name__ == "__main__":
    main()
