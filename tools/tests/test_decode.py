"""tools/decode.py on a small random Llama and random drafters.

    python -m unittest discover -s tools/tests        (all of this is skipped without torch)
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [TOOLS, os.path.dirname(os.path.abspath(__file__))]

try:
    import torch
    from safetensors.torch import save_file

    import decode
    import extract
    import tiny_llama
    from dtrain_tools import speculation
    from dtrain_tools.dflash_drafter import Drafter, rope_frequencies
    from dtrain_tools.target_model import Target
except ImportError:
    torch = None

BLOCK = 6
CONFIG = {"block_size": BLOCK, "dflash_config": {"mask_token_id": 259, "target_layer_ids": [1, 2, 3]},
          "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
          "layer_types": ["full_attention", "full_attention"], "sliding_window": None}


def save_drafter(folder, **changes):
    config = {**CONFIG, **changes}
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    torch.manual_seed(2)
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv, wide = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    shapes = {"fc": (hidden, 3 * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        shapes.update({f"layers.{i}.{name}": shape for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * dim, hidden), "self_attn.k_proj": (kv * dim, hidden),
            "self_attn.v_proj": (kv * dim, hidden), "self_attn.o_proj": (hidden, heads * dim),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,), "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}.items()})
    tensors = {f"{name}.weight": (1 + 0.1 * torch.randn(shape)) if len(shape) == 1 else 0.3 * torch.randn(shape)
               for name, shape in shapes.items()}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
              os.path.join(folder, "model.safetensors"))
    return folder


@unittest.skipIf(torch is None, "needs torch and transformers")
class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = cls.temporary.name
        cls.model = os.path.join(cls.folder, "model")
        tiny_llama.save(cls.model)
        cls.target = Target(cls.model, device="cpu")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def drafter(self, **changes):
        folder = save_drafter(tempfile.mkdtemp(dir=self.folder), **changes)
        return Drafter(folder, self.target, torch.float32)


class Block(Case):
    def states(self, drafter, features, anchor=5):
        drafter.forget()
        drafter.see(features)
        return drafter.block(anchor)

    def test_context_may_come_in_pieces(self):
        drafter, features = self.drafter(), torch.randn(11, 3, 32)
        whole = self.states(drafter, features)
        drafter.forget()
        for piece in features.split([4, 1, 6]):
            drafter.see(piece)
        torch.testing.assert_close(drafter.block(5), whole, rtol=1e-5, atol=1e-5)

    def test_whole_block_against_plain_attention(self):
        """One layer written out with torch's own attention and a mask."""
        drafter, features = self.drafter(num_hidden_layers=1, layer_types=["full_attention"]), torch.randn(7, 3, 32)
        w = {name.replace("layers.0.", "").replace(".weight", ""): t for name, t in drafter.weights.items()}
        norm = lambda x, name: torch.nn.functional.rms_norm(x, x.shape[-1:], w[name], 1e-6)  # noqa: E731
        angles = torch.arange(7 + BLOCK)[:, None] * (10000.0 ** (-torch.arange(4) / 4))
        turn = torch.polar(torch.ones_like(angles), angles)

        def rope(x, turn):  # rotate-half as a product of complex numbers
            pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous()) * turn[:, None]
            return torch.cat([pairs.real, pairs.imag], -1)
        context = norm(features.flatten(1) @ w["fc"].T, "hidden_norm")
        x = self.target.embedding(torch.tensor([5] + [259] * (BLOCK - 1)))
        n = norm(x, "input_layernorm")
        both = torch.cat([context, n])
        q = rope(norm((n @ w["self_attn.q_proj"].T).view(BLOCK, 4, 8), "self_attn.q_norm"), turn[7:])
        k = rope(norm((both @ w["self_attn.k_proj"].T).view(-1, 2, 8), "self_attn.k_norm"), turn)
        v = (both @ w["self_attn.v_proj"].T).view(-1, 2, 8)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True)
        x = x + out[0].transpose(0, 1).flatten(1) @ w["self_attn.o_proj"].T
        m = norm(x, "post_attention_layernorm")
        x = x + (torch.nn.functional.silu(m @ w["mlp.gate_proj"].T) * (m @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        torch.testing.assert_close(self.states(drafter, features), norm(x, "norm"), rtol=1e-4, atol=1e-4)

    def test_window_is_measured_from_the_query(self):
        drafter = self.drafter(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=4)
        features = torch.randn(9, 3, 32)  # the anchor is position 9: slot k sees positions above 5 + k
        before = self.states(drafter, features)
        for position, slots in ((5, []), (6, [0]), (7, [0, 1]), (8, [0, 1, 2])):
            changed = features.clone()
            changed[position] += 1
            differs = (self.states(drafter, changed) != before).any(dim=1).nonzero().flatten().tolist()
            self.assertEqual(differs, slots, position)

    def test_sliding_layers_are_causal_in_the_block_and_full_layers_are_not(self):
        features = torch.randn(9, 3, 32)
        for kind, same in (("sliding_attention", True), ("full_attention", False)):
            drafter = self.drafter(layer_types=[kind] * 2, sliding_window=64)
            whole = self.states(drafter, features)
            drafter.block_size = 3
            close = torch.allclose(self.states(drafter, features), whole[:3], rtol=1e-5, atol=1e-5)
            self.assertEqual(close, same, kind)

    def test_rope_scalings(self):
        plain, _ = rope_frequencies(CONFIG)
        linear, factor = rope_frequencies({**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 4}})
        torch.testing.assert_close(linear, plain / 4)
        self.assertEqual(factor, 1.0)
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        for dim in (8, 64):
            ours = rope_frequencies({**CONFIG, "head_dim": dim, "rope_scaling": yarn})
            config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim,
                                 max_position_embeddings=2048, rope_parameters={**yarn, "rope_theta": 10000.0})
            theirs = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
            torch.testing.assert_close(ours[0].float(), theirs[0], rtol=1e-5, atol=0)
            self.assertAlmostEqual(ours[1], theirs[1], places=6)


class Decoding(Case):
    PROMPTS = [[tiny_llama.START, 104, 105], list(b"some longer words"), [120]] if torch else []

    def test_text_is_the_targets_own(self):
        drafter = self.drafter()
        runner = speculation.Runner(self.target, drafter.layer_ids, False)
        for prompt in self.PROMPTS:
            expected, _ = speculation.greedy(runner, prompt, 40, {tiny_llama.END})
            text, blocks = speculation.speculate(runner, drafter, prompt, 40, {tiny_llama.END})
            self.assertEqual(text, expected)
            self.assertEqual(blocks[0].anchor, len(prompt))

    def test_drafts_that_are_right_are_accepted_up_to_the_end(self):
        """A drafter that knows the text, wrong in its fourth draft."""
        drafter = self.drafter()
        runner = speculation.Runner(self.target, drafter.layer_ids, False)
        for prompt in self.PROMPTS:
            expected, _ = speculation.greedy(runner, prompt, 32, set())

            def draft(_, prompt=prompt, expected=expected):
                at = drafter.length - len(prompt) + 1
                ahead = (expected + [0] * BLOCK)[at:at + BLOCK - 1]
                return ahead[:3] + [(ahead[3] + 1) % 250, ahead[4]]
            with mock.patch.object(drafter, "draft", draft):
                text, blocks = speculation.speculate(runner, drafter, prompt, 32, set())
            self.assertEqual(text, expected)
            self.assertEqual([b.accepted for b in blocks], [3] * 7 + [3])
            self.assertEqual([b.anchor for b in blocks], [len(prompt) + 4 * i for i in range(8)])
            self.assertEqual(blocks[-1].scored, 3)

    def test_end_token_ends_the_text_inside_a_block(self):
        drafter = self.drafter()
        runner = speculation.Runner(self.target, drafter.layer_ids, False)
        prompt = self.PROMPTS[1]
        endless, _ = speculation.greedy(runner, prompt, 12, set())
        end = endless[9]
        first = endless.index(end)
        expected, _ = speculation.greedy(runner, prompt, 12, {end})
        self.assertEqual(expected, endless[:first + 1])
        with mock.patch.object(drafter, "draft", lambda _: (endless + [0] * 9)[drafter.length - len(prompt) + 1:][:5]):
            text, blocks = speculation.speculate(runner, drafter, prompt, 12, {end})
        self.assertEqual(text, expected)
        self.assertEqual(blocks[-1].anchor + blocks[-1].scored, len(prompt) + first)

    def run_decode(self, *options):
        printed = io.StringIO()
        with mock.patch.object(sys, "argv", ["decode.py", "--model", self.model, "--device", "cpu", *options]), \
                contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return decode.main(), printed.getvalue()

    def test_shard_documents_and_blocks_file(self):
        prompts = os.path.join(self.folder, "prompts.jsonl")
        with open(prompts, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"turns": [f"number {i}"]}) + "\n" for i in range(5))
        out = os.path.join(self.folder, "shards")
        with mock.patch.object(sys, "argv", ["extract.py", "--model", self.model, "--out", out, "--layers", "3",
                                             "--max-new-tokens", "20", "--device", "cpu", prompts]), \
                contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(extract.main(), 0)
        drafter = save_drafter(os.path.join(self.folder, "drafter"))
        blocks = os.path.join(self.folder, "blocks.jsonl")
        shard = os.path.join(out, "train-00000.h5")
        status, printed = self.run_decode("--drafter", drafter, "--shard", shard, "--blocks-out", blocks)
        self.assertEqual(status, 0, printed)
        self.assertIn("5 texts", printed)
        with open(blocks, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        import h5py
        with h5py.File(shard, "r") as file:
            offsets, mask = file["doc_offsets"][:], file["loss_mask"][:]
            for name, begin, end in zip(file["doc_id"][:], offsets[:-1], offsets[1:]):
                anchors = [(line["anchor"], line["accepted"]) for line in lines if line["doc_id"] == int(name)]
                at = int(np.argmax(mask[begin:end]))
                for anchor, accepted in anchors:
                    self.assertEqual(anchor, at)
                    at += accepted + 1
                self.assertGreaterEqual(at, end - begin - 1)
        status, printed = self.run_decode("--drafter", drafter, "--max-new-tokens", "9", prompts)
        self.assertEqual(status, 0, printed)
        self.assertIn("0 differences", printed)

    def test_a_file_that_is_no_shard_is_refused(self):
        drafter = save_drafter(os.path.join(self.folder, "for-no-shard"))
        status, printed = self.run_decode("--drafter", drafter, "--shard", __file__)
        self.assertEqual(status, 2, printed)
        self.assertIn("not a feature shard", printed)

    def test_faults_of_the_export_are_named(self):
        for changes, word in (({"rope_theta": None}, "rope_theta"), ({"block_size": None}, "block_size"),
                              ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
                              ({"sliding_window_non_causal": True}, "sliding_window_non_causal"),
                              ({"dflash_config": {"mask_token_id": 260, "target_layer_ids": [1, 2, 3]}}, "260"),
                              ({"dflash_config": {"mask_token_id": 259, "target_layer_ids": [1, 2, 9]}}, "layers"),
                              ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "layers.2")):
            folder = save_drafter(tempfile.mkdtemp(dir=self.folder), **changes)
            if "num_hidden_layers" in changes:  # config.json names a layer that the weights do not have
                save_drafter(folder)
                with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                    json.dump({**CONFIG, **changes}, file)
            status, printed = self.run_decode("--drafter", folder, __file__)
            self.assertEqual(status, 2, printed)
            self.assertIn(word, printed)


if __name__ == "__main__":
    if torch is None:
        print("skipped: needs torch and transformers (tools/requirements.txt)")
        sys.exit(77)
    unittest.main()
