#!/usr/bin/env python3
"""How fast tools/extract.py captures states, and what of the device it takes: budgets against fixed batches.

    extraction.py [--model DIR | --shape smollm2|tiny] [--device cuda] [--documents 1500] [--planes bfloat16,float8] [--cap-gib 4]

Documents of 20 to 4,000 tokens (lognormal, seeded). Before each line is timed, every fifth document and the longest are captured once with
its kind of batch: loading of kernels, choices at first sight of a size and the device's first allocations are in no figure. For each
budget of padded tokens: tokens a second, the share of padding, the peak of the device beside the sum that extract.py tells before loading
(dtrain_tools/memory.py), and how often memory ran out. What the peak has above that sum are the forward pass's activations. For comparison
the same documents in their order in batches of a fixed number of documents. Then the ratio of each budget to the best fixed batch. With
--cap-gib the largest budget and the largest batch run once more with no more memory than that: the first goes on with smaller batches, the
second ends.
"""

import argparse
import os
import sys
import tempfile
import time
import types

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tools"))

from dtrain_tools import memory  # noqa: E402
from dtrain_tools.budget import Budget, is_out_of_memory  # noqa: E402
from dtrain_tools.target_directory import default_layer_ids  # noqa: E402
from dtrain_tools.target_model import Capture, Target  # noqa: E402

SHAPES = {  # of a random Llama
    "smollm2": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
                "tie_word_embeddings": True},
    "tiny": {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192},
}


def make_model(shape, folder):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape])).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_documents(count, vocab):
    random = np.random.default_rng(7)
    lengths = np.clip(random.lognormal(6.0, 1.0, count), 20, 4000).astype(int)
    return [random.integers(0, vocab, length).tolist() for length in lengths]


class Meter:
    def __init__(self, device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self.started = time.time()

    def stop(self):
        """-> seconds, peak bytes (0 on a CPU)."""
        if self.device.type != "cuda":
            return time.time() - self.started, 0
        torch.cuda.synchronize(self.device)
        return time.time() - self.started, torch.cuda.max_memory_allocated(self.device)


def run_budget(capture, documents, tokens, rows):
    said, padded, meter = [], 0, Meter(capture.target.device)
    for group, _ in Budget(tokens, said.append).run(documents, len, lambda group: capture.run(group, rows)):
        padded += len(group) * max(map(len, group))
    seconds, peak = meter.stop()
    real = sum(map(len, documents))
    return real / seconds, 1 - real / padded, peak, len(said)


def run_fixed(capture, documents, count, rows):
    """-> the same, or None where memory runs out, as a fixed batch would end."""
    padded, meter = 0, Meter(capture.target.device)
    try:
        for at in range(0, len(documents), count):
            group = documents[at:at + count]
            capture.run(group, rows)
            padded += len(group) * max(map(len, group))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    seconds, peak = meter.stop()
    real = sum(map(len, documents))
    return real / seconds, 1 - real / padded, peak, 0


class Table:
    """Runs, their lines and rates."""

    def __init__(self, args, target, documents, layers):
        self.args, self.target, self.documents, self.layers = args, target, documents, layers
        self.weights = sum(weight.numel() * weight.element_size() for weight in target.model.parameters())
        self.longest, self.rates = max(map(len, documents)), {}
        self.first = documents[::5] + [max(documents, key=len)]  # captured before each line is timed

    def told(self, budget):
        options = types.SimpleNamespace(batch_tokens=budget, teacher_rows=self.args.teacher_rows, answer_tokens=0)
        parts = memory.extraction_parts(self.target.config, self.layers, options, self.weights, self.longest, 0,
                                        self.target.dtype.itemsize)
        return memory.needed(parts)

    def line(self, capture, name, kind, value):
        work = run_budget if kind == "budget" else run_fixed
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        found = work(capture, self.first, value, self.args.teacher_rows)
        if found is not None:
            found = work(capture, self.documents, value, self.args.teacher_rows)
        if found is None:
            print(f"{name} {kind} {value:7}: out of memory, which ends such a run", flush=True)
            return
        rate, padding, peak, halved = found
        beside = f", told {self.told(value) / 1e9:.2f} GB" if kind == "budget" else ""
        print(f"{name} {kind} {value:7}: {rate:10,.0f} tokens/s, {100 * padding:4.1f} % padding, peak {peak / 1e9:.2f} GB"
              f"{beside}, {halved} times out of memory", flush=True)
        self.rates[(name, kind, value)] = rate

    def ratios(self, name):
        fixed = {value: rate for (n, kind, value), rate in self.rates.items() if (n, kind) == (name, "fixed")}
        if not fixed:
            return
        best = max(fixed, key=fixed.get)
        parts = [f"{value}: {rate / fixed[best]:.2f}" for (n, kind, value), rate in self.rates.items()
                 if (n, kind) == (name, "budget")]
        print(f"{name}: budgets over the best fixed batch, {best} documents: {', '.join(parts)}", flush=True)


def numbers(text):
    return [int(value) for value in text.split(",") if value]


def main():
    parser = argparse.ArgumentParser(description="speed and memory of capturing states")
    parser.add_argument("--model")
    parser.add_argument("--shape", default="smollm2", choices=sorted(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument("--teacher-rows", type=int, default=1024)
    parser.add_argument("--planes", default="bfloat16")
    parser.add_argument("--budgets", type=numbers, default="4096,16384,65536,262144")
    parser.add_argument("--fixed", type=numbers, default="1,4,16,64,256")
    parser.add_argument("--cap-gib", type=float, help="of GPU memory, for one more run of each kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(args.model or make_model(args.shape, folder), None, args.device)
    documents, layers = make_documents(args.documents, target.vocab_size), default_layer_ids(len(target.layers), 3)
    table = Table(args, target, documents, len(layers))
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} tokens, the longest {table.longest}; {target.dtype}, "
          f"{target.device}; before each line {len(table.first)} of them, the longest too, untimed, with its kind of batch", flush=True)
    for planes in args.planes.split(","):
        with Capture(target, layers, planes == "float8") as capture:
            for kind, values in (("budget", args.budgets), ("fixed", args.fixed)):
                for value in values:
                    table.line(capture, planes, kind, value)
            table.ratios(planes)
    if args.cap_gib:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(args.cap_gib * 2**30 / torch.cuda.mem_get_info()[1])
        with Capture(target, layers) as capture:
            table.line(capture, f"at most {args.cap_gib} GiB,", "budget", max(args.budgets))
            table.line(capture, f"at most {args.cap_gib} GiB,", "fixed", max(args.fixed))


if __name__ == "__main__":
    main()
