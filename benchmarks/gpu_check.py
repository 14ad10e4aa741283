#!/usr/bin/env python3
"""Compares dtrain on a GPU with dtrain on the CPU, and a GPU run with itself.

    python3 benchmarks/gpu_check.py --dtrain build/dtrain

One step in fp32 is traced on both for two mixtures of losses; tensors may differ by 1e-4 of their
largest value. 50 steps in bf16 run twice and must leave the same bits. Needs numpy, h5py, safetensors.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np
from safetensors import safe_open

import cpu_step

LIMIT = 1e-4
STEPS = 50
MIXTURES = {
    "kl": "{kl: 1.0, slot_decay_gamma: 4.0}",
    "all terms": "{kl: 0.5, reverse_kl: 0.2, js: 0.3, ce_teacher: 0.1, ce_data: 0.2, tv: 0.4, "
                 "nla: 0.1, lk: 0.3}",
}


def write_config(folder, name, loss, device, compute, extra=""):
    text = f"""
run: {{dir: {name}, epochs: {STEPS}, max_steps: {STEPS}, device: {device}, compute: {compute}}}
target: {{path: target}}
data: {{train: [train.h5], seq_len: {cpu_step.TOKENS}, rows_per_step: 1{extra}}}
drafter: {{kind: dflash, layers: 3, block_size: {cpu_step.BLOCK}, mask_token_id: 0,
  layer_types: [full_attention, sliding_attention, full_attention], sliding_window: 200}}
anchors: {{max_anchors: 64, per: row}}
loss: {loss}
optimizer: {{lr: 1.0e-4}}
checkpoint: {{every: {STEPS}}}
parallel: {{threads: 8}}
log: {{every: 1000, tensorboard: false}}
"""
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def run(arguments, log):
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        print(f"FAIL {log}: exit status {done.returncode}\n{done.stdout[-1500:]}")
    return done.returncode == 0


def read_trace(path):
    """All tensors but the inputs and the updates (in the first step signs of gradients)."""
    left_out = ("row", "param.", "updated.", "adam_", "decay.")
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()
                if not name.startswith(left_out)}


def compare(cpu, cuda, label):
    """Prints the worst tensors; True when all are within LIMIT."""
    errors = []
    for name, a in cpu.items():
        b = cuda[name]
        a, b = a.astype(np.float64), b.astype(np.float64)
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            errors.append((np.inf, name))
        elif name.endswith("argmax"):
            errors.append((np.mean(a != b) * LIMIT / 0.01, name))  # 1 % may be near ties
        else:
            scale = np.max(np.abs(a), initial=0.0)
            worst = np.max(np.abs(a - b), initial=0.0)
            errors.append((worst / (scale if scale > 0 else 1.0), name))
    errors.sort(reverse=True)
    worst = "; ".join(f"{name} {error:.1e}" for error, name in errors[:4])
    ok = errors[0][0] <= LIMIT
    print(f"{'ok  ' if ok else 'FAIL'} trace, {label}: {len(errors)} tensors, worst {worst}")
    return ok


def check_trace(dtrain, folder, label, loss, extra):
    traces = []
    for device in ("cpu", "cuda"):
        config = write_config(folder, f"trace-{device}", loss, device, "fp32", extra)
        out = str(folder / f"{device}.safetensors")
        if not run([dtrain, "trace", "--config", config, "--out", out], f"trace on {device}"):
            return False
        traces.append(read_trace(out))
    return compare(*traces, label)


def check_repeats(dtrain, folder):
    states, seconds = [], []
    for name in ("first", "second"):
        config = write_config(folder, name, MIXTURES["kl"], "cuda", "bf16")
        if not run([dtrain, "--config", config], f"{STEPS} steps"):
            return False
        lines = [json.loads(line) for line in open(folder / name / "metrics.jsonl")]
        steps = [line for line in lines if "loss" in line]
        seconds += [line["seconds"] for line in steps[5:]]
        checkpoint = folder / name / "checkpoints" / f"step-{STEPS:08d}"
        states.append([(checkpoint / f"{part}.safetensors").read_bytes()
                       for part in ("master", "adam_m", "adam_v")] + [[s["loss"] for s in steps]])
    ok = states[0] == states[1] and len(states[0][3]) == STEPS
    print(f"{'ok  ' if ok else 'FAIL'} {STEPS} steps in bf16 twice: bits "
          f"{'equal' if ok else 'differ'}; loss {states[0][3][0]:.4f} to {states[0][3][-1]:.4f}; "
          f"{1e3 * statistics.median(seconds):.2f} ms a step")
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", required=True)
    dtrain = str(pathlib.Path(parser.parse_args().dtrain).resolve())
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        cpu_step.write_target(folder / "target", rng)
        cpu_step.write_shard(folder / "train.h5", rng)
        noise = ", noise_std: 0.05, noise_kind: uniform"
        results = [check_trace(dtrain, folder, "kl", MIXTURES["kl"], ""),
                   check_trace(dtrain, folder, "all terms, noise", MIXTURES["all terms"], noise),
                   check_repeats(dtrain, folder)]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
