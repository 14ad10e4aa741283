"""benchmarks/made_up.py: what it writes is sound, the same at the same seed, and drawn by another process.

    python -m unittest discover -s tools/tests        (skipped without torch)
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BENCHMARKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benchmarks")
DTRAIN = os.environ.get("DTRAIN")

# In a process that has not seen torch: whether it has now, which alone can hold a GPU.
SCRIPT = """
import pathlib, sys
import made_up
place, model = pathlib.Path(sys.argv[1]), made_up.MODELS["tiny"]
made_up.write_target(place / "target", model)
documents = made_up.mixed_documents(512)
for name, seed in (("a", 0), ("b", 0), ("c", 1)):
    made_up.write_shard(place / f"{name}.h5", model, documents, seed)
print(len(documents), "torch" in sys.modules)
"""


@unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
class MadeUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.place = pathlib.Path(temporary.name)
        cls.done = cls.run_script(cls.place)

    @staticmethod
    def run_script(place):
        return subprocess.run([sys.executable, "-c", SCRIPT, str(place)], capture_output=True, text=True,
                              env=dict(os.environ, PYTHONPATH=BENCHMARKS))

    def test_another_process_draws(self):
        self.assertEqual((self.done.returncode, self.done.stderr), (0, ""))
        count, torch_here = self.done.stdout.split()
        self.assertEqual(torch_here, "False")
        import h5py
        states = {}
        for name in "abc":
            with h5py.File(self.place / f"{name}.h5") as file:
                self.assertEqual(len(file["doc_id"]), int(count))
                self.assertEqual(file["hidden_states"].shape, (file["doc_offsets"][-1], 6, 128))
                states[name] = file["hidden_states"][()].tobytes(), file["input_ids"][()].tobytes()
        self.assertEqual(states["a"], states["b"])
        self.assertNotEqual(states["a"][0], states["c"][0])
        self.assertNotEqual(states["a"][1], states["c"][1])

    @unittest.skipIf(not DTRAIN, "needs DTRAIN")
    def test_dtrain_reads_it(self):
        done = subprocess.run([DTRAIN, "vocab", "--size", "100", "--out", str(self.place / "map"), "--target",
                               str(self.place / "target"), str(self.place / "a.h5")], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = subprocess.run([DTRAIN, "data", "check", "--no-verdicts", str(self.place / "a.h5")], capture_output=True,
                              text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_failure_there_is_one_here(self):
        other = self.place / "other"
        (other / "a.h5").mkdir(parents=True)
        done = self.run_script(other)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("CalledProcessError", done.stderr)


if __name__ == "__main__":
    unittest.main()
