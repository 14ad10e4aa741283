"""The golden cases: what each one covers. make_golden.py turns them into files.

A case overrides keys of BASE (section -> key -> value) and says how its rows are made: `documents` are the
lengths of the packed documents of each row, `unsupervised` the positions of each row whose loss_mask is 0.
`last_hidden` is post_norm and `step` 1 unless given; `untied` targets have an lm_head of their own; `draft_vocab` is
the number of tokens that are kept. EAGLE-3 cases override keys of BASE_EAGLE3.
Sizes are tiny and awkward on purpose: several blocks run past their document, some documents have no anchor.
"""

BASE = {
    "run": {"dir": "unused", "seed": 1, "device": "cpu", "compute": "fp32"},
    "target": {"path": "target", "layer_ids": [1, 3, 6]},
    "data": {"seq_len": 64, "rows_per_step": 2, "noise_std": 0.0, "noise_kind": "normal"},
    "drafter": {
        "kind": "dflash",
        "style": "qwen3",
        "layers": 2,
        "block_size": 6,
        "mask_token_id": 60,
        "predict_from_anchor": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 12,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": "none",
        "rope_factor": 1.0,
        "max_position_embeddings": 256,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window_non_causal": False,
        "window_origin": "query",
    },
    "anchors": {"max_anchors": 9, "per": "row", "tail": "mask"},
    "loss": {
        "kl": 0.0,
        "reverse_kl": 0.0,
        "js": 0.0,
        "ce_teacher": 0.0,
        "ce_data": 0.0,
        "tv": 0.0,
        "nla": 0.0,
        "lk": 0.0,
        "lk_eta": 3.0,
        "slot_weight": "exp",
        "slot_decay_gamma": 4.0,
        "dpace_alpha": 0.5,
        "slot_mask": "prefix",
        "normalize": "weighted",
    },
    "optimizer": {
        "kind": "adamw",
        "lr": 0.01,
        "betas": [0.9, 0.99],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip": 0.0,
    },
    "schedule": {"kind": "constant", "warmup_ratio": 0.0},
}

EAGLE3_DRAFTER = {
    "kind": "eagle3",
    "style": "llama",
    "layers": 1,
    "ttt_steps": 4,
    "lm_head": "frozen",
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": "none",
    "rope_factor": 1.0,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention"],
}
DFLASH_LOSS = ("slot_weight", "slot_decay_gamma", "dpace_alpha", "slot_mask")
BASE_EAGLE3 = {
    **{section: keys for section, keys in BASE.items() if section != "anchors"},
    "drafter": EAGLE3_DRAFTER,
    "loss": {
        **{key: value for key, value in BASE["loss"].items() if key not in DFLASH_LOSS},
        "ttt_decay_base": 0.8,
        "mask_index": "served",
        "out_of_vocab": "masked",
    },
}

MIXED = ["sliding_attention", "full_attention"]
TWO_ROWS = {"documents": [[17, 9, 6], [24]], "unsupervised": [[0, 1, 5, 17, 22], [0, 1, 2, 10, 11, 19]]}
MANY = {
    "documents": [[9, 2, 13, 5], [1, 7, 16, 3]],
    "unsupervised": [[0, 4, 9, 12, 24], [1, 8, 9, 15, 24]],
}
LONG = {"documents": [[40, 20], [33, 8]], "unsupervised": [[0, 1, 2, 20, 31, 40], [0, 7, 18, 33]]}

# name -> {"config": overrides, "rows": how rows are made, then what else differs}
CASES = {
    "kl": {
        "config": {"loss": {"kl": 1.0}},
        "rows": TWO_ROWS,
    },
    "reverse_kl_sliding": {
        "config": {
            "loss": {"reverse_kl": 1.0},
            "drafter": {"layer_types": MIXED, "sliding_window": 8, "head_dim": 8},
            "optimizer": {"grad_clip": 0.05, "weight_decay": 0.1},
        },
        "rows": LONG,
        "last_hidden": "pre_norm",
        "step": 5,
    },
    "js_from_anchor": {
        "config": {
            "loss": {"js": 1.0, "slot_weight": "uniform", "slot_mask": "each"},
            "drafter": {"predict_from_anchor": True, "block_size": 5},
        },
        "rows": TWO_ROWS,
    },
    "ce_teacher_whole": {
        "config": {
            "loss": {"ce_teacher": 1.0},
            "drafter": {"layer_types": MIXED, "sliding_window": 6, "sliding_window_non_causal": True},
            "anchors": {"tail": "whole", "per": "document", "max_anchors": 4},
        },
        "rows": LONG,
        "last_hidden": "pre_norm",
        "untied": True,
    },
    "ce_data_dpace": {
        "config": {
            "loss": {"ce_data": 1.0, "slot_weight": "dpace", "dpace_alpha": 0.4, "slot_mask": "each"},
            "drafter": {
                "rope_scaling": "yarn",
                "rope_factor": 4.0,
                "rope_original_positions": 24,
                "rope_theta": 100.0,
                "head_dim": 8,
            },
        },
        "rows": MANY,
        "step": 3,
    },
    "tv_window_from_anchor": {
        "config": {
            "loss": {"tv": 1.0, "normalize": "count", "slot_mask": "each"},
            "drafter": {"layer_types": MIXED[::-1], "window_origin": "anchor", "sliding_window": 7},
        },
        "rows": LONG,
        "untied": True,
    },
    "nla_linear": {
        "config": {
            "loss": {"nla": 1.0},
            "drafter": {"rope_scaling": "linear", "rope_factor": 2.5, "rope_theta": 500.0, "head_dim": 8},
        },
        "rows": MANY,
        "last_hidden": "pre_norm",
    },
    "lk_noise": {
        "config": {
            "loss": {"lk": 1.0, "lk_eta": 2.0, "slot_weight": "uniform"},
            "data": {"noise_std": 0.3},
        },
        "rows": TWO_ROWS,
        "step": 2,
    },
    "mixture_ce_tv_dpace": {
        "config": {
            "loss": {"ce_teacher": 0.1, "tv": 0.9, "slot_weight": "dpace"},
            "drafter": {
                "predict_from_anchor": True,
                "layers": 3,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "block_size": 8,
                "sliding_window": 9,
            },
        },
        "rows": LONG,
        "untied": True,
        "last_hidden": "pre_norm",
        "step": 7,
    },
    "mixture_all_count": {
        "config": {
            "loss": {
                "kl": 0.5,
                "reverse_kl": 0.25,
                "js": 1.5,
                "ce_teacher": 0.125,
                "ce_data": 0.2,
                "tv": 0.75,
                "nla": 0.3,
                "lk": 0.6,
                "normalize": "count",
            },
            "drafter": {"predict_from_anchor": True, "block_size": 4, "num_key_value_heads": 4},
            "anchors": {"tail": "whole"},
            "optimizer": {"weight_decay": 0.05, "grad_clip": 1.0},
        },
        "rows": MANY,
        "step": 4,
    },
    "row_without_anchors": {
        "config": {
            "loss": {"kl": 1.0},
            "target": {"layer_ids": [2, 5]},
            "drafter": {"layer_types": MIXED, "sliding_window": 10, "num_key_value_heads": 1, "mask_token_id": 3},
        },
        "rows": {
            "documents": [[6, 5], [19, 8]],
            "unsupervised": [[0, 2, 4, 6, 8, 10], [0, 1, 12, 20]],
        },
        "last_hidden": "pre_norm",
    },
    "nothing_supervised": {
        "config": {"loss": {"kl": 1.0}, "optimizer": {"weight_decay": 0.1}},
        "rows": {"documents": [[5, 4], [8]], "unsupervised": [list(range(9)), list(range(8))]},
        "step": 3,
    },
}

CASES |= {
    "eagle3_kl": {
        "config": {"loss": {"kl": 1.0}, "drafter": {"kind": "eagle3"}},
        "rows": TWO_ROWS,
    },
    "eagle3_vocabulary_masked": {
        "config": {
            "loss": {"kl": 1.0, "ttt_decay_base": 0.7},
            "drafter": {"kind": "eagle3", "fc_norm": True, "norm_output": True, "ttt_steps": 7},
            "optimizer": {"grad_clip": 0.05, "weight_decay": 0.1},
        },
        "rows": LONG,
        "last_hidden": "pre_norm",
        "untied": True,
        "draft_vocab": 29,
        "step": 5,
    },
    "eagle3_vocabulary_kept": {
        "config": {
            "loss": {"kl": 0.5, "ce_teacher": 0.3, "lk": 1.0, "lk_eta": 2.0, "mask_index": "input",
                     "out_of_vocab": "kept", "ttt_decay_base": 1.0},
            "drafter": {
                "kind": "eagle3", "style": "qwen3", "norm_before_residual": True, "head_dim": 8, "rope_scaling": "yarn",
                "rope_factor": 4.0, "rope_original_positions": 24, "rope_theta": 100.0, "num_key_value_heads": 1,
            },
        },
        "rows": MANY,
        "draft_vocab": 40,
        "step": 3,
    },
    "eagle3_trainable_head": {
        "config": {
            "loss": {"ce_data": 0.7, "tv": 0.5, "reverse_kl": 0.2, "mask_index": "label"},
            "drafter": {
                "kind": "eagle3", "lm_head": "trainable", "norm_before_fc": True, "norm_output": True, "ttt_steps": 3,
            },
            "optimizer": {"weight_decay": 0.05},
        },
        "rows": LONG,
        "last_hidden": "pre_norm",
        "draft_vocab": 31,
        "step": 2,
    },
    "eagle3_two_layers": {
        "config": {
            "loss": {"js": 1.0, "mask_index": "feature"},
            "data": {"noise_std": 0.3},
            "drafter": {
                "kind": "eagle3", "style": "qwen3", "layers": 2, "layer_types": MIXED, "sliding_window": 6,
                "ttt_steps": 5, "fc_norm": True, "norm_before_residual": True,
            },
        },
        "rows": LONG,
        "untied": True,
    },
    "eagle3_three_layers": {
        "config": {
            "loss": {"nla": 1.0, "normalize": "count", "mask_index": "label"},
            "target": {"layer_ids": [2, 5]},
            "drafter": {
                "kind": "eagle3", "layers": 3, "sliding_window": 7, "ttt_steps": 6, "norm_output": True,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                "rope_scaling": "linear", "rope_factor": 2.5, "rope_theta": 500.0, "head_dim": 8,
            },
        },
        "rows": MANY,
        "last_hidden": "pre_norm",
        "step": 7,
    },
    "eagle3_all_terms": {
        "config": {
            "loss": {
                "kl": 0.5, "reverse_kl": 0.25, "js": 1.5, "ce_teacher": 0.125, "ce_data": 0.2, "tv": 0.75, "nla": 0.3,
                "lk": 0.6, "normalize": "count", "ttt_decay_base": 0.9,
            },
            "target": {"layer_ids": [1, 2, 3, 6]},
            "drafter": {
                "kind": "eagle3", "lm_head": "trainable", "style": "qwen3", "num_key_value_heads": 4,
                "norm_before_residual": True, "norm_output": True,
            },
            "optimizer": {"weight_decay": 0.05, "grad_clip": 1.0},
        },
        "rows": TWO_ROWS,
        "untied": True,
        "step": 4,
    },
    "eagle3_one_step": {
        "config": {
            "loss": {"kl": 1.0, "out_of_vocab": "kept"},
            "drafter": {
                "kind": "eagle3", "ttt_steps": 1, "layers": 2, "layer_types": MIXED[::-1], "sliding_window": 2,
                "norm_before_fc": True,
            },
        },
        "rows": {"documents": [[6, 5], [19, 8]], "unsupervised": [[0, 2, 4, 6, 8, 10], [0, 1, 12, 20]]},
        "draft_vocab": 7,
    },
    "eagle3_nothing_supervised": {
        "config": {"loss": {"kl": 1.0}, "drafter": {"kind": "eagle3"}, "optimizer": {"weight_decay": 0.1}},
        "rows": {"documents": [[5, 4], [8]], "unsupervised": [list(range(9)), list(range(8))]},
        "step": 3,
    },
}  # fmt: skip

# New cases go here: a case's numbers follow from its place.
CASES |= {
    "muon": {
        "config": {
            "loss": {"kl": 1.0},
            "optimizer": {
                "kind": "muon",
                "lr": 0.002,
                "weight_decay": 0.05,
                "grad_clip": 0.1,
                "muon_lr": 0.02,
                "muon_momentum": 0.9,
                "muon_ns_steps": 5,
                "muon_scale": "adamw_rms",
                "muon_weight_decay": 0.1,
            },
        },
        "rows": TWO_ROWS,
        "step": 4,
    },
    "muon_original": {
        "config": {
            "loss": {"ce_data": 1.0},
            "drafter": {"head_dim": 8},
            "optimizer": {
                "kind": "muon",
                "weight_decay": 0.2,
                "muon_momentum": 0.95,
                "muon_ns_steps": 3,
                "muon_scale": "original",
            },
        },
        "rows": MANY,
    },
    "markov": {
        "config": {
            "loss": {"kl": 1.0},
            "drafter": {"markov_rank": 5},
            "optimizer": {"weight_decay": 0.1, "grad_clip": 0.05},
        },
        "rows": TWO_ROWS,
        "step": 3,
    },
    "markov_from_anchor": {
        "config": {
            "loss": {"ce_teacher": 0.1, "tv": 0.9, "slot_mask": "each"},
            "drafter": {
                "predict_from_anchor": True,
                "block_size": 5,
                "markov_rank": 8,
                "layer_types": MIXED,
                "sliding_window": 8,
            },
            "optimizer": {
                "kind": "muon",
                "muon_lr": 0.02,
                "muon_momentum": 0.9,
                "muon_ns_steps": 5,
                "muon_scale": "adamw_rms",
            },
        },
        "rows": LONG,
        "last_hidden": "pre_norm",
        "untied": True,
    },
    "eagle3_markov": {
        "config": {
            "loss": {"js": 1.0, "ce_data": 0.3, "mask_index": "feature"},
            "drafter": {"kind": "eagle3", "ttt_steps": 3, "markov_rank": 4, "norm_output": True},
        },
        "rows": MANY,
        "step": 2,
    },
    "eagle3_markov_vocabulary": {
        "config": {
            "loss": {"kl": 1.0, "ce_data": 0.2},
            "drafter": {"kind": "eagle3", "lm_head": "trainable", "ttt_steps": 4, "markov_rank": 6, "fc_norm": True},
            "optimizer": {"weight_decay": 0.05},
        },
        "rows": LONG,
        "last_hidden": "pre_norm",
        "draft_vocab": 31,
        "step": 4,
    },
    "eagle3_markov_frozen": {
        "config": {
            "loss": {"kl": 0.5, "nla": 0.5, "out_of_vocab": "kept"},
            "drafter": {"kind": "eagle3", "ttt_steps": 2, "markov_rank": 3, "style": "qwen3"},
        },
        "rows": TWO_ROWS,
        "untied": True,
        "draft_vocab": 23,
    },
}
