"""examples/tiny: the numpy forward pass equals torch's, and the shards hold what they say.

    python -m unittest discover -s tools/tests      (comparisons with torch are skipped without it)
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

import h5py
import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TINY = os.path.join(ROOT, "examples", "tiny")
sys.path[:0] = [os.path.join(ROOT, "tools"), TINY]

import make_shards  # noqa: E402
from dtrain_tools.crc32c import crc32c  # noqa: E402
from dtrain_tools.tensor_file import bf16_to_float, float_to_bf16, read_tensors  # noqa: E402
from tiny_model import TinyModel  # noqa: E402

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError:
    torch = None

MODEL = os.path.join(TINY, "model")


class Crc32c(unittest.TestCase):
    def test_known_value(self):
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)

    def test_any_split_and_length_agree_with_the_plain_loop(self):
        data = np.random.default_rng(0).integers(0, 256, 512 * 33 + 5, dtype=np.uint8)
        for length in (0, 1, 511, 512, 513, 1536, len(data)):
            crc = 0xFFFFFFFF
            for byte in data[:length].tolist():
                crc ^= byte
                for _ in range(8):
                    crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
            crc ^= 0xFFFFFFFF
            self.assertEqual(crc32c(data[:length]), crc, length)
            self.assertEqual(crc32c(data[:length // 3], data[length // 3:length]), crc, length)


class Bf16(unittest.TestCase):
    def test_rounds_to_nearest_even(self):
        values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.5, np.inf, 3.4e38], dtype=np.float32)
        expected = [1.0, 1.0, 1.0 + 2**-6, -1.5, np.inf, np.inf]
        np.testing.assert_array_equal(bf16_to_float(float_to_bf16(values)), np.float32(expected))
        self.assertTrue(np.isnan(bf16_to_float(float_to_bf16(np.array([np.nan]))))[0])


@unittest.skipIf(torch is None, "needs torch and transformers")
class NumpyForward(unittest.TestCase):
    def test_states_and_logits_equal_torch(self):
        tiny = TinyModel(MODEL)
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        tokens = np.random.default_rng(3).integers(0, 258, (3, 40))
        inner = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, args: inner.append(args[0]))
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(tokens), output_hidden_states=True)
        hook.remove()
        cache = tiny.new_cache(3, 40)
        for at in range(40):
            states, logits = tiny.step(tokens[:, at], at, cache, [1, 2, 3])
            planes = [expected.hidden_states[i + 1][:, at] for i in (1, 2, 3)] + [inner[0][:, at]]
            np.testing.assert_allclose(states, torch.stack(planes, 1).numpy(), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(logits, expected.logits[:, at].numpy(), rtol=1e-4, atol=1e-4)

    def test_tokenizer_is_bytes(self):
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        text = "Ann has 3 apples.\x00\x7f"
        self.assertEqual(tokenizer.encode(text, add_special_tokens=False), list(text.encode()))
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "a "}], add_generation_prompt=True)
        ids = ids["input_ids"] if hasattr(ids, "keys") else ids
        self.assertEqual(ids, [256, 97, 32])


class Shards(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        with mock.patch.object(sys, "argv", ["make_shards.py", "--out", cls.folder.name, "--train", "12",
                                             "--val", "8", "--tokens", "200"]), \
                contextlib.redirect_stdout(io.StringIO()):
            make_shards.main()

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def shard(self, name):
        return h5py.File(os.path.join(self.folder.name, "shards", name), "r")

    def test_layout(self):
        with self.shard("val-0.h5") as file:
            self.assertEqual(file.attrs["format"], "dtrain-features")
            self.assertEqual(list(file.attrs["target_layer_ids"]), [1, 2, 3])
            for name, dataset in file.items():
                self.assertIsNone(dataset.chunks, name)
                self.assertIsNotNone(dataset.id.get_offset(), name)
                if dataset.size * dataset.dtype.itemsize >= 4096:
                    self.assertEqual(dataset.id.get_offset() % 4096, 0, name)

    def test_checksums_and_masks(self):
        seen = set()
        for shard in ("train-0.h5", "val-0.h5"):
            with self.shard(shard) as file:
                offsets = file["doc_offsets"][:]
                for d, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:])):
                    ids, mask = file["input_ids"][begin:end], file["loss_mask"][begin:end]
                    self.assertEqual(crc32c(ids, mask, file["hidden_states"][begin:end]), file["doc_crc32c"][d])
                    start = int(np.argmax(mask))
                    self.assertTrue(0 < start and mask[start:].all() and not mask[:start].any())
                    seen.add(int(file["doc_id"][d]))
        self.assertEqual(len(seen), 20)

    def test_validation_documents_are_greedy_and_columns_match_the_head(self):
        head = read_tensors(os.path.join(self.folder.name, "target", "head.safetensors"))
        embedding, norm = (bf16_to_float(head[n][1]) for n in ("embed_tokens.weight", "norm.weight"))
        with self.shard("val-0.h5") as file:
            ids, mask, top1 = file["input_ids"][:], file["loss_mask"][:], file["teacher_top1"][:]
            first = np.isin(np.arange(len(ids)), file["doc_offsets"][:])
            generated = np.flatnonzero((mask == 1) & ~first)
            np.testing.assert_array_equal(ids[generated], top1[generated - 1])
            last = bf16_to_float(file["hidden_states"][:, -1])
            normed = last / np.sqrt((last * last).mean(1, keepdims=True) + 1e-6) * norm
            logits = normed @ embedding.T
            lse = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
            np.testing.assert_allclose(lse, file["teacher_lse"][:], atol=0.1, rtol=0.01)
            np.testing.assert_allclose(logits.max(1), file["teacher_top1_logit"][:], atol=0.1, rtol=0.01)

    def test_target_directory(self):
        with open(os.path.join(self.folder.name, "target", "config.json"), encoding="utf-8") as file:
            self.assertTrue(json.load(file)["tie_word_embeddings"])
        head = read_tensors(os.path.join(self.folder.name, "target", "head.safetensors"))
        self.assertEqual(sorted(head), ["embed_tokens.weight", "norm.weight"])


if __name__ == "__main__":
    unittest.main()
