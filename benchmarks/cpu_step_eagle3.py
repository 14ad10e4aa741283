#!/usr/bin/env python3
"""Times one EAGLE-3 step of dtrain and the same step in PyTorch, on the same cores, in one run.

    python3 benchmarks/cpu_step_eagle3.py --dtrain build/dtrain [--tokens 512] [--ttt-steps 4] [--threads 2]

Needs torch, numpy, h5py, safetensors. The PyTorch step is written as a careful user would: scores against the keys of
ttt_step 0 are one product with a causal mask, each later step adds one column to them; the teacher's logits are
computed once per position and shared by the steps; torch's fused AdamW. One Llama layer of SmolLM2-135M's sizes, its whole
vocabulary, two documents, every token supervised. Runs of the two alternate; the medians are compared.
"""
import argparse
import os
import pathlib
import statistics
import tempfile
import time

import numpy as np

import cpu_step
from cpu_step import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB

FEATURES = 3
EPS = 1e-5


def write_config(folder, arguments):
    text = f"""
run: {{dir: run, epochs: {arguments.steps}, max_steps: {arguments.steps}, device: cpu, compute: fp32}}
target: {{path: target, layer_ids: [1, 14, 26]}}
data: {{train: [train.h5], seq_len: {arguments.tokens}, rows_per_step: 1}}
drafter: {{kind: eagle3, style: llama, layers: 1, ttt_steps: {arguments.ttt_steps}, fc_norm: true, norm_output: true}}
loss: {{kl: 1.0, ttt_decay_base: 0.8}}
optimizer: {{lr: 1.0e-4}}
checkpoint: {{every: 0}}
parallel: {{threads: {arguments.threads}}}
log: {{every: 1000, tensorboard: false}}
"""
    (folder / "config.yaml").write_text(text)


def build_torch():
    import torch
    from torch import nn
    from torch.nn import functional as f

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x):
            return f.rms_norm(x, (HIDDEN,), self.weight, EPS)

    def rotate(x, position):
        angle = position[:, None, None] * 100000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        (a, b), cos, sin = x.chunk(2, dim=-1), angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).transpose(0, 1)  # [heads, T, head_dim]

    class Drafter(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc_norm = nn.ModuleList(Norm() for _ in range(FEATURES))
            self.fc = nn.Linear(FEATURES * HIDDEN, HIDDEN, bias=False)
            self.embed_norm, self.hidden_norm, self.mlp_norm, self.norm = Norm(), Norm(), Norm(), Norm()
            self.qkv = nn.Linear(2 * HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
            self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
            self.gate_up = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
            self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

        def fuse(self, features):
            return self.fc(torch.cat([norm(features[:, i]) for i, norm in enumerate(self.fc_norm)], dim=-1))

        def forward(self, h, embedded, position, mask, keys, values):
            """One ttt_step; its keys and values join the lists."""
            inputs = torch.cat([self.embed_norm(embedded), self.hidden_norm(h)], dim=-1)
            q, k, v = self.qkv(inputs).split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], dim=-1)
            q, k = rotate(q.view(-1, HEADS, HEAD_DIM), position), rotate(k.view(-1, KV_HEADS, HEAD_DIM), position)
            v = v.view(-1, KV_HEADS, HEAD_DIM).transpose(0, 1)
            keys.append(k.repeat_interleave(HEADS // KV_HEADS, 0))
            values.append(v.repeat_interleave(HEADS // KV_HEADS, 0))
            scores = [q @ keys[0].transpose(1, 2) + mask] + [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
            weights = (torch.cat(scores, dim=-1) * HEAD_DIM**-0.5).softmax(-1)
            tokens = weights.shape[1]
            out = weights[..., :tokens] @ values[0]
            for i, value in enumerate(values[1:]):
                out = out + weights[..., tokens + i, None] * value
            h = h + self.o(out.transpose(0, 1).flatten(1))
            gate, up = self.gate_up(self.mlp_norm(h)).chunk(2, dim=-1)
            return self.norm(h + self.down(f.silu(gate) * up))

    return cpu_step.start_weights(Drafter())


def torch_step(model, head, ids, planes, optimizer, arguments):
    import torch
    from torch.nn import functional as f

    tokens, length = arguments.tokens, arguments.tokens // cpu_step.DOCUMENTS
    position = torch.arange(tokens) % length
    document = torch.arange(tokens) // length
    seen = (document[:, None] == document) & (torch.arange(tokens) <= torch.arange(tokens)[:, None])
    mask = torch.zeros(tokens, tokens).masked_fill(~seen, float("-inf"))
    with torch.no_grad():
        teacher = f.rms_norm(planes[:, -1], (HIDDEN,), None, EPS) @ head.T
        log_p = teacher.log_softmax(-1)
    h, keys, values, total, weights = model.fuse(planes[:, :FEATURES]), [], [], 0.0, 0.0
    for i in range(arguments.ttt_steps):
        h = model(h, head[torch.roll(ids, -1 - i)], position + 1 + i, mask, keys, values)
        at = torch.nonzero(position + 2 + i < length)[:, 0]
        log_q = (h[at] @ head.T).log_softmax(-1)
        kl = f.kl_div(log_q, log_p[at + 1 + i], reduction="none", log_target=True).sum(-1)
        total, weights = total + 0.8**i * kl.sum(), weights + 0.8**i * len(at)
    loss = total / weights
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def torch_seconds(embed, ids, hidden, arguments):
    import torch

    torch.set_num_threads(arguments.threads)
    model, head = build_torch(), torch.from_numpy(embed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    planes = torch.from_numpy(cpu_step.from_bf16(hidden))[:, [0, 2, 4, 5]]  # layers 1, 14, 26 and the last state
    token_ids, seconds = torch.from_numpy(ids.astype(np.int64)), []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        torch_step(model, head, token_ids, planes, optimizer, arguments)
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    cpu_step.TOKENS, cpu_step.DOCUMENTS = arguments.tokens, 2
    rng, ours, theirs = np.random.default_rng(0), [], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        embed = cpu_step.write_target(folder / "target", rng)
        ids, hidden = cpu_step.write_shard(folder / "train.h5", rng)
        write_config(folder, arguments)
        for _ in range(arguments.rounds):
            ours += cpu_step.dtrain_seconds(os.path.abspath(arguments.dtrain), folder, dict(os.environ))
            theirs += torch_seconds(embed, ids, hidden, arguments)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"{arguments.tokens} tokens, {arguments.ttt_steps} ttt_steps, hidden {HIDDEN}, 1 layer, vocabulary {VOCAB}, "
          f"{arguments.threads} threads")
    print(f"dtrain  median {a:.3f} s  min {min(ours):.3f}  max {max(ours):.3f}")
    print(f"PyTorch median {b:.3f} s  min {min(theirs):.3f}  max {max(theirs):.3f}")
    print(f"ratio dtrain / PyTorch {a / b:.3f}")


if __name__ == "__main__":
    main()
