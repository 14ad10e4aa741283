#!/usr/bin/env python3
"""Lets the tiny target answer prompts from text.txt and writes feature shards and its target directory.

    python3 make_shards.py            # -> shards/train-0.h5, shards/val-0.h5, target/

Needs numpy and h5py, not torch: this is what `make demo` runs. For real targets use tools/extract.py,
which writes the same files. A prompt is the first part of a line, the target writes the rest:
training prompts from lines it was trained on, validation prompts from lines it never saw.
All documents run together, position by position, so prompt and answer take the same path and no
document is padded; states are kept as they are computed.
"""

import argparse
import os
import sys
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tools"))

from dtrain_tools.shards import ShardWriter, document_id  # noqa: E402
from dtrain_tools.target_directory import default_layer_ids, write_target_directory  # noqa: E402
from dtrain_tools.tensor_file import float_to_bf16  # noqa: E402
from tiny_model import TinyModel  # noqa: E402

BOS, EOS = 256, 257
HELD_OUT = 119  # lines at the end of text.txt that the target was not trained on; as in make_target.py
TOGETHER = 256  # documents that run together


def prompt_of(line):
    """BOS and the words of the first two fifths of the line, as bytes."""
    cut = line.find(" ", len(line) * 2 // 5)
    return [BOS, *line[:cut if cut > 0 else len(line)].encode()]


class Batch:
    """Documents that run together. Arrays shrink as documents end."""

    def __init__(self, model, prompts, positions, layer_ids):
        self.model, self.layer_ids, self.positions = model, layer_ids, positions
        self.ids = [list(prompt) for prompt in prompts]
        self.prompts = [len(prompt) for prompt in prompts]
        planes, width = len(layer_ids) + 1, model.config["hidden_size"]
        self.states = np.zeros((len(prompts), positions, planes, width), dtype=np.uint16)
        self.teacher = [np.zeros((len(prompts), positions), dtype=kind) for kind in ("<i4", "<f4", "<f4")]
        self.running = np.arange(len(prompts))
        self.cache = model.new_cache(len(prompts), positions)

    def run(self, choose, progress):
        """choose(documents, logits) -> next tokens, for documents that are past their prompts."""
        for position in range(self.positions):
            progress(position)
            tokens = np.array([self.ids[d][position] for d in self.running])
            states, logits = self.model.step(tokens, position, self.cache, self.layer_ids)
            self._keep(position, states, logits)
            nexts = choose(self.running, logits)
            for document, token in zip(self.running, nexts):
                done = len(self.ids[document]) > position + 1 or self.ids[document][-1] == EOS
                if not done and position + 1 < self.positions:
                    self.ids[document].append(int(token))
            self._drop_ended(position)
            if not len(self.running):
                break

    def _keep(self, position, states, logits):
        top = logits.max(axis=1)
        self.states[self.running, position] = float_to_bf16(states)
        self.teacher[0][self.running, position] = logits.argmax(axis=1)
        self.teacher[1][self.running, position] = top
        self.teacher[2][self.running, position] = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))

    def _drop_ended(self, position):
        alive = np.array([len(self.ids[d]) > position + 1 for d in self.running], dtype=bool)
        if not alive.all():
            self.running = self.running[alive]
            for layer in self.cache:
                layer[:] = [kept[alive] for kept in layer]

    def documents(self):
        """(ids, mask, states, teacher) of each document."""
        for index, ids in enumerate(self.ids):
            mask = np.arange(len(ids)) >= self.prompts[index]
            yield ids, mask, self.states[index, :len(ids)], [column[index, :len(ids)] for column in self.teacher]


def chooser(names, temperature, seed):
    """Greedy, or sampled with a stream of random numbers for each document."""
    streams = [np.random.default_rng([seed, name]) for name in names]

    def choose(documents, logits):
        if temperature <= 0:
            return logits.argmax(axis=1)
        scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature
        total = np.cumsum(np.exp(scaled.astype(np.float64)), axis=1)
        drawn = np.array([streams[d].random() for d in documents])
        return (total < drawn[:, None] * total[:, -1:]).sum(axis=1)
    return choose


def show_progress(text, position):
    """A live line on a terminal, otherwise a line now and then."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif position % 100 == 0:
        print(text, file=sys.stderr, flush=True)


def answer(model, lines, first, args, temperature):
    """-> list of (doc_id, ids, mask, states, teacher); `first` numbers the first line in text.txt."""
    documents = []
    for at in range(0, len(lines), TOGETHER):
        prompts = [prompt_of(line) for line in lines[at:at + TOGETHER]]
        names = range(first + at, first + at + len(prompts))
        batch = Batch(model, prompts, args.tokens, args.layer_ids)
        batch.run(chooser(names, temperature, args.seed), lambda position: show_progress(
            f"documents {at + 1} to {at + len(prompts)} of {len(lines)}: position {position} of at most {args.tokens}",
            position))
        for name, (ids, mask, *rest) in zip(names, batch.documents()):
            documents.append((document_id(f"text.txt:{name}", 0, ids, mask), ids, mask, *rest))
    return documents


def write_shard(path, model, documents, args):
    attributes = {
        "target_model": "dtrain-tiny", "target_layer_ids": args.layer_ids,
        "hidden_size": model.config["hidden_size"], "vocab_size": model.config["vocab_size"],
        "last_hidden": "pre_norm", "created_by": "examples/tiny/make_shards.py",
        "dataset": "examples/tiny/text.txt"}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    shard = ShardWriter(path, attributes, [len(d[1]) for d in documents], [d[0] for d in documents])
    for index, (_, *document) in enumerate(documents):
        shard.write(index, *document)
    shard.finish()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    tokens, supervised = (sum(int(f) for f in count) for count in
                          zip(*((len(d[1]), d[2].sum()) for d in documents)))
    print(f"{path}: {len(documents)} documents, {tokens:,} tokens, {supervised:,} supervised, "
          f"{os.path.getsize(path) / 1e6:.0f} MB")


def parse_arguments():
    parser = argparse.ArgumentParser(description="make the tiny example's feature shards and target directory")
    parser.add_argument("--model", default=os.path.join(HERE, "model"))
    parser.add_argument("--out", default=HERE, help="folder that gets shards/ and target/")
    parser.add_argument("--train", type=int, default=512, help="training documents")
    parser.add_argument("--val", type=int, default=HELD_OUT, help="validation documents")
    parser.add_argument("--tokens", type=int, default=300, help="longest document")
    parser.add_argument("--temperature", type=float, default=0.0,
                        help="of the training documents; validation documents are always greedy")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not 1 <= args.val <= HELD_OUT:
        parser.error(f"--val must be 1..{HELD_OUT}")
    return args


def main():
    args = parse_arguments()
    started = time.time()
    with open(os.path.join(HERE, "text.txt"), encoding="ascii") as file:
        lines = file.read().splitlines()
    known = len(lines) - HELD_OUT
    if not 1 <= args.train <= known:
        sys.exit(f"--train must be 1..{known}")
    longest = max(len(prompt_of(line)) for line in lines[:args.train] + lines[known:known + args.val])
    if args.tokens < longest:
        sys.exit(f"--tokens must be at least {longest}, the longest prompt")
    model = TinyModel(args.model)
    args.layer_ids = default_layer_ids(len(model.layers), 3)
    write_target_directory(os.path.join(args.out, "target"), os.path.join(args.model, "config.json"),
                           os.path.join(args.model, "model.safetensors"))
    for name, first, count, temperature in (("train", 0, args.train, args.temperature),
                                            ("val", known, args.val, 0.0)):
        documents = answer(model, lines[first:first + count], first, args, temperature)
        write_shard(os.path.join(args.out, "shards", f"{name}-0.h5"), model, documents, args)
    print(f"made in {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
