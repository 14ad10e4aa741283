"""One EAGLE-3 training step in float64, written from the definitions.

Owns which positions count at which ttt_step, the network with its unrolled steps, and the draft vocabulary.
Losses, optimizer and what is common to slots come from dflash_step.py. Deliberately naive: every position of the row
goes through every ttt_step, over one boolean mask of all keys of all steps; whole rows of logits; gradients
by autograd. Nothing here is shared with the C program, which computes far less: agreement means something.

Shapes: T tokens of the row, F features (captured layers), H hidden, I ttt_steps, S scored slots, V vocabulary, Vd draft
vocabulary.
"""

import torch

from dflash_step import Slot, Step, attention, document_of, mixture, overlap_of, positions_of, rms_norm, rotate
from dflash_step import term_weights, top_gap


class Eagle3Slot(Slot):
    """A position at a ttt_step: block counts the row's positions that have any, slot is the ttt_step."""

    @property
    def ttt_step(self):
        return self.slot

    @property
    def position(self):
        return self.teacher_row - 1 - self.slot


# ---- slots -------------------------------------------------------------------------------------------


def counts(row, mask_index, t, i, end):
    """Whether position t of a document that ends at `end` counts at ttt_step i."""
    if t + 1 + i >= end:  # no teacher row
        return False
    if mask_index == "feature":
        return bool(row.loss_mask[t + i])
    if mask_index == "input":
        return bool(row.loss_mask[t + 1 + i])
    if t + 2 + i >= end:  # no label
        return False
    if mask_index == "label":
        return bool(row.loss_mask[t + 2 + i])
    assert mask_index == "served"
    return bool(row.loss_mask[t + 1 : t + 3 + i].all())


def scored_slots(rows, shape, loss):
    """Every slot that counts, in order of row, position, ttt_step. A label of -1: the document has no such token."""
    result, weights = [], [float(loss["ttt_decay_base"]) ** i for i in range(shape.ttt_steps)]
    for r, row in enumerate(rows):
        block = 0
        for t in range(len(row.input_ids)):
            _, end = document_of(row, t)
            found = [i for i, w in enumerate(weights) if w > 0 and counts(row, loss["mask_index"], t, i, end)]
            for i in found:
                label = int(row.input_ids[t + 2 + i]) if t + 2 + i < end else -1
                result.append(Eagle3Slot(r, block, i, label, t + 1 + i, weights[i]))
            block += bool(found)
    return result


def anchors_of(slots, row_index):
    """The token after each position that counts, ascending: what dtrain calls the anchors of a row."""
    return sorted({s.position + 1 for s in slots if s.row == row_index})


# ---- network -----------------------------------------------------------------------------------------


def fuse(params, shape, row):
    """g = fc(features), with the norms before fc that the drafter has. [T, H]"""
    x = row.features.flatten(1)
    if shape.norm_before_fc:
        x = rms_norm(x, params["input_norm.weight"], shape.eps)
    if shape.fc_norm:
        parts = x.unflatten(-1, (row.features.shape[1], -1)).unbind(1)
        x = torch.cat([rms_norm(p, params[f"fc_norm.{n}.weight"], shape.eps) for n, p in enumerate(parts)], dim=-1)
    return x @ params["fc.weight"].T


def chain_mask(row, shape, i, layer_type):
    """True where the queries of ttt_step i may look. [T, (i + 1) T]: keys of step 0, then of step 1, ..."""
    T = len(row.input_ids)
    mask = torch.zeros(T, (i + 1) * T, dtype=torch.bool)
    for t in range(T):
        first, _ = document_of(row, t)
        if layer_type == "sliding_attention":  # measured from t + i, where serving has the query
            first = max(first, t + i - shape.sliding_window + 1)
        mask[t, first : t + 1] = True
        for j in range(1, i + 1):
            mask[t, j * T + t] = True
    return mask


def fed_tokens(row, i):
    """Token that each position takes in at ttt_step i. Past the row's end any token: nothing that counts sees it."""
    ids = torch.zeros(len(row.input_ids), dtype=torch.long)
    ids[: max(len(ids) - 1 - i, 0)] = row.input_ids[1 + i :]
    return ids


def layer_forward(params, shape, index, x, embedded, positions, keys, values, mask):
    """One layer at one ttt_step; its keys and values are appended to those of the earlier steps. [T, H]"""

    def weight(name):
        return params[f"layers.{index}.{name}.weight"]

    def heads(name, inputs, count):
        return (inputs @ weight(f"self_attn.{name}").T).unflatten(-1, (count, shape.head_dim))

    if index == 0:
        normed = rms_norm(x, weight("hidden_norm"), shape.eps)
        n = torch.cat([rms_norm(embedded, weight("input_layernorm"), shape.eps), normed], dim=-1)
        residual = normed if shape.norm_before_residual else x
    else:
        n, residual = rms_norm(x, weight("input_layernorm"), shape.eps), x
    q, k = heads("q_proj", n, shape.heads), heads("k_proj", n, shape.kv_heads)
    if shape.head_norms:
        q = rms_norm(q, weight("self_attn.q_norm"), shape.eps)
        k = rms_norm(k, weight("self_attn.k_norm"), shape.eps)
    keys.append(rotate(k, positions, shape))
    values.append(heads("v_proj", n, shape.kv_heads))
    seen = attention(rotate(q, positions, shape), torch.cat(keys), torch.cat(values), mask)
    x = residual + seen @ weight("self_attn.o_proj").T
    m = rms_norm(x, weight("post_attention_layernorm"), shape.eps)
    gate = torch.nn.functional.silu(m @ weight("mlp.gate_proj").T)
    return x + (gate * (m @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T


def chain_forward(params, shape, row, embed):
    """Hidden states of every position at every ttt_step, after the drafter's final norm. [I, T, H]"""
    h, result = fuse(params, shape, row), []
    keys, values = [[] for _ in shape.layer_types], [[] for _ in shape.layer_types]
    for i in range(shape.ttt_steps):
        embedded, positions = embed[fed_tokens(row, i)], positions_of(row) + 1 + i
        masks = {kind: chain_mask(row, shape, i, kind) for kind in set(shape.layer_types)}
        for l, kind in enumerate(shape.layer_types):
            h = layer_forward(params, shape, l, h, embedded, positions, keys[l], values[l], masks[kind])
        normed = rms_norm(h, params["norm.weight"], shape.eps)
        result.append(normed)
        if shape.norm_output:
            h = normed
    return torch.stack(result)


# ---- the step ----------------------------------------------------------------------------------------


class Eagle3Step(Step):
    """One step: rows, parameters and config in; slots, losses, gradients and new parameters out.

    kept: target ids of the draft vocabulary, in the order of draft ids [Vd]; None: all.
    """

    def __init__(self, config, shape, target, rows, params, last_hidden, kept=None, chunk=512):
        self.kept = torch.arange(len(target.head)) if kept is None else kept
        self.draft_of = torch.full((len(target.head),), -1, dtype=torch.long)
        self.draft_of[self.kept] = torch.arange(len(self.kept))
        self.config, self.shape, self.target, self.rows = config, shape, target, rows
        self.loss, self.last_hidden, self.chunk = config["loss"], last_hidden, chunk
        self.params = {n: p.detach().clone().requires_grad_(True) for n, p in params.items()}
        self.teacher_hidden = [self._teacher_hidden(row) for row in rows]
        self.slots = scored_slots(rows, shape, self.loss)
        labels = torch.tensor([s.label for s in self.slots], dtype=torch.long)
        self.labels = torch.where(labels < 0, -1, self.draft_of[labels.clamp(min=0)])  # in draft ids
        self._look()
        self._weigh()

    @property
    def first_slot(self):
        return 0

    @property
    def reported(self):
        return self.weight.nonzero().flatten()

    def groups(self):
        """(row index, None, indices of its slots, where they lie in the chain: ttt_step and position)."""
        for r in range(len(self.rows)):
            members = [i for i, s in enumerate(self.slots) if s.row == r]
            if members:
                places = [(self.slots[i].slot, self.slots[i].position) for i in members]
                yield r, None, torch.tensor(members), torch.tensor(places)

    def hidden(self, r, _, places):
        """Student's hidden states at some places of a row, ready for the head. [n, H]"""
        chain = chain_forward(self.params, self.shape, self.rows[r], self.target.embed)
        return chain[places[:, 0], places[:, 1]]

    def _head_logits(self, hidden):
        if self.shape.trainable_head:
            return hidden @ self.params["lm_head.weight"].T
        return hidden @ self.target.head[self.kept].T

    def _losses(self, m, student, teacher):
        """The mixture for each row. A label outside the draft vocabulary takes its ce_data out. [n]"""
        labels, weights = self.labels[m], term_weights(self.loss)
        data = weights.pop("ce_data", 0.0)
        total = mixture(weights, student, teacher, labels, self.loss["lk_eta"]) if weights else 0.0
        if data:
            known = labels >= 0
            ce = mixture({"ce_data": data}, student, teacher, labels.clamp(min=0), 0.0)
            total = total + torch.where(known, ce, 0.0)
        return total

    def _look_at(self, m, hidden):
        student, full = self._student_logits(m, hidden), self._teacher_logits(m.tolist())
        teacher = None if full is None else full[:, self.kept]
        self.slot_loss[m] = self._losses(m, student, teacher)
        self.student_lse[m] = student.logsumexp(-1)
        self.student_argmax[m], self.student_gap[m] = self.kept[student.argmax(-1)], top_gap(student)
        if full is not None:
            self.teacher_lse[m] = teacher.logsumexp(-1)
            self.teacher_argmax[m], self.teacher_gap[m] = full.argmax(-1), top_gap(full)
            self.overlap[m] = overlap_of(full.softmax(-1)[:, self.kept], student.softmax(-1))

    def _weigh(self):
        """Weights: masked where the target's own answer is outside the draft vocabulary; without a teacher the label."""
        self.weight = torch.tensor([s.weight for s in self.slots], dtype=torch.float64)
        if self.loss["out_of_vocab"] == "masked" and len(self.kept) < len(self.draft_of):
            self.weight = self.weight * ((self.draft_of[self.teacher_argmax] if self.has_teacher else self.labels) >= 0)
        self._total()

    def _loss_backward(self, m, hidden):
        student, full = self._student_logits(m, hidden), self._teacher_logits(m.tolist())
        losses = self._losses(m, student, None if full is None else full[:, self.kept])
        ((self.weight[m] * losses).sum() / self.divisor).backward()

    def metrics(self):
        """As Step's, of every slot that counts, masked or not; cond_acc: among those whose chain was right so far."""
        result = super().metrics()
        if result is None:
            return None
        agree = (self.student_argmax == self.teacher_argmax).tolist()
        right, tried = [0] * self.shape.ttt_steps, [0] * self.shape.ttt_steps
        going = {}
        for s, ok in zip(self.slots, agree):
            reached = s.slot == 0 or going.get((s.row, s.block)) == s.slot - 1
            tried[s.slot] += reached
            right[s.slot] += reached and ok
            if reached and ok:
                going[(s.row, s.block)] = s.slot
        result["cond_acc"] = [r / n if n else 0.0 for r, n in zip(right, tried)]
        return result


def make_step(config, shape, target, rows, params, last_hidden, kept=None, group=64):
    """The step of the drafter's kind."""
    if config["drafter"]["kind"] == "eagle3":
        return Eagle3Step(config, shape, target, rows, params, last_hidden, kept)
    return Step(config, shape, target, rows, params, last_hidden, group=group)
