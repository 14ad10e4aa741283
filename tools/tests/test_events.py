"""TensorBoard's own readers find in events/ what metrics.jsonl holds, after kills and resumes too.

    DTRAIN=build/dtrain python tools/tests/test_events.py        (skipped without DTRAIN or tensorboard)
"""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."),
                os.path.dirname(os.path.abspath(__file__))]

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None

DTRAIN = os.environ.get("DTRAIN")
PATIENCE = 120  # seconds that one thing may take on a machine that much else runs on
GROUPS = {"tokens_per_second": "speed", "block_rows_per_second": "speed", "wait_share": "speed", "mfu": "speed",
          "read_gb_per_second": "speed", "memory_bytes": "speed", "seconds": "time"}
TRAIN = re.compile(r"loss(_(?!seconds)\w+)?|accept_len|eal_marginal|overlap|outside_share|lr|grad_norm|clip_factor")
VAL = re.compile(r"accept_len(_walk(_\d+)?)?|loss|eal_marginal|overlap|outside_share")


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def scalars_of(line):
    """{tag: value} that a line of metrics.jsonl has in events/, by the rules of docs/file-formats.md."""
    found = {}
    for name, value in line.items():
        scored = name.startswith("val_")
        short = name[4:] if scored else name
        if short == "acc":
            found.update({f"{'val_' * scored}acc/slot_{k:02}": v for k, v in enumerate(value) if v is not None})
        elif short == "acc_given":
            found.update({f"{'val_' * scored}acc/given_{k:02}": v for k, v in enumerate(value) if v is not None})
        elif scored and VAL.fullmatch(short):
            found[f"val/{short}"] = value
        elif not scored and TRAIN.fullmatch(short):
            found[f"train/{short}"] = value
        elif not scored and (short in GROUPS or short.endswith("_seconds")):
            found[f"{GROUPS.get(short, 'time')}/{short}"] = value
    return {tag: single(value) for tag, value in found.items() if value is not None}


def expected(lines):
    """{tag: [(step, value), ...]}"""
    curves = {}
    for line in lines:
        for tag, value in scalars_of(line).items():
            curves.setdefault(tag, []).append((line["step"], value))
    return curves


def accumulated(accumulator):
    accumulator.Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}


class Board:
    """TensorBoard's server over a folder; out: the file for what it says."""

    def __init__(self, folder, out, *options):
        self.out = out
        with open(out, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", "127.0.0.1", "--port", "0",
                 "--reload_interval", "1", "--samples_per_plugin", "scalars=100000", *options],
                stdout=file, stderr=subprocess.STDOUT)
        self.address = f"http://127.0.0.1:{self._port()}/data/plugin/scalars/"

    def _said(self):
        with open(self.out, encoding="utf-8") as file:
            return file.read()

    def _port(self):
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            port = re.search(r"http://127\.0\.0\.1:(\d+)/", self._said())
            if port:
                return port.group(1)
            time.sleep(0.1)
        self.close()
        raise AssertionError(f"tensorboard did not start:\n{self._said()}")

    def get(self, path, **query):
        address = self.address + path + "?" + urllib.parse.urlencode(query)
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return json.load(answer)

    def curves(self):
        return {tag: [(step, value) for _, step, value in self.get("scalars", run=run, tag=tag)]
                for run, tags in self.get("tags").items() for tag in tags}

    def close(self):
        """How it ends is not what is tested, and on a busy machine that takes it long."""
        self.process.terminate()
        try:
            self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@unittest.skipIf(EventAccumulator is None or not DTRAIN, "needs tensorboard and DTRAIN")
class Events(unittest.TestCase):
    def setUp(self):
        import tiny_run
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.runs = tiny_run.Runs(temporary.name, DTRAIN)

    def same(self, found, lines):
        wanted = expected(lines)
        self.assertEqual(sorted(found), sorted(wanted))
        for tag in wanted:
            self.assertEqual(found[tag], wanted[tag], tag)

    def lines(self, last):
        lines = self.runs.metrics("run")
        self.assertEqual([line["step"] for line in lines if "loss" in line], list(range(1, last + 1)))
        return lines

    def segments(self):
        """A run in three pieces: killed behind its checkpoint, stopped, and ended."""
        self.assertEqual(self.runs.stop_at("run", 70), -signal.SIGKILL)
        yield
        self.assertEqual(self.runs.stop_at("run", 150, signal.SIGTERM), 75)
        yield
        self.runs.train("run")

    def test_accumulator(self):
        for _ in self.segments():
            pass
        events = self.runs.path("run", "events")
        self.assertEqual(len(os.listdir(events)), 3)
        lines = self.lines(300)
        found = accumulated(EventAccumulator(events, size_guidance={"scalars": 0}))
        self.same(found, lines)
        for tag in ("train/loss", "train/loss_kl", "train/loss_tv", "acc/slot_01", "acc/slot_03", "train/clip_factor",
                    "speed/block_rows_per_second", "speed/mfu", "time/copy_seconds"):
            self.assertEqual([step for step, _ in found[tag]], list(range(1, 301)), tag)
        for tag in ("val/accept_len_walk", "val/accept_len_walk_1", "val/overlap", "val_acc/slot_01"):
            self.assertEqual([step for step, _ in found[tag]], [0, 60, 120, 180, 240, 300], tag)

    def test_accumulator_that_read_what_was_cut(self):
        events = self.runs.path("run", "events")
        os.makedirs(events)
        accumulator = EventAccumulator(events, size_guidance={"scalars": 0})
        for _ in self.segments():
            accumulated(accumulator)
        self.same(accumulated(accumulator), self.lines(300))

    def test_begun_again_without_a_checkpoint(self):
        self.assertEqual(self.runs.stop_at("run", 3, signal.SIGKILL, "checkpoint.every=0"), -signal.SIGKILL)
        self.runs.train("run", "checkpoint.every=0")
        self.assertNotIn("resuming from", self.runs.said("run"))
        self.same(accumulated(EventAccumulator(self.runs.path("run", "events"), size_guidance={"scalars": 0})),
                  self.lines(300))

    def serve(self, *options):
        events = self.runs.path("run")
        os.makedirs(os.path.join(events, "events"))
        board = Board(events, self.runs.path("board.out"), *options)
        self.addCleanup(board.close)
        for _ in self.segments():
            time.sleep(1.5)  # it reads what will be cut
        wanted, lines, end = expected(self.lines(300)), self.lines(300), time.monotonic() + PATIENCE
        while board.curves() != wanted and time.monotonic() < end:
            time.sleep(0.5)
        self.same(board.curves(), lines)

    def test_server(self):
        self.serve("--load_fast=false")

    def test_server_with_fast_loading(self):
        self.serve("--load_fast=auto")


if __name__ == "__main__":
    if EventAccumulator is None or not DTRAIN:
        print("skipped: needs tensorboard and DTRAIN")
        sys.exit(77)
    unittest.main()
