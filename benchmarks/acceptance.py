"""Tokens per block by prompt, with confidence intervals, from what `dtrain eval --blocks` and tools/decode.py write.

Intervals are percentiles of a bootstrap over prompts: documents of one prompt are drawn together, and systems that are
compared are given the same draws. They say nothing about how much seeds differ: that is the difference's own half width (Student's t).
"""
import json

import numpy as np

DRAWS = 4000
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}  # 97.5 %, by degrees of freedom


def read_blocks(path):
    """-> {(document, anchor): accepted}."""
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return {(line["doc_id"], line["anchor"]): line["accepted"] for line in lines}


def by_prompt(blocks, prompt_of):
    """-> int [prompts, 2]: tokens and blocks of each prompt, prompts in the order of prompt_of (document -> number)."""
    counts = np.zeros((max(prompt_of.values()) + 1, 2), np.int64)
    for (document, _), accepted in blocks.items():
        counts[prompt_of[document]] += (accepted + 1, 1)
    return counts


def draws(prompts, seed=0):
    """How often each prompt is in each draw: [DRAWS, prompts]."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=DRAWS)


def tokens_per_block(counts, weights=None):
    """counts [prompts, 2] -> a number, or one for each draw."""
    total = counts.sum(axis=0) if weights is None else weights @ counts
    return total[..., 0] / total[..., 1]


def interval(values):
    low, high = np.quantile(values, [0.025, 0.975])
    return [float(low), float(high)]


def over_seeds(ours, theirs):
    """Half of the 95 % interval of a difference of means of independent values of one variance; None with fewer than two values each."""
    freedom = len(ours) + len(theirs) - 2
    if min(len(ours), len(theirs)) < 2 or freedom not in STUDENT:
        return None
    variance = sum(np.var(some) * len(some) for some in (ours, theirs)) / freedom
    return float(STUDENT[freedom] * np.sqrt(variance * (1 / len(ours) + 1 / len(theirs))))


def compare(ours, theirs):
    """Lists over seeds of counts. -> means over seeds, their intervals, and those of the difference (ours - theirs)."""
    weights = draws(len(ours[0]))

    def mean(runs, some):
        return np.mean([tokens_per_block(counts, some) for counts in runs], axis=0)

    result = {}
    for name, runs in (("ours", ours), ("theirs", theirs)):
        result[name] = dict(mean=float(mean(runs, None)), interval=interval(mean(runs, weights)),
                            by_seed=[float(tokens_per_block(counts)) for counts in runs])
    difference = mean(ours, weights) - mean(theirs, weights)
    result["difference"] = dict(mean=result["ours"]["mean"] - result["theirs"]["mean"], interval=interval(difference),
                                over_seeds=over_seeds(result["ours"]["by_seed"], result["theirs"]["by_seed"]))
    return result


def single(runs):
    weights = draws(len(runs[0]))
    values = np.mean([tokens_per_block(counts, weights) for counts in runs], axis=0)
    seeds = [float(tokens_per_block(counts)) for counts in runs]
    return dict(mean=float(np.mean(seeds)), interval=interval(values), by_seed=seeds)


def time_to(level, curve):
    """Seconds at which a curve of (step, seconds, tokens per block) first reaches the level; None: never."""
    before = (0.0, 1.0)  # (seconds, tokens per block) of a drafter that nothing is accepted of
    for _, seconds, value in curve:
        if value >= level:
            share = (level - before[1]) / max(value - before[1], 1e-9)
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    return None
