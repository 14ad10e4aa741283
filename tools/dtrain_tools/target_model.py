"""A Transformers model as a target: loading, the states that are captured, and its logits.

Owns: where decoder layers, final norm and head are found; hooks on the wanted layers only (never
output_hidden_states); logits in fp32, in tiles of the vocabulary. Does not batch documents and does
not write files other than the target directory.
"""

import contextlib
import hashlib
import json
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dtrain_tools.documents import InputError
from dtrain_tools.target_directory import write_head

VOCABULARY_TILE = 16384  # rows of the head that are fp32 at the same time when the model is bf16


def pick_device(name):
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {name}: torch sees no GPU")
    return torch.device(name)


def split_model_path(model, gguf):
    """-> folder and the extra argument of from_pretrained, for a directory or a GGUF file."""
    if gguf is not None:
        if not os.path.isfile(gguf):
            raise InputError(f"{gguf}: no such file")
        return os.path.dirname(os.path.abspath(gguf)), {"gguf_file": os.path.basename(gguf)}
    if not os.path.isdir(model):
        raise InputError(f"{model}: no such model directory")
    return model, {}


def load_tokenizer(model, gguf=None):
    folder, extra = split_model_path(model, gguf)
    return AutoTokenizer.from_pretrained(folder, **extra)


def tokenizer_sha256(tokenizer):
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


class Target:
    """The loaded model. `dtype` auto: the model's own on a GPU, fp32 on a CPU."""

    def __init__(self, model, gguf=None, device="auto", dtype="auto"):
        folder, extra = split_model_path(model, gguf)
        self.device = pick_device(device)
        self.stored_dtype = torch.float32 if gguf else self._stored_dtype(folder)
        if dtype == "auto":
            dtype = "float32" if self.device.type == "cpu" or self.stored_dtype != torch.bfloat16 else "bfloat16"
        self.dtype = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype, **extra)
        self.model.to(self.device).eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.config_path = None if gguf else os.path.join(folder, "config.json")
        self.generation = self._generation_config(folder)
        self._find_parts(model or gguf)

    @staticmethod
    def _stored_dtype(folder):
        config = AutoConfig.from_pretrained(folder)
        return config.get_text_config().dtype or config.dtype or torch.float32

    def _generation_config(self, folder):
        with contextlib.suppress(OSError):
            return GenerationConfig.from_pretrained(folder)
        return self.model.generation_config

    def _find_parts(self, name):
        self.decoder = self.model.get_decoder()
        self.layers = getattr(self.decoder, "layers", None)
        self.norm = getattr(self.decoder, "norm", None)
        self.head = self.model.get_output_embeddings()
        self.embedding = self.model.get_input_embeddings()
        for part in ("layers", "norm", "head", "embedding"):
            if getattr(self, part) is None:
                raise InputError(f"{name}: model_type {self.config.model_type!r}: its {part} is not where "
                                 "decoder models have it; this model is not supported")

    @property
    def hidden_size(self):
        return self.config.hidden_size

    @property
    def vocab_size(self):
        return self.embedding.weight.shape[0]

    def end_ids(self, tokenizer):
        """Every token that ends an answer: the tokenizer's and the generation config's."""
        ids = self.generation.eos_token_id
        ids = ids if isinstance(ids, (list, tuple)) else [ids]
        return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})

    def logits(self, states):
        """fp32 logits [n, V] of final (normed) states [n, H], as the model computes them from these."""
        weight, bias = self.head.weight, getattr(self.head, "bias", None)
        states = states.float()
        if weight.dtype == torch.float32:
            out = states @ weight.T
        else:
            out = torch.cat([states @ tile.float().T for tile in weight.split(VOCABULARY_TILE)], dim=1)
        if bias is not None:
            out += bias.float()
        return self._transform(out)

    def _transform(self, logits):
        """What some families do after the head."""
        scale = getattr(self.config, "logit_scale", None)
        divide = getattr(self.config, "logits_scaling", None)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if scale:
            logits = logits * scale
        if divide:
            logits = logits / divide
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def teacher(self, states, rows):
        """Top-1, its logit and the log-sum-exp of final states [n, H], `rows` of them at a time."""
        parts = []
        for some in states.split(rows):
            logits = self.logits(some)
            top, index = logits.max(dim=1)
            parts.append((index.int(), top, torch.logsumexp(logits, dim=1)))
        return [torch.cat(column).cpu().numpy() for column in zip(*parts)]

    def check_logits(self, ids):
        """Refuses a model whose head does something that logits() does not know."""
        ids = torch.tensor([ids], device=self.device)
        with torch.inference_mode():
            expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
            got = self.logits(self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0])
        tolerance = 1e-3 if self.dtype == torch.float32 else 3e-2
        error = float((got - expected).abs().max() / expected.abs().max())
        if not error <= tolerance:
            raise InputError(f"model_type {self.config.model_type!r}: logits differ from the model's own by "
                             f"{error:.1e}: it changes them after the head in a way that is not known here")

    def write_target_directory(self, folder):
        """config.json and head.safetensors, in the dtype that the model is stored in (fp16 as fp32)."""
        os.makedirs(folder, exist_ok=True)
        tensors = {"embed_tokens.weight": self.embedding.weight, "norm.weight": self.norm.weight}
        if self.head.weight.data_ptr() != self.embedding.weight.data_ptr():
            tensors["lm_head.weight"] = self.head.weight
        if getattr(self.head, "bias", None) is not None:
            tensors["lm_head.bias"] = self.head.bias
        kind = torch.bfloat16 if self.stored_dtype == torch.bfloat16 else torch.float32
        tensors = {name: stored_tensor(tensor, kind) for name, tensor in tensors.items()}
        if self.config_path:
            write_head(folder, self.config_path, tensors)
            return
        own = os.path.join(folder, "config.json.tmp")  # a GGUF file has none: written from what was loaded
        config = self.model.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):  # the weights are not quantised any more
            config.pop(name, None)
        config["architectures"] = [type(self.model).__name__]
        with open(own, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
        write_head(folder, own, tensors)
        os.remove(own)


def stored_tensor(tensor, kind):
    """-> (safetensors dtype name, numpy array)."""
    tensor = tensor.detach().to(kind).cpu().contiguous()
    if kind == torch.bfloat16:
        return "BF16", tensor.view(torch.uint16).numpy()
    return "F32", tensor.numpy()


class Capture:
    """Hooks that keep the outputs of some decoder layers and the input of the final norm.

    Each plane is turned to bf16 and cut to the real tokens inside its hook, so that no more than one
    padded state exists beside the forward pass itself.
    """

    def __init__(self, target, layer_ids):
        self.target, self.layer_ids = target, layer_ids
        self.planes, self.keep = {}, None
        self.handles = []

    def __enter__(self):
        for plane, layer in enumerate(self.layer_ids):
            self.handles.append(self.target.layers[layer].register_forward_hook(self._layer_hook(plane)))
        self.handles.append(self.target.norm.register_forward_pre_hook(
            lambda _, inputs: self._store(len(self.layer_ids), inputs[0])))
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def _layer_hook(self, plane):
        def hook(_module, _inputs, output):
            self._store(plane, output[0] if isinstance(output, tuple) else output)
        return hook

    def _store(self, plane, states):
        self.planes[plane] = states[self.keep].to(torch.bfloat16)

    def run(self, documents, teacher_rows):
        """documents: lists of ids -> per document (states uint16 [n, P, H], teacher columns)."""
        lengths = [len(ids) for ids in documents]
        longest, device = max(lengths), self.target.device
        ids = torch.zeros(len(documents), longest, dtype=torch.long)
        for row, document in enumerate(documents):
            ids[row, :len(document)] = torch.tensor(document)
        mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        self.planes, self.keep = {}, mask.to(device)
        positions = torch.arange(longest)[None].expand(len(documents), -1)
        with torch.inference_mode():
            out = self.target.decoder(input_ids=ids.to(device), attention_mask=mask.long().to(device),
                                      position_ids=positions.to(device), use_cache=False)
            teacher = self.target.teacher(out.last_hidden_state[self.keep], teacher_rows)
            states = torch.stack([self.planes.pop(p) for p in range(len(self.layer_ids) + 1)], dim=1)
        states = states.cpu().view(torch.uint16).numpy()
        results, at = [], 0
        for length in lengths:
            results.append((states[at:at + length], [column[at:at + length] for column in teacher]))
            at += length
        return results
