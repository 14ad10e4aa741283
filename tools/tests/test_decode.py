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
    from safetensors.torch import load_file, save_file

    import decode
    import extract
    import tiny_llama
    from dtrain_tools import speculation
    from dtrain_tools.documents import InputError
    from dtrain_tools.dflash_drafter import Drafter
    from dtrain_tools.exported_drafter import open_drafter
    from dtrain_tools.rotary import rope_frequencies
    from dtrain_tools.target_model import Target
except ImportError:
    torch = None

BLOCK = 6
GREEDY = speculation.Greedy() if torch else None
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


def save_speculators(folder, target, kept=None, **changes):
    """The same drafter in speculators' layout; kept: target ids of a draft vocabulary."""
    save_drafter(folder, **changes)
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    dflash, block = config.pop("dflash_config"), config.pop("block_size")
    config.update(model_type="qwen3", vocab_size=target.vocab_size)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({"speculators_model_type": "dflash", "transformer_layer_config": config, "block_size": block,
                   "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
                   "mask_token_id": dflash["mask_token_id"], "sample_from_anchor": False,
                   "draft_vocab_size": len(kept or range(target.vocab_size))}, file)
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    head = target.head.weight if kept is None else target.head.weight[kept]
    tensors.update({"embed_tokens.weight": target.embedding.weight.clone(), "lm_head.weight": head.clone()})
    if kept:
        tensors["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
        tensors["t2d"][kept] = True
    save_file(tensors, path)
    return folder


def save_dspark(folder, target, from_anchor, rank=5, kept=None):
    """The same drafter with a Markov head."""
    save_speculators(folder, target, kept)
    path, config_path = os.path.join(folder, "model.safetensors"), os.path.join(folder, "config.json")
    with open(config_path, encoding="utf-8") as file:
        config = json.load(file)
    config.update(speculators_model_type="dspark", markov_rank=rank, sample_from_anchor=from_anchor)
    with open(config_path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    torch.manual_seed(7)
    tables = {"w1": torch.randn(target.vocab_size, rank), "w2": torch.randn(len(kept or range(target.vocab_size)), rank)}
    save_file({**load_file(path), **{f"markov_head.markov_{n}.weight": t for n, t in tables.items()}}, path)
    return folder


def one_hot(ids):
    return torch.nn.functional.one_hot(torch.tensor(ids), tiny_llama.VOCAB).float()


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
        torch.testing.assert_close(torch.tensor(linear), torch.tensor(plain) / 4)
        self.assertEqual(factor, 1.0)
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        for dim in (8, 64):
            ours = rope_frequencies({**CONFIG, "head_dim": dim, "rope_scaling": yarn})
            config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim,
                                 max_position_embeddings=2048, rope_parameters={**yarn, "rope_theta": 10000.0})
            theirs = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
            torch.testing.assert_close(torch.tensor(ours[0], dtype=torch.float32), theirs[0], rtol=1e-5, atol=0)
            self.assertAlmostEqual(ours[1], theirs[1], places=6)


class Decoding(Case):
    PROMPTS = [[tiny_llama.START, 104, 105], list(b"some longer words"), [120]] if torch else []

    def test_text_is_the_targets_own(self):
        drafter = self.drafter()
        runner = speculation.Runner(self.target, drafter.layer_ids, False)
        for prompt in self.PROMPTS:
            expected = speculation.plain(runner, prompt, 40, {tiny_llama.END}, GREEDY)
            text, blocks = speculation.speculate(runner, drafter, prompt, 40, {tiny_llama.END}, GREEDY)
            self.assertEqual(text, expected)
            self.assertEqual(blocks[0].anchor, len(prompt))

    def test_drafts_that_are_right_are_accepted_up_to_the_end(self):
        """A drafter that knows the text, wrong in its fourth draft."""
        drafter = self.drafter()
        runner = speculation.Runner(self.target, drafter.layer_ids, False)
        for prompt in self.PROMPTS:
            expected = speculation.plain(runner, prompt, 32, set(), GREEDY)

            def draft(_, prompt=prompt, expected=expected):
                at = drafter.length - len(prompt) + 1
                ahead = (expected + [0] * BLOCK)[at:at + BLOCK - 1]
                return one_hot(ahead[:3] + [(ahead[3] + 1) % 250, ahead[4]])
            with mock.patch.object(drafter, "slots", draft):
                text, blocks = speculation.speculate(runner, drafter, prompt, 32, set(), GREEDY)
            self.assertEqual(text, expected)
            self.assertEqual([b.accepted for b in blocks], [3] * 7 + [3])
            self.assertEqual([b.anchor for b in blocks], [len(prompt) + 4 * i for i in range(8)])
            self.assertEqual(blocks[-1].scored, 3)

    def test_end_token_ends_the_text_inside_a_block(self):
        drafter = self.drafter()
        runner = speculation.Runner(self.target, drafter.layer_ids, False)
        prompt = self.PROMPTS[1]
        endless = speculation.plain(runner, prompt, 12, set(), GREEDY)
        end = endless[9]
        first = endless.index(end)
        expected = speculation.plain(runner, prompt, 12, {end}, GREEDY)
        self.assertEqual(expected, endless[:first + 1])
        with mock.patch.object(drafter, "slots",
                               lambda _: one_hot((endless + [0] * 9)[drafter.length - len(prompt) + 1:][:5])):
            text, blocks = speculation.speculate(runner, drafter, prompt, 12, {end}, GREEDY)
        self.assertEqual(text, expected)
        self.assertEqual(blocks[-1].anchor + blocks[-1].scored, len(prompt) + first)

    def test_both_layouts_are_the_same_drafter(self):
        folder = save_speculators(os.path.join(self.folder, "speculators"), self.target)
        ours, theirs = self.drafter(), Drafter(folder, self.target, torch.float32)
        self.assertEqual(ours.layer_ids, theirs.layer_ids)
        features = torch.randn(9, 3, 32)
        for drafter in (ours, theirs):
            drafter.see(features)
        torch.testing.assert_close(ours.slots(7), theirs.slots(7))

    def test_draft_vocabulary(self):
        kept = [0, 2, 3, 97, 98, 200]
        folder = save_speculators(os.path.join(self.folder, "kept"), self.target, kept)
        whole, some = self.drafter(), Drafter(folder, self.target, torch.float32)
        features = torch.randn(9, 3, 32)
        for drafter in (whole, some):
            drafter.see(features)
        expected = torch.full((BLOCK - 1, tiny_llama.VOCAB), float("-inf"))
        expected[:, kept] = whole.slots(7)[:, kept]
        torch.testing.assert_close(some.slots(7), expected)

    def test_markov_head(self):
        """Drafts one after the other: the plain drafter's logits and, by hand, what the tables say after each draft."""
        kept = [0, 2, 3, 97, 98, 200]
        for from_anchor, some in ((False, None), (True, None), (False, kept)):
            folder = save_dspark(tempfile.mkdtemp(dir=self.folder), self.target, from_anchor, kept=some)
            drafter = open_drafter(folder, self.target, torch.float32)
            drafter.see(torch.randn(9, 3, 32))
            w1, w2 = (load_file(os.path.join(folder, "model.safetensors"))[f"markov_head.markov_{n}.weight"] for n in ("w1", "w2"))
            logits, previous, expected = drafter.logits(drafter.block(7)[0 if from_anchor else 1:]), 7, []
            for row in logits:
                for column, token in enumerate(some or range(self.target.vocab_size)):
                    row[token] += (w1[previous] * w2[column]).sum()
                previous = int(row.argmax())
                expected.append(previous)
            self.assertEqual(drafter.drafts(7, GREEDY), (expected, None))
            self.assertEqual(len(expected), BLOCK if from_anchor else BLOCK - 1)
            if some is None:
                self.assertNotEqual(expected, drafter.logits(drafter.block(7)).argmax(dim=1).tolist()[-len(expected):])
            runner = speculation.Runner(self.target, drafter.layer_ids, False)
            text, _ = speculation.speculate(runner, drafter, self.PROMPTS[1], 24, set(), GREEDY)
            self.assertEqual(text, speculation.plain(runner, self.PROMPTS[1], 24, set(), GREEDY))

    def test_a_markov_head_elsewhere_is_refused(self):
        folder = save_drafter(os.path.join(self.folder, "markov"), markov_rank=4)
        with self.assertRaisesRegex(InputError, "markov_rank: a Markov head"):
            open_drafter(folder, self.target, torch.float32)

    def test_fewer_drafts_are_a_shorter_block(self):
        drafter = Drafter(save_drafter(os.path.join(self.folder, "short")), self.target, torch.float32, 2)
        drafter.see(torch.randn(9, 3, 32))
        self.assertEqual(list(drafter.slots(7).shape), [2, tiny_llama.VOCAB])

    def test_target_with_windows(self):
        """Its cache is cut back while the window moves; the text is still what the model itself writes."""
        from transformers import MistralConfig, MistralForCausalLM
        torch.manual_seed(3)
        folder = os.path.join(self.folder, "windows")
        MistralForCausalLM(MistralConfig(
            vocab_size=tiny_llama.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=5, max_position_embeddings=128,
            initializer_range=0.4)).save_pretrained(folder)
        target = Target(folder, device="cpu")
        drafter = Drafter(save_drafter(tempfile.mkdtemp(dir=self.folder)), target, torch.float32)
        runner = speculation.Runner(target, drafter.layer_ids, False)
        prompt = list(range(40, 60))
        written = target.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, 20:].tolist()
        text, _ = speculation.speculate(runner, drafter, prompt, 24, set(), GREEDY)
        self.assertEqual(text, written)

    def test_target_that_can_not_be_rolled_back_is_refused(self):
        with mock.patch.object(self.target.config, "layer_types", ["linear_attention", "full_attention"], create=True), \
                self.assertRaisesRegex(InputError, "linear_attention"):
            speculation.Runner(self.target, [], False)

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
        self.assertIn("plain decoding", printed)
        sampled = [self.run_decode("--drafter", drafter, "--max-new-tokens", "9", "--temperature", "1", "--seed", seed,
                                   "--drafts", "2", prompts) for seed in ("4", "4", "5")]
        lines = [[line for line in printed.splitlines() if line.startswith("prompt")] for _, printed in sampled]
        self.assertEqual([status for status, _ in sampled], [0, 0, 0])
        self.assertEqual(len(lines[0]), 5)
        self.assertEqual(lines[0], lines[1])
        self.assertNotEqual(lines[0], lines[2])

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


class Table:
    """A target and a drafter over four tokens whose distributions are tables: what is right can be added up.

    The target's next token depends on the two before it; the drafter's on the anchor and the slot, and it is off.
    """
    TOKENS, DRAFTS = 4, 3

    def __init__(self):
        torch.manual_seed(8)
        self.own = 1.5 * torch.randn(self.TOKENS, self.TOKENS, self.TOKENS)
        self.drafter = 1.5 * torch.randn(self.TOKENS, self.DRAFTS, self.TOKENS)
        self.ids = []

    def forget(self):
        self.ids.clear()

    def see(self, ids):
        begin = len(self.ids)
        self.ids.extend(ids)
        return torch.stack([self.own[self.ids[max(at - 1, 0)], self.ids[at]] for at in range(begin, len(self.ids))]), \
            torch.zeros(len(ids))

    def drop(self, count):
        del self.ids[len(self.ids) - count:]

    def slots(self, anchor):
        return self.drafter[anchor]

    def chances(self, prompt, length, temperature, end):
        """-> {text: its probability}."""
        open_texts, done = {(): 1.0}, {}
        for _ in range(length):
            grown = {}
            for text, chance in open_texts.items():
                before = [*prompt, *text]
                row = torch.softmax(self.own[before[-2], before[-1]].double() / temperature, dim=0)
                for token, share in enumerate(row.tolist()):
                    (done if token == end else grown)[(*text, token)] = chance * share
            open_texts = grown
        return {**done, **open_texts}


@unittest.skipIf(torch is None, "needs torch and transformers")
class Sampled(unittest.TestCase):
    TEXTS, LENGTH, PROMPT = 2500, 4, [1, 2]

    def distance(self, decode, temperature, end):
        """Chi-square of the texts that decode(stream) gives, in deviations from what chance alone would give."""
        expected = Table().chances(self.PROMPT, self.LENGTH, temperature, end)
        self.assertAlmostEqual(sum(expected.values()), 1.0)
        stream, counts = np.random.default_rng(17), dict.fromkeys(expected, 0)
        for _ in range(self.TEXTS):
            counts[tuple(decode(stream))] += 1
        large = {text for text, chance in expected.items() if chance * self.TEXTS >= 5}
        pairs = [(counts[text], expected[text] * self.TEXTS) for text in large]
        pairs.append((self.TEXTS - sum(seen for seen, _ in pairs), self.TEXTS - sum(due for _, due in pairs)))
        total = sum((seen - due) ** 2 / due for seen, due in pairs if due > 0)
        return (total - len(large)) / (2 * len(large)) ** 0.5

    def speculate(self, temperature, end):
        table = Table()

        def decode(stream):
            chooser = speculation.Sampling(temperature, stream)
            return speculation.speculate(table, Split(table), self.PROMPT, self.LENGTH, {end}, chooser)[0]
        return decode

    def test_speculation_keeps_the_targets_distribution(self):
        for temperature, end in ((1.0, None), (0.6, 3)):
            self.assertLess(abs(self.distance(self.speculate(temperature, end), temperature, end)), 4)

    def test_plain_sampling_has_it_too(self):
        table = Table()
        self.assertLess(abs(self.distance(lambda stream: speculation.plain(
            table, self.PROMPT, self.LENGTH, set(), speculation.Sampling(1.0, stream)), 1.0, None)), 4)

    def test_the_measure_sees_a_wrong_rule(self):
        """Drafts accepted too easily, and a replacement drawn from the whole of p: both must show."""
        def easy(_, drafts, chances, logits):
            return [*drafts, int(logits[-1].argmax())]

        def whole(chooser, drafts, chances, logits):
            own = chooser._probabilities(logits)
            for slot, token in enumerate(drafts):
                if chooser.stream.random() * chances[slot, token] >= own[slot, token]:
                    return [*drafts[:slot], chooser._draw(own[slot])]
            return [*drafts, chooser._draw(own[len(drafts)])]
        for rule in (easy, whole):
            with mock.patch.object(speculation.Sampling, "verify", rule):
                self.assertGreater(self.distance(self.speculate(1.0, None), 1.0, None), 8)


class Split:
    """The drafter's face of a Table: seeing context is not its target's business."""

    def __init__(self, table):
        self.table = table

    def forget(self):
        pass

    def see(self, _, ids):
        pass

    def drafts(self, anchor, chooser):
        return chooser.drafts(self.table.slots(anchor))


if __name__ == "__main__":
    if torch is None:
        print("skipped: needs torch and transformers (tools/requirements.txt)")
        sys.exit(77)
    unittest.main()
