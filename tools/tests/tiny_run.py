"""A training run of a few seconds for tests that look at what it leaves: random states, numpy and h5py only.

It has so many steps that it is still running when a test has seen one of them.
"""

import json
import os
import signal
import subprocess
import time

import numpy as np

from dtrain_tools.shards import ShardWriter
from dtrain_tools.tensor_file import float_to_bf16, write_tensors

HIDDEN, VOCAB, LAYERS = 16, 64, 3
PATIENCE = 240  # seconds that a run may take on a machine that much else runs on

CONFIG = """
run: {dir: unset, seed: 3, epochs: 100, max_steps: 300, device: cpu, compute: fp32}
target: {path: target}
data: {train: [train.h5], val: [val.h5], seq_len: 128, rows_per_step: 1}
validation: {every: 60, rows: 2, draft_tokens: [1, 3]}
drafter: {layers: 1, block_size: 4, mask_token_id: 60}
anchors: {max_anchors: 16}
loss: {kl: 0.5, tv: 0.5}
checkpoint: {every: 20, keep: 2, background: false}
parallel: {threads: 1}
log: {every: 1, peak_tflops: 0.01}
"""


def write_target(folder):
    pick = np.random.default_rng(1)
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
                   "vocab_size": VOCAB, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
                   "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
                   "rope_theta": 10000.0, "tie_word_embeddings": False}, file)
    matrix = pick.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    write_tensors(os.path.join(folder, "head.safetensors"),
                  {"embed_tokens.weight": ("F32", matrix), "lm_head.weight": ("F32", matrix[::-1]),
                   "norm.weight": ("F32", np.ones(HIDDEN, dtype=np.float32))})


def write_shard(path, seed, documents):
    pick = np.random.default_rng(seed)
    lengths = [int(pick.integers(20, 100)) for _ in range(documents)]
    writer = ShardWriter(path, {"target_model": "tiny", "target_layer_ids": list(range(LAYERS)),
                                "hidden_size": HIDDEN, "vocab_size": VOCAB, "last_hidden": "pre_norm"},
                         lengths, [seed * 1000 + d for d in range(documents)], has_teacher=False)
    for d, length in enumerate(lengths):
        ids = pick.integers(0, 50, size=length)
        states = float_to_bf16(pick.normal(size=(length, LAYERS + 1, HIDDEN)).astype(np.float32))
        writer.write(d, ids, np.arange(length) >= 4, states)
    writer.finish()


class Runs:
    """A folder with a target, shards and run.yaml, in which runs are started."""

    def __init__(self, folder, dtrain):
        self.folder, self.dtrain = folder, dtrain
        write_target(self.path("target"))
        write_shard(self.path("train.h5"), 1, 30)
        write_shard(self.path("val.h5"), 2, 4)
        with open(self.path("run.yaml"), "w", encoding="utf-8") as file:
            file.write(CONFIG)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def start(self, name, *sets):
        words = [word for one in (f"run.dir={self.path(name)}", *sets) for word in ("--set", one)]
        with open(self.path(name + ".out"), "a", encoding="utf-8") as out:
            return subprocess.Popen([self.dtrain, "--config", self.path("run.yaml"), *words], stdout=out,
                                    stderr=subprocess.STDOUT)

    def train(self, name, *sets):
        status = self.start(name, *sets).wait(timeout=PATIENCE)
        if status != 0:
            raise AssertionError(f"{name} ended with {status}:\n{self.said(name)}")

    def said(self, name):
        with open(self.path(name + ".out"), encoding="utf-8") as file:
            return file.read()

    def stop_at(self, name, step, how=signal.SIGKILL, *sets):
        """Starts a run and ends it once metrics.jsonl has a step; its exit status."""
        process = self.start(name, *sets)
        end = time.monotonic() + PATIENCE
        while process.poll() is None and not any(line["step"] >= step for line in self.metrics(name)):
            time.sleep(0.005)
            if time.monotonic() > end:
                process.kill()
                process.wait()
                raise AssertionError(f"{name} did not reach step {step}:\n{self.said(name)}")
        process.send_signal(how)
        return process.wait(timeout=PATIENCE)

    def metrics(self, name):
        """Whole lines so far."""
        try:
            with open(self.path(name, "metrics.jsonl"), encoding="utf-8") as file:
                return [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []
