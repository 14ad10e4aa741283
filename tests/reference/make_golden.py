#!/usr/bin/env python3
"""Writes the golden files of tests/golden: small steps with their float64 results, for the C tests.

    make_golden.py [--out DIR] [--check]

Each CASE.safetensors has the layout of `dtrain trace` and carries its target too (tensors target.NAME and
target_config in the metadata), so that the C tests need neither PyTorch nor other files. Results are computed
in float64 and stored rounded to float32. --check recomputes and compares with the stored files instead.
"""

import argparse
import copy
import json
import os
import sys

import numpy as np
import torch
from safetensors import safe_open

from dflash_step import MARKOV, TERMS, adamw, clip_factor, global_norm, inverse_frequencies, is_valid_anchor
from dflash_step import loss_term, positions_of
from eagle3_step import anchors_of, make_step, scored_slots
from golden_cases import BASE, BASE_EAGLE3, CASES
from muon_step import muon, takes, weight_decay
from trace_file import Eagle3Shape, Row, Shape, make_shape, make_target

VOCAB, HIDDEN = 67, 16
DEFAULT_OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")


# ---- inputs ------------------------------------------------------------------------------------------


def normal(rng, shape, std):
    return torch.from_numpy((rng.standard_normal(shape) * std).astype(np.float32))


def is_eagle3(config):
    return config.get("drafter", {}).get("kind") == "eagle3"


def resolved(overrides):
    config = copy.deepcopy(BASE_EAGLE3 if is_eagle3(overrides) else BASE)
    for section, keys in overrides.items():
        config[section].update(keys)
    return config


def target_config(untied):
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": not untied,
    }


def target_tensors(rng, untied):
    tensors = {
        "embed_tokens.weight": normal(rng, (VOCAB, HIDDEN), 0.6),
        "norm.weight": 1 + normal(rng, HIDDEN, 0.2),
    }
    if untied:
        tensors["lm_head.weight"] = normal(rng, (VOCAB, HIDDEN), 0.6)
    return tensors


def dflash_sizes(shape, planes):
    sizes = {"fc": (HIDDEN, planes * HIDDEN), "hidden_norm": HIDDEN, "norm": HIDDEN}
    for i in range(shape.layers):
        sizes.update(layer_sizes(shape, f"layers.{i}.", HIDDEN, True))
    return sizes


def layer_sizes(shape, layer, inputs, head_norms):
    """inputs: columns of the projections to queries, keys and values."""
    q, kv, mlp = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, 12
    sizes = {layer + "input_layernorm": HIDDEN, layer + "post_attention_layernorm": HIDDEN}
    sizes[layer + "self_attn.q_proj"] = (q, inputs)
    sizes[layer + "self_attn.k_proj"] = sizes[layer + "self_attn.v_proj"] = (kv, inputs)
    sizes[layer + "self_attn.o_proj"] = (HIDDEN, q)
    if head_norms:
        sizes[layer + "self_attn.q_norm"] = sizes[layer + "self_attn.k_norm"] = shape.head_dim
    sizes[layer + "mlp.gate_proj"] = sizes[layer + "mlp.up_proj"] = (mlp, HIDDEN)
    sizes[layer + "mlp.down_proj"] = (HIDDEN, mlp)
    return sizes


def eagle3_sizes(shape, planes):
    sizes = {"fc": (HIDDEN, planes * HIDDEN), "norm": HIDDEN, "layers.0.hidden_norm": HIDDEN}
    if shape.norm_before_fc:
        sizes["input_norm"] = planes * HIDDEN
    if shape.fc_norm:
        sizes.update({f"fc_norm.{i}": HIDDEN for i in range(planes)})
    for i in range(shape.layers):
        sizes.update(layer_sizes(shape, f"layers.{i}.", HIDDEN if i else 2 * HIDDEN, shape.head_norms))
    return sizes


def parameters(rng, shape, planes, head=None):
    """fp32 parameters by name, larger than at the start of training so that every path matters.

    head: the target's rows of the draft vocabulary, near which a trainable head lies; None: the whole vocabulary.
    """
    sizes = eagle3_sizes(shape, planes) if isinstance(shape, Eagle3Shape) else dflash_sizes(shape, planes)
    params = {
        n + ".weight": normal(rng, s, s[1] ** -0.5) if isinstance(s, tuple) else 1 + normal(rng, s, 0.3)
        for n, s in sizes.items()
    }
    if isinstance(shape, Eagle3Shape) and shape.trainable_head:
        params["lm_head.weight"] = head.float() + normal(rng, tuple(head.shape), 0.2)
    if shape.markov_rank:
        params[MARKOV + "w1.weight"] = normal(rng, (VOCAB, shape.markov_rank), 0.6)
        params[MARKOV + "w2.weight"] = normal(rng, (VOCAB if head is None else len(head), shape.markov_rank), 0.6)
    return params


def draw_anchors(rng, row, shape, anchors):
    """min(max_anchors, valid) anchors for the row or for each document, sorted."""
    offsets = row.doc_offsets.tolist()
    bounds = [(0, offsets[-1])] if anchors["per"] == "row" else list(zip(offsets[:-1], offsets[1:]))
    result = []
    for start, end in bounds:
        valid = [a for a in range(start, end) if is_valid_anchor(row, shape, anchors["tail"], a)]
        count = min(anchors["max_anchors"], len(valid))
        result += sorted(rng.choice(valid, count, replace=False).tolist()) if count else []
    return torch.tensor(result, dtype=torch.long)


def make_row(rng, lengths, unsupervised, planes):
    """(row without anchors, hidden_states bf16 [T, P, H])."""
    T = sum(lengths)
    mask = torch.ones(T, dtype=torch.bool)
    mask[unsupervised] = False
    hidden = normal(rng, (T, planes + 1, HIDDEN), 1.0).to(torch.bfloat16)
    exact = hidden.to(torch.float64)
    row = Row(
        input_ids=torch.from_numpy(rng.integers(0, VOCAB, T)),
        loss_mask=mask,
        doc_offsets=torch.tensor(np.cumsum([0] + lengths)),
        anchors=torch.zeros(0, dtype=torch.long),
        features=exact[:, :-1],
        last_hidden=exact[:, -1],
    )
    return row, hidden


def let_teacher_agree(rng, step, planes_of_rows):
    """Gives the teacher the student's own answer, blurred, at most scored slots, so that metrics have something to count."""
    for r, anchors, members, places in step.groups():
        hidden = step.hidden(r, anchors, places).detach()
        if step.last_hidden == "pre_norm":
            hidden = hidden / step.target.norm
        if is_eagle3(step.config):  # the last one to come is answered whole; neighbours share teacher rows
            order = rng.permutation(max(step.slots[i].position for i in members) + 1)
            turn = [(order[step.slots[i].position], step.slots[i].ttt_step, n) for n, i in enumerate(members)]
            chosen = torch.tensor([n for _, _, n in sorted(turn)])
            members, hidden = members[chosen], hidden[chosen]
        for i, h in zip(members.tolist(), hidden):
            if rng.random() < 0.7:
                planes_of_rows[r][step.slots[i].teacher_row, -1] = (h + normal(rng, HIDDEN, 0.4)).to(torch.bfloat16)
    for row, planes in zip(step.rows, planes_of_rows):
        row.last_hidden = planes[:, -1].to(torch.float64)


def make_rows(rng, case, config, shape, tensors):
    """The rows of a case; their tensors are added to `tensors`."""
    planes, noise_std = len(config["target"]["layer_ids"]), config["data"]["noise_std"]
    rows = []
    for r, (lengths, off) in enumerate(zip(case["rows"]["documents"], case["rows"]["unsupervised"])):
        row, hidden = make_row(rng, lengths, off, planes)
        if is_eagle3(config):
            row.anchors = torch.tensor(anchors_of(scored_slots([row], shape, config["loss"]), 0), dtype=torch.long)
        else:
            row.anchors = draw_anchors(rng, row, shape, config["anchors"])
        if noise_std > 0:
            noise = normal(rng, (len(row.input_ids), planes, HIDDEN), noise_std)
            row.features = row.features + noise.to(torch.float64)
            tensors[f"row{r}.noise"] = noise
        tensors[f"row{r}.input_ids"] = row.input_ids.int()
        tensors[f"row{r}.positions"] = positions_of(row).int()
        tensors[f"row{r}.loss_mask"] = row.loss_mask.to(torch.uint8)
        tensors[f"row{r}.doc_offsets"] = row.doc_offsets
        tensors[f"row{r}.anchors"] = row.anchors.int()
        tensors[f"row{r}.hidden_states"] = hidden
        rows.append(row)
    return rows


def optimizer_state(rng, params, step):
    """Moments before the step: zero before the first one."""
    m, v = {}, {}
    for name, p in params.items():
        m[name] = torch.zeros_like(p) if step == 1 else normal(rng, tuple(p.shape), 0.01)
        v[name] = torch.zeros_like(p) if step == 1 else normal(rng, tuple(p.shape), 0.02).pow(2)
    return m, v


# ---- results -----------------------------------------------------------------------------------------


def slot_results(step, names):
    tensors, at = {}, step.reported
    for name in names:
        values = [getattr(step.slots[i], name) for i in at.tolist()]
        tensors[f"slots.{name}"] = torch.tensor(values, dtype=torch.int32)
    tensors["slots.weight"] = step.weight[at].float()
    tensors["slots.loss"] = step.slot_loss[at].float()
    for name in ("student_lse", "teacher_lse", "overlap"):
        tensors[f"slots.{name}"] = getattr(step, name)[at].float()
    for name in ("student_argmax", "teacher_argmax"):
        tensors[f"slots.{name}"] = getattr(step, name)[at].int()
    return tensors


def update_results(config, step, number, params, m, v):
    """Gradients, the update and the scalars. Parameters and moments are given as stored (fp32)."""
    optimizer = config["optimizer"]
    grads = step.gradients()
    norm = global_norm(grads)
    factor = clip_factor(norm, optimizer["grad_clip"])
    tensors = {}
    for name, p in params.items():
        decay, by_muon = weight_decay(optimizer, name, p), takes(optimizer, name, p)
        grad, mean, lr = grads[name] * factor, m[name].double(), optimizer["lr"]
        new = p.double()
        if step.weight_sum > 0 and by_muon:
            new = muon(p.double(), grad, mean, optimizer, lr, decay)
        elif step.weight_sum > 0:
            new = adamw(
                p.double(), grad, mean, v[name].double(),
                number, lr, optimizer["betas"], optimizer["eps"], decay,
            )  # fmt: skip
        tensors[f"param.{name}"], tensors[f"grad.{name}"] = p, grads[name].float()
        tensors[f"adam_m.{name}"] = m[name]
        if not by_muon:
            tensors[f"adam_v.{name}"] = v[name]
        tensors[f"updated.{name}"] = new.float()
        tensors[f"decay.{name}"] = torch.tensor([decay], dtype=torch.float32)
    scalars = {
        "loss": step.total, "weight_sum": step.weight_sum, "lr": optimizer["lr"], "grad_norm": norm,
        "clip_factor": factor, "step": number,
    }  # fmt: skip
    metrics = step.metrics() or {}
    names = ("accept_len", "eal_marginal") + (("overlap",) if is_eagle3(config) else ())
    scalars.update({n: metrics[n] for n in names if n in metrics})
    for name in ("acc", "cond_acc"):
        if name in metrics:
            tensors[f"metrics.{name}"] = torch.tensor(metrics[name], dtype=torch.float32)
    for name, value in scalars.items():
        tensors[f"scalar.{name}"] = torch.tensor([value], dtype=torch.float64)
    return tensors


def draw_vocabulary(rng, case):
    """Target ids of a draft vocabulary, ascending, or None."""
    if "draft_vocab" not in case:
        return None
    return torch.from_numpy(np.sort(rng.choice(VOCAB, case["draft_vocab"], replace=False)))


def make_file(index, case):
    """(tensors, metadata) of one golden step."""
    rng = np.random.default_rng([2025, index])
    config, number = resolved(case["config"]), case.get("step", 1)
    last_hidden, untied = case.get("last_hidden", "post_norm"), case.get("untied", False)
    frozen = target_tensors(rng, untied)
    target = make_target(target_config(untied), frozen, "golden")
    shape = make_shape(config, target.config)
    kept = draw_vocabulary(rng, case)
    head = target.head if kept is None else target.head[kept]
    params = parameters(rng, shape, len(config["target"]["layer_ids"]), head)
    tensors = {f"target.{n}": t for n, t in frozen.items()}
    if kept is not None:
        config["drafter"]["draft_vocab"] = "vocabulary.safetensors"
        tensors["d2t"] = kept - torch.arange(len(kept))
    rows = make_rows(rng, case, config, shape, tensors)
    m, v = optimizer_state(rng, params, number)
    exact = {n: p.double() for n, p in params.items()}
    planes = [tensors[f"row{r}.hidden_states"] for r in range(len(rows))]
    let_teacher_agree(rng, make_step(config, shape, target, rows, exact, last_hidden, kept), planes)
    step = make_step(config, shape, target, rows, exact, last_hidden, kept)
    names = ("row", "block", "slot", "label", "teacher_row") + (("position", "ttt_step") if is_eagle3(config) else ())
    tensors.update(slot_results(step, names))
    tensors.update(update_results(config, step, number, params, m, v))
    metadata = {
        "config": json.dumps(config),
        "config_yaml": to_yaml(config),
        "kind": config["drafter"]["kind"],
        "step": str(number),
        "world_size": "1",
        "version": "golden",
        "last_hidden": last_hidden,
        "target_layer_ids": json.dumps(config["target"]["layer_ids"]),
        "target_config": json.dumps(target.config),
    }
    return tensors, metadata


def to_yaml(config):
    """The sections as block YAML; a number keeps a decimal point, also with an exponent."""

    def scalar(value):
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, list):
            return "[" + ", ".join(scalar(v) for v in value) + "]"
        text = repr(value) if isinstance(value, float) else str(value)
        return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text

    lines = []
    for section, keys in config.items():
        lines.append(f"{section}:")
        lines += [f"  {k}: {scalar(v)}" for k, v in keys.items()]
    return "\n".join(lines) + "\n"


# ---- losses and frequencies by themselves ------------------------------------------------------------


def make_losses():
    """loss_terms: rows of student and teacher, each term's loss and its gradient by hidden state and by logit.

    Rows 0..3 are unrelated; 4..6 nearly equal; 7 equal; 8, 9 sharply peaked; 10, 11 peaked at different tokens.
    """
    rng = np.random.default_rng([2025, 1000])
    n = 12
    head = normal(rng, (VOCAB, HIDDEN), 0.7)
    teacher = normal(rng, (n, HIDDEN), 1.0)
    student = normal(rng, (n, HIDDEN), 1.0)
    student[4:7] = teacher[4:7] + normal(rng, (3, HIDDEN), 0.02)
    student[7] = teacher[7]
    teacher[8:12] *= 6
    student[8:10] = teacher[8:10] + normal(rng, (2, HIDDEN), 0.5)
    student[10:12] *= 6
    labels = torch.from_numpy(rng.integers(0, VOCAB, n))
    tensors = {"head": head, "student_hidden": student, "teacher_hidden": teacher, "labels": labels.int()}
    p = teacher.double() @ head.double().T
    for term in TERMS:
        hidden = student.double().requires_grad_(True)
        logits = hidden @ head.double().T
        losses = loss_term(term, logits, p, labels, 3.0)
        by_hidden, by_logit = torch.autograd.grad(losses.sum(), [hidden, logits])
        tensors[f"loss.{term}"] = losses.detach()
        tensors[f"grad_hidden.{term}"], tensors[f"grad_logits.{term}"] = by_hidden, by_logit.float()
    q = student.double() @ head.double().T
    tensors["student_lse"], tensors["teacher_lse"] = q.logsumexp(-1), p.logsumexp(-1)
    tensors["student_argmax"], tensors["teacher_argmax"] = q.argmax(-1).int(), p.argmax(-1).int()
    tensors["overlap"] = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    return tensors, {"lk_eta": "3.0"}


ROPES = [
    # head_dim, theta, scaling, factor, original positions
    (128, 1e6, "none", 1.0, 40960),
    (128, 1e6, "linear", 4.0, 40960),
    (128, 1e6, "yarn", 4.0, 32768),
    (64, 1e4, "yarn", 16.0, 4096),
    (8, 1e4, "yarn", 2.0, 64),
    (256, 1e7, "yarn", 3.5, 262144),
    (80, 5e5, "yarn", 1.0, 8192),
]


def library_frequencies(head_dim, theta, scaling, factor, original):
    """The same from the transformers library."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = {"none": "default"}.get(scaling, scaling)
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = original
    config = Qwen3Config(
        hidden_size=64, num_attention_heads=1, head_dim=head_dim,
        max_position_embeddings=int(original * factor), rope_parameters=parameters,
    )  # fmt: skip
    if kind == "default":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        return Qwen3RotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def make_ropes():
    """rope: inverse frequencies and the factor on sine and cosine, checked against the transformers library."""
    tensors, cases = {}, []
    for i, (head_dim, theta, scaling, factor, original) in enumerate(ROPES):
        shape = Shape(
            layers=1, block_size=2, mask_token_id=0, predict_from_anchor=False, heads=1, kv_heads=1,
            head_dim=head_dim, eps=1e-6, rope_theta=theta, rope_scaling=scaling, rope_factor=factor,
            rope_original_positions=original, layer_types=["full_attention"], sliding_window=None,
            non_causal=False, window_origin="query",
        )  # fmt: skip
        ours, scale = inverse_frequencies(shape)
        theirs, their_scale = library_frequencies(head_dim, theta, scaling, factor, original)
        error = float(((ours - theirs.double()) / ours).abs().max())
        if not (error <= 2e-6 and abs(scale - their_scale) <= 1e-12):
            raise AssertionError(f"rope case {i}: inverse frequencies differ by {error}")
        tensors[f"{i}.inverse_frequencies"] = ours
        tensors[f"{i}.attention_factor"] = torch.tensor([scale], dtype=torch.float64)
        numbers = {"head_dim": head_dim, "theta": theta, "factor": factor, "original_positions": original}
        for key, value in numbers.items():
            tensors[f"{i}.{key}"] = torch.tensor([value], dtype=torch.float64)
        cases.append(scaling)
    return tensors, {"rope_scaling": json.dumps(cases)}


# ---- files -------------------------------------------------------------------------------------------


def everything():
    for index, (name, case) in enumerate(CASES.items()):
        yield name, *make_file(index, case)
    yield "loss_terms", *make_losses()
    yield "rope", *make_ropes()


DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
          torch.uint8: "U8"}  # fmt: skip


def write(path, tensors, metadata):
    """A safetensors file whose bytes depend on nothing but the contents: the library orders metadata at random."""
    header, parts, end = {"__metadata__": metadata}, [], 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):  # aligned without gaps
        tensor = tensors[name].contiguous()
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(parts))


def compare(path, tensors, metadata):
    """Faults of a stored file against what is computed now."""
    with safe_open(path, framework="pt") as stored:
        if set(stored.keys()) != set(tensors) or stored.metadata() != metadata:
            return ["other tensors or metadata"]
        faults = []
        for name, tensor in tensors.items():
            old, new = stored.get_tensor(name).double(), tensor.double()
            if old.shape != new.shape or not float((old - new).norm()) <= 1e-6 * max(float(new.norm()), 1e-30):
                faults.append(f"{name} differs")
        return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=DEFAULT_OUT, help="folder of the golden files")
    parser.add_argument("--check", action="store_true", help="compare with the stored files instead of writing")
    arguments = parser.parse_args()
    os.makedirs(arguments.out, exist_ok=True)
    failed = 0
    for name, tensors, metadata in everything():
        path = os.path.join(arguments.out, name + ".safetensors")
        if arguments.check:
            faults = compare(path, tensors, metadata)
            failed += bool(faults)
            print(f"{name}: {'; '.join(faults) or 'ok'}")
        else:
            write(path, tensors, metadata)
            print(f"{path}: {os.path.getsize(path)} bytes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
