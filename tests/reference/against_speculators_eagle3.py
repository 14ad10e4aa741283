#!/usr/bin/env python3
"""Compares with the published `speculators` package: its EAGLE-3 model, mask, losses and metrics, unchanged.

    against_speculators_eagle3.py                              made-up batches, against eagle3_step.py
    against_speculators_eagle3.py TRACE.safetensors [--target DIR]    the loss and gradients that a trace states

Only settings that reproduce it can be compared: loss.mask_index input, loss.out_of_vocab kept, loss terms other than
ce_data, lk_eta 3, and full layers (it measures windows from a position and not from the position that its
ttt_step stands for, which differ after ttt_step 0). Bridged here, because no setting expresses it:
  - it divides each ttt_step's loss by that step's own slots (+ 1e-5) and adds the steps up: it is asked for 1, 2, ...
    ttt_steps, and the differences are weighed by slots;
  - it does not stop a chain at the end of its document: documents are given one by one, or packed when their first
    ttt_steps tokens are unsupervised;
  - its head is frozen; for lm_head trainable its own head is set free.
Softmax and norms run in fp32 on their side: agreement is at fp32's level.
"""

import copy
import sys

import numpy as np
import torch

from against_speculators import REDUCTION_EPS, TERM_NAMES, compare, layer_sizes, main, refuse_missing
from eagle3_step import Eagle3Step
from golden_cases import BASE_EAGLE3
from make_golden import let_teacher_agree, make_row, parameters, target_config, target_tensors
from recompute_step import load
from trace_file import make_shape, make_target


def check_settings(config, shape):
    """Refuses what speculators cannot do."""
    loss, sliding = config["loss"], "sliding_attention" in shape.layer_types
    wanted = {
        "drafter.kind eagle3": config["drafter"]["kind"] == "eagle3",
        "loss.mask_index input": loss["mask_index"] == "input",
        "loss.out_of_vocab kept": loss["out_of_vocab"] == "kept",
        "loss.normalize count or loss.ttt_decay_base 1": loss["normalize"] == "count" or loss["ttt_decay_base"] == 1,
        "loss.ce_data 0": loss["ce_data"] == 0,
        "loss.lk_eta 3": loss["lk"] == 0 or loss["lk_eta"] == 3.0,
        "full layers or one ttt_step": not sliding or shape.ttt_steps == 1,
        "not both norm_before_fc and fc_norm": not (shape.norm_before_fc and shape.fc_norm),
    }
    refuse_missing(wanted)


# ---- their model -------------------------------------------------------------------------------------


def layer_config(shape, target, intermediate):
    """Their config of the draft layers."""
    from transformers import LlamaConfig, Qwen3Config

    sizes = layer_sizes(shape, target, intermediate)
    if shape.head_norms:
        result = Qwen3Config(**sizes, use_sliding_window=True)
    else:
        result = LlamaConfig(**sizes)
    result.sliding_window = shape.sliding_window
    result._attn_implementation = "eager"
    return result


def their_model(shape, target, params, last_hidden, kept):
    """Their EAGLE-3 draft model with our parameters in fp32."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    V, H = target.embed.shape
    kept = torch.arange(V) if kept is None else kept
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(shape, target, params["layers.0.mlp.gate_proj.weight"].shape[0]),
        draft_vocab_size=len(kept),
        target_hidden_size=H,
        eagle_aux_hidden_state_layer_ids=list(range(1, params["fc.weight"].shape[1] // H + 1)),
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
    )
    model = Eagle3DraftModel(config).to(torch.float32)
    frozen = {
        "embed_tokens.weight": target.embed,
        "lm_head.weight": target.head[kept],
        "verifier_lm_head.weight": target.head[kept],
        "verifier_norm.weight": target.norm,
    }
    state = {n: t.float() for n, t in {**frozen, **params}.items()}
    if len(kept) != V:
        state["d2t"], state["t2d"] = kept - torch.arange(len(kept)), torch.zeros(V, dtype=torch.bool)
        state["t2d"][kept] = True
    loaded = model.load_state_dict(state, strict=True)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    model.lm_head.weight.requires_grad_(shape.trainable_head)
    model.verifier_norm.variance_epsilon = target.norm_eps
    if last_hidden == "post_norm":
        model.verifier_norm = torch.nn.Identity()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == set(params), trained ^ set(params)
    return model


def shifted(row, start, end):
    """One document as their training code hands it over: tokens, teacher and mask one ahead of the features."""
    from speculators.models.eagle3.data import shift_batch

    return shift_batch(
        {
            "input_ids": row.input_ids[start:end],
            "hidden_states": row.features[start:end].flatten(1).float(),
            "verifier_last_hidden_states": row.last_hidden[start:end].float(),
            "loss_mask": row.loss_mask[start:end],
            "lengths": torch.tensor([end - start]),
            "position_ids": torch.arange(end - start),
        }
    )


def batches(row, packed):
    """Keyword arguments of their forward: documents one by one, or all in one row."""
    bounds = list(zip(row.doc_offsets.tolist()[:-1], row.doc_offsets.tolist()[1:]))
    documents = [shifted(row, start, end) for start, end in bounds if end - start > 1]
    for group in [documents] if packed else [[d] for d in documents]:
        names = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids")
        batch = {n: torch.cat([d[n] for d in group])[None] for n in names}
        batch["document_ids"] = torch.cat([torch.full_like(d["input_ids"], n) for n, d in enumerate(group)])[None]
        yield batch


def run_theirs(config, shape, target, rows, params, last_hidden, kept, packed):
    """(loss, gradients, accept_len or None, slots) of their model over all rows, divided by all slots at once."""
    return run_model(their_model(shape, target, params, last_hidden, kept), config, shape.ttt_steps, rows, packed)


def run_model(model, config, ttt_steps, rows, packed):
    """The same of a model that holds its parameters."""
    from speculators.losses import resolve_loss_config

    loss = config["loss"]
    weights = {TERM_NAMES[n]: loss[n] for n in TERM_NAMES if loss[n] > 0}
    terms = resolve_loss_config(str(weights).replace("'", '"'), "eager")
    total, slots, accepted, blocks = 0.0, 0.0, 0.0, 0.0
    for row in rows:
        for batch in batches(row, packed):
            before = 0.0
            for steps in range(1, min(ttt_steps, batch["input_ids"].shape[1]) + 1):
                _, value, metrics = model(
                    **batch, ttt_steps=steps, ttt_step_loss_decay=loss["ttt_decay_base"], loss_config=terms
                )
                count = float(batch["loss_mask"][:, steps - 1 :].sum())
                total = total + (value - before) * (count + REDUCTION_EPS)
                before, slots = value, slots + count
                accepted += float(metrics[f"full_acc_{steps - 1}_sum"])
            mask = batch["loss_mask"][0]
            reach = [mask[t : t + ttt_steps].any() for t in range(len(mask))]
            blocks += float(sum(reach))
    total = total / slots
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return float(total.detach()), grads, 1 + accepted / blocks, int(slots)


# ---- made-up batches ---------------------------------------------------------------------------------

BATCHES = {
    "kl": {"loss": {"kl": 1.0}},
    "kl, decay 0.8": {"loss": {"kl": 1.0, "ttt_decay_base": 0.8, "normalize": "count"}},
    "reverse_kl, qwen3": {"loss": {"reverse_kl": 1.0}, "drafter": {"style": "qwen3"}},
    "js, norm_before_residual": {"loss": {"js": 1.0}, "drafter": {"norm_before_residual": True}},
    "ce_teacher, norm_output": {"loss": {"ce_teacher": 1.0}, "drafter": {"norm_output": True}},
    "tv, norm_before_fc": {"loss": {"tv": 1.0}, "drafter": {"norm_before_fc": True}},
    "nla, fc_norm": {"loss": {"nla": 1.0}, "drafter": {"fc_norm": True}},
    "lk, all norms": {
        "loss": {"lk": 1.0},
        "drafter": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "style": "qwen3"},
    },
    "two layers": {
        "loss": {"ce_teacher": 0.1, "tv": 0.9},
        "drafter": {"layers": 2, "layer_types": ["full_attention"] * 2, "norm_output": True, "ttt_steps": 5},
    },
    "yarn": {
        "loss": {"kl": 1.0},
        "drafter": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 24},
    },
    "window, one ttt_step": {
        "loss": {"kl": 1.0},
        "drafter": {"style": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 5, "ttt_steps": 1},
    },
    "trainable head": {"loss": {"kl": 1.0}, "drafter": {"lm_head": "trainable", "fc_norm": True}},
}  # fmt: skip


def make_batch(index, overrides, size, packed):
    """Config, shape, target, rows, parameters and kept ids (size: how many; None: all).

    Packed documents begin with ttt_steps + 1 unsupervised tokens; otherwise the mask has gaps, and there is a document
    of one token.
    """
    rng = np.random.default_rng([2026, 3000 + index])
    config = copy.deepcopy(BASE_EAGLE3)
    config["loss"].update({"mask_index": "input", "out_of_vocab": "kept", "ttt_decay_base": 1.0})
    for section, keys in overrides.items():
        config[section].update(keys)
    target = make_target(target_config(True), target_tensors(rng, True), "made up")
    shape = make_shape(config, target.config)
    kept = None if size is None else torch.from_numpy(np.sort(rng.choice(len(target.head), size, replace=False)))
    head = target.head if kept is None else target.head[kept]
    params = {n: p.double() for n, p in parameters(rng, shape, 3, head).items()}
    lengths = [19, 26, 15] if packed else [19, 1, 25, 15]
    starts = np.cumsum([0, *lengths])[:-1]
    quiet = [s + i for s in starts for i in range(shape.ttt_steps + 1)] if packed else [0, 1, 8, 9, 19, 20, 21, 30, 33]
    row, planes = make_row(rng, lengths, quiet, 3)
    let_teacher_agree(rng, Eagle3Step(config, shape, target, [row], params, "pre_norm", kept), [planes])
    return config, shape, target, [row], params, kept


def compare_batches(report):
    for index, (name, overrides) in enumerate(BATCHES.items()):
        for size in (None, 23):
            for packed in (True, False):
                config, shape, target, rows, params, kept = make_batch(index, overrides, size, packed)
                check_settings(config, shape)
                step = Eagle3Step(config, shape, target, rows, params, "pre_norm", kept)
                theirs = run_theirs(config, shape, target, rows, params, "pre_norm", kept, packed)
                # Their agreement is with the draft vocabulary's argmax, and goes on across gaps in the mask.
                accepted = step.metrics()["accept_len"] if size is None and packed else None
                what = f"{name}, {'whole' if size is None else size} vocabulary, {'packed' if packed else 'by document'}"
                compare(report, what, (step.total, step.gradients(), accepted, len(step.slots)), theirs)


def compare_trace(report, trace, target_folder):
    shape, target, rows, params = load(trace, target_folder)
    check_settings(trace.config, shape)
    theirs = run_theirs(
        trace.config, shape, target, rows, params, trace.metadata["last_hidden"], trace.kept_ids(), False
    )
    ours = (trace.scalar("loss"), trace.group("grad"), None, len(trace.get("slots.row")))
    compare(report, "trace", ours, theirs)


if __name__ == "__main__":
    sys.exit(main("against_speculators_eagle3", compare_trace, compare_batches))
