"""tools/extract.py on a small random Llama.

    python -m unittest discover -s tools/tests        (all of this is skipped without torch)
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import h5py
import numpy as np

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [TOOLS, os.path.dirname(os.path.abspath(__file__))]

from dtrain_tools.crc32c import crc32c  # noqa: E402
from dtrain_tools.tensor_file import bf16_to_float, read_tensors  # noqa: E402

try:
    import torch

    import extract
    import tiny_llama
    from dtrain_tools import documents, extraction, generate, shards
    from dtrain_tools.budget import Budget
    from dtrain_tools.target_model import Capture, Target
except ImportError:
    torch = None

needs_torch = unittest.skipIf(torch is None, "needs torch and transformers")
DATASETS = ("doc_offsets", "doc_id", "doc_crc32c", "input_ids", "loss_mask", "hidden_states", "teacher_top1",
            "teacher_top1_logit", "teacher_lse")


class Case(unittest.TestCase):
    """A folder with the model, removed afterwards."""

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = cls.temporary.name
        cls.model = os.path.join(cls.folder, "model")
        tiny_llama.save(cls.model)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def lines(self, entries):
        """A new JSONL file of the entries (strings are written as they are)."""
        handle, path = tempfile.mkstemp(suffix=".jsonl", dir=self.folder)
        with os.fdopen(handle, "w") as file:
            for entry in entries:
                file.write((entry if isinstance(entry, str) else json.dumps(entry)) + "\n")
        return path

    def out(self):
        return tempfile.mkdtemp(dir=self.folder)

    def command(self, path, out, *options):
        return ["extract.py", "--model", self.model, "--out", out, "--layers", "3", "--device", "cpu", "--threads",
                "1", "--max-new-tokens", "12", *options, path]

    def extract(self, path, out, *options):
        """-> status, what was printed."""
        printed = io.StringIO()
        with mock.patch.object(sys, "argv", self.command(path, out, *options)), \
                contextlib.redirect_stderr(printed):
            try:
                status = extract.main()
            except SystemExit as stop:
                status = stop.code
        return status, printed.getvalue()

    def read(self, out, name="train-00000.h5"):
        """-> per document {dataset: its rows}, attributes."""
        with h5py.File(os.path.join(out, name), "r") as file:
            offsets = file["doc_offsets"][:]
            rows = [n for n in DATASETS if not n.startswith("doc_")]
            found = [{**{n: file[n][a:b] for n in rows}, "id": int(file["doc_id"][d]),
                      "crc": int(file["doc_crc32c"][d])}
                     for d, (a, b) in enumerate(zip(offsets[:-1], offsets[1:]))]
            return found, dict(file.attrs)


PROMPTS = [{"turns": [f"question {'long ' * (i % 7)}{i}"]} for i in range(24)] if torch else []


@needs_torch
class States(Case):
    def setUp(self):
        self.target = Target(self.model, device="cpu")
        generator = np.random.default_rng(1)
        self.documents = [generator.integers(0, 257, n).tolist() for n in (7, 40, 19)]

    def test_planes_are_the_outputs_of_the_layers_and_the_input_of_the_norm(self):
        with Capture(self.target, [0, 2, 5]) as capture:
            states, teacher = capture.run([self.documents[1]], 16)[0]
        ids = torch.tensor([self.documents[1]])
        with torch.no_grad():
            out = self.target.model(input_ids=ids, output_hidden_states=True)
            states = torch.from_numpy(bf16_to_float(states))
            for plane, layer in enumerate((0, 2)):
                torch.testing.assert_close(states[:, plane], out.hidden_states[layer + 1][0], rtol=2**-8, atol=1e-6)
            torch.testing.assert_close(states[:, 2], states[:, 3], rtol=0, atol=0)  # layer 5 is the last one
            torch.testing.assert_close(self.target.norm(states[:, 3]), out.hidden_states[-1][0], rtol=0.02, atol=0.02)
        logits = out.logits[0]
        np.testing.assert_array_equal(teacher[0], logits.argmax(1).numpy())
        np.testing.assert_allclose(teacher[1], logits.max(1).values.numpy(), rtol=1e-5)
        np.testing.assert_allclose(teacher[2], torch.logsumexp(logits, 1).numpy(), rtol=1e-5)

    def test_padded_equals_unpadded(self):
        with Capture(self.target, [1, 2, 3]) as capture:
            together = capture.run(self.documents, 16)
            for document, (states, teacher) in zip(self.documents, together):
                alone, alone_teacher = capture.run([document], 16)[0]
                np.testing.assert_allclose(bf16_to_float(states), bf16_to_float(alone), rtol=2**-7, atol=1e-5)
                np.testing.assert_array_equal(teacher[0], alone_teacher[0])
                np.testing.assert_allclose(teacher[2], alone_teacher[2], rtol=1e-5)

    def test_padding_check_refuses_a_model_that_sees_padding(self):
        class Leaky:
            def run(self, documents, _):
                noise = len(documents)
                return [(np.full((len(d), 2, 4), 0x3F80 + 16 * noise, dtype=np.uint16), None) for d in documents]
        items = [documents.Document("k", 0, 0, "f:1", ids, []) for ids in self.documents]
        with self.assertRaises(documents.InputError):
            extraction.check_padding(Leaky(), items, 16, 0.02)

    def test_logits_that_the_model_changes_are_refused_unless_known(self):
        self.target.check_logits(self.documents[0])
        head = self.target.model.lm_head
        with mock.patch.object(type(head), "forward", lambda self, x: 2 * torch.nn.functional.linear(x, self.weight)):
            with self.assertRaises(documents.InputError):
                self.target.check_logits(self.documents[0])


@needs_torch
class Answers(Case):
    def setUp(self):
        self.target = Target(self.model, device="cpu")

    def generation(self, prompts, temperature=0.0, limit=15, seed=3):
        streams = [generate.random_stream(seed, str(p), 0) for p in prompts]
        return generate.Generation(self.target, prompts, streams, [tiny_llama.END], limit, temperature).run()

    def test_batched_greedy_equals_the_plain_loop(self):
        prompts = [list(b"hello"), list(b"a longer prompt"), [tiny_llama.START, 120], list(b"zz")]
        for prompt, answer in zip(prompts, self.generation(prompts)):
            ids = list(prompt)
            for _ in range(15):
                with torch.no_grad():
                    ids.append(int(self.target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] == tiny_llama.END:
                    break
            self.assertEqual(answer, ids[len(prompt):])

    def test_samples_do_not_depend_on_the_batch(self):
        prompts = [list(b"hello"), list(b"something else"), list(b"x")]
        together = self.generation(prompts, temperature=1.0)
        self.assertEqual(together, [self.generation([p], temperature=1.0)[0] for p in prompts])
        self.assertNotEqual(together, self.generation(prompts, temperature=1.0, seed=4))

    def test_answers_do_not_depend_on_when_it_looks_for_their_ends(self):
        prompts = [bytes([97 + n, 98, 99 + n % 3]) for n in range(12)]
        for temperature in (0.0, 1.0):
            usual = self.generation([list(p) for p in prompts], temperature)
            self.assertGreater(len({len(answer) for answer in usual}), 1)
            for every, keep in ((4, 0.7), (100, 1.0)):
                with mock.patch.dict(generate.LOOK_EVERY, cpu=every), mock.patch.dict(generate.KEEP_ABOVE, cpu=keep):
                    self.assertEqual(self.generation([list(p) for p in prompts], temperature), usual)

    def test_generated_ids_are_kept_and_ends_are_supervised(self):
        script = [[97], [98], [tiny_llama.END], [98], [97], [98], [tiny_llama.END]]
        path, out = self.lines([{"turns": ["first ab", "second"]}]), self.out()
        with mock.patch.object(generate, "choose", side_effect=lambda *_: torch.tensor(script.pop(0))):
            status, printed = self.extract(path, out)
        self.assertEqual(status, 0, printed)
        document = self.read(out)[0][0]
        encode = lambda text: tiny_llama.make_tokenizer()(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        first, second = [97, 98, tiny_llama.END], [98, 97, 98, tiny_llama.END]
        before = encode("<start>user\nfirst ab<end>\n<start>assistant\n")
        between = encode("\n<start>user\nsecond<end>\n<start>assistant\n")
        self.assertEqual(document["input_ids"].tolist(), before + first + between + second)
        self.assertEqual(document["loss_mask"].tolist(),
                         [0] * len(before) + [1] * 3 + [0] * len(between) + [1] * 4)

    def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_answers(self):
        model = os.path.join(self.folder, "forgetful")
        tiny_llama.save(model, tiny_llama.FORGETFUL)
        path = self.lines([{"turns": ["one", "two"]}])
        out = self.out()
        tokenizer = tiny_llama.make_tokenizer(tiny_llama.FORGETFUL)
        template = documents.Template(tokenizer, [tiny_llama.END])
        with self.assertRaises(documents.InputError) as caught:
            template.next_turn([{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"},
                                {"role": "user", "content": "two"}], "three", [1], "f:1")
        self.assertIn("--turns first", str(caught.exception))
        with mock.patch.object(self, "model", model):
            self.assertEqual(self.extract(path, out, "--turns", "first")[0], 0)


@needs_torch
class Masks(unittest.TestCase):
    MESSAGES = [{"role": "user", "content": "hi ab"}, {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "so"}, {"role": "assistant", "content": "no ab"}]

    def supervised(self, template, supervise="all"):
        tokenizer = tiny_llama.make_tokenizer(template)
        ids, mask = documents.Template(tokenizer, [tiny_llama.END], None, supervise).conversation(
            self.MESSAGES, "f:1")
        self.assertEqual(ids, tokenizer.apply_chat_template(self.MESSAGES, return_dict=True)["input_ids"])
        return tokenizer.decode([i for i, m in zip(ids, mask) if m])

    def test_by_prefixes(self):
        self.assertEqual(self.supervised(tiny_llama.CHATML), "yes<end>no ab<end>")
        self.assertEqual(self.supervised(tiny_llama.CHATML, "last"), "no ab<end>")

    def test_by_the_templates_marks(self):
        self.assertEqual(self.supervised(tiny_llama.MARKED), "yes<end>no ab<end>")

    def test_no_guess_when_a_prefix_is_not_one(self):
        with self.assertRaises(documents.InputError) as caught:
            self.supervised(tiny_llama.FORGETFUL)
        self.assertIn("f:1: message 1", str(caught.exception))
        self.assertEqual(self.supervised(tiny_llama.FORGETFUL, "last"), "no ab<end>")


@needs_torch
class WholeRuns(Case):
    def test_shard_holds_what_the_format_says(self):
        path, out = self.lines(PROMPTS), self.out()
        status, printed = self.extract(path, out)
        self.assertEqual(status, 0, printed)
        found, attributes = self.read(out)
        self.assertEqual(attributes["format"], "dtrain-features")
        self.assertEqual(attributes["last_hidden"], "pre_norm")
        self.assertEqual(list(attributes["target_layer_ids"]), [1, 2, 3])
        self.assertEqual(len(attributes["chat_template_sha256"]), 64)
        for document in found:
            ids, mask = document["input_ids"], document["loss_mask"]
            self.assertEqual(crc32c(ids, mask, document["hidden_states"]), document["crc"])
            generated = np.flatnonzero(mask)
            np.testing.assert_array_equal(ids[generated], document["teacher_top1"][generated - 1])
        head = read_tensors(os.path.join(out, "target", "head.safetensors"))
        self.assertEqual(sorted(head), ["embed_tokens.weight", "lm_head.weight", "norm.weight"])
        with open(os.path.join(out, "documents.jsonl"), encoding="utf-8") as file:
            manifest = [json.loads(line) for line in file]
        self.assertEqual([(m["doc_id"], m["tokens"]) for m in manifest],
                         [(d["id"], len(d["input_ids"])) for d in found])

    def test_ready_ids_are_not_touched(self):
        ids = [97, 98, tiny_llama.AB, 0, 13, 97, 98]
        path, out = self.lines([{"input_ids": ids, "loss_mask": [0, False, True, 1, 0, 1, 1]}]), self.out()
        with mock.patch.object(documents.Template, "_render", side_effect=AssertionError("template used")):
            status, printed = self.extract(path, out)
        self.assertEqual(status, 0, printed)
        document = self.read(out)[0][0]
        self.assertEqual(document["input_ids"].tolist(), ids)
        self.assertEqual(document["loss_mask"].tolist(), [0, 0, 1, 1, 0, 1, 1])

    def test_all_samples_of_a_prompt_on_one_side(self):
        path, out = self.lines(PROMPTS + PROMPTS[:2]), self.out()
        status, printed = self.extract(path, out, "--samples", "3", "--temperature", "1", "--split-val", "5")
        self.assertEqual(status, 0, printed)
        with open(os.path.join(out, "documents.jsonl"), encoding="utf-8") as file:
            manifest = [json.loads(line) for line in file]
        self.assertEqual(len(manifest), 26 * 3)
        self.assertEqual(len({m["doc_id"] for m in manifest}), len(manifest))
        sides = {}
        for entry in manifest:
            sides.setdefault(entry["key"].split("#")[0], set()).add(entry["shard"][:3])
        self.assertTrue(all(len(side) == 1 for side in sides.values()))
        self.assertEqual(sum(side == {"val"} for side in sides.values()), 5)

    def test_kill_and_resume(self):
        path, whole, out = self.lines(PROMPTS), self.out(), self.out()
        small = ("--shard-bytes", "40000", "--batch-tokens", "300", "--answer-tokens", "300", "--split-val", "4")
        self.assertEqual(self.extract(path, whole, *small)[0], 0)
        for wanted in ("answers.jsonl", "train-00001.h5"):
            command = [sys.executable, os.path.join(TOOLS, "extract.py"), *self.command(path, out, *small)[1:]]
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
                deadline = time.time() + 400
                wanted_path = os.path.join(out, wanted)
                while time.time() < deadline and process.poll() is None and not (
                        os.path.exists(wanted_path) and os.path.getsize(wanted_path)):
                    time.sleep(0.001)
                process.send_signal(signal.SIGKILL)
            self.assertEqual(process.returncode, -signal.SIGKILL, "finished before it could be killed")
        kept = {name: os.stat(os.path.join(out, name)).st_mtime_ns for name in os.listdir(out) if name.endswith(".h5")}
        self.assertTrue(kept)
        status, printed = self.extract(path, out, *small)
        self.assertEqual(status, 0, printed)
        names = sorted(name for name in os.listdir(whole) if name.endswith(".h5"))
        self.assertEqual(names, sorted(n for n in os.listdir(out) if n.endswith(".h5")))
        self.assertGreater(len(names), len(kept))
        for name, when in kept.items():
            self.assertEqual(os.stat(os.path.join(out, name)).st_mtime_ns, when)
        for name in names:
            for ours, theirs in zip(self.read(out, name)[0], self.read(whole, name)[0]):
                self.assertEqual(ours["input_ids"].tolist(), theirs["input_ids"].tolist())
                self.assertEqual((ours["id"], ours["crc"]), (theirs["id"], theirs["crc"]))
        with open(os.path.join(out, "answers.jsonl"), encoding="utf-8") as file:
            answered = [json.loads(line)["key"] for line in file]
        self.assertEqual(len(answered), len(set(answered)))

    def test_other_settings_do_not_mix(self):
        path, out = self.lines(PROMPTS[:3]), self.out()
        self.assertEqual(self.extract(path, out)[0], 0)
        status, printed = self.extract(path, out, "--max-new-tokens", "11")
        self.assertEqual(status, 2)
        self.assertIn("max_new_tokens", printed)

    def test_full_disk_is_refused_before_anything_is_captured(self):
        path, out = self.lines(PROMPTS), self.out()
        with mock.patch.object(extraction, "free_bytes", return_value=5000):
            status, printed = self.extract(path, out)
        self.assertEqual(status, 1)
        self.assertIn("bytes needed, 5,000 free", printed)
        self.assertFalse([name for name in os.listdir(out) if ".h5" in name])

    def test_disk_that_fills_up_keeps_finished_shards(self):
        path, out = self.lines(PROMPTS), self.out()
        free = [10**9, 0]
        with mock.patch.object(shards, "free_bytes", side_effect=lambda _: free.pop(0)):
            status, printed = self.extract(path, out, "--shard-bytes", "40000")
        self.assertEqual(status, 1)
        self.assertIn("finished shards are kept", printed)
        self.assertEqual([n for n in os.listdir(out) if ".h5" in n], ["train-00000.h5"])
        self.assertEqual(self.extract(path, out, "--shard-bytes", "40000")[0], 0)


@needs_torch
class Memory(Case):
    def test_budget_is_halved_and_every_item_done_once(self):
        said, sizes = [], []
        budget = Budget(1000, said.append)

        def work(group):
            if max(group) * len(group) > 450:
                raise torch.OutOfMemoryError("CUDA out of memory")
            sizes.append(len(group))
            return group
        items = [10 + i % 13 for i in range(200)]
        done = [item for _, group in budget.run(items, lambda n: n, work) for item in group]
        self.assertEqual(sorted(done), sorted(items))
        self.assertTrue(225 <= budget.tokens <= 450)
        self.assertGreater(min(sizes[:-1]), 8)
        self.assertIn("out of memory", said[0])

    def test_little_padding_and_no_tiny_batches(self):
        lengths = np.random.default_rng(0).lognormal(5.5, 0.6, 3000).astype(int).tolist()
        groups = [group for group, _ in Budget(8192, print).run(lengths, lambda n: n, lambda group: group)]
        padded = [len(group) * max(group) for group in groups]
        self.assertLess(1 - sum(lengths) / sum(padded), 0.05)
        self.assertLessEqual(max(padded), 8192)
        self.assertGreater(min(padded[:-1]), 8192 // 8)
        self.assertEqual(sorted(n for group in groups for n in group), sorted(lengths))

    def test_other_errors_are_not_swallowed(self):
        with self.assertRaises(RuntimeError):
            list(Budget(10, print).run([1], lambda n: n, mock.Mock(side_effect=RuntimeError("shape"))))

    def test_a_document_that_never_fits_is_an_error(self):
        with self.assertRaises(MemoryError):
            list(Budget(64, lambda _: None).run([8] * 9, lambda n: n, mock.Mock(side_effect=MemoryError())))

    def test_run_survives_out_of_memory(self):
        path, plain, out = self.lines(PROMPTS), self.out(), self.out()
        self.assertEqual(self.extract(path, plain)[0], 0)
        real = Capture.run

        def run(capture, group, rows):
            if len(group) * max(map(len, group)) > 200:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return real(capture, group, rows)
        with mock.patch.object(Capture, "run", run):
            status, printed = self.extract(path, out)
        self.assertEqual(status, 0, printed)
        self.assertIn("out of memory", printed)
        self.assertEqual([d["id"] for d in self.read(out)[0]], [d["id"] for d in self.read(plain)[0]])


@needs_torch
class BadInput(Case):
    def refused(self, entries, text, *options):
        path = self.lines(entries)
        status, printed = self.extract(path, self.out(), *options)
        self.assertEqual(status, 2, printed)
        self.assertIn(text.replace("FILE", path), printed)

    def test_each_names_file_and_line(self):
        good = {"turns": ["x"]}
        self.refused([good, "{"], "FILE:2: not JSON")
        self.refused([good, "[1]"], "FILE:2: expected a JSON object")
        self.refused([{"text": "x"}], "FILE:1: has none of")
        self.refused([{"turns": []}], "FILE:1: `turns`")
        self.refused([{"messages": [{"role": "user"}]}], "FILE:1: message 0")
        self.refused([{"messages": [{"role": "system", "content": ""}]}], "FILE:1: the last message")
        self.refused([{"input_ids": [1, 2]}], "FILE:1: `input_ids` without `loss_mask`")
        self.refused([{"input_ids": [1, 2], "loss_mask": [1]}], "FILE:1: 2 input_ids but 1 loss_mask")
        self.refused([{"input_ids": [1, 2], "loss_mask": [1, 2]}], "FILE:1: `loss_mask` holds 2")
        self.refused([{"input_ids": [1, 2.5], "loss_mask": [1, 1]}], "FILE:1: `input_ids` must be")
        self.refused([good, {"input_ids": [1, 260], "loss_mask": [1, 1]}], "FILE:2: token id 260")
        self.refused([{"input_ids": [1], "loss_mask": [0]}], "no document has a supervised token")
        self.refused([], "no documents")

    def test_what_json_can_say_and_no_text_or_token_is(self):
        good = {"turns": ["x"]}
        self.refused([good, '{"input_ids": [' + 20 * "9" + '], "loss_mask": [1]}'], "FILE:2: `input_ids` holds a number")
        self.refused([good, '{"input_ids": [' + 5000 * "9" + '], "loss_mask": [1]}'], "FILE:2: not JSON that can be read")
        self.refused(["[" * 100000], "FILE:1: not JSON that can be read")
        self.refused([{"input_ids": [True], "loss_mask": [1]}], "FILE:1: `input_ids` must be a flat list of integers")
        self.refused([good, '{"turns": ["a\\ud800b"]}'], "FILE:2: holds half of a character")
        self.refused([{"turns": ["x"], "system": None}], "FILE:1: `system` must be a string")
        for content in (None, 5, {"text": "x"}):
            self.refused([{"messages": [{"role": "user", "content": content}]}], "FILE:1: message 0: `content` must be")
        path = self.lines([good])
        with open(path, "ab") as file:
            file.write(b'{"turns": ["caf\xe9"]}\n')
        status, printed = self.extract(path, self.out())
        self.assertEqual(status, 2, printed)
        self.assertIn(f"{path}:2: not UTF-8 text: invalid continuation byte at byte 16 of the line", printed)

    def test_pairs_of_surrogates_and_parts_are_text(self):
        parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        path = self.lines(['{"turns": ["\\ud83d\\ude00"]}', {"messages": parts}])
        status, printed = self.extract(path, self.out())
        self.assertEqual(status, 0, printed)

    def test_a_model_that_does_not_load(self):
        spoiled = os.path.join(self.folder, "spoiled")
        for name, content, text in (("config.json", b"{", "Transformers cannot load its tokenizer"),
                                    ("tokenizer.json", b"x", "Transformers cannot load its tokenizer"),
                                    ("model.safetensors", b"x" * 5000, "Transformers cannot load its weights")):
            shutil.copytree(self.model, spoiled)
            with open(os.path.join(spoiled, name), "wb") as file:
                file.write(content)
            self.refused([{"turns": ["x"]}], f"{spoiled}: {text}", "--model", spoiled)
            shutil.rmtree(spoiled)

    def test_a_place_that_cannot_be_written(self):
        status, printed = self.extract(self.lines([{"turns": ["x"]}]), os.path.join(self.model, "config.json", "out"))
        self.assertEqual(status, 1, printed)
        self.assertIn("config.json/out: Not a directory", printed)
        self.assertNotIn("Traceback", printed)

    def test_options(self):
        self.refused([{"turns": ["x"]}], "--layer-ids [3, 1]", "--layer-ids", "3,1")
        self.refused([{"turns": ["x"]}], "--samples above 1", "--samples", "2")
        self.refused([{"turns": ["x"]}], "leaves no prompt", "--split-val", "1")
        for name, value in (("--max-tokens", "0"), ("--limit", "-1"), ("--threads", "0"), ("--temperature", "nan"),
                            ("--temperature", "-1"), ("--split-val", "nan"), ("--split-val", "-1"), ("--split-val", "1.5"),
                            ("--split-val", "inf"), ("--shard-bytes", "0"), ("--shard-bytes", "nan"), ("--device", "none")):
            self.refused([{"turns": ["x"]}], name, name, value)
        status, printed = self.extract(os.path.join(self.folder, "none.jsonl"), self.out())
        self.assertEqual(status, 2)
        self.assertIn("none.jsonl: No such file", printed)


if __name__ == "__main__":
    if torch is None:
        print("skipped: needs torch and transformers (tools/requirements.txt)")
        sys.exit(77)
    unittest.main()
