"""A Transformers model as a target: loading, the states that are captured, and its logits.

Owns: where decoder layers, final norm and head are found, in text models and in the text part of multimodal ones; a
model that is spread over devices; hooks on the wanted layers only (never output_hidden_states, but to check
them once); logits in fp32, in tiles of the vocabulary. Does not batch documents and does not write files other than the
target directory.
"""

import contextlib
import hashlib
import json
import os

import torch
from safetensors import SafetensorError
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer,
                          GenerationConfig)

from dtrain_tools.documents import InputError
from dtrain_tools.float8 import quantise
from dtrain_tools.shards import Float8
from dtrain_tools.target_directory import write_head

VOCABULARY_TILE = 16384  # rows of the head that are fp32 at the same time when the model is bf16
NORM_NAMES = ("norm", "final_layernorm", "norm_f", "embedding_norm")
QUANTISED_TOKENS = 8192  # whose states are fp32 at the same time when they become float8
ALIKE = 0.01  # of the size of a state, which is rounded to bf16 on one side


def pick_device(name):
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {name}: torch sees no GPU")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device {name}: torch knows no such device") from error


def split_model_path(model, gguf):
    """-> folder and the extra argument of from_pretrained, for a directory or a GGUF file."""
    if gguf is not None:
        if not os.path.isfile(gguf):
            raise InputError(f"{gguf}: no such file")
        return os.path.dirname(os.path.abspath(gguf)), {"gguf_file": os.path.basename(gguf)}
    if not os.path.isdir(model):
        raise InputError(f"{model}: no such model directory")
    return model, {}


@contextlib.contextmanager
def loading(folder, what):
    """Files that Transformers cannot load are the user's fault, not a fault of the program."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{folder}: Transformers cannot load its {what}: {words}") from error


def load_tokenizer(model, gguf=None):
    folder, extra = split_model_path(model, gguf)
    with loading(folder, "tokenizer"):
        return AutoTokenizer.from_pretrained(folder, **extra)


def load_config(folder, **extra):
    with loading(folder, "config"):
        return AutoConfig.from_pretrained(folder, **extra)


def tokenizer_sha256(tokenizer):
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def load_model(folder, **options):
    """A causal language model, or a multimodal one whose text part is used."""
    try:
        with loading(folder, "weights"):
            return AutoModelForCausalLM.from_pretrained(folder, **options)
    except InputError as error:
        if "Unrecognized configuration class" not in str(error.__cause__):
            raise
    try:
        return AutoModelForImageTextToText.from_pretrained(folder, **options)
    except ValueError as error:
        raise InputError(f"{folder}: not a model that Transformers generates text with: {str(error).splitlines()[0]}"
                         ) from error


def stored_type(config):
    """What a model's weights are stored as, by its config.json."""
    return config.get_text_config().dtype or config.dtype or torch.float32


def batch_limit(config):
    """-> the longest text that may be in a batch, and the rotary embedding that says so; None: any, and why not.

    Beyond it Transformers turns all positions of a batch by what its longest text, or one before, was.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for all layers, or one a type
    limits = []
    for part in parts:
        kind = part.get("rope_type", part.get("type"))
        if kind == "dynamic":
            limits.append((config.max_position_embeddings, kind))
        elif kind in ("longrope", "su"):
            limits.append((part.get("original_max_position_embeddings") or
                           getattr(config, "original_max_position_embeddings", None) or
                           config.max_position_embeddings, kind))
    return min(limits, default=(None, None))


def element_bytes(config, dtype, device):
    """-> bytes of a weight as stored and as loaded. dtype: as for Target."""
    stored = stored_type(config)
    return stored.itemsize, loaded_type(stored, dtype, device).itemsize


def loaded_type(stored, dtype, device):
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" or stored != torch.bfloat16 else "bfloat16"
    return getattr(torch, dtype)


class Target:
    """The loaded model. `dtype` auto: the model's own on a GPU, fp32 on a CPU.

    spread: how a model that one device cannot hold is spread over several (device_map, max_memory and offload_folder of
    from_pretrained); device is then where embedding and head compute.
    """

    def __init__(self, model, gguf=None, device="auto", dtype="auto", spread=None):
        folder, extra = split_model_path(model, gguf)
        self.device = pick_device(device)
        self.spread, self.fetched = bool(spread), {}
        self.stored_dtype = torch.float32 if gguf else stored_type(load_config(folder))
        self.dtype = loaded_type(self.stored_dtype, dtype, self.device)
        self.model = load_model(folder, dtype=self.dtype, **extra, **(spread or {}))
        if not spread:
            self.model.to(self.device)
        self.model.eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.config_path = None if gguf else os.path.join(folder, "config.json")
        self.generation = self._generation_config(folder)
        self._find_parts(model or gguf)

    def _generation_config(self, folder):
        with contextlib.suppress(OSError):
            return GenerationConfig.from_pretrained(folder)
        return self.model.generation_config

    def _find_parts(self, name):
        self.decoder = self.model.get_decoder()
        for inner in ("language_model", "text_model"):
            self.decoder = getattr(self.decoder, inner, self.decoder)
        self.layers = getattr(self.decoder, "layers", None)
        self.norm = next((getattr(self.decoder, name) for name in NORM_NAMES if hasattr(self.decoder, name)), None)
        self.head = self.model.get_output_embeddings()
        self.embedding = self.model.get_input_embeddings()
        for part in ("layers", "norm", "head", "embedding"):
            if getattr(self, part) is None:
                raise InputError(f"{name}: model_type {self.config.model_type!r}: its {part} is not where "
                                 "decoder models have it; this model is not supported")

    @property
    def tied(self):
        """Whether head and embedding are one matrix."""
        if self.spread:  # whose weights may have no address
            return bool(getattr(self.config, "tie_word_embeddings", False))
        return self.head.weight.data_ptr() == self.embedding.weight.data_ptr()

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

    def weights_of(self, module):
        """{"weight", perhaps "bias"} of head, embedding or norm, on the device. A spread model may have them elsewhere,
        on disk even: they are fetched once."""
        if not self.spread:
            return dict(module.named_parameters(recurse=False))
        if module not in self.fetched:
            from accelerate.utils import align_module_device
            with align_module_device(module, self.device):
                self.fetched[module] = {name: tensor.detach()
                                        for name, tensor in module.named_parameters(recurse=False)}
        return self.fetched[module]

    def logits(self, states):
        """fp32 logits [n, V] of final (normed) states [n, H], as the model computes them from these."""
        weight, bias = self.weights_of(self.head)["weight"], self.weights_of(self.head).get("bias")
        states = states.to(self.device, torch.float32)  # a spread model's last layer may be elsewhere
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

    def _own_config(self):
        """config.json where the model's cannot be copied: a GGUF file has none, and some leave the number of layers out."""
        if self.config_path:
            with open(self.config_path, encoding="utf-8") as file:
                config = json.load(file)
            text = config.get("text_config", config)
            if "num_hidden_layers" in text:
                return None
            text["num_hidden_layers"] = len(self.layers)
            return config
        config = self.model.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):  # the weights are not quantised any more
            config.pop(name, None)
        config["architectures"] = [type(self.model).__name__]
        return config

    def check_norm(self, states):
        """Refuses a final norm that is not what training computes: RMS of fp32, times w or 1 + w. states: before it."""
        weights = self.weights_of(self.norm)
        eps = next((getattr(self.norm, name) for name in ("eps", "variance_epsilon") if hasattr(self.norm, name)), 1e-6)
        with torch.inference_mode():
            expected = self.norm(states).float().to(self.device)
        values = states.float().to(self.device)
        values = values * torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)
        weight = weights["weight"].float() if "weight" in weights else torch.ones_like(values[0])
        errors = [float((values * used - expected).abs().max() / expected.abs().max()) for used in (weight, 1 + weight)]
        if weights.get("bias") is not None or not min(errors) <= (1e-4 if self.dtype == torch.float32 else 3e-2):
            raise InputError(f"model_type {self.config.model_type!r}: its final norm is a {type(self.norm).__name__}, not "
                             "an RMS norm with a weight, which is what training computes")

    def check_states(self, ids, layer_ids):
        """Refuses a model whose layers do not give what Transformers calls its hidden states."""
        with Capture(self, layer_ids) as capture, torch.inference_mode():  # both of one pass: kernels make no difference
            capture.keep = torch.ones(1, len(ids), dtype=torch.bool)
            out = self.decoder(input_ids=torch.tensor([ids], device=self.device), use_cache=False,
                               output_hidden_states=True)
        states = getattr(out, "hidden_states", None)
        if states is None or len(states) != len(self.layers) + 1:
            raise InputError(f"model_type {self.config.model_type!r}: gives {0 if states is None else len(states)} hidden "
                             f"states of {len(self.layers)} layers: which one is a layer's output is not known")
        for plane, layer in enumerate(layer_ids):
            if not _alike(capture.planes[plane], states[layer + 1][0]):
                raise InputError(f"model_type {self.config.model_type!r}: the output of layer {layer} is not "
                                 f"hidden_states[{layer + 1}]: this model is not supported")
        last = capture.planes[len(layer_ids)].to(self.dtype)
        self.check_norm(last)
        with torch.inference_mode():
            if not _alike(self.norm(last), states[-1][0]):
                raise InputError(f"model_type {self.config.model_type!r}: its last hidden state is not what its final norm "
                                 "gives: this model is not supported")

    def write_target_directory(self, folder):
        """config.json and head.safetensors, in the dtype that the model is stored in (fp16 as fp32)."""
        os.makedirs(folder, exist_ok=True)
        head, embedding = self.weights_of(self.head), self.weights_of(self.embedding)["weight"]
        tensors = {"embed_tokens.weight": embedding, "norm.weight": self.weights_of(self.norm)["weight"]}
        if not self.tied:
            tensors["lm_head.weight"] = head["weight"]
        if head.get("bias") is not None:
            tensors["lm_head.bias"] = head["bias"]
        kind = torch.bfloat16 if self.stored_dtype == torch.bfloat16 else torch.float32
        tensors = {name: stored_tensor(tensor, kind) for name, tensor in tensors.items()}
        config = self._own_config()
        if config is None:
            write_head(folder, self.config_path, tensors)
            return
        own = os.path.join(folder, "config.json.tmp")
        with open(own, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
        write_head(folder, own, tensors)
        os.remove(own)


def _alike(a, b):
    """States [n, H] of the same tokens, one of them rounded to bf16."""
    a, b = a.float().cpu(), b.float().cpu()
    return bool(((a - b).norm(dim=-1) <= ALIKE * b.norm(dim=-1)).all())


def stored_tensor(tensor, kind):
    """-> (safetensors dtype name, numpy array)."""
    tensor = tensor.detach().to(kind).cpu().contiguous()
    if kind == torch.bfloat16:
        return "BF16", tensor.view(torch.uint16).numpy()
    return "F32", tensor.numpy()


class Capture:
    """Hooks that keep the outputs of some decoder layers and the input of the final norm.

    Each plane is turned to bf16 and cut to the real tokens inside its hook, into its place among the states of the
    batch, so that no more than one padded state and no second copy of the others exist beside the forward pass itself.
    """

    def __init__(self, target, layer_ids, float8=False):
        self.target, self.layer_ids, self.float8 = target, layer_ids, float8
        self.batch, self.planes, self.keep = None, {}, None  # planes: views of batch [tokens, P, H]
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
        """Of a layer, wherever it is."""
        if states.shape[:-1] != self.keep.shape:
            raise InputError(f"model_type {self.target.config.model_type!r}: states of shape {list(states.shape)} for "
                             f"{list(self.keep.shape)} tokens: this model is not supported")
        if not self.planes:
            self.batch = torch.empty(int(self.keep.sum()), len(self.layer_ids) + 1, states.shape[-1], dtype=torch.bfloat16,
                                     device=self.target.device)
        self.batch[:, plane] = states[self.keep.to(states.device)]
        self.planes[plane] = self.batch[:, plane]

    def _stored(self):
        """The states of all real tokens in host memory; the device's are given up."""
        batch, self.batch, self.planes = self.batch, None, {}
        if not self.float8:
            return batch.cpu().view(torch.uint16).numpy()
        layers = len(self.layer_ids)
        parts = [[part.cpu() for part in quantise(some[:, :layers])] for some in batch.split(QUANTISED_TOKENS)]
        codes, scales = (torch.cat(part).numpy() for part in zip(*parts))
        return Float8(codes, scales, batch[:, layers].cpu().view(torch.uint16).numpy())

    @staticmethod
    def _cut(states, begin, end):
        return Float8(*(part[begin:end] for part in states)) if isinstance(states, Float8) else states[begin:end]

    def run(self, documents, teacher_rows):
        """documents: lists of ids -> per document (states uint16 [n, P, H] or Float8, teacher columns)."""
        lengths = [len(ids) for ids in documents]
        longest, device = max(lengths), self.target.device
        ids = torch.zeros(len(documents), longest, dtype=torch.long)
        for row, document in enumerate(documents):
            ids[row, :len(document)] = torch.tensor(document)
        mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        self.batch, self.planes, self.keep = None, {}, mask.to(device)
        positions = torch.arange(longest)[None].expand(len(documents), -1)
        with torch.inference_mode():
            out = self.target.decoder(input_ids=ids.to(device), attention_mask=mask.long().to(device),
                                      position_ids=positions.to(device), use_cache=False)
            normed = out.last_hidden_state
            teacher = self.target.teacher(normed[self.keep.to(normed.device)].to(self.target.device), teacher_rows)
            states = self._stored()
        results, at = [], 0
        for length in lengths:
            results.append((self._cut(states, at, at + length), [column[at:at + length] for column in teacher]))
            at += length
        return results
