"""Small random models of many families, for the tests of extraction. Needs torch and transformers."""

import torch
import transformers as tf

SIZES = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 2,
         "bos_token_id": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
PICTURES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
            "patch_size": 8}
QWEN_PICTURES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
                 "patch_size": 4, "spatial_merge_size": 2}
THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

TEXT = {  # class, beyond SIZES
    "qwen3": ("Qwen3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "glm4": ("Glm4Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, **EXPERTS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v3": ("DeepseekV3Config", {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                                         "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
                                         "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
                                         "num_key_value_heads": 4}),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "nemotron_h": ("NemotronHConfig", {"hybrid_override_pattern": "M*M*M-", "mamba_num_heads": 4, "mamba_head_dim": 16,
                                       "ssm_state_size": 8, "n_groups": 1}),
    "falcon_h1": ("FalconH1Config", {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8}),
    "lfm2": ("Lfm2Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 8}),
    "gemma4_text": ("Gemma4TextConfig", {"sliding_window": 8}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
    "cohere": ("CohereConfig", {"logit_scale": 0.0625}),
    "starcoder2": ("Starcoder2Config", {}),
    "phi3_longrope": ("Phi3Config", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 8.0,
        "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 9.0, 20.0]}}),
    "llama_dynamic": ("LlamaConfig", {"max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
}
WRAPPED = {  # class, text class with what goes beyond SIZES, pictures
    "gemma3": ("Gemma3Config", ("Gemma3TextConfig", {"sliding_window": 8}), PICTURES),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", ("Qwen2_5_VLTextConfig", {"rope_parameters": THREE_AXES}), QWEN_PICTURES),
    "qwen3_vl": ("Qwen3VLConfig", ("Qwen3VLTextConfig", {"rope_parameters": THREE_AXES}),
                 {**QWEN_PICTURES, "deepstack_visual_indexes": [0]}),
    "llava": ("LlavaConfig", ("LlamaConfig", {}), {**PICTURES, "model_type": "clip_vision_model"}),
    "mistral3": ("Mistral3Config", ("MistralConfig", {}), {**PICTURES, "model_type": "pixtral", "head_dim": 8}),
}
OTHERS = {
    "gemma3n_text": lambda: text_config("Gemma3nTextConfig", {
        "vocab_size_per_layer_input": 260, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "laurel_rank": 4,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3}),
    "mamba": lambda: tf.MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=6),
    "gpt2": lambda: tf.GPT2Config(vocab_size=260, n_embd=32, n_layer=6, n_head=4, n_positions=512),
}


def text_config(kind, more):
    return getattr(tf, kind)(**{**SIZES, **more})


def make(name):
    if name == "gemma3n_text":
        return tf.Gemma3nForCausalLM(OTHERS[name]())
    if name in OTHERS:
        return tf.AutoModelForCausalLM.from_config(OTHERS[name]())
    if name in TEXT:
        return tf.AutoModelForCausalLM.from_config(text_config(*TEXT[name]))
    kind, text, pictures = WRAPPED[name]
    config = getattr(tf, kind)(text_config=text_config(*text).to_dict(), vision_config=pictures)
    return tf.AutoModelForImageTextToText.from_config(config)


def save(name, folder):
    """Weights are larger than at the start of training, so that layers and texts differ, and norms are not all 1."""
    model = make(name).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1 and "norm" in key:
                weight.add_(0.2 * torch.randn_like(weight))
            elif weight.dim() == 2:
                weight.mul_(3)
    model.save_pretrained(folder)
