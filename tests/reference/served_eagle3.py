"""The EAGLE-3 drafters of served_exports.py: what is trained, and what servers must find.

SpecForge's layout is SGLang's; vLLM loads it as well but takes its own default layers there, whatever it says.
"""

import json
import os

SLIDING, FULL = "sliding_attention", "full_attention"
LAYOUTS = ("specforge", "speculators")
DEFAULT_LAYERS = {"captured layers"}  # what differs at vLLM in SpecForge's layout
EVERY_NORM = {"style": "qwen3", "norm_before_residual": True, "norm_before_fc": True, "norm_output": True}

# drafter keys, target, tokens of the draft vocabulary (None: all), layouts
SERVED = {
    "eagle3": ({}, "untied", None, LAYOUTS),
    "eagle3, tied and trained head": ({"lm_head": "trainable", "norm_output": True}, "tied", None, LAYOUTS),
    "eagle3, draft vocabulary": ({"fc_norm": True, "norm_output": True, "ttt_steps": 7}, "untied", 30, LAYOUTS),
    "eagle3, yarn": ({"fc_norm": True, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_theta": 1e7,
                      "max_position_embeddings": 256}, "tied", 41, LAYOUTS),
    "eagle3, two layers, own sizes": (
        {"layers": 2, "layer_types": [FULL, FULL], "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 5000.0}, "untied", 30, LAYOUTS),
    "eagle3, every norm": (EVERY_NORM, "untied", 30, ("speculators",)),
    "eagle3, windows": ({**EVERY_NORM, "layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 20}, "untied", None,
                        ("speculators",)),
    "eagle3, llama, windows": ({"layers": 2, "layer_types": [FULL, SLIDING], "sliding_window": 9}, "untied", 30,
                               ("speculators",)),
}  # fmt: skip

# What --allow-unservable lets through in SpecForge's layout: drafter keys, {server: facts that differ}.
ALLOWED = {
    "eagle3, head norms": ({"style": "qwen3"}, {"sglang": {"draft model class", "head norms", "tensors"}}),
    "eagle3, normed residual": ({"norm_before_residual": True}, {"sglang": {"norm before residual"}}),
    "eagle3, norm before fc": ({"norm_before_fc": True}, {"sglang": set()}),
    "eagle3, window": ({"layer_types": [SLIDING], "sliding_window": 20}, {"sglang": {"layer 0"}}),
}


def put(path, value):
    """A change of config.json: the value at a path; None: taken away."""
    def change(folder):
        place = os.path.join(folder, "config.json")
        with open(place, encoding="utf-8") as file:
            config = json.load(file)
        *above, name = path.split(".")
        inner = config
        for part in above:
            inner = inner[part]
        if value is None:
            inner.pop(name)
        else:
            inner[name] = value
        with open(place, "w", encoding="utf-8") as file:
            json.dump(config, file)
    return change


def other_tokens(folder):
    """A table of offsets as if it held target ids."""
    from safetensors.torch import load_file, save_file
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    tensors["d2t"] = tensors["d2t"].flip(0).contiguous()
    save_file(tensors, path)


WHOLE = {"the whole export"}
# Breaks of a drafter with fc_norm, norm_output and a draft vocabulary: the layout, the change, {server: facts that differ}.
BROKEN = {
    "layer ids one up": ("specforge", put("eagle_config.eagle_aux_hidden_state_layer_ids", [2, 4, 7]),
                         {"sglang": {"captured layers"}}),
    "no layers": ("specforge", put("eagle_config.use_aux_hidden_state", False), {"sglang": {"captured layers"}}),
    "another class": ("specforge", put("architectures", ["Eagle3Qwen3ForCausalLM"]), {"sglang": {"draft model class"}}),
    "layer ids in the other numbering": ("speculators", put("eagle_aux_hidden_state_layer_ids", [1, 3, 6]),
                                         {"vllm": {"captured layers"}}),
    "layer ids left out": ("speculators", put("eagle_aux_hidden_state_layer_ids", None), {"vllm": {"captured layers"}}),
    "norm output": ("specforge", put("norm_output", None), {"sglang": {"norm output"}}),
    "norm output, speculators": ("speculators", put("norm_output", False), {"vllm": {"norm output"}}),
    "fc norm": ("specforge", put("fc_norm", None), {"sglang": {"fc norm", "tensors"}}),
    "normed residual left out": ("speculators", put("norm_before_residual", None), {"vllm": {"norm before residual"}}),
    "number of drafts": ("speculators", put("speculators_config.proposal_methods", [{"speculative_tokens": 9}]),
                         {"vllm": {"drafts"}}),
    "theta": ("specforge", put("rope_theta", 1e6), {"sglang": {"rotary theta", "rotary angles"}}),
    "theta, speculators": ("speculators", put("transformer_layer_config.rope_theta", 1e6),
                           {"vllm": {"rotary theta", "rotary angles"}}),
    "draft vocabulary": ("speculators", put("draft_vocab_size", 29), {"vllm": WHOLE}),
    "draft vocabulary, SGLang": ("specforge", put("draft_vocab_size", 29), {"sglang": WHOLE}),
    "other tokens": ("speculators", other_tokens, {"vllm": {"vocabulary map"}}),
    "other tokens, SGLang": ("specforge", other_tokens, {"sglang": {"vocabulary map"}}),
    "norm epsilon": ("specforge", put("rms_norm_eps", 1e-6), {"sglang": {"norm epsilon"}}),
}  # fmt: skip
