"""What SGLang would run of an export: its own argument resolution and its own draft model class.

Run by conform.py, never imported by it. The arguments are resolved for a CUDA device with flashinfer, which
needs neither. One import of another package's kernel, made on machines without a GPU only, is answered
with nothing, since the draft model is built and not run. All else is SGLang's.
"""

import importlib
import os
import sys
import types

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from dtrain_tools import probe  # noqa: E402


def prepare(target):
    kernels = types.ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None
    sys.modules["vllm._custom_ops"] = kernels
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm"]._custom_ops = kernels
    importlib.import_module("sglang.srt.models.dflash")
    importlib.import_module("sglang.srt.models.llama_eagle3")
    return target


def resolve(target, export):
    """-> server arguments, resolved and published as a scheduler of one GPU would."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs
    eagle3 = export.get("kind") == "eagle3"
    told = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4} if eagle3 else {}
    arguments = ServerArgs(model_path=target, speculative_algorithm="EAGLE3" if eagle3 else "DFLASH", skip_tokenizer_init=True,
                           speculative_draft_model_path=export["folder"], device="cuda", dtype="bfloat16",
                           mem_fraction_static=0.8, attention_backend="flashinfer", sampling_backend="pytorch", **told)
    arguments.resolve_once()
    runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    alone = types.SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
    runtime_context.get_parallel().override_permanently(tp_group=alone, attn_tp_group=alone, pp_group=alone)
    return arguments


def load(model, module, weights):
    """-> names of tensors that the model, whose code is in `module`, did not take."""
    taken, current = set(), [None]

    def recording(loader):
        def load_one(*args, **kwargs):
            taken.add(current[0])
            return loader(*args, **kwargs)
        return load_one

    for weight in model.parameters():
        if hasattr(weight, "weight_loader"):
            weight.weight_loader = recording(weight.weight_loader)
    plain, module.default_weight_loader = module.default_weight_loader, recording(module.default_weight_loader)

    def stream():
        for name, tensor in weights.items():
            current[0] = name
            yield name, tensor
    try:
        model.load_weights(stream())
    finally:
        module.default_weight_loader = plain
    return sorted(set(weights) - taken)


def mask_token(config, target_config):
    """As SGLang's worker resolves it, without a tokenizer."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    runner = types.SimpleNamespace(model_config=target_config)
    worker = types.SimpleNamespace(target_worker=types.SimpleNamespace(model_runner=runner, tokenizer=None))
    return DFlashWorkerV2._resolve_mask_token_id(worker, mask_token=config.mask_token,
                                                 mask_token_id=config.mask_token_id)


def build(arguments, export, algorithm, module, model_class):
    """The target's config, what SGLang captures for the drafter, the drafter with its weights, tensors left unread."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    target_config = ModelConfig.from_server_args(arguments)
    capture = spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
        server_args=arguments, model_config=target_config, is_draft_worker=False,
        spec_algorithm=SpeculativeAlgorithm.from_string(algorithm))
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(capture.draft_model_config.hf_config)
    finally:
        torch.set_default_dtype(torch.float32)
    probe.spoil(model)
    return target_config, capture, model, load(model, module, probe.read_weights(export["folder"]))


def probe_export(target, export):
    if export["layout"] == "speculators":
        return {"unread": "SGLang does not read the speculators layout; give it --format "
                          + ("specforge" if export.get("kind") == "eagle3" else "zlab")}
    if export.get("kind") == "eagle3":
        return probe_eagle3(target, export)
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.models import dflash
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    arguments = resolve(target, export)
    target_config, capture, model, ignored = build(arguments, export, "DFLASH", dflash, dflash.DFlashDraftModel)
    draft = capture.draft_model_config
    parsed = parse_dflash_draft_config(draft_hf_config=draft.hf_config)
    facts = model_facts(model, draft.hf_config)
    captured = [int(i) for i in capture.dflash_target_layer_ids]
    facts.update(named=draft.hf_config.architectures[0], captured=captured, captured_own=captured, ignored=ignored,
                 quantization=draft.quantization, drafts=int(resolved_view(arguments).speculative_num_draft_tokens) - 1,
                 mask_token_id=mask_token(parsed, target_config))
    return facts


def attention_of(layer):
    from sglang.srt.layers.radix_attention import AttentionType
    left = layer.self_attn.sliding_window_size
    return {"window": None if left < 0 else left + 1,
            "causal": layer.self_attn.attn_type != AttentionType.ENCODER_ONLY}


def model_facts(model, hf_config):
    layers = list(model.layers)
    attention = layers[0].self_attn
    return {
        "architecture": type(model).__name__,
        "attention": [attention_of(layer) for layer in layers],
        "sizes": {"hidden_size": attention.hidden_size, "heads": attention.total_num_heads,
                  "kv_heads": attention.total_num_kv_heads, "head_dim": attention.head_dim,
                  "intermediate_size": layers[0].mlp.down_proj.input_size,
                  "fc_inputs": model.fc.in_features, "vocab_size": None},
        "eps": [float(attention.q_norm.variance_epsilon), float(model.norm.variance_epsilon)],
        "activation": getattr(hf_config, "hidden_act", "silu"),
        "rotary": probe.rotary_facts(attention.rotary_emb),
        "embedding": "target" if model.embed_tokens is None else "own", "head": "target",
        "draft_vocab": None, "vocabulary_map": "none",
        "bias": bool(getattr(hf_config, "attention_bias", False)),
        "unset": probe.unreached(model),
    }


def probe_eagle3(target, export):
    from sglang.srt.models import llama_eagle3
    arguments = resolve(target, export)
    target_config, capture, model, ignored = build(arguments, export, "EAGLE3", llama_eagle3,
                                                   llama_eagle3.LlamaForCausalLMEagle3)
    draft = capture.draft_model_config
    layers = target_config.num_hidden_layers
    captured = capture.eagle_aux_hidden_state_layer_ids
    if captured is None:  # as set_eagle3_layers_to_capture of its models has it
        captured = [1, layers // 2 - 1, layers - 4]
    if not capture.eagle_use_aux_hidden_state:  # it then gives the drafter the last hidden state
        captured = []
    facts = eagle3_facts(model, draft.hf_config)
    # d2t and t2d are not parameters; later layers' norm is looked for under hidden_norm alone.
    later = {f"layers.{i}.input_layernorm.weight" for i in range(1, len(model.model.layers))}
    facts.update(named=draft.hf_config.architectures[0], captured=[int(i) for i in captured], captured_own=[int(i) for i in captured],
                 ignored=[name for name in ignored if name not in {"d2t", "t2d"} | later], quantization=draft.quantization)
    return facts


def eagle3_facts(model, hf_config):
    inner, first = model.model, model.model.layers[0]
    attention = first.self_attn
    idle = {f"model.layers.{i}.input_layernorm.weight" for i in range(1, len(inner.layers))} | {"model.embed_tokens.weight"}
    kept = model.get_hot_token_id()
    return {
        "architecture": type(model).__name__,
        "attention": [{"window": None if layer.self_attn.attn.sliding_window_size < 0
                       else layer.self_attn.attn.sliding_window_size + 1} for layer in inner.layers],
        "drafts": None,
        "switches": {"head_norms": hasattr(attention, "q_norm"), "norm_before_residual": False,
                     "norm_before_fc": inner.input_norm is not None, "fc_norm": inner.fc_norm is not None,
                     "norm_output": bool(inner.norm_output)},
        "sizes": {"hidden_size": attention.hidden_size, "heads": attention.total_num_heads,
                  "kv_heads": attention.total_num_kv_heads, "head_dim": attention.head_dim,
                  "intermediate_size": first.mlp.down_proj.input_size, "fc_inputs": inner.fc.in_features,
                  "vocab_size": inner.vocab_size},
        "eps": [float(norm.variance_epsilon) for norm in (first.hidden_norm, inner.norm)],
        "activation": getattr(hf_config, "hidden_act", "silu"), "logits": probe.logits_fact(model.logits_processor),
        "rotary": probe.rotary_facts(attention.rotary_emb),
        "embedding": "target", "head": "target" if model.load_lm_head_from_target else "own",
        "draft_vocab": hf_config.draft_vocab_size, "kept": None if kept is None else kept.tolist(),
        "bias": bool(getattr(hf_config, "attention_bias", False)),
        "unset": [name for name in probe.unreached(model) if name not in idle],
    }


if __name__ == "__main__":
    probe.run("SGLang", "sglang", prepare, probe_export)
