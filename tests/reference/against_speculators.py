#!/usr/bin/env python3
"""Compares with the published `speculators` package: its DFlash model, mask, losses and metrics, unchanged. A
drafter with a Markov head is its DSpark model, with a vanilla head and without a confidence head.

    against_speculators.py                              made-up batches, against dflash_step.py
    against_speculators.py TRACE.safetensors [--target DIR]    the loss and gradients that a trace states

speculators differs from dtrain's defaults, so only settings that reproduce it can be compared:
loss.slot_mask each, loss.normalize count, drafter.window_origin anchor, loss terms other than ce_data, lk_eta 3,
D-PACE with ce_teacher alone. Three things are bridged here, because no setting expresses them:
  - it draws anchors itself: the batch's anchors are put in place of its choice;
  - it does not stop a block at the end of its document: documents are given one by one, padded with unsupervised
    tokens, unless a batch says that its documents begin with a block of unsupervised tokens;
  - from the anchor, it reads the loss mask at the slot's own position and not at the predicted one: the mask is
    handed over shifted.
Its loss is divided by (slots + 1e-5), and its softmax and norms run in fp32: agreement is at fp32's level.
"""

import argparse
import copy
import sys

import numpy as np
import torch

from dflash_step import Step, is_valid_anchor
from golden_cases import BASE
from make_golden import let_teacher_agree, make_row, parameters, target_config, target_tensors
from recompute_step import Report, load
from trace_file import Refused, Trace, make_shape, make_target, text_config

TERM_NAMES = {"kl": "kl_div", "reverse_kl": "rkl", "js": "jsd", "ce_teacher": "ce", "tv": "tv", "nla": "nla", "lk": "lk_hybrid"}
REDUCTION_EPS = 1e-5


def check_settings(config, shape):
    """Refuses what speculators cannot do."""
    loss, sliding = config["loss"], "sliding_attention" in shape.layer_types
    wanted = {
        "loss.slot_mask each": loss["slot_mask"] == "each",
        "loss.normalize count": loss["normalize"] == "count",
        "drafter.window_origin anchor": not sliding or shape.window_origin == "anchor",
        "loss.ce_data 0": loss["ce_data"] == 0,
        "loss.lk_eta 3": loss["lk"] == 0 or loss["lk_eta"] == 3.0,
        "loss.slot_weight exp or dpace": loss["slot_weight"] != "uniform",
        "dpace with ce_teacher alone": loss["slot_weight"] != "dpace" or [t for t in TERM_NAMES if loss[t] > 0] == ["ce_teacher"],
    }  # fmt: skip
    refuse_missing(wanted)


def refuse_missing(wanted):
    """`wanted`: what has to hold, and whether it does."""
    missing = [name for name, holds in wanted.items() if not holds]
    if missing:
        raise Refused("speculators cannot do this; it needs " + ", ".join(missing))


# ---- their model -------------------------------------------------------------------------------------


def layer_sizes(shape, target, intermediate):
    """What the config of the draft layers says, whatever their style."""
    text = text_config(target.config)
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    positions = text["max_position_embeddings"]
    if shape.rope_scaling != "none":
        rope |= {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
    if shape.rope_scaling == "yarn":
        rope["original_max_position_embeddings"] = shape.rope_original_positions
        positions = int(shape.rope_original_positions * shape.rope_factor)
    return {
        "vocab_size": target.embed.shape[0], "hidden_size": target.embed.shape[1], "intermediate_size": intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "rms_norm_eps": shape.eps, "max_position_embeddings": positions,
        "rope_parameters": rope, "layer_types": shape.layer_types, "attention_bias": False, "attention_dropout": 0.0,
        "pad_token_id": None,
    }  # fmt: skip


def layer_config(shape, target, intermediate):
    """Their config of the draft layers."""
    from transformers import Qwen3Config

    result = Qwen3Config(
        **layer_sizes(shape, target, intermediate), use_sliding_window=True, sliding_window=shape.sliding_window
    )
    result.sliding_window = shape.sliding_window
    result._attn_implementation = "eager"
    return result


def their_model(shape, target, params, last_hidden):
    """Their DFlash or DSpark draft model with our parameters in fp32."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    H = target.embed.shape[1]
    config_class, model_class, head = DFlashSpeculatorConfig, DFlashDraftModel, {}
    if shape.markov_rank:
        config_class, model_class = DSparkSpeculatorConfig, DSparkDraftModel
        head = {"markov_rank": shape.markov_rank, "enable_confidence_head": False, "confidence_head_with_markov": False}
    config = config_class(
        transformer_layer_config=layer_config(shape, target, params["layers.0.mlp.gate_proj.weight"].shape[0]),
        draft_vocab_size=target.head.shape[0],
        block_size=shape.block_size,
        target_hidden_size=H,
        aux_hidden_state_layer_ids=list(range(1, params["fc.weight"].shape[1] // H + 1)),
        mask_token_id=shape.mask_token_id,
        sliding_window_non_causal=shape.non_causal,
        sample_from_anchor=shape.predict_from_anchor,
        **head,
    )
    model = model_class(config).to(torch.float32)
    frozen = {
        "embed_tokens.weight": target.embed,
        "lm_head.weight": target.head,
        "verifier_lm_head.weight": target.head,
        "verifier_norm.weight": target.norm,
    }
    loaded = model.load_state_dict({n: t.float() for n, t in {**params, **frozen}.items()}, strict=True)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    model.verifier_norm.variance_epsilon = target.norm_eps
    if last_hidden == "post_norm":
        model.verifier_norm = torch.nn.Identity()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == set(params), trained ^ set(params)
    return model


def pieces(row, shape, packed):
    """What is handed over at once: the whole row, or each document padded. (start, end, padding)"""
    offsets = row.doc_offsets.tolist()
    if packed:
        yield 0, offsets[-1], 0
        return
    for start, end in zip(offsets[:-1], offsets[1:]):
        if bool(((row.anchors >= start) & (row.anchors < end)).any()):
            yield start, end, shape.block_size + 1


def their_inputs(row, shape, start, end, padding):
    """Keyword arguments of their forward, all with a leading batch dimension of 1."""

    def padded(values, fill):
        tail = torch.full((padding, *values.shape[1:]), fill, dtype=values.dtype)
        return torch.cat([values[start:end], tail])[None]

    document, position = torch.zeros(len(row.input_ids)).long(), torch.zeros(len(row.input_ids)).long()
    for d, (a, b) in enumerate(zip(row.doc_offsets.tolist()[:-1], row.doc_offsets.tolist()[1:])):
        document[a:b], position[a:b] = d, torch.arange(b - a)
    mask = padded(row.loss_mask, False)
    if shape.predict_from_anchor:
        mask = torch.cat([mask[:, 1:], torch.zeros(1, 1, dtype=torch.bool)], dim=1)
    return {
        "hidden_states": padded(row.features.flatten(1).float(), 0.0),
        "input_ids": padded(row.input_ids, 0),
        "loss_mask": mask,
        "verifier_last_hidden_states": padded(row.last_hidden.float(), 0.0),
        "document_ids": padded(document, -1),
        "position_ids": padded(position, 0),
    }


def forced_anchors(anchors, spare):
    """In place of their random choice; `spare` unused anchors, marked as they mark them."""

    def choose(loss_mask, num_anchors, block_size):
        valid = torch.arange(num_anchors) < len(anchors)
        return torch.cat([anchors, torch.zeros(spare, dtype=torch.long)]), valid

    return choose


def run_theirs(config, shape, target, rows, params, last_hidden, packed, own_choice=False, model=None):
    """(loss, gradients, accept_len, slots) of their model over all rows, divided by all slots at once.

    model: one of theirs that holds the parameters already.
    """
    import speculators.models.dflash.core as core
    from speculators.losses import resolve_loss_config

    loss = config["loss"]
    model = their_model(shape, target, params, last_hidden) if model is None else model
    weights = {TERM_NAMES[n]: loss[n] for n in TERM_NAMES if loss[n] > 0}
    terms = resolve_loss_config(str(weights).replace("'", '"'), "eager")
    # What their overlap is measured by; only DSpark asks.
    overlap = {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]} if shape.markov_rank else {}
    weighting = {"exp": "fixed-exp-decay", "dpace": "dpace"}[loss["slot_weight"]]
    theirs, original = [], core.select_anchors
    for row in rows:
        for start, end, padding in pieces(row, shape, packed):
            anchors = row.anchors[(row.anchors >= start) & (row.anchors < end)] - start
            spare = 1
            if not own_choice:
                core.select_anchors = forced_anchors(anchors, spare)
            try:
                _, value, metrics = model(
                    **their_inputs(row, shape, start, end, padding), loss_config=terms,
                    gamma=loss["slot_decay_gamma"], max_anchors=end - start if own_choice else len(anchors) + spare,
                    per_position_loss_weight=weighting, dpace_alpha=loss["dpace_alpha"], **overlap,
                )  # fmt: skip
            finally:
                core.select_anchors = original
            theirs.append((value, metrics))
    slots = sum(float(m["full_acc_total"]) for _, m in theirs)
    total = sum(v * (float(m["full_acc_total"]) + REDUCTION_EPS) for v, m in theirs) / slots
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    accepted = sum(float(m["eal_sum"]) for _, m in theirs) / sum(float(m["eal_total"]) for _, m in theirs)
    return float(total.detach()), grads, accepted, slots


# ---- made-up batches ---------------------------------------------------------------------------------

MIXED = ["sliding_attention", "full_attention"]
BATCHES = {
    "kl": {"loss": {"kl": 1.0}},
    "reverse_kl": {"loss": {"reverse_kl": 1.0}},
    "js": {"loss": {"js": 1.0}},
    "ce_teacher": {"loss": {"ce_teacher": 1.0}},
    "tv": {"loss": {"tv": 1.0}},
    "nla": {"loss": {"nla": 1.0}},
    "lk": {"loss": {"lk": 1.0}},
    "mixture": {"loss": {"ce_teacher": 0.1, "tv": 0.9}},
    "dpace": {"loss": {"ce_teacher": 1.0, "slot_weight": "dpace"}},
    "from anchor": {"loss": {"kl": 1.0}, "drafter": {"predict_from_anchor": True}},
    "sliding": {"loss": {"kl": 1.0}, "drafter": {"layer_types": MIXED, "sliding_window": 5, "window_origin": "anchor"}},
    "sliding, not causal": {
        "loss": {"kl": 1.0},
        "drafter": {
            "layer_types": MIXED, "sliding_window": 5, "window_origin": "anchor", "sliding_window_non_causal": True,
        },
    },  # fmt: skip
    "yarn": {
        "loss": {"kl": 1.0},
        "drafter": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 24},
    },
    "linear": {"loss": {"kl": 1.0}, "drafter": {"rope_scaling": "linear", "rope_factor": 2.0}},
    "Markov head": {"loss": {"ce_teacher": 0.1, "tv": 0.9}, "drafter": {"markov_rank": 7}},
    "Markov head, from anchor": {"loss": {"kl": 1.0}, "drafter": {"markov_rank": 8, "predict_from_anchor": True}},
}  # fmt: skip


def make_batch(index, overrides, packed):
    """Config, shape, target, rows and parameters. Packed documents begin with a block of unsupervised tokens."""
    rng = np.random.default_rng([2025, 2000 + index])
    config = copy.deepcopy(BASE)
    config["loss"].update({"slot_mask": "each", "normalize": "count"})
    for section, keys in overrides.items():
        config[section].update(keys)
    target = make_target(target_config(True), target_tensors(rng, True), "made up")
    shape = make_shape(config, target.config)
    params = {n: p.double() for n, p in parameters(rng, shape, 3).items()}
    B, lengths = shape.block_size + 1, [19, 26, 15]
    starts = np.cumsum([0] + lengths)
    quiet = [s + i for s in starts[:-1] for i in range(B)] if packed else [0, 1, 19, 21, 45]
    # With gaps, what follows an unsupervised token counts: slot_mask each.
    quiet += list(range(sum(lengths) - B, sum(lengths))) if packed else [8, 9, 30, 33, 52]
    row, planes = make_row(rng, lengths, quiet, 3)
    valid = [a for a in range(sum(lengths)) if is_valid_anchor(row, shape, "mask", a)]
    row.anchors = torch.tensor(valid if packed else sorted(rng.choice(valid, 9, replace=False).tolist()))
    let_teacher_agree(rng, Step(config, shape, target, [row], params, "pre_norm"), [planes])
    return config, shape, target, [row], params


def compare(report, name, ours, theirs):
    """Loss, accept_len and gradients; the note of `grad` names the worst tensor."""
    (loss, grads, accepted, slots), (their_loss, their_grads, their_accepted, their_slots) = ours, theirs
    report.number(f"{name}.loss", loss, their_loss)
    if accepted is not None:
        report.number(f"{name}.accept_len", accepted, their_accepted)
    report.exact(f"{name}.slots", [slots], [their_slots])
    errors = {n: float((grads[n].double() - g.double()).norm() / g.double().norm()) for n, g in their_grads.items()}
    worst = max(errors, key=errors.get)
    report.add(f"{name}.grad", errors[worst], note=f"worst of {len(errors)}: {worst}")


def compare_batches(report):
    for index, (name, overrides) in enumerate(BATCHES.items()):
        for packed in (True, False):
            batch = make_batch(index, overrides, packed)
            config, shape = batch[0], batch[1]
            check_settings(config, shape)
            step = Step(*batch, "pre_norm")
            ours = (step.total, step.gradients(), step.metrics()["accept_len"], len(step.slots))
            theirs = run_theirs(*batch, "pre_norm", packed)
            compare(report, f"{name}, {'packed' if packed else 'by document'}", ours, theirs)
            if packed and not shape.predict_from_anchor:
                # Every valid anchor, chosen by their own rule, scores the same slots. (From the anchor the
                # shifted mask would shift their choice too.)
                own = run_theirs(*batch, "pre_norm", packed, own_choice=True)
                compare(report, f"{name}, their anchors", ours, own)


def compare_trace(report, trace, target_folder):
    shape, target, rows, params = load(trace, target_folder)
    check_settings(trace.config, shape)
    theirs = run_theirs(trace.config, shape, target, rows, params, trace.metadata["last_hidden"], False)
    accepted = trace.scalar("accept_len") if "scalar.accept_len" in trace else None
    ours = (trace.scalar("loss"), trace.group("grad"), accepted, len(trace.get("slots.row")))
    compare(report, "trace", ours, theirs)


def main(name, compare_a_trace, compare_all_batches):
    """The command line of this script and of the one for EAGLE-3."""
    parser = argparse.ArgumentParser(description="compares with the published speculators package")
    parser.add_argument("trace", nargs="?", help="a trace; default: made-up batches")
    parser.add_argument("--target", help="target directory of the trace")
    parser.add_argument("--tol", type=float, default=1e-4, help="largest relative error (default 1e-4)")
    arguments = parser.parse_args()
    report = Report(arguments.tol)
    try:
        if arguments.trace:
            compare_a_trace(report, Trace(arguments.trace), arguments.target)
        else:
            compare_all_batches(report)
    except Refused as refusal:
        print(f"{name}: {refusal}", file=sys.stderr)
        return 2
    return 1 if report.print(True) else 0


if __name__ == "__main__":
    sys.exit(main("against_speculators", compare_trace, compare_batches))
