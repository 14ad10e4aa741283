"""One DFlash training step in float64, written from the definitions.

Owns slots and their weights, the teacher, the network, the losses, the metrics and the optimizer.
Deliberately naive: Python loops over slots, a dense boolean attention mask, whole rows of logits, gradients
by autograd. Nothing here is shared with the C program, so that agreement means something.

Shapes: T tokens of the row, L captured layers, H hidden, A anchors, B block size, N block rows, S scored
slots, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

MARKOV = "markov_head.markov_"
TERMS = ("kl", "reverse_kl", "js", "ce_teacher", "ce_data", "tv", "nla", "lk")


# ---- slots -------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """A slot of nonzero weight. weight is w(k); D-PACE replaces it once the student's answer is known."""

    row: int
    block: int
    slot: int
    label: int
    teacher_row: int
    weight: float


def document_of(row, position):
    """Bounds of the document that holds a position of the row."""
    for start, end in zip(row.doc_offsets.tolist()[:-1], row.doc_offsets.tolist()[1:]):
        if start <= position < end:
            return start, end
    raise ValueError(f"position {position} is in no document")


def positions_of(row):
    """Positions restart at 0 in each document. [T]"""
    result = torch.zeros(len(row.input_ids), dtype=torch.long)
    for start, end in zip(row.doc_offsets.tolist()[:-1], row.doc_offsets.tolist()[1:]):
        result[start:end] = torch.arange(end - start)
    return result


def predicted_position(shape, anchor, slot):
    return anchor + slot + (1 if shape.predict_from_anchor else 0)


def first_slot(shape):
    return 0 if shape.predict_from_anchor else 1


def is_valid_anchor(row, shape, tail, anchor):
    start, end = document_of(row, anchor)
    if anchor + 1 >= end or not (row.loss_mask[anchor] and row.loss_mask[anchor + 1]):
        return False
    return tail == "mask" or predicted_position(shape, anchor, shape.block_size - 1) < end


def static_weight(shape, loss, slot):
    if loss["slot_weight"] == "exp":
        return math.exp(-(slot - first_slot(shape)) / loss["slot_decay_gamma"])
    return 1.0


def scored_slots(rows, shape, loss):
    """Every slot of nonzero weight, in order of row, block, slot."""
    result = []
    for r, row in enumerate(rows):
        for b, anchor in enumerate(row.anchors.tolist()):
            _, end = document_of(row, anchor)
            for k in range(first_slot(shape), shape.block_size):
                position = predicted_position(shape, anchor, k)
                if position >= end or not row.loss_mask[position]:
                    if loss["slot_mask"] == "prefix":
                        break
                    continue
                weight = static_weight(shape, loss, k)
                result.append(Slot(r, b, k, int(row.input_ids[position]), position - 1, weight))
    return result


def dpace_weights(slots, confidence, alpha):
    """Weights of D-PACE: sum over scored j >= k of the product of smoothed confidences up to j. [S]"""
    blocks = {}
    for i, slot in enumerate(slots):
        blocks.setdefault((slot.row, slot.block), []).append(i)
    result = torch.zeros(len(slots), dtype=torch.float64)
    for members in blocks.values():
        cumulative, product = [], 1.0
        for i in members:
            product *= (1 - alpha) * float(confidence[i]) + alpha
            cumulative.append(product)
        for n, i in enumerate(members):
            result[i] = sum(cumulative[n:])
    return result


# ---- network -----------------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def inverse_frequencies(shape):
    """(inverse frequencies [head_dim / 2], factor on sine and cosine)."""
    dim, theta, factor = shape.head_dim, shape.rope_theta, shape.rope_factor
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if shape.rope_scaling == "none":
        return plain, 1.0
    if shape.rope_scaling == "linear":
        return plain / factor, 1.0

    # YaRN: pairs that turn more than beta_fast times within the original positions are kept, those that turn
    # less than beta_slow times are slowed by `factor`, with a linear ramp over the pairs between.
    def pair_of(turns):
        return dim * math.log(shape.rope_original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(32.0)), 0)
    high = min(math.ceil(pair_of(1.0)), dim - 1)
    width = high - low if high > low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain * (1 - ramp) + plain / factor * ramp, scale


def rotate(x, positions, shape):
    """Rotate-half rotary embedding. x [rows, heads, head_dim], positions [rows]."""
    frequencies, scale = inverse_frequencies(shape)
    angle = positions[:, None].to(torch.float64) * frequencies  # [rows, head_dim / 2]
    cos = (torch.cos(angle) * scale)[:, None]
    sin = (torch.sin(angle) * scale)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention_mask(row, shape, anchors, layer_type):
    """True where a query may look. [N, T + N]; keys are the row's context, then the blocks themselves."""
    T, B = len(row.input_ids), shape.block_size
    N = len(anchors) * B
    sliding = layer_type == "sliding_attention"
    mask = torch.zeros(N, T + N, dtype=torch.bool)
    for b, anchor in enumerate(anchors):
        start, _ = document_of(row, anchor)
        for k in range(B):
            first = start
            if sliding:
                # From the query: kv > query - window. From the anchor, as speculators has it: kv >= anchor - window.
                seen = anchor + k - shape.sliding_window + 1
                first = max(start, seen if shape.window_origin == "query" else anchor - shape.sliding_window)
            mask[b * B + k, first:anchor] = True
            last = k if sliding and not shape.non_causal else B - 1
            mask[b * B + k, T + b * B : T + b * B + last + 1] = True
    return mask


def attention(q, k, v, mask):
    """q [N, heads, d], k and v [M, kv_heads, d], mask [N, M] -> [N, heads * d]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)


def fuse(params, shape, row):
    """Context of every layer: hidden_norm(fc(features)). [T, H]"""
    return rms_norm(row.features.flatten(1) @ params["fc.weight"].T, params["hidden_norm.weight"], shape.eps)


def layer_forward(params, shape, index, x, context, context_positions, block_positions, mask):
    def weight(name):
        return params[f"layers.{index}.{name}.weight"]

    def heads(y, count):
        return y.unflatten(-1, (count, shape.head_dim))

    n = rms_norm(x, weight("input_layernorm"), shape.eps)
    keys_in = torch.cat([context, n])
    q = heads(n @ weight("self_attn.q_proj").T, shape.heads)
    k = heads(keys_in @ weight("self_attn.k_proj").T, shape.kv_heads)
    v = heads(keys_in @ weight("self_attn.v_proj").T, shape.kv_heads)
    q = rotate(rms_norm(q, weight("self_attn.q_norm"), shape.eps), block_positions, shape)
    key_positions = torch.cat([context_positions, block_positions])
    k = rotate(rms_norm(k, weight("self_attn.k_norm"), shape.eps), key_positions, shape)
    x = x + attention(q, k, v, mask) @ weight("self_attn.o_proj").T
    m = rms_norm(x, weight("post_attention_layernorm"), shape.eps)
    gate = torch.nn.functional.silu(m @ weight("mlp.gate_proj").T)
    return x + (gate * (m @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T


def blocks_forward(params, shape, row, anchors, embed):
    """Hidden states of the blocks of some anchors, after the drafter's final norm. [anchors, B, H]"""
    B = shape.block_size
    positions = positions_of(row)
    ids, block_positions = [], []
    for anchor in anchors:
        ids += [int(row.input_ids[anchor])] + [shape.mask_token_id] * (B - 1)
        block_positions += [int(positions[anchor]) + k for k in range(B)]
    x = embed[torch.tensor(ids)]
    context = fuse(params, shape, row)
    masks = {t: attention_mask(row, shape, anchors, t) for t in set(shape.layer_types)}
    for i, layer_type in enumerate(shape.layer_types):
        x = layer_forward(
            params, shape, i, x, context, positions, torch.tensor(block_positions), masks[layer_type]
        )
    return rms_norm(x, params["norm.weight"], shape.eps).unflatten(0, (len(anchors), B))


# ---- losses ------------------------------------------------------------------------------------------


def overlap_of(p, q):
    # `where` and not `minimum`: at p = q the gradient is the one of q, as the definition has it.
    return torch.where(q <= p, q, p).sum(-1)


def loss_term(name, student, teacher, labels, eta):
    """One term for each row. student, teacher: logits [n, V]; labels: data tokens [n] -> [n]."""
    log_q = student.log_softmax(-1)
    if name == "ce_data":
        return -log_q.gather(-1, labels[:, None])[:, 0]
    log_p = teacher.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    if name == "kl":
        return kl
    if name == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "js":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2
    if name == "ce_teacher":
        return -log_q.gather(-1, teacher.argmax(-1, keepdim=True))[:, 0]
    overlap = overlap_of(p, q)
    if name == "tv":
        return 1 - overlap
    if name == "nla":
        return -torch.log(overlap)
    if name == "lk":
        mix = torch.exp(-eta * overlap).detach()
        return mix * kl + (1 - mix) * (1 - overlap)
    raise ValueError(name)


def mixture(weights, student, teacher, labels, eta):
    """The configured mixture for each row. [n]"""
    return sum(w * loss_term(n, student, teacher, labels, eta) for n, w in weights.items())


def term_weights(loss):
    return {n: float(loss[n]) for n in TERMS if loss[n] > 0}


# ---- the step ----------------------------------------------------------------------------------------


class Step:
    """One step: rows, parameters and config in; slots, losses, gradients and new parameters out."""

    def __init__(self, config, shape, target, rows, params, last_hidden, group=64, chunk=512):
        self.config, self.shape, self.target, self.rows = config, shape, target, rows
        self.loss, self.last_hidden, self.group, self.chunk = config["loss"], last_hidden, group, chunk
        self.params = {n: p.detach().clone().requires_grad_(True) for n, p in params.items()}
        self.teacher_hidden = [self._teacher_hidden(row) for row in rows]
        self.slots = scored_slots(rows, shape, self.loss)
        self.labels = torch.tensor([s.label for s in self.slots], dtype=torch.long)
        self._look()
        self._weigh()

    def _teacher_hidden(self, row):
        if row.last_hidden is None or self.last_hidden == "post_norm":
            return row.last_hidden
        return rms_norm(row.last_hidden, self.target.norm, self.target.norm_eps)

    def groups(self):
        """(row index, anchors, indices of scored slots, their places in the group's block rows)."""
        first = {}
        for i, s in enumerate(self.slots):
            first.setdefault((s.row, s.block), []).append(i)
        for r, row in enumerate(self.rows):
            anchors = row.anchors.tolist()
            for g in range(0, len(anchors), self.group):
                part = anchors[g : g + self.group]
                members, places = [], []
                for b in range(len(part)):
                    for i in first.get((r, g + b), []):
                        members.append(i)
                        places.append(b * self.shape.block_size + self.slots[i].slot)
                if members:
                    yield r, part, torch.tensor(members), torch.tensor(places)

    def hidden(self, r, anchors, places):
        """Student's hidden states at some block rows of a group, ready for the head. [n, H]"""
        hidden = blocks_forward(self.params, self.shape, self.rows[r], anchors, self.target.embed)
        return hidden.flatten(0, 1)[places]

    def _head_logits(self, hidden):
        return hidden @ self.target.head.T

    def _student_logits(self, m, hidden):
        """Of slots m, with what a Markov head says to the token in front of each one's prediction. [n, V]"""
        logits = self._head_logits(hidden)
        if not self.shape.markov_rank:
            return logits
        return logits + self.params[MARKOV + "w1.weight"][self.previous(m)] @ self.params[MARKOV + "w2.weight"].T

    def previous(self, m):
        """Token in front of the one that each of slots m predicts. [n]"""
        slots = [self.slots[i] for i in m.tolist()]
        return torch.stack([self.rows[s.row].input_ids[s.teacher_row] for s in slots])

    def _teacher_logits(self, members):
        if not self.has_teacher:
            return None
        hidden = torch.stack([self.teacher_hidden[self.slots[i].row][self.slots[i].teacher_row] for i in members])
        return hidden @ self.target.head.T

    @property
    def first_slot(self):
        return first_slot(self.shape)

    @property
    def reported(self):
        """Indices of the slots that a trace has."""
        return torch.arange(len(self.slots))

    @property
    def has_teacher(self):
        return all(h is not None for h in self.teacher_hidden)

    @torch.no_grad()
    def _look(self):
        """Everything about the slots that needs no gradient: what a trace says of them."""
        S = len(self.slots)
        self.slot_loss, self.student_lse, self.teacher_lse, self.overlap, self.confidence = (
            torch.zeros(S, dtype=torch.float64) for _ in range(5)
        )
        self.student_argmax, self.teacher_argmax = (torch.zeros(S, dtype=torch.long) for _ in range(2))
        self.student_gap, self.teacher_gap = (torch.zeros(S, dtype=torch.float64) for _ in range(2))
        for r, anchors, members, places in self.groups():
            hidden = self.hidden(r, anchors, places)
            for i in range(0, len(members), self.chunk):
                self._look_at(members[i : i + self.chunk], hidden[i : i + self.chunk])

    def _look_at(self, m, hidden):
        student, labels = self._student_logits(m, hidden), self.labels[m]
        teacher = self._teacher_logits(m.tolist())
        weights = term_weights(self.loss)
        self.slot_loss[m] = mixture(weights, student, teacher, labels, self.loss["lk_eta"])
        self.student_lse[m] = student.logsumexp(-1)
        self.student_argmax[m], self.student_gap[m] = student.argmax(-1), top_gap(student)
        confident_of = labels
        if teacher is not None:
            self.teacher_lse[m] = teacher.logsumexp(-1)
            self.teacher_argmax[m], self.teacher_gap[m] = teacher.argmax(-1), top_gap(teacher)
            self.overlap[m] = overlap_of(teacher.softmax(-1), student.softmax(-1))
            if set(weights) != {"ce_data"}:
                confident_of = self.teacher_argmax[m]
        self.confidence[m] = student.softmax(-1).gather(-1, confident_of[:, None])[:, 0]

    def _weigh(self):
        if self.loss["slot_weight"] == "dpace":
            self.weight = dpace_weights(self.slots, self.confidence, self.loss["dpace_alpha"])
        else:
            self.weight = torch.tensor([s.weight for s in self.slots], dtype=torch.float64)
        self._total()

    def _total(self):
        self.weight_sum = float(self.weight.sum())
        counted = self.loss["normalize"] == "count"
        self.divisor = float((self.weight != 0).sum()) if counted else self.weight_sum
        self.total = float((self.weight * self.slot_loss).sum()) / self.divisor if self.divisor > 0 else 0.0

    def gradients(self):
        """Gradient of the normalised loss, before clipping. {name: tensor}"""
        for p in self.params.values():
            p.grad = torch.zeros_like(p)
        if self.divisor == 0:
            return {n: p.grad for n, p in self.params.items()}
        for r, anchors, members, places in self.groups():
            hidden = self.hidden(r, anchors, places)
            leaf = hidden.detach().requires_grad_(True)
            for i in range(0, len(members), self.chunk):
                self._loss_backward(members[i : i + self.chunk], leaf[i : i + self.chunk])
            hidden.backward(leaf.grad)
        return {n: p.grad for n, p in self.params.items()}

    def _loss_backward(self, m, hidden):
        student = self._student_logits(m, hidden)
        teacher = self._teacher_logits(m.tolist())
        losses = mixture(term_weights(self.loss), student, teacher, self.labels[m], self.loss["lk_eta"])
        ((self.weight[m] * losses).sum() / self.divisor).backward()

    def metrics(self):
        """accept_len, eal_marginal, acc by slot, mean overlap. None when nothing was scored or without a teacher."""
        if not self.slots or not self.has_teacher:
            return None
        agree = (self.student_argmax == self.teacher_argmax).tolist()
        B, start = self.shape.block_size, self.first_slot
        hits, seen = [0] * B, [0] * B
        by_block = {}
        for s, ok in zip(self.slots, agree):
            hits[s.slot] += ok
            seen[s.slot] += 1
            by_block.setdefault((s.row, s.block), {})[s.slot] = ok
        lengths = []
        for answers in by_block.values():
            k = start
            while answers.get(k, False):
                k += 1
            lengths.append(1 + k - start)
        acc = [h / n if n else 0.0 for h, n in zip(hits, seen)]
        marginal, product = 0.0, 1.0
        for k in range(start, B):
            product *= acc[k]
            marginal += product
        return {
            "accept_len": sum(lengths) / len(lengths),
            "eal_marginal": marginal,
            "overlap": float(self.overlap.mean()),
            "acc": acc,
        }


def top_gap(logits):
    """How far the best logit is ahead of the next one: infinite where there is no other. [n]"""
    if logits.shape[-1] == 1:
        return torch.full((len(logits),), math.inf, dtype=logits.dtype)
    top = logits.topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


# ---- optimizer ---------------------------------------------------------------------------------------


def global_norm(grads):
    return math.sqrt(sum(float(g.pow(2).sum()) for g in grads.values()))


def clip_factor(norm, limit):
    return limit / norm if limit > 0 and norm > limit else 1.0


def adamw(param, grad, m, v, step, lr, betas, eps, decay):
    """AdamW with bias correction and decoupled decay; step counts from 1. Returns the new parameter."""
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad * grad
    m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    return param * (1 - lr * decay) - lr * m_hat / (v_hat.sqrt() + eps)
