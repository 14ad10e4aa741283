"""What an extraction takes of a device, from files and options alone, so that it is known before anything is loaded.

    weights   bytes of the weight files, in the type they are loaded in
    states    planes x tokens x hidden size x 2, for the padded tokens of a batch (with float8 also the codes)
    teacher   rows x vocabulary x 4, twice: logits, and what their log-sum-exp takes
    KV cache  documents x the longest sequence among them x bytes a token: the cache is allocated for the longest
              one, not for the average

The forward pass's own activations come on top.
"""

import dataclasses
import math
import os

WEIGHT_FILES = (".safetensors", ".bin", ".gguf")
ATTENDING = ("attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid")


@dataclasses.dataclass
class Part:
    name: str
    bytes: int
    how: str


def weight_bytes(folder, gguf, stored, loaded):
    """stored, loaded: bytes of an element. A GGUF file's are only known when it is loaded: None."""
    if gguf is not None:
        return None
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)
             if name.endswith(WEIGHT_FILES)}
    safetensors = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    return (safetensors or sum(sizes.values())) * loaded // stored


def kv_layers(config):
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return sum(kind in ATTENDING for kind in kinds) if kinds else config.num_hidden_layers


def kv_token_bytes(config, element):
    """Of one token in the cache, of all layers that have one."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # cached as keys and values of every head
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return kv_layers(config) * width * element


def batch_of(budget, longest):
    """-> documents of the largest batch, all counted as long as its longest."""
    return max(1, budget // max(1, longest))


def extraction_parts(config, layers, args, weights, longest, answers, element):
    """longest: tokens of the longest document; answers: of the longest answered one, 0: none is; element: bytes."""
    tokens = max(args.batch_tokens, longest)
    planes, hidden, vocab = layers + 1, config.hidden_size, config.vocab_size
    parts = []
    if weights is not None:
        parts.append(Part("weights", weights, "files"))
    parts.append(Part("states", planes * tokens * hidden * 2,
                      f"{planes} planes x {tokens:,} tokens x {hidden} x 2 bytes, in host memory too"))
    parts.append(Part("teacher", 2 * args.teacher_rows * vocab * 4, f"2 x {args.teacher_rows:,} rows x {vocab:,} x 4 bytes"))
    if answers:
        documents, each = batch_of(args.answer_tokens, answers), kv_token_bytes(config, element)
        parts.append(Part("KV cache", documents * answers * each,
                          f"{documents:,} documents x {answers:,} tokens, the longest of a batch, x {each:,} bytes"))
    return parts


def needed(parts):
    """What is there at the same time: the cache while answering, states and teacher afterwards."""
    size = {part.name: part.bytes for part in parts}
    return size.get("weights", 0) + max(size.get("KV cache", 0), size["states"] + size["teacher"])


def device_bytes(device):
    """-> free bytes of a device."""
    import torch
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def spread_bytes(limits):
    """Free bytes of all GPUs, or of the CPU where there is none; limits: max_memory, whose numbers hold where given."""
    import torch
    if limits:
        return sum(limits.values())
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return sum(device_bytes(device) for device in devices or [torch.device("cpu")])


def tell(parts, free, say):
    for part in parts:
        say(f"  {part.name:9} {part.bytes / 1e9:8.2f} GB  {part.how}")
    say(f"  together  {needed(parts) / 1e9:8.2f} GB at most, and the forward pass's activations; {free / 1e9:.2f} GB free")


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "B": 1}


def byte_size(text):
    """"2GiB", "512 MiB", "1e9" -> bytes; ValueError where it is not of this form."""
    unit = next((unit for unit in UNITS if text.lower().endswith(unit.lower())), "")
    number = float(text[:len(text) - len(unit)])
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number * UNITS.get(unit, 1))


def parse_limits(text):
    """"0=70GiB,1=70GiB,cpu=200GiB" -> {0: bytes, "cpu": bytes}; ValueError where it is not of this form."""
    limits = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size or size[-1] not in "bB":
            raise ValueError(f"{part!r}: expected DEVICE=SIZE with GiB, MiB, GB or MB")
        limits[int(name) if name.isdigit() else name] = byte_size(size)
    return limits
