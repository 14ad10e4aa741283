"""EAGLE-3 from other engines' dumps to a served layout: every format is imported with its self-checks, an EAGLE-3 drafter is
trained from the shards, and what it is does not depend on where its states came from.

    DTRAIN=build/dtrain python -m unittest discover -s tools/tests

The dumps are those of test_import.py and test_import_dumps.py: three layers of the tiny target.
"""

import json
import os
import re
import subprocess
import sys
import unittest
from importlib.util import find_spec

import h5py
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import test_import  # noqa: E402
import test_import_dumps  # noqa: E402
from test_import import DTRAIN, MODEL, ROOT  # noqa: E402

VERIFIED = ("--model", MODEL, "--device", "cpu")
CONFIG = """
run: {{dir: unset, seed: 1, epochs: 1000, max_steps: 40, device: cpu, compute: fp32}}
target: {{path: "{model}"}}
data: {{train: ["{train}"], seq_len: 512, rows_per_step: 1}}
drafter: {{kind: eagle3, style: llama, layers: 1, ttt_steps: 3, norm_output: true}}
loss: {{kl: 1.0}}
optimizer: {{lr: 2.0e-3, betas: [0.9, 0.98]}}
checkpoint: {{every: 20, background: false}}
parallel: {{threads: 1}}
log: {{every: 10, tensorboard: false}}
"""


def blocks_of(path):
    """-> {(doc_id, anchor): accepted drafts}"""
    with open(path, encoding="utf-8") as file:
        return {(block["doc_id"], block["anchor"]): block["accepted"] for block in map(json.loads, file)}


class FromDumps(test_import.Case):
    """Without tests of its own for what its parent only prepares."""

    def dumped(self, case, *options, write=(), **arguments):
        """Imports a dump of another test's class, verified by the model. -> path of its shard."""
        case = case()
        case.texts = self.texts
        case.setUp()
        self.addCleanup(case.doCleanups)
        getattr(case, "write", case.dump)(*write)
        printed = case.imported(*options, *VERIFIED, trust=False, **arguments)
        self.assertIn("planes are the layers declared", printed)
        return os.path.join(case.out, "train-00000.h5")

    def shards(self):
        """-> {name: path} of every dump an EAGLE-3 drafter may be trained from."""
        modelopt = test_import_dumps.Modelopt
        return {
            "speculators": self.dumped(test_import.Imports),
            "specforge": self.dumped(test_import.Specforge),
            "specforge.gz": self.dumped(test_import.Specforge, write=("eagle3", ".ckpt.gz")),
            "deepspec": self.dumped(test_import_dumps.Deepspec, layers=None),
            "deepspec, float8": self.dumped(test_import_dumps.Deepspec, "--planes", "float8", layers=None),
            "modelopt of Transformers": self.dumped(modelopt, "--last-hidden", "post_norm"),
            "modelopt of vLLM": self.dumped(modelopt, "--last-hidden", "pre_norm", layers="2,3,4",
                                            numbering="vllm", write=(np.array,))}

    def run_dtrain(self, *words, status=0):
        done = subprocess.run([DTRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, status, done.stdout)
        return done.stdout

    def config(self, train):
        path = os.path.join(self.folder, "run.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(CONFIG.format(model=MODEL, train=train))
        return path

    def train(self, name, shard, *sets):
        """-> the run's folder and its losses."""
        run = os.path.join(self.folder, re.sub(r"\W", "-", name))
        words = [word for one in (f"run.dir={run}", *sets) for word in ("--set", one)]
        self.run_dtrain("train", "--config", self.config(shard), *words)
        with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
            return run, [line["loss"] for line in map(json.loads, file) if "lr" in line]

    def scores(self, checkpoint, shard, *options):
        """-> what eval prints, numbers by name."""
        said = self.run_dtrain("eval", "--config", self.config(shard), "--checkpoint", checkpoint, "--set",
                               f"data.val=[{shard}]", *options)
        return {name: float(value) for name, value in re.findall(r"^(\w+) +([0-9.]+)(?: +\(\d+ blocks\))?$", said, re.M)}


@test_import.needs_dtrain
@unittest.skipIf(test_import.torch is None or not find_spec("transformers"), "needs torch and transformers")
class Eagle3(FromDumps):
    def test_every_dump_trains_and_is_the_same_data(self):
        shards = self.shards()
        run, _ = self.train("reference", shards["speculators"])
        checkpoint = os.path.join(run, "checkpoints", "step-00000040")
        expected = self.scores(checkpoint, shards["speculators"])
        self.assertGreater(expected["accept_len_walk"], 1.0)
        for name, shard in shards.items():
            with self.subTest(name):
                _, losses = self.train(name, shard, "run.max_steps=20")
                self.assertLess(np.mean(losses[-5:]), 0.9 * np.mean(losses[:5]))
                found = self.scores(checkpoint, shard)
                with h5py.File(shard, "r") as file:
                    exact = file.attrs["last_hidden"] == "pre_norm"  # else the teacher was rounded behind its norm
                    self.assertEqual(file.attrs["dtype"] == "float8_e4m3", "float8" in name)
                for what, value in expected.items():
                    self.assertLessEqual(abs(found[what] - value), 0 if exact else 0.02 * abs(value) + 0.01, what)

    def test_without_a_teacher(self):
        shard = self.dumped(test_import.Specforge, "--last-hidden", "absent", write=("dflash",))
        config = self.config(shard)
        run = ("--set", f"run.dir={self.folder}/blind")
        self.assertIn("last_hidden", self.run_dtrain("train", "--config", config, *run, status=2))
        sets = ("run.max_steps=2", "loss.kl=0", "loss.ce_data=1.0")
        self.train("labels", shard, *sets)

    def test_to_decoding(self):
        """Both layouts come back by init_from with the same scores, and decode as eval says."""
        shard = self.dumped(test_import.Specforge)
        run, _ = self.train("run", shard)
        checkpoint = os.path.join(run, "checkpoints", "step-00000040")
        expected = self.scores(checkpoint, shard, "--served")
        for layout in ("specforge", "speculators"):
            out = os.path.join(self.folder, layout)
            self.run_dtrain("export", "--checkpoint", checkpoint, "--format", layout, "--out", out)
            again, _ = self.train(f"again-{layout}", shard, f"drafter.init_from={out}", "run.max_steps=1",
                                  "optimizer.lr=1e-30")  # which changes no weight
            self.assertEqual(self.scores(os.path.join(again, "checkpoints", "step-00000001"), shard), expected)
            self.assertGreater(self.same_blocks(out, checkpoint, shard, layout), 0.9)

    def same_blocks(self, export, checkpoint, shard, layout):
        """-> share of the blocks that decoding accepts as eval says, of those that begin at the same tokens."""
        real, said = os.path.join(self.folder, f"{layout}.real"), os.path.join(self.folder, f"{layout}.said")
        self.scores(checkpoint, shard, "--served", "--blocks", said)
        drafts = ["--drafts", "3"] if layout == "specforge" else []  # which speculators' config.json says
        done = subprocess.run(
            [sys.executable, os.path.join(ROOT, "tools", "decode.py"), "--model", MODEL, "--drafter", export, "--shard", shard,
             "--limit", "2", "--device", "cpu", "--bf16-features", "--blocks-out", real, *drafts], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn(" 0 differences from greedy text", done.stdout)
        of_eval, of_decode = blocks_of(said), blocks_of(real)
        common = set(of_eval) & set(of_decode)
        self.assertGreater(len(common), len(of_decode) // 2)
        return np.mean([of_eval[block] == of_decode[block] for block in common])


if __name__ == "__main__":
    unittest.main()
