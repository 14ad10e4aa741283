#!/usr/bin/env python3
"""Gradient error of a traced bf16 step beside that of PyTorch autocast on the same inputs, per tensor.

    bf16_error.py TRACE.safetensors... --target DIR [--limit 1.25] [--device cuda] [--all]

Both are compared with float64 gradients of the same step: the same fp32 master weights, features, anchors and
target (its tensors rounded to bf16, as every bf16 step holds them). Autocast runs the network as published
trainers do: fp32 parameters under torch.autocast(bfloat16), so matrices and their gradients in bf16, the residual
stream in fp32 (fp32 embedding plus bf16 outputs), norms that normalise in fp32 and round to their input's type,
attention by scaled_dot_product_attention, the head's logits in bf16, softmax and loss in fp32.
The error of a tensor is the norm of the difference over the norm of the reference. Exit status 1 when dtrain's
error exceeds `limit` times autocast's for any tensor; 2 when the files do not say enough.

--logits fp32 and --rope fp32 take from autocast its roundings of the logits and of sine and cosine: a harder
opponent, to see what remains. --reference rounded computes the reference from the weights rounded to bf16, which
leaves out the error that rounding weights makes, the same on both sides.
"""

import argparse
import sys

import torch
from torch.nn import functional as f

from dflash_step import MARKOV, attention_mask, inverse_frequencies, mixture, positions_of, term_weights
from eagle3_step import chain_mask, fed_tokens, make_step
from trace_file import Refused, Trace, make_shape, read_target


def round_bf16(x):
    return x.to(torch.bfloat16).to(torch.float64)


def load(path, arguments):
    """(trace, shape, target, rows, parameters), everything float64 on the device."""
    trace, device = Trace(path), arguments.device
    if trace.config["run"]["compute"] != "bf16":
        raise Refused("the trace is not of a bf16 step")
    if trace.config["loss"].get("slot_weight") == "dpace":
        raise Refused("D-PACE weights follow each side's own student: their gradients are not comparable")
    target = read_target(arguments.target) if arguments.target else trace.own_target()
    if target is None:
        raise Refused("the trace does not carry its target: give --target DIR")
    shape = make_shape(trace.config, target.config)
    target.embed, target.head = round_bf16(target.embed).to(device), round_bf16(target.head).to(device)
    target.norm = round_bf16(target.norm).to(device)
    rows = trace.rows()
    for row in rows:
        for name in ("input_ids", "loss_mask", "doc_offsets", "anchors", "features", "last_hidden"):
            value = getattr(row, name)
            setattr(row, name, None if value is None else value.to(device))
        row.features = round_bf16(row.features)  # with noise: as it enters fc
    params = {n: p.to(device) for n, p in trace.group("param").items()}
    return trace, shape, target, rows, params


# ---- the network under autocast


def norm(x, weight, eps):
    """As in transformers: normalised in fp32, rounded to the input's type, then times the fp32 weight."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rotate(x, positions, shape, rope_type):
    """x [rows, heads, head_dim]; sine and cosine rounded to rope_type."""
    frequencies, scale = inverse_frequencies(shape)
    angle = positions[:, None].to(torch.float64) * frequencies.to(positions.device)
    angle = torch.cat([angle, angle], dim=-1)[:, None]
    cos, sin = ((g(angle) * scale).to(rope_type) for g in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Autocast:
    """One step as an autocast trainer runs it: all anchors of a row in one pass."""

    def __init__(self, step, params, logits_type, rope_type):
        self.step, self.shape = step, step.shape
        self.logits_type, self.rope_type = logits_type, rope_type
        self.params = {n: p.to(torch.float32).requires_grad_(True) for n, p in params.items()}
        self.embed, self.head = step.target.embed.to(torch.float32), step.target.head.to(torch.float32)

    def attend(self, q, k, v, mask):
        """q [rows, heads, head_dim], k and v [keys, kv_heads, head_dim]"""
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        return f.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1).flatten(1)

    def mlp(self, index, x):
        weight = [self.params[f"layers.{index}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")]
        m = norm(x, self.params[f"layers.{index}.post_attention_layernorm.weight"], self.shape.eps)
        return x + f.linear(f.silu(f.linear(m, weight[0])) * f.linear(m, weight[1]), weight[2])

    def layer(self, index, x, context, context_positions, block_positions, mask):
        p, shape = self.params, self.shape

        def weight(name):
            return p[f"layers.{index}.{name}.weight"]

        def heads(y, count):
            return y.unflatten(-1, (count, shape.head_dim))

        n = norm(x, weight("input_layernorm"), shape.eps)
        q = norm(heads(f.linear(n, weight("self_attn.q_proj")), shape.heads), weight("self_attn.q_norm"), shape.eps)
        k, v = (
            torch.cat([f.linear(context, weight(w)), f.linear(n, weight(w))])
            for w in ("self_attn.k_proj", "self_attn.v_proj")
        )
        k = norm(heads(k, shape.kv_heads), weight("self_attn.k_norm"), shape.eps)
        q = rotate(q, block_positions, shape, self.rope_type)
        k = rotate(k, torch.cat([context_positions, block_positions]), shape, self.rope_type)
        out = self.attend(q, k, heads(v, shape.kv_heads), mask)
        return self.mlp(index, x + f.linear(out, weight("self_attn.o_proj")))

    def hidden(self, r, anchors, places):
        shape, row, p, anchors = self.shape, self.step.rows[r], self.params, torch.tensor(anchors)
        positions, block = positions_of(row), shape.block_size
        ids = torch.full((len(anchors), block), shape.mask_token_id)
        ids[:, 0] = row.input_ids[anchors]
        block_positions = (positions[anchors][:, None] + torch.arange(block)).flatten()
        masks = {t: attention_mask(row, shape, anchors, t) for t in set(shape.layer_types)}
        context = f.linear(row.features.flatten(1).to(torch.bfloat16), p["fc.weight"])
        context = norm(context, p["hidden_norm.weight"], shape.eps)
        x = self.embed[ids.flatten()]
        for i, kind in enumerate(shape.layer_types):
            x = self.layer(i, x, context, positions, block_positions, masks[kind])
        return norm(x, p["norm.weight"], shape.eps)[places]

    def logits(self, hidden, head):
        if self.logits_type == torch.bfloat16:
            return f.linear(hidden, head)
        with torch.autocast(hidden.device.type, enabled=False):  # bf16 factors, fp32 sums kept
            return f.linear(hidden.to(torch.bfloat16).to(torch.float32), head)

    def student_head(self):
        return self.head

    def student(self, m, hidden):
        logits = self.logits(hidden, self.student_head()).to(torch.float32)
        if not self.shape.markov_rank:
            return logits
        return logits + f.linear(self.params[MARKOV + "w1.weight"][self.step.previous(m)], self.params[MARKOV + "w2.weight"])

    def losses(self, m, student, teacher):
        return mixture(term_weights(self.step.loss), student, teacher, self.step.labels[m], self.step.loss["lk_eta"])

    def teacher(self, m):
        step = self.step
        places = [(step.slots[i].row, step.slots[i].teacher_row) for i in m.tolist()]
        hidden = torch.stack([step.rows[r].last_hidden[t] for r, t in places]).to(torch.bfloat16)
        if step.last_hidden == "pre_norm":
            hidden = norm(hidden, step.target.norm.to(torch.float32), step.target.norm_eps)
        return self.logits(hidden, self.head)

    def backward(self):
        step = self.step
        for r, anchors, members, places in step.groups():
            with torch.autocast(step.target.embed.device.type, dtype=torch.bfloat16):
                hidden = self.hidden(r, anchors, places)
                leaf = hidden.detach().requires_grad_(True)
                total = torch.zeros((), dtype=torch.float32)
                for i in range(0, len(members), step.chunk):
                    m = members[i : i + step.chunk]
                    student = self.student(m, leaf[i : i + step.chunk])
                    with torch.no_grad():
                        teacher = self.teacher(m).to(torch.float32) if step.has_teacher else None
                    losses = self.losses(m, student, teacher)
                    total = (step.weight[m].to(torch.float32) * losses).sum() / step.divisor
                    total.backward()
            hidden.backward(leaf.grad)
        return {n: p.grad for n, p in self.params.items()}


class Eagle3Autocast(Autocast):
    """The same of EAGLE-3: every position of a row through every ttt_step. What fc gives is bf16, and so the residual stream."""

    def __init__(self, step, params, logits_type, rope_type):
        super().__init__(step, params, logits_type, rope_type)
        self.head = self.head[step.kept]  # of teacher and frozen student

    def student_head(self):
        return self.params["lm_head.weight"] if self.shape.trainable_head else self.head

    def losses(self, m, student, teacher):
        return self.step._losses(m, student, teacher)

    def fuse(self, row):
        p, shape, x = self.params, self.shape, row.features.to(torch.bfloat16)
        if shape.norm_before_fc:
            x = norm(x.flatten(1), p["input_norm.weight"], shape.eps).view(x.shape)
        if shape.fc_norm:
            parts = [norm(y, p[f"fc_norm.{i}.weight"], shape.eps) for i, y in enumerate(x.unbind(1))]
            x = torch.stack(parts, dim=1)
        return f.linear(x.flatten(1), p["fc.weight"])

    def ttt_layer(self, index, x, embedded, positions, keys, values, mask):
        shape = self.shape

        def weight(name):
            return self.params[f"layers.{index}.{name}.weight"]

        def heads(name, count):
            y = f.linear(n, weight(f"self_attn.{name}_proj")).unflatten(-1, (count, shape.head_dim))
            return norm(y, weight(f"self_attn.{name}_norm"), shape.eps) if name != "v" and shape.head_norms else y

        n = norm(x, weight("input_layernorm" if index else "hidden_norm"), shape.eps)
        residual = n if index == 0 and shape.norm_before_residual else x
        if index == 0:
            n = torch.cat([norm(embedded, weight("input_layernorm"), shape.eps), n], dim=-1)
        q = rotate(heads("q", shape.heads), positions, shape, self.rope_type)
        keys.append(rotate(heads("k", shape.kv_heads), positions, shape, self.rope_type))
        values.append(heads("v", shape.kv_heads))
        out = self.attend(q, torch.cat(keys), torch.cat(values), mask)
        return self.mlp(index, residual + f.linear(out, weight("self_attn.o_proj")))

    def hidden(self, r, _, places):
        shape, row = self.shape, self.step.rows[r]
        h, result = self.fuse(row), []
        keys, values = [[] for _ in shape.layer_types], [[] for _ in shape.layer_types]
        for i in range(shape.ttt_steps):
            embedded, positions = self.embed[fed_tokens(row, i)], positions_of(row) + 1 + i
            for l, kind in enumerate(shape.layer_types):
                mask = chain_mask(row, shape, i, kind)
                h = self.ttt_layer(l, h, embedded, positions, keys[l], values[l], mask)
            result.append(norm(h, self.params["norm.weight"], shape.eps))
            if shape.norm_output:
                h = result[-1]
        return torch.stack(result)[places[:, 0], places[:, 1]]


# ---- comparing


def error(got, reference):
    size = float(reference.norm())
    return float((got.to(torch.float64) - reference).norm()) / (size if size > 0 else 1.0)


def compare(traced, autocast, reference, arguments):
    lines = []
    for name, wanted in reference.items():
        own, other = error(traced[name].to(wanted.device), wanted), error(autocast[name], wanted)
        ratio = own / other if other > 0 else (1.0 if own == 0 else float("inf"))
        lines.append((ratio, name, own, other))
    lines.sort(reverse=True)
    failed = [line for line in lines if not line[0] <= arguments.limit]
    for ratio, name, own, other in lines if arguments.all else lines[: max(8, len(failed))]:
        print(f"{'ok  ' if ratio <= arguments.limit else 'FAIL'} {name:44} {own:9.3e} / {other:9.3e} = {ratio:5.2f}")
    print(f"{len(lines)} tensors, {len(failed)} above {arguments.limit}; largest ratio {lines[0][0]:.2f}, "
          f"median {lines[len(lines) // 2][0]:.2f}")
    return not failed


def same_inputs(a, b):
    names = {n for n in a.names if n.startswith(("row", "param."))}
    return names == {n for n in b.names if n.startswith(("row", "param."))} and all(
        torch.equal(a.get(n), b.get(n)) for n in names
    )


def gradients(path, arguments):
    """(trace, reference's gradients, autocast's gradients)"""
    trace, shape, target, rows, params = load(path, arguments)
    weights = {n: round_bf16(p) for n, p in params.items()} if arguments.reference == "rounded" else params
    last_hidden = trace.metadata.get("last_hidden")
    step = make_step(trace.config, shape, target, rows, weights, last_hidden, trace.kept_ids(), group=1 << 20)
    reference = step.gradients()
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    network = Eagle3Autocast if trace.config["drafter"]["kind"] == "eagle3" else Autocast
    autocast = network(step, params, kinds[arguments.logits], kinds[arguments.rope]).backward()
    return trace, reference, autocast


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--target", help="target directory; default: what the trace itself carries")
    parser.add_argument("--limit", type=float, default=1.25)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--logits", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rope", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--reference", choices=("masters", "rounded"), default="masters")
    parser.add_argument("--all", action="store_true", help="print every tensor, not only the worst")
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    known, ok = None, True
    for path in arguments.traces:
        print(path)
        trace = Trace(path)
        if known is None or not same_inputs(known[0], trace):
            known = gradients(path, arguments)
        ok = compare(trace.group("grad"), known[2], known[1], arguments) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as refusal:
        print(f"bf16_error: {refusal}", file=sys.stderr)
        sys.exit(2)
