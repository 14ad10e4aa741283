"""Checks of eagle3_step.py by hand-made cases, closed forms and a loop that decodes as servers do. Run by self_check.py."""

import numpy as np
import torch

from dflash_step import rms_norm, rotate
from eagle3_step import Eagle3Step, anchors_of, chain_forward, fuse, scored_slots
from make_golden import make_row, parameters, resolved, target_config, target_tensors
from trace_file import Row, make_shape, make_target


def close(a, b, tol):
    error = float((torch.as_tensor(a, dtype=torch.float64) - torch.as_tensor(b, dtype=torch.float64)).abs().max())
    assert error <= tol, f"differ by {error}"


def model(drafter, loss=None, kept=None, seed=5):
    """Config, shape, target and float64 parameters of a tiny drafter."""
    rng = np.random.default_rng(seed)
    config = resolved({"drafter": {"kind": "eagle3", **drafter}, "loss": {"kl": 1.0, **(loss or {})}})
    target = make_target(target_config(True), target_tensors(rng, True), "made up")
    shape = make_shape(config, target.config)
    head = target.head if kept is None else target.head[kept]
    return config, shape, target, {n: p.double() for n, p in parameters(rng, shape, 3, head).items()}


def plain_row(lengths, unsupervised=()):
    """ids = position, no features."""
    tokens = sum(lengths)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[list(unsupervised)] = False
    return Row(
        input_ids=torch.arange(tokens),
        loss_mask=mask,
        doc_offsets=torch.tensor(np.cumsum([0, *lengths])),
        anchors=None,
        features=torch.zeros(tokens, 3, 16, dtype=torch.float64),
        last_hidden=None,
    )


def eagle3_alignment():
    """Which positions count, by hand: documents of 7 and 4, 3 ttt_steps, prompt of 2 tokens, a gap at 5."""
    row = plain_row([7, 4], [0, 1, 5])
    expected = {  # (position, ttt_step)
        # x_{t+1} and all labels up to the step are supervised: runs are 2..4, 6 and 7..10
        "served": [(1, 0), (1, 1), (2, 0), (7, 0), (7, 1), (8, 0)],
        # x_{t+2+i} is supervised, in the document
        "label": [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2), (3, 1), (4, 0), (7, 0), (7, 1), (8, 0)],
        # x_{t+1+i} is supervised and has a teacher row
        "input": [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (3, 2), (4, 1), (5, 0)]
        + [(7, 0), (7, 1), (7, 2), (8, 0), (8, 1), (9, 0)],
        # x_{t+i} is supervised, t+1+i has a teacher row
        "feature": [(0, 2), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (4, 0)]
        + [(7, 0), (7, 1), (7, 2), (8, 0), (8, 1), (9, 0)],
    }
    for mask_index, places in expected.items():
        config, shape, _, _ = model({"ttt_steps": 3}, {"mask_index": mask_index})
        slots = scored_slots([row], shape, config["loss"])
        assert [(s.position, s.ttt_step) for s in slots] == places, mask_index
        assert [s.teacher_row for s in slots] == [t + 1 + i for t, i in places]
        ends = [7 if t < 7 else 11 for t, _ in places]
        assert [s.label for s in slots] == [t + 2 + i if t + 2 + i < e else -1 for (t, i), e in zip(places, ends)]
        close([s.weight for s in slots], [0.8**i for _, i in places], 1e-15)
        assert anchors_of(slots, 0) == sorted({t + 1 for t, _ in places})


def eagle3_no_leak():
    """A chain sees its own document's features up to its position, and of a window only the last of them."""
    for drafter, first in (({}, 6), ({"layer_types": ["sliding_attention"], "sliding_window": 4}, 9)):
        _, shape, target, params = model(drafter)
        row, _ = make_row(np.random.default_rng(1), [6, 12], [], 3)
        row.features.requires_grad_(True)
        chain = chain_forward(params, shape, row, target.embed)
        (grad,) = torch.autograd.grad(chain[:, 12].square().sum(), row.features)
        seen = (grad.flatten(1).abs().sum(1) > 0).nonzero().flatten().tolist()
        assert seen == list(range(first, 13)), seen
        # step i looks back from t + i
        (grad,) = torch.autograd.grad(chain_forward(params, shape, row, target.embed)[3, 12].sum(), row.features)
        assert grad[12].abs().sum() > 0


def served_chain(params, shape, row, embed, t):
    """The chain of one position as a server runs it: a cache of the positions before, one query at a time."""
    g = fuse(params, shape, row)
    cache = [[] for _ in shape.layer_types]  # (place, key, value), heads apart
    outputs = []
    for place in range(t + shape.ttt_steps):
        if place <= t:
            h = g[place]  # a true feature; its guesses are overwritten
        embedded = embed[row.input_ids[place + 1]]
        for l, kind in enumerate(shape.layer_types):
            w = {n: params[f"layers.{l}.{n}.weight"] for n in
                 ("input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                  "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}  # fmt: skip
            if l == 0:
                normed = rms_norm(h, params["layers.0.hidden_norm.weight"], shape.eps)
                n = torch.cat([rms_norm(embedded, w["input_layernorm"], shape.eps), normed])
                h = normed if shape.norm_before_residual else h
            else:
                n = rms_norm(h, w["input_layernorm"], shape.eps)
            q, k = (w["self_attn.q_proj"] @ n).view(-1, shape.head_dim), (w["self_attn.k_proj"] @ n).view(-1, shape.head_dim)
            if shape.head_norms:
                q = rms_norm(q, params[f"layers.{l}.self_attn.q_norm.weight"], shape.eps)
                k = rms_norm(k, params[f"layers.{l}.self_attn.k_norm.weight"], shape.eps)
            at = torch.tensor([place + 1])
            q, k = rotate(q[None], at, shape)[0], rotate(k[None], at, shape)[0]
            cache[l].append((place, k, (w["self_attn.v_proj"] @ n).view(-1, shape.head_dim)))
            kept = [c for c in cache[l] if kind == "full_attention" or c[0] > place - shape.sliding_window]
            answer = []
            for head in range(shape.heads):
                own = head * shape.kv_heads // shape.heads
                scores = torch.stack([q[head] @ c[1][own] for c in kept]) * shape.head_dim**-0.5
                answer.append(sum(p * c[2][own] for p, c in zip(scores.softmax(0), kept)))
            h = h + w["self_attn.o_proj"] @ torch.cat(answer)
            m = rms_norm(h, w["post_attention_layernorm"], shape.eps)
            h = h + w["mlp.down_proj"] @ (torch.nn.functional.silu(w["mlp.gate_proj"] @ m) * (w["mlp.up_proj"] @ m))
        normed = rms_norm(h, params["norm.weight"], shape.eps)
        h = normed if shape.norm_output else h
        if place >= t:
            outputs.append(normed)
    return torch.stack(outputs)


def eagle3_is_what_servers_run():
    """Every option against a decoding loop with a cache, in which a document's chain is one run of positions."""
    mixed = ["sliding_attention", "full_attention"]
    for drafter in (
        {},
        {"style": "qwen3", "norm_before_residual": True, "norm_output": True, "fc_norm": True},
        {"layers": 2, "layer_types": mixed, "sliding_window": 5, "norm_before_fc": True, "num_key_value_heads": 1},
        {"layers": 3, "layer_types": mixed + mixed[:1], "sliding_window": 4, "norm_output": True, "ttt_steps": 4},
    ):
        _, shape, target, params = model(drafter)
        row, _ = make_row(np.random.default_rng(3), [17], [], 3)
        chain = chain_forward(params, shape, row, target.embed)
        for t in (0, 1, 9, 17 - 1 - shape.ttt_steps):
            close(chain[:, t], served_chain(params, shape, row, target.embed, t), 1e-12)


def eagle3_packed_is_the_sum():
    """Two documents packed equal the same two alone."""
    config, shape, target, params = model({"layers": 2, "layer_types": ["full_attention"] * 2})
    packed, _ = make_row(np.random.default_rng(2), [13, 11], [2, 15], 3)
    parts = [
        Row(
            input_ids=packed.input_ids[start:end],
            loss_mask=packed.loss_mask[start:end],
            doc_offsets=torch.tensor([0, end - start]),
            anchors=None,
            features=packed.features[start:end],
            last_hidden=packed.last_hidden[start:end],
        )
        for start, end in ((0, 13), (13, 24))
    ]
    one = Eagle3Step(config, shape, target, [packed], params, "post_norm")
    two = Eagle3Step(config, shape, target, parts, params, "post_norm", chunk=3)
    close(one.total, two.total, 1e-12)
    a, b = one.gradients(), two.gradients()
    for name in a:
        close(a[name], b[name], 1e-12)


def eagle3_vocabulary_by_hand():
    """Four of 67 tokens kept: ids, the teacher renormalised in the loss and whole in overlap and agreement."""
    kept = torch.tensor([0, 2, 3, 7])
    row, _ = make_row(np.random.default_rng(4), [9], [], 3)
    results = {}
    for rule in ("masked", "kept"):
        config, shape, target, params = model({}, {"ce_data": 1.0, "kl": 0.5, "out_of_vocab": rule})
        row.last_hidden = torch.zeros(9, 16, dtype=torch.float64)
        row.last_hidden[::2] = 30 * target.head[7]  # the target is sure of token 7, or of 5
        row.last_hidden[1::2] = 30 * target.head[5]
        row.input_ids[3], row.input_ids[4] = 7, 5
        results[rule] = step = Eagle3Step(config, shape, target, [row], params, "post_norm", kept)
        assert (step.draft_of[[0, 2, 3, 7, 5]] == torch.tensor([0, 1, 2, 3, -1])).all()
        hidden = step.hidden(0, None, torch.tensor([[s.slot, s.position] for s in step.slots])).detach()
        for n, (s, h) in enumerate(zip(step.slots, hidden)):
            full = (target.head @ row.last_hidden[s.teacher_row]).softmax(0)
            q, p = (target.head[kept] @ h).softmax(0), full[kept] / full[kept].sum()
            loss = 0.5 * float((p * (p / q).log()).sum())
            if s.label in kept.tolist():
                loss -= float(q[kept.tolist().index(s.label)].log())
            close(step.slot_loss[n], loss, 1e-12)
            close(step.overlap[n], torch.minimum(full[kept], q).sum(), 1e-12)
            assert step.student_argmax[n] == kept[q.argmax()]
            assert step.teacher_argmax[n] == (5 if s.teacher_row % 2 else 7)
            inside = s.teacher_row % 2 == 0 or rule == "kept"
            close(step.weight[n], 0.8**s.slot if inside else 0.0, 1e-15)
    assert len(results["masked"].reported) < len(results["kept"].reported) == len(results["kept"].slots)
    # What is masked is a rejection all the same.
    assert results["masked"].metrics() == results["kept"].metrics()


def eagle3_head_gradient():
    """Of a trainable head with kl: the sum of weight (q - p) h, over the sum of weights."""
    kept = torch.tensor([1, 4, 9, 33, 60])
    config, shape, target, params = model({"lm_head": "trainable"}, {"out_of_vocab": "kept"}, kept)
    row, _ = make_row(np.random.default_rng(6), [11], [3], 3)
    step = Eagle3Step(config, shape, target, [row], params, "pre_norm", kept)
    expected = torch.zeros_like(params["lm_head.weight"])
    chain = chain_forward(params, shape, row, target.embed)
    for s in step.slots:
        h = chain[s.slot, s.position]
        last = rms_norm(row.last_hidden[s.teacher_row], target.norm, target.norm_eps)
        q, p = (params["lm_head.weight"] @ h).softmax(0), (target.head[kept] @ last).softmax(0)
        expected += s.weight * torch.outer(q - p, h) / step.weight_sum
    close(step.gradients()["lm_head.weight"], expected, 1e-13)


CHECKS = (
    eagle3_alignment, eagle3_no_leak, eagle3_is_what_servers_run, eagle3_packed_is_the_sum, eagle3_vocabulary_by_hand,
    eagle3_head_gradient,
)  # fmt: skip
