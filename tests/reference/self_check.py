#!/usr/bin/env python3
"""Checks the reference itself: hand-made cases, closed forms, finite differences, torch's own optimizer.

    self_check.py

against_speculators.py holds the reference against another project's code; this holds it against arithmetic.
Closes with the line "N passed, N failed".
"""

import copy
import math
import os
import sys
import traceback

import numpy as np
import torch

from dflash_step import Step, adamw, blocks_forward, clip_factor, dpace_weights, global_norm
from dflash_step import TERMS, is_valid_anchor, loss_term, scored_slots
from eagle3_step import make_step
from golden_cases import BASE, CASES
from make_golden import DEFAULT_OUT, draw_vocabulary, make_row, make_rows, parameters, resolved
from make_golden import target_config, target_tensors
from muon_step import COEFFICIENTS, muon, orthogonal
from recompute_step import recompute
from self_check_eagle3 import CHECKS as EAGLE3_CHECKS
from trace_file import Row, Trace, make_shape, make_target


def close(a, b, tol):
    error = float((torch.as_tensor(a, dtype=torch.float64) - torch.as_tensor(b, dtype=torch.float64)).abs().max())
    assert error <= tol, f"differ by {error}"


def plain_row(tokens, anchors, mask=None):
    """One document, ids = position, without features."""
    return Row(
        input_ids=torch.arange(tokens),
        loss_mask=torch.ones(tokens, dtype=torch.bool) if mask is None else mask,
        doc_offsets=torch.tensor([0, tokens]),
        anchors=torch.tensor(anchors),
        features=torch.zeros(tokens, 3, 16, dtype=torch.float64),
        last_hidden=None,
    )


def model(overrides, seed=5):
    """Config, shape, target and float64 parameters of a tiny drafter."""
    rng = np.random.default_rng(seed)
    config = resolved(overrides)
    target = make_target(target_config(True), target_tensors(rng, True), "made up")
    shape = make_shape(config, target.config)
    return config, shape, target, {n: p.double() for n, p in parameters(rng, shape, 3).items()}


def alignment():
    """Anchor 5, B 4: labels and teacher rows of both layouts; one supervised token counts once."""
    for from_anchor, slots, labels, rows in (
        (False, [1, 2, 3], [6, 7, 8], [5, 6, 7]),
        (True, [0, 1, 2, 3], [6, 7, 8, 9], [5, 6, 7, 8]),
    ):
        config, shape, _, _ = model({"drafter": {"block_size": 4, "predict_from_anchor": from_anchor}})
        found = scored_slots([plain_row(16, [5])], shape, config["loss"])
        assert [s.slot for s in found] == slots
        assert [s.label for s in found] == labels
        assert [s.teacher_row for s in found] == rows
        mask = torch.zeros(16, dtype=torch.bool)
        mask[7] = True
        each = scored_slots([plain_row(16, [5], mask)], shape, {**config["loss"], "slot_mask": "each"})
        assert [s.slot for s in each] == [1 if from_anchor else 2]
        assert scored_slots([plain_row(16, [5], mask)], shape, config["loss"]) == []


def candidates():
    """One document of 20, B 8: 13 anchors with whole blocks, 19 without; a document of 7 has none."""
    _, shape, _, _ = model({"drafter": {"block_size": 8}})

    def count(tokens, tail):
        return sum(is_valid_anchor(plain_row(tokens, []), shape, tail, a) for a in range(tokens))

    assert count(20, "whole") == 13 and count(20, "mask") == 19 and count(7, "whole") == 0
    weights = [s.weight for s in scored_slots([plain_row(20, [16])], shape, BASE["loss"])]
    close(weights, [math.exp(-(k - 1) / 4.0) for k in (1, 2, 3)], 1e-15)


def no_leak():
    """The gradient by features at or after the anchor is exactly 0, and blocks do not see each other."""
    for layers in (["full_attention"] * 2, ["sliding_attention", "full_attention"]):
        _, shape, target, params = model({"drafter": {"layer_types": layers, "sliding_window": 3}})
        row, _ = make_row(np.random.default_rng(1), [14, 10], [], 3)
        row.features.requires_grad_(True)
        alone = blocks_forward(params, shape, row, [17], target.embed)
        (grad,) = torch.autograd.grad(alone.square().sum(), row.features)
        seen = grad.flatten(1).abs().sum(1) > 0
        assert not seen[:14].any() and not seen[17:].any() and seen[14:17].all()
        both = blocks_forward(params, shape, row, [4, 17], target.embed)
        close(both[1].detach(), alone[0].detach(), 1e-13)


def packed_is_the_sum():
    """Two documents packed equal the same two alone."""
    config, shape, target, params = model({"loss": {"kl": 1.0}})
    packed, _ = make_row(np.random.default_rng(2), [13, 11], [2, 15], 3)
    packed.anchors = torch.tensor([3, 7, 11, 13, 19])
    parts = []
    for start, end in ((0, 13), (13, 24)):
        parts.append(
            Row(
                input_ids=packed.input_ids[start:end],
                loss_mask=packed.loss_mask[start:end],
                doc_offsets=torch.tensor([0, end - start]),
                anchors=packed.anchors[(packed.anchors >= start) & (packed.anchors < end)] - start,
                features=packed.features[start:end],
                last_hidden=packed.last_hidden[start:end],
            )
        )
    one = Step(config, shape, target, [packed], params, "post_norm")
    two = Step(config, shape, target, parts, params, "post_norm")
    close(one.total, two.total, 1e-12)
    a, b = one.gradients(), two.gradients()
    for name in a:
        close(a[name], b[name], 1e-12)


def closed_forms():
    """The gradient of each term by the logits, against its formula."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(6, 11, generator=generator, dtype=torch.float64).requires_grad_(True)
    teacher = torch.randn(6, 11, generator=generator, dtype=torch.float64) * 2
    labels = torch.tensor([0, 1, 5, 10, 3, 3])
    p, q = teacher.softmax(-1), z.detach().softmax(-1)
    kl = (p * (p / q).log()).sum(-1, keepdim=True)
    reverse = (q * (q / p).log()).sum(-1, keepdim=True)
    m = (p + q) / 2
    q_m = (q * (q / m).log()).sum(-1, keepdim=True)
    overlap = torch.minimum(p, q).sum(-1, keepdim=True)
    below = (q <= p).double()
    tv_grad = -q * (below - (q * below).sum(-1, keepdim=True))
    mix = torch.exp(-3 * overlap)

    def hot(ids):
        return torch.nn.functional.one_hot(ids, 11).double()

    expected = {
        "kl": q - p,
        "reverse_kl": q * ((q / p).log() - reverse),
        "js": q * ((q / m).log() - q_m) / 2,
        "ce_teacher": q - hot(p.argmax(-1)),
        "ce_data": q - hot(labels),
        "tv": tv_grad,
        "nla": tv_grad / overlap,
        "lk": mix * (q - p) + (1 - mix) * tv_grad,
    }
    values = {"kl": kl, "reverse_kl": reverse, "tv": 1 - overlap, "nla": -overlap.log()}
    for term in TERMS:
        loss = loss_term(term, z, teacher, labels, 3.0)
        close(torch.autograd.grad(loss.sum(), z)[0], expected[term], 1e-13)
        if term in values:
            close(loss.detach()[:, None], values[term], 1e-13)


def dpace_by_hand():
    """Slots 1, 2, 4 of a block scored; alpha 0.5."""
    config, shape, _, _ = model({})
    mask = torch.ones(12, dtype=torch.bool)
    mask[[6, 8]] = False
    slots = scored_slots([plain_row(12, [3], mask)], shape, {**config["loss"], "slot_mask": "each"})
    assert [s.slot for s in slots] == [1, 2, 4]
    p1, p2, p4 = 0.5 * 0.2 + 0.5, 0.5 * 0.6 + 0.5, 0.5 * 1.0 + 0.5
    c1, c2, c4 = p1, p1 * p2, p1 * p2 * p4
    close(dpace_weights(slots, torch.tensor([0.2, 0.6, 1.0]), 0.5), [c1 + c2 + c4, c2 + c4, c4], 1e-7)


def finite_differences():
    """The directional derivative of the whole step, for golden cases whose weights do not depend on the student."""
    for index, (name, case) in enumerate(CASES.items()):
        config = resolved(case["config"])
        constant = config["loss"].get("slot_weight") != "dpace" and config["loss"]["lk"] == 0
        if not constant or name.endswith("nothing_supervised"):
            continue
        rng = np.random.default_rng(index)
        target = make_target(target_config(True), target_tensors(rng, True), name)
        shape = make_shape(config, target.config)
        kept = draw_vocabulary(rng, case)
        head = target.head if kept is None else target.head[kept]
        params = {n: p.double() for n, p in parameters(rng, shape, len(config["target"]["layer_ids"]), head).items()}
        rows = make_rows(rng, case, config, shape, {})
        direction = {n: torch.from_numpy(rng.standard_normal(tuple(p.shape))) for n, p in params.items()}
        length = global_norm(direction)
        direction = {n: d / length for n, d in direction.items()}

        def loss_at(h):
            moved = {n: p + h * direction[n] for n, p in params.items()}
            return make_step(config, shape, target, rows, moved, "pre_norm", kept).total

        grads = make_step(config, shape, target, rows, params, "pre_norm", kept).gradients()
        expected = sum(float((grads[n] * direction[n]).sum()) for n in params)
        found = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
        assert abs(found - expected) <= 1e-7 * max(0.01, abs(expected)), f"{name}: {found}, expected {expected}"


def optimizer():
    """AdamW and clipping, against torch's."""
    generator = torch.Generator().manual_seed(4)
    ours = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    m = v = torch.zeros_like(ours)
    for step in range(1, 6):
        grad = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        theirs.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 2.0)
        adam.step()
        grad = grad * clip_factor(global_norm({"p": grad}), 2.0)
        ours = adamw(ours, grad, m, v, step, 0.01, (0.9, 0.99), 1e-6, 0.1)
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad * grad
        close(ours, theirs.detach(), 1e-7)  # torch adds 1e-6 to the norm it divides by


def muon_iterations():
    """Muon through singular values, against the same iteration by products, and against torch's bf16 one."""
    generator = torch.Generator().manual_seed(6)
    a, b, c = COEFFICIENTS
    for shape in ((7, 12), (12, 7), (9, 9)):
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = matrix / matrix.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        close(orthogonal(matrix, 5), x, 1e-9)
    optimizer = {"kind": "muon", "lr": 0.02, "weight_decay": 0.1, "muon_momentum": 0.95, "muon_ns_steps": 5,
                 "muon_scale": "adamw_rms"}  # fmt: skip
    ours = torch.randn(24, 40, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.float())
    library = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    m = torch.zeros_like(ours)
    for _ in range(3):
        grad = torch.randn(24, 40, generator=generator, dtype=torch.float64)
        theirs.grad = grad.float()
        before = theirs.detach().double()
        library.step()
        change = muon(ours, grad, m, optimizer, 0.02, 0.1) - ours
        m = 0.95 * m + 0.05 * grad
        error = float((theirs.detach().double() - before - change).norm() / change.norm())
        assert error <= 3e-2, error  # they iterate in bf16
        ours = theirs.detach().double()


def groups_do_not_matter():
    """Anchors one by one or all together, losses in chunks of any size."""
    config, shape, target, params = model({"loss": {"tv": 1.0, "slot_weight": "dpace"}})
    row, _ = make_row(np.random.default_rng(7), [20, 9], [4, 22], 3)
    row.anchors = torch.tensor([0, 5, 6, 11, 18, 23])
    whole = Step(config, shape, target, [row], params, "pre_norm")
    parts = Step(copy.deepcopy(config), shape, target, [row], params, "pre_norm", group=1, chunk=2)
    close(whole.total, parts.total, 1e-13)
    a, b = whole.gradients(), parts.gradients()
    for name in a:
        close(a[name], b[name], 1e-13)


# case -> settings that its results must depend on: a C test that read them wrongly would not pass.
CHANGES = {
    "kl": {
        "drafter.rope_theta": 9000.0, "drafter.rms_norm_eps": 1e-3, "drafter.mask_token_id": 61,
        "loss.slot_decay_gamma": 4.1, "loss.slot_mask": "each", "loss.slot_weight": "uniform",
        "loss.normalize": "count", "loss.js": 0.1,
    },
    "reverse_kl_sliding": {
        "drafter.sliding_window": 9, "drafter.window_origin": "anchor", "drafter.sliding_window_non_causal": True,
        "drafter.layer_types": ["full_attention", "sliding_attention"],
    },
    "js_from_anchor": {"drafter.predict_from_anchor": False, "loss.slot_mask": "prefix"},
    "ce_teacher_whole": {"drafter.sliding_window_non_causal": False, "drafter.sliding_window": 7},
    "ce_data_dpace": {
        "loss.dpace_alpha": 0.5, "drafter.rope_factor": 3.0, "drafter.rope_original_positions": 96,
        "drafter.rope_scaling": "linear", "loss.slot_mask": "prefix",
    },
    "tv_window_from_anchor": {"drafter.window_origin": "query", "drafter.sliding_window": 6, "loss.normalize": "weighted"},
    "nla_linear": {"drafter.rope_factor": 2.0, "drafter.rope_scaling": "none"},
    "lk_noise": {"loss.lk_eta": 3.0},
    "mixture_ce_tv_dpace": {"loss.dpace_alpha": 0.6, "loss.slot_weight": "exp", "drafter.sliding_window": 8},
    "mixture_all_count": {f"loss.{t}": 0.0 for t in TERMS} | {"loss.normalize": "weighted"},
    "row_without_anchors": {"drafter.mask_token_id": 4, "drafter.sliding_window": 11},
    "eagle3_kl": {
        "drafter.rope_theta": 5000.0, "drafter.rms_norm_eps": 1e-2, "drafter.ttt_steps": 3, "drafter.norm_output": True,
        "drafter.norm_before_residual": True, "loss.ttt_decay_base": 0.81, "loss.mask_index": "label",
        "loss.normalize": "count", "loss.js": 0.1,
    },
    "eagle3_vocabulary_masked": {
        "loss.out_of_vocab": "kept", "drafter.norm_output": False, "drafter.ttt_steps": 6, "drafter.fc_norm": False,
        "loss.mask_index": "input",
    },
    "eagle3_vocabulary_kept": {
        "loss.out_of_vocab": "masked", "loss.mask_index": "feature", "loss.lk_eta": 3.0, "drafter.style": "llama",
        "drafter.norm_before_residual": False, "loss.ttt_decay_base": 0.9,
    },
    "eagle3_trainable_head": {
        "drafter.lm_head": "frozen", "drafter.norm_before_fc": False, "loss.mask_index": "served", "loss.ce_data": 0.6,
    },
    "eagle3_two_layers": {
        "drafter.sliding_window": 7, "drafter.layer_types": ["full_attention"] * 2, "loss.mask_index": "input",
        "drafter.norm_before_residual": False,
    },
    "eagle3_three_layers": {"drafter.sliding_window": 8, "drafter.rope_factor": 2.0, "loss.normalize": "weighted"},
    "eagle3_all_terms": {f"loss.{t}": 0.0 for t in TERMS} | {"drafter.lm_head": "frozen"},
    "markov": {"drafter.markov_rank": 0, "loss.slot_weight": "uniform", "loss.slot_decay_gamma": 4.5},
    "markov_from_anchor": {"drafter.markov_rank": 0, "drafter.predict_from_anchor": False, "drafter.sliding_window": 7},
    "eagle3_markov": {"drafter.markov_rank": 0, "loss.mask_index": "label"},
    "eagle3_markov_frozen": {"drafter.markov_rank": 0, "loss.out_of_vocab": "masked"},
    "eagle3_markov_vocabulary": {"drafter.markov_rank": 0, "drafter.lm_head": "frozen", "loss.out_of_vocab": "kept"},
    "eagle3_one_step": {"drafter.sliding_window": 3, "loss.mask_index": "label"},
}  # fmt: skip


def golden_files_depend_on_settings():
    """The stored loss is found again, and is another one when one setting is changed."""
    for name, changes in CHANGES.items():
        trace = Trace(os.path.join(DEFAULT_OUT, name + ".safetensors"))
        stored = trace.scalar("loss")
        close(recompute(trace, None, 64)[0].total, stored, 1e-7)
        original = copy.deepcopy(trace.config)
        for key, value in changes.items():
            trace.config = copy.deepcopy(original)
            section, field = key.split(".")
            assert trace.config[section][field] != value, f"{name}: {key} is {value} already"
            trace.config[section][field] = value
            changed = recompute(trace, None, 64)[0].total
            assert abs(changed - stored) > 1e-5 * abs(stored), f"{name}: {key} = {value} makes no difference"


CHECKS = (
    alignment, candidates, no_leak, packed_is_the_sum, closed_forms, dpace_by_hand, finite_differences, optimizer,
    muon_iterations, groups_do_not_matter, golden_files_depend_on_settings, *EAGLE3_CHECKS,
)  # fmt: skip


def main():
    failed = 0
    for check in CHECKS:
        try:
            check()
            print(f"ok    {check.__name__}")
        except AssertionError:
            failed += 1
            print(f"FAIL  {check.__name__}")
            traceback.print_exc()
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
