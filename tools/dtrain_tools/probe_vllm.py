"""What vLLM would run of an export: its own argument resolution and its own draft model class.

Run by conform.py, never imported by it. vLLM takes its CPU platform here, since it refuses to resolve
anything without a device; its V2 model runner is asked for, as it is the default on GPUs. The attention
layer of the draft model is replaced, for it would choose a kernel. All else is vLLM's.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from dtrain_tools import probe  # noqa: E402


def speculative(export):
    """-> --speculative-config, the number of drafts that vLLM itself finds in the export or None."""
    own, kind = None, export.get("kind", "dflash")
    if export["layout"] == "speculators":
        from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
        found = SpeculatorsConfig.extract_vllm_speculative_config(probe.read_config(export["folder"]))
        own = found["num_speculative_tokens"]
    return {"model": export["folder"], "method": kind,
            "num_speculative_tokens": own or max(export["block_size"] - 1, 1)}, own


def prepare(target):
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_LOGGING_LEVEL="CRITICAL",
                      VLLM_NO_USAGE_STATS="1", VLLM_CONFIGURE_LOGGING="0")
    import torch
    from vllm.model_executor.models import llama, qwen3, qwen3_dflash

    class NoAttention(torch.nn.Module):
        def __init__(self, *_, per_layer_sliding_window=None, **__):
            super().__init__()
            self.window = per_layer_sliding_window

    for module in (llama, qwen3, qwen3_dflash):
        module.Attention = NoAttention
    return target


def resolve(target, export):
    """-> vLLM's whole configuration, and the number of drafts that the export states."""
    from vllm.engine.arg_utils import EngineArgs
    wanted, own = speculative(export)
    arguments = EngineArgs(model=target, speculative_config=wanted, skip_tokenizer_init=True, dtype="bfloat16")
    return arguments.create_engine_config(), own


def build(config):
    """-> vLLM's draft model with empty weights."""
    import torch
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import get_model_architecture
    meeting = os.path.join(os.path.dirname(os.path.abspath(sys.argv[2])), "meeting")  # a port could be another probe's
    init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)
    kind, _ = get_model_architecture(config.speculative_config.draft_model_config)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return kind(vllm_config=config, prefix="")
    finally:
        torch.set_default_dtype(torch.float32)


def refuse_from_anchor(hf_config):
    """What vLLM's DFlash speculator does at its start, which needs a GPU."""
    if (getattr(hf_config, "dflash_config", None) or {}).get("sample_from_anchor", False):
        raise ValueError("sample_from_anchor is not supported for DFlash (v1/worker/gpu/spec_decode/dflash/speculator.py)")


def probe_export(target, export):
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
    config, own = resolve(target, export)
    draft = config.speculative_config.draft_model_config
    refuse_from_anchor(draft.hf_config)
    with set_current_vllm_config(config):
        model = build(config)
        probe.spoil(model)
        model.load_weights(probe.read_weights(export["folder"]).items())
    if export.get("kind") == "eagle3":
        return eagle3_facts(config, own, model, draft)
    captured = list(get_eagle3_aux_layers_from_config(config.speculative_config))
    facts = model_facts(model, draft.hf_config)
    if export.get("kind") == "dspark":
        facts.update(markov_rank=model.model.markov_head.markov_w1.embedding_dim,
                     first_draft=0 if draft.hf_config.sample_from_anchor else 1)
    facts.update(captured=[i - 1 for i in captured], captured_own=captured, drafts=own,
                 mask_token_id=get_parallel_drafting_token_id(draft.hf_config), quantization=draft.quantization)
    return facts


def model_facts(model, hf_config):
    inner, layers = model.model, list(model.model.layers)
    attention = layers[0].self_attn
    own_embedding = bool(getattr(model, "has_own_embed_tokens", False))
    own_head = bool(getattr(model, "has_own_lm_head", False))
    shared = ({"model.mask_embedding"} | (set() if own_embedding else {"model.embed_tokens.weight"})
              | (set() if own_head else {"lm_head.weight"}))
    return {
        "architecture": type(model).__name__,
        "attention": [{"window": layer.self_attn.attn.window, "causal": causal}
                      for layer, causal in zip(layers, model.get_draft_attn_causal())],
        "sizes": {"hidden_size": attention.hidden_size, "heads": attention.total_num_heads,
                  "kv_heads": attention.total_num_kv_heads, "head_dim": attention.head_dim,
                  "intermediate_size": sum(layers[0].mlp.gate_up_proj.output_sizes) // 2,
                  "fc_inputs": inner.fc.input_size, "vocab_size": inner.embed_tokens.org_vocab_size},
        "eps": [float(attention.q_norm.variance_epsilon), float(inner.norm.variance_epsilon)],
        "activation": hf_config.hidden_act, "logits": probe.logits_fact(model.logits_processor),
        "rotary": probe.rotary_facts(attention.rotary_emb),
        "embedding": "own" if own_embedding else "target", "head": "own" if own_head else "target",
        "draft_vocab": model.config.draft_vocab_size,
        "vocabulary_map": "none" if model.draft_id_to_target_id is None else "d2t",
        "bias": bool(getattr(hf_config, "attention_bias", False)),
        "unset": [name for name in probe.unreached(model) if name not in shared], "ignored": [],
    }


def default_layers(config):
    """Which layers vLLM captures where the draft model's config does not say, after its Llama and Qwen models."""
    layers = config.model_config.get_total_num_hidden_layers()
    return [2, layers // 2, layers - 3]


def eagle3_facts(config, own, model, draft):
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    captured = list(get_eagle3_aux_layers_from_config(config.speculative_config) or default_layers(config))
    inner, first = model.model, model.model.layers[0]
    attention, hf_config = first.self_attn, draft.hf_config
    own_embedding = bool(getattr(model, "has_own_embed_tokens", False))
    offsets = model.draft_id_to_target_id
    kept = None if offsets is None else [i + offset for i, offset in enumerate(offsets.tolist())]
    bound = getattr(first._residual_norm, "__name__", "")
    return {
        "architecture": type(model).__name__,
        "attention": [{"window": layer.self_attn.attn.window} for layer in inner.layers],
        "captured": [i - 1 for i in captured], "captured_own": captured, "drafts": own, "quantization": draft.quantization,
        "switches": {"head_norms": hasattr(attention, "q_norm"), "norm_before_residual": bound == "_norm_before_residual",
                     "norm_before_fc": inner.input_norm is not None, "fc_norm": inner.fc_norm is not None,
                     "norm_output": bool(inner.norm_output)},
        "sizes": {"hidden_size": inner.config.hidden_size, "heads": attention.total_num_heads,
                  "kv_heads": attention.total_num_kv_heads, "head_dim": attention.head_dim,
                  "intermediate_size": sum(first.mlp.gate_up_proj.output_sizes) // 2, "fc_inputs": inner.fc.input_size,
                  "vocab_size": inner.embed_tokens.org_vocab_size},
        "eps": [float(norm.variance_epsilon) for norm in (first.hidden_norm, inner.norm)],
        "activation": hf_config.hidden_act, "logits": probe.logits_fact(model.logits_processor),
        "rotary": probe.rotary_facts(attention.rotary_emb),
        "embedding": "own" if own_embedding else "target",
        "head": "own" if getattr(model, "has_own_lm_head", False) else "target",
        "draft_vocab": model.config.draft_vocab_size, "kept": kept, "bias": bool(getattr(hf_config, "attention_bias", False)),
        "unset": unset_eagle3(model, own_embedding), "ignored": [],
    }


def unset_eagle3(model, own_embedding):
    """hidden_norm of later layers is never run there."""
    idle = {f"model.layers.{i}.hidden_norm.weight" for i in range(1, len(model.model.layers))}
    shared = set() if own_embedding else {"model.embed_tokens.weight"}
    return [name for name in probe.unreached(model) if name not in shared | idle]


if __name__ == "__main__":
    probe.run("vLLM", "vllm", prepare, probe_export)
