"""EAGLE-3 drafters in tools/decode.py: a small random Llama, random drafters, both layouts.

    python -m unittest discover -s tools/tests        (all of this is skipped without torch)
"""

import json
import os
import sys
import tempfile
import unittest
from unittest import mock

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [TOOLS, os.path.dirname(os.path.abspath(__file__))]

try:
    import torch
    from safetensors.torch import load_file, save_file

    import tiny_llama
    from dtrain_tools import speculation
    from dtrain_tools.documents import InputError
    from dtrain_tools.exported_drafter import open_drafter
    from dtrain_tools.target_model import Target
except ImportError:
    torch = None

GREEDY = speculation.Greedy() if torch else None
HIDDEN, HEADS, KV, DIM, WIDE, DRAFTS = 32, 4, 2, 8, 40, 4
INNER = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_attention_heads": HEADS,
         "num_key_value_heads": KV, "head_dim": DIM, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None}


def save_tensors(folder, target, kept, layers, head_norms, first, planes=3):
    torch.manual_seed(3)
    shapes = {"fc": (HIDDEN, planes * HIDDEN), "norm": (HIDDEN,), f"{first}hidden_norm": (HIDDEN,),
              "input_norm": (planes * HIDDEN,), **{f"fc_norm.{i}": (HIDDEN,) for i in range(planes)}}
    for i in range(layers):
        inputs = HIDDEN if i else 2 * HIDDEN
        prefix = f"layers.{i}." if i else first
        shapes.update({prefix + name: shape for name, shape in {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * DIM, inputs), "self_attn.k_proj": (KV * DIM, inputs),
            "self_attn.v_proj": (KV * DIM, inputs), "self_attn.o_proj": (HIDDEN, HEADS * DIM), "mlp.gate_proj": (WIDE, HIDDEN),
            "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE)}.items()})
        if head_norms:
            shapes.update({f"{prefix}self_attn.{n}_norm": (DIM,) for n in "qk"})
    tensors = {f"{n}.weight": 1 + 0.1 * torch.randn(s) if len(s) == 1 else 0.3 * torch.randn(s)
               for n, s in shapes.items()}
    tensors = {n: t.bfloat16() for n, t in tensors.items()}
    tensors["lm_head.weight"] = target.head.weight[kept].clone()
    tensors["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
    tensors["t2d"][kept] = True
    if first != "midlayer.":
        tensors["embed_tokens.weight"] = target.embedding.weight.clone()
    save_file(tensors, os.path.join(folder, "model.safetensors"))


def save_drafter(folder, target, layout="speculators", kept=None, layers=1, head_norms=False, **changes):
    """changes: of config.json, at the top or among the draft layers, wherever the layout has it."""
    os.makedirs(folder, exist_ok=True)
    kept = list(range(target.vocab_size)) if kept is None else kept
    inner = {**INNER, "num_hidden_layers": layers, "vocab_size": target.vocab_size,
             **{n: v for n, v in changes.items() if n in ("layer_types", "sliding_window")}}
    flags = {n: v for n, v in changes.items() if n not in inner}
    if layout == "speculators":
        config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": inner,
                  "draft_vocab_size": len(kept), "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
                  "speculators_config": {"proposal_methods": [{"speculative_tokens": DRAFTS}]}, **flags}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **inner, "draft_vocab_size": len(kept),
                  "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}, **flags}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    save_tensors(folder, target, kept, layers, head_norms, "layers.0." if layout == "speculators" else "midlayer.")
    return folder


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x, position):
    """Rotate-half as a product of complex numbers. x [heads, DIM]"""
    angle = position * 10000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
    pairs = torch.complex(x[:, :DIM // 2].double(), x[:, DIM // 2:].double()) * torch.polar(torch.ones(DIM // 2).double(), angle)
    return torch.cat([pairs.real, pairs.imag], dim=1)


@unittest.skipIf(torch is None, "needs torch and transformers")
class Eagle3(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.model = os.path.join(cls.temporary.name, "model")
        tiny_llama.save(cls.model)
        cls.target = Target(cls.model, device="cpu")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def folder(self, **options):
        return save_drafter(tempfile.mkdtemp(dir=self.temporary.name), self.target, **options)

    def drafter(self, **options):
        drafts = options.pop("drafts", None)
        return open_drafter(self.folder(**options), self.target, torch.float32, drafts)

    def states_of(self, drafter, chain):
        """Logits that lead to each draft when the drafts are `chain`."""
        rows, left = [], list(chain)

        class Told:
            def drafts(self, logits):
                rows.append(logits[0])
                return [left.pop(0)], None
        drafter.drafts(11, Told())
        return torch.stack(rows)

    def by_hand(self, folder, features, ids, chain, flags):
        """The same by loops over positions and heads, in fp64, of a drafter of one layer."""
        w = {n: t.double() for n, t in load_file(os.path.join(folder, "model.safetensors")).items()}
        x = features.double()
        if flags.get("norm_before_fc"):
            x = norm(x.flatten(1), w["input_norm.weight"]).view_as(x)
        if flags.get("fc_norm"):
            x = torch.stack([norm(x[:, i], w[f"fc_norm.{i}.weight"]) for i in range(3)], dim=1)
        g = x.flatten(1) @ w["fc.weight"].T
        tokens, seen, rows = [*ids[1:], 11, *chain], [], []
        h = None  # of the last place
        for place in range(len(ids) + len(chain) - 1):
            h = g[place] if place < len(ids) else h
            hn = norm(h, w["layers.0.hidden_norm.weight"])
            n = torch.cat([norm(w["embed_tokens.weight"][tokens[place]], w["layers.0.input_layernorm.weight"]), hn])
            q, k, v = ((w[f"layers.0.self_attn.{p}_proj.weight"] @ n).view(-1, DIM) for p in "qkv")
            if flags.get("head_norms"):
                q, k = norm(q, w["layers.0.self_attn.q_norm.weight"]), norm(k, w["layers.0.self_attn.k_norm.weight"])
            seen.append((turned(k, place), v))
            window = seen[-flags["sliding_window"]:] if flags.get("sliding_window") else seen
            heads = []
            for head, query in enumerate(turned(q, place)):
                scores = torch.stack([query @ key[head * KV // HEADS] for key, _ in window]) * DIM ** -0.5
                heads.append(sum(p * value[head * KV // HEADS] for p, (_, value) in zip(scores.softmax(0), window)))
            h = (hn if flags.get("norm_before_residual") else h) + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(heads)
            m = norm(h, w["layers.0.post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(w["layers.0.mlp.gate_proj.weight"] @ m)
            h = h + w["layers.0.mlp.down_proj.weight"] @ (gate * (w["layers.0.mlp.up_proj.weight"] @ m))
            out = norm(h, w["norm.weight"])
            h = out if flags.get("norm_output") else h
            if place >= len(ids) - 1:
                rows.append(w["lm_head.weight"] @ out)
        return torch.stack(rows)

    def test_every_switch_against_loops(self):
        features, ids, chain = torch.randn(9, 3, HIDDEN), list(range(20, 29)), [5, 6, 7, 8]
        for flags in ({}, {"norm_before_residual": True, "norm_output": True}, {"norm_before_fc": True, "head_norms": True},
                      {"fc_norm": True}, {"layer_types": ["sliding_attention"], "sliding_window": 6}):
            folder = self.folder(**flags)
            drafter = open_drafter(folder, self.target, torch.float32)
            drafter.see(features, ids)
            expected = self.by_hand(folder, features, ids, chain, flags)
            torch.testing.assert_close(self.states_of(drafter, chain).double(), expected, rtol=1e-4, atol=1e-4, msg=str(flags))

    def test_guesses_are_overwritten(self):
        """What a chain left behind does not matter to the next, and positions may come in pieces."""
        features, ids = torch.randn(9, 3, HIDDEN), list(range(20, 29))
        for layers in (1, 2):
            whole, pieces = self.drafter(layers=layers), self.drafter(layers=layers)
            whole.see(features, ids)
            pieces.see(features[:5], ids[:5])
            self.states_of(pieces, [1, 2, 3, 4])  # after token 11, which is not what came
            pieces.forget()
            pieces.see(features[:4], ids[:4])
            pieces.drafts(ids[4], GREEDY)
            pieces.see(features[4:], ids[4:])
            torch.testing.assert_close(self.states_of(whole, [5, 6, 7, 8]), self.states_of(pieces, [5, 6, 7, 8]))

    def test_layouts_are_the_same_drafter(self):
        features, ids, kept = torch.randn(6, 3, HIDDEN), list(range(20, 26)), [0, 3, 5, 11, 40, 200]
        ours = self.drafter(layout="specforge", kept=kept, drafts=DRAFTS)
        theirs = self.drafter(layout="speculators", kept=kept)
        for drafter in (ours, theirs):
            drafter.see(features, ids)
        self.assertEqual(ours.layer_ids, theirs.layer_ids)
        rows = self.states_of(ours, [5, 3, 40, 0])
        torch.testing.assert_close(rows, self.states_of(theirs, [5, 3, 40, 0]))
        self.assertEqual((rows > float("-inf")).nonzero()[:, 1].unique().tolist(), kept)

    def test_text_is_the_targets_own(self):
        runner = speculation.Runner(self.target, [1, 2, 3], False)
        prompt = [tiny_llama.VOCAB - 2, 17, 33, 21]
        expected = speculation.plain(runner, prompt, 24, set(), GREEDY)
        for kept in (None, [0, 3, 5, 11, 40, 200]):
            text, blocks = speculation.speculate(runner, self.drafter(kept=kept), prompt, 24, set(), GREEDY)
            self.assertEqual(text, expected)
            self.assertEqual(sum(block.accepted + 1 for block in blocks), len(text) - 1)

    def test_right_drafts_are_accepted(self):
        runner, drafter, prompt = speculation.Runner(self.target, [1, 2, 3], False), self.drafter(), [17, 33, 21]
        expected = speculation.plain(runner, prompt, 25, set(), GREEDY)
        place = {"at": 0}

        def right(_anchor, _chooser):
            made = expected[place["at"] + 1:place["at"] + 1 + DRAFTS]
            place["at"] += DRAFTS + 1
            return made + [0] * (DRAFTS - len(made)), None
        with mock.patch.object(drafter, "drafts", right):
            text, blocks = speculation.speculate(runner, drafter, prompt, 25, set(), GREEDY)
        self.assertEqual(text, expected)
        self.assertEqual([block.accepted for block in blocks], [DRAFTS] * 4 + [4])

    def test_faults_are_named(self):
        with self.assertRaisesRegex(InputError, "give --drafts"):
            self.drafter(layout="specforge")
        with self.assertRaisesRegex(InputError, "layers.0.self_attn.q_proj.weight is missing or not"):
            folder = self.folder()
            path = os.path.join(folder, "model.safetensors")
            tensors = load_file(path)
            tensors["layers.0.self_attn.q_proj.weight"] = torch.zeros(HEADS * DIM, HIDDEN)
            save_file(tensors, path)
            open_drafter(folder, self.target, torch.float32)


if __name__ == "__main__":
    if torch is None:
        print("skipped: needs torch and transformers (tools/requirements.txt)")
        sys.exit(77)
    unittest.main()
