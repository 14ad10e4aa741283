"""The tables of real_input.py from its results: text in Markdown, for docs/performance.md."""
import numpy as np

import acceptance
from real_runs import SYSTEMS

DIFFERENCES = """What both share: target, shards, packed rows and their order (compared row by row), steps, anchors a row, learning
rate of each step, betas, eps, no weight decay, clipping at 1, distribution of initial weights, KL to the full teacher with the same
slot decay, division by the number of scored slots, every scored slot counted that is supervised. What differs:

- anchors: each system draws its own. The peer takes any supervised token outside the last block of the padded row, dtrain those whose next
  token is supervised and in the same document; a row with fewer than the maximum gives the peer padded blocks of weight 0
- slots behind a document's end: the peer scores those that the next document supervises, dtrain none
- teacher: heads in bf16 under autocast (peer); dtrain's products of bf16 with fp32 logits
- random numbers: initial weights come from different generators
- rows: the peer pads each to the full length and has all features on the GPU, dtrain reads them from shards while it trains
- peer: decoder layers, norms and the mask are compiled, its loss runs as its own Triton kernels outside of the compiled graph"""


def seconds(entry):
    return entry["training"]["seconds"]


def final(entry):
    judged = (entry or {}).get("judged", {}).get(str((entry or {}).get("training", {}).get("steps")))
    return judged


def counts_of(results, kind, system, block, seeds):
    found = []
    for seed in seeds:
        judged = final(results["runs"].get(f"{kind}-{system}-b{block}-s{seed}"))
        if judged:
            found.append(np.array(judged["counts"]))
    return found


def number(value, form="{:.3f}"):
    return "-" if value is None else form.format(value)


def with_interval(part):
    return f"{part['mean']:.3f} [{part['interval'][0]:.3f}, {part['interval'][1]:.3f}]"


def of_difference(compared):
    """Two cells: over prompts, over seeds."""
    d = compared["difference"]
    half = "unknown" if d["over_seeds"] is None else f"+-{d['over_seeds']:.3f}"
    return f"{d['mean']:+.3f} [{d['interval'][0]:+.3f}, {d['interval'][1]:+.3f}] | {half}"


def acceptance_table(results, args):
    lines = ["| blocks of | seeds | dtrain | speculators | difference | over seeds | by seed, dtrain; speculators |", "|---|---|---|---|---|---|---|"]
    for block in args.blocks:
        both = [seed for seed in args.seeds if all(counts_of(results, "main", s, block, [seed]) for s in SYSTEMS)]
        if not both:
            continue
        c = acceptance.compare(*(counts_of(results, "main", s, block, both) for s in SYSTEMS))
        results.setdefault("acceptance", {})[str(block)] = dict(c, seeds=both)
        by_seed = "; ".join(", ".join(f"{v:.3f}" for v in c[name]["by_seed"]) for name in ("ours", "theirs"))
        lines.append(f"| {block} | {len(both)} | {with_interval(c['ours'])} | {with_interval(c['theirs'])} | {of_difference(c)} | {by_seed} |")
    return lines


def curve_of(entry):
    clock = dict((step, at) for step, at in entry["training"]["marks"])
    judged = sorted((int(step), some["walk"]) for step, some in entry.get("judged", {}).items())
    return [(step, clock[step], walk) for step, walk in judged if step in clock]


def cost_table(results, args):
    lines = ["| blocks of | system | a step | training | start | whole process | memory | tokens per block at the end | seconds to "
             "90 %, 95 % of the lower gain |", "|---|---|---|---|---|---|---|---|---|"]
    for block in args.blocks:
        entries = {s: results["runs"].get(f"main-{s}-b{block}-s{args.seeds[0]}") for s in SYSTEMS}
        ends = [final(entry)["walk"] for entry in entries.values() if final(entry)]
        for system, entry in entries.items():
            if not entry or "training" not in entry:
                continue
            t, least = entry["training"], min(ends) if ends else None
            times = [number(acceptance.time_to(1 + share * (least - 1), curve_of(entry)), "{:.1f} s") if least else "-" for share in (0.9, 0.95)]
            if system == "dtrain":
                memory = f"{t['own_gib']:.1f} GiB (planned {t['planned_gib']:.1f}; the device's rose by {number(t['memory'].get('used_gib'), '{:.1f}')})"
                start, whole = t["wall"] - t["seconds"], t["wall"]
            else:
                memory = f"{number(t.get('allocated_gib'), '{:.1f}')} GiB, reserved {number(t.get('reserved_gib'), '{:.1f}')}, without features"
                start = t["build_seconds"] + t["compile_seconds"]
                whole = start + t["load_seconds"] + t["seconds"]
            if t.get("not_compiled"):
                memory += f" (NOT compiled: {t['not_compiled'][:120]})"
            lines.append(f"| {block} | {system} | {1e3 * t['seconds'] / t['steps']:.2f} ms | {t['seconds']:.1f} s | {start:.1f} s | "
                         f"{whole:.1f} s | {memory} | {number(final(entry) and final(entry)['walk'])} | {', '.join(times)} |")
    return lines


def curves(results, args):
    lines = []
    for block in args.blocks:
        for system in SYSTEMS:
            entry = results["runs"].get(f"main-{system}-b{block}-s{args.seeds[0]}")
            if entry and "training" in entry:
                points = ", ".join(f"{at:.1f} s: {walk:.3f}" for _, at, walk in curve_of(entry))
                lines.append(f"- blocks of {block}, {system}: {points}")
    return lines


def decoding(results, args):
    lines = ["| blocks of | system | decoded | eval on the same prompts | blocks in common | text |", "|---|---|---|---|---|---|"]
    for block in args.blocks:
        for system in SYSTEMS:
            entry = results["runs"].get(f"main-{system}-b{block}-s{args.seeds[0]}") or {}
            d = entry.get("decoding")
            if d:
                lines.append(f"| {block} | {system} | {d['decoded']:.4f} | {d['judged']:.4f} | {d['same']} of {d['blocks']} | {d['last']} |")
    return lines


def passes(results, args):
    names = {"once": f"1 pass, {args.passes * args.few_anchors} anchors", "six": f"{args.passes} passes, {args.few_anchors} anchors",
             "once-rate": "1 pass, learning rate times the root of the passes",
             "six-few": f"{args.passes} passes, {args.passes} rows a step: as many steps as 1 pass"}
    token_bytes = results["token_bytes"]
    lines = [f"Blocks of {args.blocks[0]}, dtrain; every run has about as many block rows.", "",
             "| | steps | block rows | features read | seconds | tokens per block | by seed |", "|---|---|---|---|---|---|---|"]
    for kind, name in names.items():
        entries = [results["runs"].get(f"{kind}-dtrain-b{args.blocks[0]}-s{seed}") for seed in args.seeds]
        entries = [entry for entry in entries if entry and final(entry)]
        if entries:
            a = acceptance.single([np.array(final(entry)["counts"]) for entry in entries])
            results.setdefault("passes", {})[kind] = a
            t = entries[0]["training"]
            lines.append(f"| {name} | {t['steps']} | {t['block_rows'] / 1e6:.2f} M | {t['tokens_read'] * token_bytes / 1e9:.1f} GB | "
                         f"{t['seconds']:.1f}{'' if entries[0].get('alone') else ' (beside others)'} | {with_interval(a)} | "
                         f"{', '.join(f'{v:.3f}' for v in a['by_seed'])} |")
    return lines + ["", *passes_compared(results, args)]


def passes_compared(results, args):
    """The one pass beside the several, over the seeds that both have."""
    block = args.blocks[0]
    both = [seed for seed in args.seeds if all(counts_of(results, kind, "dtrain", block, [seed]) for kind in ("once", "six"))]
    if not both:
        return []
    c = acceptance.compare(*(counts_of(results, kind, "dtrain", block, both) for kind in ("once", "six")))
    results.setdefault("passes", {})["difference"] = dict(c["difference"], seeds=both)
    over_prompts, half = of_difference(c).split(" | ")
    return [f"1 pass less {args.passes} passes: {over_prompts} over prompts, {half} over seeds ({len(both)} each)."]


def report(results, args):
    data = results.get("data", {})
    lines = [f"# Real input: {results.get('machine', {})}", ""]
    for split in ("train", "val"):
        if split in data:
            lines.append(f"- {split}: {data[split]}")
    lines += [f"- same rows in both systems: {results.get('same_rows', {})}", f"- phases: {results['phases']}",
              f"- left out for time: {results['dropped'] or 'nothing'}", f"- failed: {results['failed'] or 'nothing'}", "",
              "## Acceptance on held-out prompts", "",
              "accept_len_walk, mean over seeds, 95 % intervals over prompts (the same draws for both); over seeds: half of the difference's",
              "95 % interval by Student's t from how much the seeds of each system differ.", ""]
    lines += acceptance_table(results, args) + ["", "## Time and memory, the first seed alone on the machine", ""]
    lines += cost_table(results, args) + ["", "Tokens per block over seconds of training:", ""] + curves(results, args)
    lines += ["", "## Real decoding", ""] + decoding(results, args) + ["", "## One pass or several", ""] + passes(results, args)
    return "\n".join(lines + ["", "## The comparison", "", DIFFERENCES, ""])
