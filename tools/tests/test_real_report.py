"""benchmarks/real_report.py and acceptance.py: the report of a comparison on real input says what its results are, also when
some of them were left out for time.

    python -m unittest discover -s tools/tests
"""

import os
import sys
import types
import unittest

import numpy as np

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benchmarks")]

import acceptance  # noqa: E402
import real_report  # noqa: E402

ARGS = types.SimpleNamespace(blocks=[8, 16], seeds=[1, 2, 3], passes=6, few_anchors=256)
STEPS = 100


def counts(level, prompts=40):
    """[prompts, 2] whose tokens per block are the level as nearly as whole tokens allow; prompts differ in length and acceptance."""
    blocks = 200 + 10 * (np.arange(prompts) % 7)
    return np.stack([np.rint(blocks * (level + 0.2 * np.cos(np.arange(prompts)))).astype(int), blocks], 1)


def training(system, seconds):
    shared = dict(seconds=seconds, steps=STEPS, marks=[[50, seconds / 2], [STEPS, seconds]], wall=seconds + 6, block_rows=10**6, tokens_read=10**5)
    if system == "dtrain":
        return dict(shared, own_gib=4.7, planned_gib=4.8, memory={})
    return dict(shared, build_seconds=15.0, compile_seconds=85.0, load_seconds=3.0, allocated_gib=2.2, reserved_gib=2.4)


def entry(system, level, half=None, seconds=8.0):
    """half: tokens per block at the half of the training."""
    judged = {str(STEPS): dict(walk=level, counts=counts(level).tolist())}
    if half:
        judged["50"] = dict(walk=half, counts=counts(half).tolist())
    return dict(training=training(system, seconds), judged=judged)


def results(**runs):
    return dict(runs={name.replace("_", "-"): run for name, run in runs.items()}, phases={}, dropped=[], failed=[], token_bytes=6912)


def cells(report, beginning):
    """Of the lines of a table that begin so."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if line.startswith(beginning)]


class Acceptance(unittest.TestCase):
    def test_a_difference_over_seeds_is_students(self):
        # by hand: both have the variance 0.01, so that the half width is 2.776 * sqrt(0.01 * 2 / 3)
        self.assertAlmostEqual(acceptance.over_seeds([2.0, 2.1, 2.2], [2.3, 2.4, 2.5]), 2.776 * (0.02 / 3) ** 0.5, 9)
        self.assertIsNone(acceptance.over_seeds([2.0], [2.3, 2.4]))

    def test_systems_that_are_compared_get_the_same_draws(self):
        compared = acceptance.compare([counts(2.4)], [counts(2.4)])
        self.assertEqual(compared["difference"]["interval"], [0.0, 0.0])
        low, high = compared["ours"]["interval"]
        self.assertTrue(low < compared["ours"]["mean"] < high)

    def test_time_to_a_level_lies_between_the_marks(self):
        curve = [(50, 4.0, 2.0), (100, 8.0, 3.0)]
        self.assertAlmostEqual(acceptance.time_to(2.5, curve), 6.0)
        self.assertAlmostEqual(acceptance.time_to(1.5, curve), 2.0)
        self.assertIsNone(acceptance.time_to(3.1, curve))


class Report(unittest.TestCase):
    def test_seeds_that_both_have_are_compared(self):
        text = real_report.report(results(
            main_dtrain_b8_s1=entry("dtrain", 2.4, 2.0), main_dtrain_b8_s2=entry("dtrain", 2.5), main_dtrain_b8_s3=entry("dtrain", 9.0),
            main_speculators_b8_s1=entry("speculators", 2.3, 1.8, 40.0), main_speculators_b8_s2=entry("speculators", 2.4)), ARGS)
        (row,) = [row for row in cells(text, "| 8 | 2 |")]
        self.assertTrue(row[4].startswith("+0.10"), row)
        self.assertTrue(row[5].startswith("+-0.30"), row)  # two seeds of each, 0.1 apart: 4.303 * sqrt(0.005)
        costs = cells(text, "| 8 | dtrain |") + cells(text, "| 8 | speculators |")
        # 90 % of the lower gain, 1 + 0.9 * 1.3 = 2.17: 17/40 behind the half of dtrain's training, 37/50 of the peer's
        self.assertEqual([row[8].split(",")[0] for row in costs], ["5.7 s", "34.8 s"])
        self.assertEqual([row[5] for row in costs], ["14.0 s", "143.0 s"])

    def test_one_pass_beside_several(self):
        text = real_report.report(results(**{f"{kind}_dtrain_b8_s{seed}": entry("dtrain", level + 0.01 * seed)
                                             for kind, level in (("once", 2.2), ("six", 2.3)) for seed in (1, 2, 3)}), ARGS)
        (line,) = [line for line in text.splitlines() if line.startswith("1 pass less 6 passes")]
        self.assertIn("-0.10", line)
        self.assertIn("(3 each)", line)

    def test_what_was_left_out_does_not_stop_it(self):
        lacking = dict(training=training("dtrain", 8.0))  # trained, not judged
        for some in (results(), results(main_dtrain_b8_s1=lacking), results(main_speculators_b16_s1=entry("speculators", 2.3)),
                     results(once_dtrain_b8_s1=entry("dtrain", 2.2), six_dtrain_b8_s2=entry("dtrain", 2.3))):
            self.assertNotIn("1 pass less", real_report.report(some, ARGS))


if __name__ == "__main__":
    unittest.main()
