#!/usr/bin/env python3
"""Recomputes a traced training step in float64 and compares it with what the trace says.

    recompute_step.py TRACE.safetensors [--target DIR] [--tol 1e-4] [--all]

The trace gives the inputs (ids, masks, document bounds, anchors, features, parameters, optimizer state, a draft
vocabulary) and the results; nothing of the results is used to rebuild them. Labels, teacher rows and weights come
from the ids, masks, bounds and anchors. The error of a tensor is the norm of the difference over the norm of the reference.
Exit status 1 when any error exceeds the tolerance. Golden files carry their target, so they need no --target.
"""

import argparse
import json
import math
import sys

import torch

from dflash_step import adamw, clip_factor, global_norm, is_valid_anchor, positions_of
from eagle3_step import anchors_of, make_step
from muon_step import muon, takes, weight_decay
from trace_file import Refused, Trace, make_shape, read_target


class Report:
    """Collects comparisons; prints those that fail, the worst of each kind, or all."""

    def __init__(self, tol):
        self.tol = tol
        self.lines = []  # (kind, name, error, tolerance, note)

    def add(self, name, error, tol=None, note=""):
        self.lines.append((name.split(".")[0], name, float(error), self.tol if tol is None else tol, note))

    def tensor(self, name, got, reference, floor=0.0):
        """Norm of the difference over the norm of the reference, less what `floor` (an absolute norm) excuses."""
        got, reference = got.to(torch.float64), reference.to(torch.float64)
        if got.shape != reference.shape:
            self.add(name, math.inf, note=f"shape {list(got.shape)}, expected {list(reference.shape)}")
            return
        distance = max(float((got - reference).norm()) - floor, 0.0)
        size = float(reference.norm())
        if not math.isfinite(distance):
            distance = math.inf
        self.add(name, distance if size == 0 else distance / size, note=f"norm {size:.4g}")

    def number(self, name, got, reference):
        self.add(name, abs(got - reference) / max(abs(reference), 1e-30), note=f"{got:.9g}, expected {reference:.9g}")

    def exact(self, name, got, reference):
        got, reference = torch.as_tensor(got).long().flatten(), torch.as_tensor(reference).long().flatten()
        if got.shape != reference.shape:
            self.add(name, math.inf, 0, f"{len(got)} values, expected {len(reference)}")
            return
        wrong = (got != reference).nonzero().flatten().tolist()
        note = f"{len(got)} values"
        if wrong:
            i = wrong[0]
            note = f"{len(wrong)} of {len(got)} differ, first at {i}: {int(got[i])}, expected {int(reference[i])}"
        self.add(name, len(wrong), 0, note)

    def claim(self, name, holds, note=""):
        self.add(name, 0 if holds else math.inf, 0, note)

    @staticmethod
    def bad(line):
        return not line[2] <= line[3]

    def print(self, show_all):
        worst = {}
        for line in self.lines:
            if line[0] not in worst or line[2] > worst[line[0]][2]:
                worst[line[0]] = line
        for line in self.lines:
            if show_all or self.bad(line) or line[0] in ("scalar", "slots", "metrics") or worst[line[0]] is line:
                status = "FAIL" if self.bad(line) else "ok"
                print(f"{status:4}  {line[1]:52} {line[2]:10.3e}  (<= {line[3]:.0e})  {line[4]}")
        failed = sum(self.bad(line) for line in self.lines)
        print(f"{len(self.lines) - failed} passed, {failed} failed")
        return failed


def check_rows(report, trace, rows, shape, step):
    """Positions, and that the anchors are as the rules allow."""
    for r, row in enumerate(rows):
        if f"row{r}.positions" in trace:
            report.exact(f"rows.row{r}.positions", trace.get(f"row{r}.positions"), positions_of(row))
        if trace.config["drafter"]["kind"] == "dflash":
            check_anchors(report, trace, r, row, shape)
        elif row.anchors is not None:
            report.exact(f"rows.row{r}.anchors", row.anchors, anchors_of(step.slots, r))


def check_anchors(report, trace, r, row, shape):
    anchors, tail = trace.config["anchors"], trace.config["anchors"]["tail"]
    chosen = row.anchors.tolist()
    report.claim(f"rows.row{r}.anchors sorted, once each", chosen == sorted(set(chosen)))
    offsets = row.doc_offsets.tolist()
    valid = [a for a in range(offsets[-1]) if is_valid_anchor(row, shape, tail, a)]
    report.claim(f"rows.row{r}.anchors valid", set(chosen) <= set(valid), f"{len(chosen)} of {len(valid)}")
    if anchors["per"] == "row":
        expected = min(anchors["max_anchors"], len(valid))
    else:
        counts = [sum(s <= a < e for a in valid) for s, e in zip(offsets[:-1], offsets[1:])]
        expected = sum(min(anchors["max_anchors"], c) for c in counts)
    report.claim(f"rows.row{r}.anchors count", len(chosen) == expected, f"{len(chosen)}, expected {expected}")


SLOT_NAMES = {
    "dflash": ("row", "block", "slot", "label", "teacher_row"),
    "eagle3": ("row", "position", "ttt_step", "label", "teacher_row"),
}


def check_slots(report, trace, step):
    at = step.reported
    for name in SLOT_NAMES[trace.config["drafter"]["kind"]]:
        report.exact(f"slots.{name}", trace.get(f"slots.{name}"), [getattr(step.slots[i], name) for i in at.tolist()])
    if len(trace.get("slots.row")) != len(at):
        return
    report.tensor("slots.weight", trace.get("slots.weight"), step.weight[at])
    report.tensor("slots.loss", trace.get("slots.loss"), step.slot_loss[at])
    report.tensor("slots.student_lse", trace.get("slots.student_lse"), step.student_lse[at])
    check_argmax(report, trace, "student", step.student_argmax[at], step.student_gap[at])
    if step.has_teacher:
        report.tensor("slots.teacher_lse", trace.get("slots.teacher_lse"), step.teacher_lse[at])
        report.tensor("slots.overlap", trace.get("slots.overlap"), step.overlap[at])
        check_argmax(report, trace, "teacher", step.teacher_argmax[at], step.teacher_gap[at])


def check_argmax(report, trace, who, reference, gap):
    """Equal, except where the two best logits are closer than rounding can tell apart."""
    got = trace.get(f"slots.{who}_argmax").long()
    differ = got != reference
    unclear = differ & (gap <= 10 * report.tol)
    wrong = int((differ & ~unclear).sum())
    report.add(f"slots.{who}_argmax", wrong, 0, f"{len(got)} values, {int(unclear.sum())} ties")


def check_metrics(report, trace, step):
    metrics = step.metrics()
    if metrics is None:
        return
    for name, value in metrics.items():
        if f"scalar.{name}" in trace:
            report.number(f"metrics.{name}", trace.scalar(name), value)
        elif f"metrics.{name}" in trace:
            report.tensor(f"metrics.{name}", trace.get(f"metrics.{name}"), torch.tensor(value))
        elif name in trace.metadata:
            got = torch.tensor(json.loads(trace.metadata[name]), dtype=torch.float64)
            report.tensor(f"metrics.{name}", got, torch.tensor(value, dtype=torch.float64))


def check_update(report, trace, params, grads, weight_sum):
    """Gradients, clipping and the optimizer: from the reference's gradient, and from the trace's own."""
    optimizer, traced = trace.config["optimizer"], trace.group("grad")
    norm = global_norm(grads)
    factor = clip_factor(norm, optimizer["grad_clip"])
    report.number("scalar.grad_norm", trace.scalar("grad_norm"), norm)
    report.number("scalar.clip_factor", trace.scalar("clip_factor"), factor)
    traced_factor = clip_factor(global_norm(traced), optimizer["grad_clip"])
    m, v, decay = trace.group("adam_m"), trace.group("adam_v"), trace.group("decay")
    lr, number = trace.scalar("lr"), int(trace.scalar("step"))
    for name, param in params.items():
        report.tensor(f"grad.{name}", traced[name], grads[name])
        wanted, by_muon = weight_decay(optimizer, name, param), takes(optimizer, name, param)
        report.number(f"decay.{name}", float(decay[name]), wanted)

        def update(grad):
            if weight_sum == 0:
                return param
            if by_muon:
                return muon(param, grad, m[name], optimizer, lr, wanted)
            return adamw(
                param, grad, m[name], v[name], number, lr, optimizer["betas"], optimizer["eps"], wanted
            )

        got = trace.real(f"updated.{name}")
        floor = 0.0 if by_muon else sign_floor(report, grads[name], v[name], lr)
        report.tensor(f"updated.{name}", got, update(grads[name] * factor), floor)
        # The change alone, from the trace's gradient: the optimizer by itself. What rounding the new
        # parameter to fp32 costs is no fault of it.
        change = update(traced[name] * traced_factor) - param
        report.tensor(f"change.{name}", got - param, change, floor=float(got.norm()) * 2.0**-23)


def sign_floor(report, grad, v, lr):
    """Norm that undecided signs excuse: with empty moments AdamW moves each element by lr times the sign of its
    gradient, and where that is all but 0, rounding decides it."""
    undecided = (grad.abs() <= 0.1 * report.tol * grad.pow(2).mean().sqrt()) & (v == 0) & (grad != 0)
    return 2 * lr * math.sqrt(int(undecided.sum()))


def rounded(tensor, compute):
    """What the step computes with: bf16 copies of the fp32 master in bf16 runs."""
    return tensor.to(torch.bfloat16).to(torch.float64) if compute == "bf16" else tensor


def load(trace, target_folder):
    """(shape, target, rows, parameters)."""
    target = read_target(target_folder) if target_folder else trace.own_target()
    if target is None:
        raise Refused("the trace does not carry its target: give --target DIR")
    return make_shape(trace.config, target.config), target, trace.rows(), trace.group("param")


def recompute(trace, target_folder, group):
    shape, target, rows, params = load(trace, target_folder)
    compute = trace.config.get("run", {}).get("compute", "fp32")
    used = {n: rounded(p, compute) for n, p in params.items()}
    last_hidden, kept = trace.metadata.get("last_hidden"), trace.kept_ids()
    step = make_step(trace.config, shape, target, rows, used, last_hidden, kept, group)
    return step, shape, rows, params


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace")
    parser.add_argument("--target", help="target directory; default: what the trace itself carries")
    parser.add_argument("--tol", type=float, default=1e-4, help="largest relative error (default 1e-4)")
    parser.add_argument("--group", type=int, default=64, help="anchors that go through the network together")
    parser.add_argument("--all", action="store_true", help="print every comparison, not only the worst of a kind")
    arguments = parser.parse_args()
    trace, report = Trace(arguments.trace), Report(arguments.tol)
    step, shape, rows, params = recompute(trace, arguments.target, arguments.group)
    check_rows(report, trace, rows, shape, step)
    check_slots(report, trace, step)
    report.number("scalar.loss", trace.scalar("loss"), step.total)
    report.number("scalar.weight_sum", trace.scalar("weight_sum"), step.weight_sum)
    check_metrics(report, trace, step)
    check_update(report, trace, params, step.gradients(), step.weight_sum)
    return 1 if report.print(arguments.all) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as refusal:
        print(f"recompute_step: {refusal}", file=sys.stderr)
        sys.exit(2)
