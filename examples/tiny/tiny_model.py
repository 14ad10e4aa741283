"""The tiny target's forward pass in numpy, one position of many documents at a time.

Reads the Hugging Face model directory itself (config.json, model.safetensors; Qwen3 layers), so that
shards can be made on a machine without torch. fp32 throughout. make_shards.py drives it.
Letters: D documents that run together, H hidden size, P planes, V vocabulary.
"""

import json
import os

import numpy as np

from dtrain_tools.tensor_file import bf16_to_float, read_tensors


def load_weights(path):
    weights = {}
    for name, (dtype, array) in read_tensors(path).items():
        if dtype not in ("BF16", "F32"):
            raise SystemExit(f"{path}: tensor {name} is {dtype}, expected BF16 or F32")
        weights[name] = bf16_to_float(array) if dtype == "BF16" else np.array(array)
    return weights


def rms_norm(x, weight, eps):
    return x * (1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))) * weight


def silu(x):
    return x / (1.0 + np.exp(-x))


def rotate(x, cos, sin):
    """Rotate-half RoPE of x [D, heads, head_dim] at one position."""
    half = x.shape[-1] // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


class TinyModel:
    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        if self.config["model_type"] != "qwen3" or not self.config["tie_word_embeddings"]:
            raise SystemExit(f"{folder}: expected a qwen3 model with tied embeddings")
        weights = load_weights(os.path.join(folder, "model.safetensors"))
        self.embedding = weights["model.embed_tokens.weight"]  # [V, H]
        self.head = np.ascontiguousarray(self.embedding.T)     # [H, V]
        self.norm = weights["model.norm.weight"]
        self.eps = self.config["rms_norm_eps"]
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.head_dim = self.config["head_dim"]
        self.layers = [self._layer(weights, f"model.layers.{i}.")
                       for i in range(self.config["num_hidden_layers"])]
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)

    @staticmethod
    def _layer(weights, prefix):
        """The layer's tensors with matrices as [in, out]; q, k, v and gate, up side by side."""
        def matrix(*names):
            return np.ascontiguousarray(np.concatenate([weights[prefix + name] for name in names]).T)
        attention, mlp = "self_attn.", "mlp."
        return {
            "input_norm": weights[prefix + "input_layernorm.weight"],
            "post_norm": weights[prefix + "post_attention_layernorm.weight"],
            "q_norm": weights[prefix + attention + "q_norm.weight"],
            "k_norm": weights[prefix + attention + "k_norm.weight"],
            "qkv": matrix(*(attention + name + "_proj.weight" for name in "qkv")),
            "o": matrix(attention + "o_proj.weight"),
            "gate_up": matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            "down": matrix(mlp + "down_proj.weight"),
        }

    def new_cache(self, documents, positions):
        """Per layer keys [D, kv_heads, head_dim, positions] and values [D, kv_heads, positions, head_dim]."""
        return [[np.zeros((documents, self.kv_heads, self.head_dim, positions), dtype=np.float32),
                 np.zeros((documents, self.kv_heads, positions, self.head_dim), dtype=np.float32)]
                for _ in self.layers]

    def step(self, tokens, position, cache, layer_ids):
        """One position of all documents. tokens [D] -> states [D, P, H], logits [D, V].

        The last plane is the last hidden state before the final norm.
        """
        angle = np.concatenate([position * self.frequencies] * 2)
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        x = self.embedding[tokens]
        planes = {}
        for index, (layer, kept) in enumerate(zip(self.layers, cache)):
            x = x + self._attention(layer, kept, rms_norm(x, layer["input_norm"], self.eps), position, cos, sin)
            gate, up = np.split(rms_norm(x, layer["post_norm"], self.eps) @ layer["gate_up"], 2, axis=1)
            x = x + (silu(gate) * up) @ layer["down"]
            planes[index] = x
        logits = rms_norm(x, self.norm, self.eps) @ self.head
        return np.stack([planes[i] for i in layer_ids] + [x], axis=1), logits

    def _attention(self, layer, kept, x, position, cos, sin):
        documents, dim = len(x), self.head_dim
        qkv = (x @ layer["qkv"]).reshape(documents, -1, dim)
        q, k, v = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=1)
        q = rotate(rms_norm(q, layer["q_norm"], self.eps), cos, sin)
        kept[0][..., position] = rotate(rms_norm(k, layer["k_norm"], self.eps), cos, sin)
        kept[1][:, :, position] = v
        q = q.reshape(documents, self.kv_heads, -1, dim)
        scores = q @ kept[0][..., :position + 1] * np.float32(dim ** -0.5)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ kept[1][:, :, :position + 1]).reshape(documents, -1) @ layer["o"]
