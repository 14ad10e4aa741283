"""Targets and feature shards of real sizes with made-up values, for benchmarks.

What is measured with them depends on sizes, lengths and masks only, not on the values, so these are drawn
at random: unit hidden states, a head with the usual spread. Needs torch (a GPU makes it quick), numpy, h5py.

Values are drawn in a process of their own, this file as a script: a CUDA context, which stays as long as its process,
would take memory beside the program that is measured.
"""
import json
import math
import pickle
import statistics
import struct
import subprocess
import sys

import h5py
import numpy as np

import packed_rows

MODELS = {
    "v4": dict(hidden=5120, vocab=248320, layers=64, heads=32, kv_heads=8, head_dim=128,
               intermediate=17408, layer_ids=[1, 16, 31, 46, 61]),
    "qwen3-8b": dict(hidden=4096, vocab=151936, layers=36, heads=32, kv_heads=8, head_dim=128,
                     intermediate=12288, layer_ids=[1, 9, 17, 25, 33]),
    "tiny": dict(hidden=128, vocab=1024, layers=8, heads=4, kv_heads=2, head_dim=64,
                 intermediate=256, layer_ids=[0, 1, 2, 4, 5]),
}
DRAFTER_LAYERS, BLOCK = 5, 16


def write_target(folder, model, seed=0):
    """A target directory: config.json and head.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(model)))
    write_elsewhere("head", folder / "head.safetensors", model, seed)


def write_shard(path, model, documents, seed=0):
    """documents: (tokens, mask): mask is a uint8 array, or None when all is supervised."""
    write_elsewhere("shard", path, model, documents, seed)


def write_elsewhere(*what):
    subprocess.run([sys.executable, __file__], input=pickle.dumps(what), check=True)


class Values:
    """Random values, in the process that may hold a GPU."""

    def __init__(self, seed):
        import torch
        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def bits(self, shape, deviation):
        """bf16 normal values as uint16 bits."""
        values = self.torch.randn(shape, generator=self.generator, device=self.device,
                                  dtype=self.torch.bfloat16) * deviation
        return values.view(self.torch.int16).cpu().numpy().view(np.uint16)

    def integers(self, low, high, count):
        return self.torch.randint(low, high, (count,), generator=self.generator, device=self.device,
                                  dtype=self.torch.int32).cpu().numpy()


def model_config(model):
    """config.json of a target of these sizes with an untied head."""
    return dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=model["hidden"],
                vocab_size=model["vocab"], num_hidden_layers=model["layers"],
                num_attention_heads=model["heads"], num_key_value_heads=model["kv_heads"],
                head_dim=model["head_dim"], intermediate_size=model["intermediate"],
                rms_norm_eps=1e-6, rope_theta=10000000.0, max_position_embeddings=40960,
                hidden_act="silu", tie_word_embeddings=False, eos_token_id=1, bos_token_id=2)


def write_head_here(path, model, seed):
    values = Values(seed)
    hidden, vocab = model["hidden"], model["vocab"]
    shapes = {"embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden],
              "norm.weight": [hidden]}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            if len(shape) == 1:
                file.write(np.full(shape, 0x3F80, np.uint16).tobytes())  # ones
                continue
            for begin in range(0, shape[0], 32768):
                rows = min(32768, shape[0] - begin)
                values.bits((rows, hidden), 0.02).tofile(file)


def write_shard_here(path, model, documents, seed):
    values = Values(seed + 1)
    lengths = [tokens for tokens, _ in documents]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total, planes, hidden = int(offsets[-1]), len(model["layer_ids"]) + 1, model["hidden"]
    masks = [np.ones(tokens, np.uint8) if mask is None else mask for tokens, mask in documents]
    ids = values.integers(3, model["vocab"] - 1, total)
    with h5py.File(path, "w", alignment_threshold=4096, alignment_interval=4096) as file:
        file.attrs.update({"format": "dtrain-features", "format_version": 1,
                           "target_model": "made up", "hidden_size": hidden,
                           "vocab_size": model["vocab"], "dtype": "bfloat16",
                           "target_layer_ids": np.array(model["layer_ids"], np.int32),
                           "last_hidden": "pre_norm"})
        file["doc_offsets"] = offsets
        file["doc_id"] = np.arange(1, len(documents) + 1, dtype=np.uint64)
        file["input_ids"] = ids
        file["loss_mask"] = np.concatenate(masks)
        states = file.create_dataset("hidden_states", (total, planes, hidden), np.uint16)
        for begin in range(0, total, 4096):
            end = min(begin + 4096, total)
            states[begin:end] = values.bits((end - begin, planes, hidden), 1.0)


def even_documents(tokens, rows=2, per_row=4):
    """Rows of `per_row` documents of the same length, every token supervised."""
    return [(tokens // per_row, None)] * (rows * per_row)


def mixed_documents(tokens, rows=3, seed=0, supervised=0.6):
    """Lengths of mean 335 with a tail to 4,042; answers (a share of the tokens) behind their prompts."""
    count, documents = rows * tokens // 335, []
    normal = statistics.NormalDist(4.91, 1.38)  # of the lengths' logarithms; mean and tail follow from it
    for share in np.random.default_rng(seed).permutation((np.arange(count) + 0.5) / count):
        length = int(min(max(math.exp(normal.inv_cdf(share)), 24), 4042, tokens))
        mask = np.ones(length, np.uint8)
        mask[:int((1 - supervised) * length)] = 0
        documents.append((length, mask))
    return documents


def few_documents(tokens):
    """The same with short answers: a row of 8,192 tokens has some 570 anchors."""
    return mixed_documents(tokens, supervised=0.07)


def rows_of(documents, tokens):
    """The rows that dtrain packs of them in the first epoch of its default seed, each a list of documents."""
    lengths = np.array([length for length, _ in documents])
    identity = np.arange(1, len(documents) + 1, dtype=np.uint64)
    some = packed_rows.Documents(None, None, None, lengths, identity, [])
    return [[documents[d] for d in row] for row in packed_rows.pack(some, tokens, 42, 0)]


def wild_documents(tokens):
    """Documents of which no two share a row, from a few anchors in all to every token supervised."""
    documents = []
    for share, supervised in ((1.0, None), (0.55, None), (0.9, 16), (0.7, 200), (0.6, 1500), (0.52, 2)):
        length = int(share * tokens)
        mask = None
        if supervised is not None:
            mask = np.zeros(length, np.uint8)
            mask[length - supervised:] = 1
        documents.append((length, mask))
    return documents


if __name__ == "__main__":
    name, *arguments = pickle.load(sys.stdin.buffer)
    {"head": write_head_here, "shard": write_shard_here}[name](*arguments)
