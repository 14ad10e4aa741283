"""tools/extract.py on other models than a Llama: small random ones of each family, spread over devices, in float8 shards,
and what it says of memory.

    python -m unittest discover -s tools/tests        (all of this is skipped without torch)
"""

import os
import subprocess
import tempfile
import types
import unittest
from importlib.util import find_spec
from unittest import mock

import h5py
import numpy as np
from test_extract import PROMPTS, Case, needs_torch, torch

if torch is not None:
    import tiny_llama
    import tiny_models
    from dtrain_tools import feeding, float8, memory
    from dtrain_tools.documents import InputError
    from dtrain_tools.shards import Float8
    from dtrain_tools.target_model import Capture, Target
    from dtrain_tools.tensor_file import bf16_to_float, read_tensors

IDS = list(range(5, 45))


@needs_torch
class Families(unittest.TestCase):
    """States, logits and norm of each, against what Transformers itself gives."""

    def target(self, name):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        torch.manual_seed(2)
        tiny_models.save(name, temporary.name)
        return Target(temporary.name, None, "cpu", "float32")

    def compare(self, name):
        target = self.target(name)
        layers = [1, 3]
        target.check_logits(IDS)
        target.check_states(IDS, layers)
        with Capture(target, layers) as capture:
            (states, teacher), (padded, _) = capture.run([IDS, IDS[:23]], 16)
        self.assertEqual(len(padded), 23)
        with torch.no_grad():
            out = target.model(input_ids=torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
        values = torch.from_numpy(bf16_to_float(states))
        for plane, layer in enumerate(layers):
            expected = out.hidden_states[layer + 1][0]
            error = (values[:, plane] - expected).norm(dim=1) / expected.norm(dim=1)
            self.assertLess(float(error.max()), 2**-8, (name, layer))
            alike = (bf16_to_float(padded)[:, plane] - expected[:23].numpy())
            self.assertLess(np.linalg.norm(alike) / float(expected[:23].norm()), 2**-7, (name, layer, "padded"))
        np.testing.assert_array_equal(teacher[0], out.logits[0].argmax(dim=1).numpy())
        np.testing.assert_allclose(teacher[2], torch.logsumexp(out.logits[0].float(), dim=1).numpy(), rtol=1e-4, atol=1e-4)

    def test_text(self):
        for name in ("qwen3", "olmo2", "glm4"):
            with self.subTest(name):
                self.compare(name)

    def test_mixtures_of_experts(self):
        for name in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"):
            with self.subTest(name):
                self.compare(name)

    def test_hybrids(self):
        for name in ("qwen3_next", "nemotron_h", "falcon_h1", "lfm2", "qwen3_5"):
            with self.subTest(name):
                self.compare(name)

    def test_scaled_embeddings_and_capped_logits(self):
        for name in ("gemma", "gemma2", "gemma3_text", "gemma4_text", "granite"):
            with self.subTest(name):
                self.compare(name)

    def test_text_models_of_multimodal_ones(self):
        for name in ("gemma3", "qwen2_5_vl", "qwen3_vl", "llava", "mistral3"):
            with self.subTest(name):
                self.compare(name)

    def test_refused(self):
        for name, text in (("cohere", "its final norm is a CohereLayerNorm, not an RMS norm"),
                           ("starcoder2", "its final norm is a LayerNorm, not an RMS norm"),
                           ("gemma3n_text", r"states of shape \[4, 1, 40, 32\] for \[1, 40\] tokens"),
                           ("mamba", "the output of layer 1 is not hidden_states"),
                           ("gpt2", "its layers is not where decoder models have it")):
            with self.subTest(name), self.assertRaisesRegex(InputError, text):
                self.target(name).check_states(IDS, [1, 3])

    def test_states_of_another_layer_are_refused(self):
        target = self.target("qwen3")
        target.layers = list(target.layers)
        target.layers[1], target.layers[2] = target.layers[2], target.layers[1]
        with self.assertRaisesRegex(InputError, "the output of layer 1 is not"):
            target.check_states(IDS, [1, 3])

    def test_a_norm_that_stores_something_else_is_refused(self):
        target = self.target("qwen3")
        with torch.no_grad():
            target.norm.weight.add_(torch.rand_like(target.norm.weight))
        target.weights_of = lambda module: {"weight": module.weight * 1.1}
        with self.assertRaisesRegex(InputError, "its final norm is a Qwen3RMSNorm"):
            target.check_states(IDS, [1, 3])


@needs_torch
@unittest.skipIf(not find_spec("accelerate"), "needs accelerate")
class Spread(Case):
    """Parts of the model on disk: the states are those of the whole one."""

    def test_states_and_target_directory(self):
        plain = Target(self.model, None, "cpu", "float32")
        places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "disk",
                  **{f"model.layers.{n}": "disk" if n > 2 else "cpu" for n in range(6)}}
        spread = Target(self.model, None, "cpu", "float32", {"device_map": places, "offload_folder": self.out()})
        self.assertTrue(spread.head.weight.is_meta)
        results = []
        for target in (plain, spread):
            with Capture(target, [1, 3, 4]) as capture:
                results.append(capture.run([IDS, IDS[:9]], 7))
            target.check_logits(IDS)
            target.check_states(IDS, [1, 3, 4])
            target.write_target_directory(os.path.join(self.folder, f"target-{len(results)}"))
        for (ours, teacher), (theirs, expected) in zip(*results):
            np.testing.assert_array_equal(ours, theirs)
            for a, b in zip(teacher, expected):
                np.testing.assert_array_equal(a, b)
        ours, theirs = (read_tensors(os.path.join(self.folder, f"target-{n}", "head.safetensors")) for n in (1, 2))
        self.assertEqual(sorted(ours), sorted(theirs))
        for name in ours:
            np.testing.assert_array_equal(ours[name][1], theirs[name][1])

    def test_whole_run(self):
        path = self.lines(PROMPTS[:4])
        plain, spread = self.out(), self.out()
        self.assertEqual(self.extract(path, plain)[0], 0)
        limits = ("--device-map", "auto", "--max-memory", "cpu=0.15MB", "--offload", self.out())
        status, printed = self.extract(path, spread, *limits)
        self.assertEqual(status, 0, printed)
        for a, b in zip(self.read(plain)[0], self.read(spread)[0]):
            self.assertEqual(a["crc"], b["crc"])


@needs_torch
class Float8Shards(Case):
    def test_codes_are_the_nearest_of_the_states(self):
        path, plain, out = self.lines(PROMPTS), self.out(), self.out()
        self.assertEqual(self.extract(path, plain)[0], 0)
        status, printed = self.extract(path, out, "--planes", "float8")
        self.assertEqual(status, 0, printed)
        with h5py.File(os.path.join(plain, "train-00000.h5")) as a, h5py.File(os.path.join(out, "train-00000.h5")) as b:
            self.assertEqual(b.attrs["dtype"], "float8_e4m3")
            bits = a["hidden_states"][:]
            expected = float8.quantise_bits(bits, 3)
            np.testing.assert_array_equal(b["hidden_states"][:], expected.codes)
            np.testing.assert_array_equal(b["scales"][:], expected.scales)
            np.testing.assert_array_equal(b["last_hidden"][:], bits[:, -1])
            for name in ("teacher_top1", "teacher_lse", "doc_id"):
                np.testing.assert_array_equal(a[name][:], b[name][:])

    def test_quantised_by_torch_and_by_numpy(self):
        torch.manual_seed(4)
        states = (torch.randn(50, 3, 65) * torch.exp(3 * torch.randn(50, 3, 1))).to(torch.bfloat16)
        states[7, 1] = 0
        codes, scales = float8.quantise(states)
        other = float8.quantise_bits(states.view(torch.int16).numpy().view(np.uint16), 3)
        np.testing.assert_array_equal(codes.numpy(), other.codes)
        np.testing.assert_array_equal(scales.numpy(), other.scales)
        found = float8.dequantise(Float8(codes.numpy(), scales.numpy(), None))
        values = states.float().numpy()
        step = np.maximum(np.abs(values) / 16, np.abs(values).max(axis=2, keepdims=True) / 448 * 2**-10)
        self.assertTrue((np.abs(found - values) <= step * 1.0001).all())


DTRAIN = os.environ.get("DTRAIN", "")


@needs_torch
@unittest.skipIf(not os.path.exists(DTRAIN), "needs $DTRAIN, the built program")
class Trainer(Case):
    """What is extracted of a family is what the trainer computes: its data check recomputes the teacher from the target
    directory, and knows norms, scales and tied heads by model_type."""

    def check(self, name, *options):
        model, out = self.out(), self.out()
        torch.manual_seed(3)
        tiny_models.save(name, model)
        tiny_llama.make_tokenizer().save_pretrained(model)
        random = np.random.default_rng(5)
        path = self.lines([{"input_ids": random.integers(3, 250, n).tolist(), "loss_mask": [1] * n} for n in (40, 70, 25)])
        with mock.patch.object(self, "model", model):
            status, printed = self.extract(path, out, "--layer-ids", "1,3", *options)
        self.assertEqual(status, 0, printed)
        done = subprocess.run([DTRAIN, "data", "check", "--target", os.path.join(out, "target"),
                               os.path.join(out, "train-00000.h5")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        return done.returncode, done.stdout + printed

    def test_teacher_is_recomputed(self):
        for name, *options in (("qwen3",), ("qwen3", "--planes", "float8"), ("gemma",), ("gemma3_text",), ("granite",),
                               ("qwen3_next",), ("gpt_oss",), ("qwen2_5_vl",), ("nemotron_h",)):
            with self.subTest(name):
                status, printed = self.check(name, *options)
                self.assertEqual(status, 0, printed)
                self.assertRegex(printed, r"teacher recomputed at \d+ positions: top-1 is the same at (100|9\d)")

    def test_capped_logits_are_told(self):
        status, printed = self.check("gemma2")
        self.assertIn("final_logit_softcapping", printed)
        self.assertNotEqual(status, 0)


@needs_torch
class RotaryOfABatch(Case):
    """Models whose rotary embedding goes by the longest text of a batch: texts as long as that are cut or refused."""

    def test_states_do_not_depend_on_the_batch(self):
        random = np.random.default_rng(6)
        path = self.lines([{"input_ids": random.integers(3, 250, n).tolist(), "loss_mask": [1] * n}
                           for n in (12, 50, 60, 64, 66, 90)])
        for name, kind in (("phi3_longrope", "longrope"), ("llama_dynamic", "dynamic")):
            model = self.out()
            torch.manual_seed(3)
            tiny_models.save(name, model)
            tiny_llama.make_tokenizer().save_pretrained(model)
            with self.subTest(name), mock.patch.object(self, "model", model):
                status, printed = self.extract(path, self.out(), "--layers", "2", "--max-tokens", "65")
                self.assertEqual(status, 2, printed)
                self.assertIn(f"beyond 64 tokens this model's rotary embedding ({kind})", printed)
                outs = [self.out(), self.out()]
                for out, tokens in zip(outs, ("4096", "1")):
                    status, printed = self.extract(path, out, "--layers", "2", "--batch-tokens", tokens)
                    self.assertEqual(status, 0, printed)
                    self.assertIn("2 documents cut to 64 tokens", printed)
                for together, alone in zip(*(self.read(out)[0] for out in outs)):
                    together, alone = (bf16_to_float(document["hidden_states"]) for document in (together, alone))
                    self.assertLess(np.linalg.norm(together - alone), 0.01 * np.linalg.norm(alone))

    def test_a_spool_of_longer_documents_is_refused(self):
        config = tiny_models.text_config(*tiny_models.TEXT["phi3_longrope"])
        target, order = types.SimpleNamespace(config=config), types.SimpleNamespace(tokens=[12, 65])
        with self.assertRaisesRegex(InputError, "run.yaml: a document of 65 tokens.*data.seq_len 64 cuts them"):
            feeding.check_lengths(target, order, "run.yaml")
        feeding.check_lengths(target, types.SimpleNamespace(tokens=[12, 64]), "run.yaml")
        config = tiny_models.text_config(*tiny_models.TEXT["qwen3"])
        feeding.check_lengths(types.SimpleNamespace(config=config), order, "run.yaml")


@needs_torch
class Memory(unittest.TestCase):
    def config(self, **values):
        plain = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32,
                 "num_hidden_layers": 6, "vocab_size": 260}
        return types.SimpleNamespace(**{**plain, **values})

    def test_a_token_in_the_cache(self):
        self.assertEqual(memory.kv_token_bytes(self.config(), 2), 2 * 6 * 2 * 8 * 2)
        hybrid = self.config(layer_types=["linear_attention", "full_attention"] * 3)
        self.assertEqual(memory.kv_token_bytes(hybrid, 2), 2 * 3 * 2 * 8 * 2)
        latent = self.config(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=6)
        self.assertEqual(memory.kv_token_bytes(latent, 2), 6 * 4 * 18 * 2)

    def test_cache_of_a_batch_is_what_is_allocated(self):
        """The bytes of a real cache after the largest batch that the budget lets through."""
        from dtrain_tools.budget import Budget
        from dtrain_tools.generate import Generation
        with tempfile.TemporaryDirectory() as folder:
            tiny_llama.save(folder)
            target = Target(folder, None, "cpu", "float32")
        lengths, new, budget = [3, 9, 30, 31, 4, 12, 28], 10, 130
        groups = [group for group, _ in Budget(budget, print).run(lengths, lambda n: n + new, lambda group: group)]
        longest = max(lengths) + new
        documents = memory.batch_of(budget, longest)
        self.assertEqual(len(groups[0]), documents)
        cache = None

        def keep(*args, original=target.decoder.forward, **options):
            nonlocal cache
            cache = options["past_key_values"]
            return original(*args, **options)
        target.decoder.forward = keep
        Generation(target, [[1] * n for n in groups[0]], [None] * documents, [], new, 0).run()
        held = sum(buffer.numel() * buffer.element_size() for layer in cache.layers for buffer in layer.buffers)
        self.assertEqual(held, documents * longest * memory.kv_token_bytes(target.config, 4))

    def test_sum(self):
        args = types.SimpleNamespace(batch_tokens=1000, teacher_rows=10, answer_tokens=500)
        parts = memory.extraction_parts(self.config(), 3, args, 7000, 2000, 150, 2)
        size = {part.name: part.bytes for part in parts}
        self.assertEqual(size, {"weights": 7000, "states": 4 * 2000 * 32 * 2, "teacher": 2 * 10 * 260 * 4,
                                "KV cache": 3 * 150 * 2 * 6 * 2 * 8 * 2})
        self.assertEqual(memory.needed(parts), 7000 + max(size["KV cache"], size["states"] + size["teacher"]))

    def test_sizes(self):
        for text, size in (("2GiB", 2**31), ("512 MiB", 2**29), ("1.5kB", 1500), ("20000", 20000), ("7B", 7)):
            self.assertEqual(memory.byte_size(text), size)
        for text in ("", "GiB", "2XB", "nan", "inf GiB"):
            with self.assertRaises(ValueError):
                memory.byte_size(text)

    def test_limits(self):
        self.assertEqual(memory.parse_limits("0=70GiB,cpu=1.5GB"), {0: 70 * 2**30, "cpu": 1500000000})
        for text in ("0", "0=70", "cpu="):
            with self.assertRaises(ValueError):
                memory.parse_limits(text)


@needs_torch
class MemoryIsTold(Case):
    def test_before_the_model_is_loaded(self):
        path = self.lines(PROMPTS[:3])
        status, printed = self.extract(path, self.out())
        self.assertEqual(status, 0, printed)
        self.assertLess(printed.index("KV cache"), printed.index("loading the target"))
        self.assertIn("4 planes x 16,384 tokens x 32 x 2 bytes", printed)

    def test_weights_that_do_not_fit(self):
        with mock.patch.object(memory, "device_bytes", return_value=1000):
            status, printed = self.extract(self.lines(PROMPTS[:1]), self.out())
        self.assertEqual(status, 2, printed)
        self.assertIn("of weights do not fit on cpu; --device-map auto", printed)


if __name__ == "__main__":
    unittest.main()
