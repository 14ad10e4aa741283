"""tools/conformance.py without the servers: what was trained, the comparison, and that a server that is missing is said.

    python -m unittest discover -s tools/tests

That the servers themselves find dtrain's exports as trained is tests/reference/served_exports.py.
"""

import contextlib
import copy
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import conformance  # noqa: E402
from dtrain_tools import conform, trained  # noqa: E402
from dtrain_tools.documents import InputError  # noqa: E402
from dtrain_tools.export_config import read_export_config  # noqa: E402
from dtrain_tools.rotary import rope_row  # noqa: E402

ZLAB = {"architectures": ["DFlashDraftModel"], "block_size": 6, "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3]},
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "vocab_size": 50,
        "max_position_embeddings": 64}
TARGET = {"hidden_size": 32, "vocab_size": 50, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 40, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0}, "max_position_embeddings": 64}
RUN = """
target: {layer_ids: [1, 3]}
data: {train: []}
drafter:
  kind: dflash
  layers: 2
  block_size: 6
  mask_token_id: 9
  rope_scaling: none
  rms_norm_eps: 1e-06
  layer_types: [sliding_attention, full_attention]
  sliding_window: 5
  sliding_window_non_causal: false
  window_origin: query
  predict_from_anchor: false
"""


def served(settings):
    """What a server that does everything right would say."""
    table = {str(p): rope_row(settings, p) for p in (0, 1, 17)}
    return {"architecture": "DFlashDraftModel", "attention": [{"window": 5, "causal": True}, {"window": None, "causal": False}],
            "captured": [1, 3], "captured_own": [2, 4], "drafts": 5, "mask_token_id": 9, "quantization": None,
            "sizes": {"hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 40,
                      "fc_inputs": 64, "vocab_size": 50},
            "eps": [1e-6, 1e-6], "activation": "silu", "bias": False, "embedding": "target", "head": "target",
            "rotary": {"dim": 8, "theta": 10000.0, "halves": True, "rows": 64, "table": table},
            "draft_vocab": 50, "vocabulary_map": "none", "unset": [], "ignored": []}


class Case(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        self.target = self.write("target", "config.json", TARGET)
        self.export = self.write("export", "config.json", ZLAB)
        with open(os.path.join(self.export, "model.safetensors"), "wb"):
            pass

    def write(self, folder, name, content):
        folder = os.path.join(self.folder, folder)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(content if isinstance(content, str) else json.dumps(content))
        return folder


class Comparing(Case):
    def differing(self, facts):
        settings = trained.from_export(self.export, self.target)
        return {line.fact for line in conform.compare(settings, {"facts": facts}, "zlab") if line.state == conform.DIFFERS}

    def test_what_is_right_is_found_right(self):
        self.assertEqual(self.differing(served(trained.from_export(self.export, self.target))), set())

    def test_every_fact_can_differ(self):
        right = served(trained.from_export(self.export, self.target))
        changes = {"draft model class": ("named", "DFlash2DraftModel"), "layers": ("attention", right["attention"][:1]),
                   "layer 0": ("attention", [{"window": 4, "causal": True}, right["attention"][1]]),
                   "layer 1": ("attention", [right["attention"][0], {"window": None, "causal": True}]),
                   "captured layers": ("captured", [2, 4]), "drafts a block": ("drafts", 6),
                   "mask token": ("mask_token_id", 8), "norm epsilon": ("eps", [1e-6, 1e-5]),
                   "activation": ("activation", "gelu"), "logits": ("logits", "times 0.5"), "bias": ("bias", True), "embedding": ("embedding", "own"),
                   "head": ("head", "own"), "draft vocabulary": ("draft_vocab", 40),
                   "vocabulary map": ("vocabulary_map", "d2t"), "quantization": ("quantization", "fp8"),
                   "tensors": ("ignored", ["lm_head.weight"]), "weights": ("unset", ["norm.weight"])}
        for fact, (name, value) in changes.items():
            self.assertEqual(self.differing({**right, name: value}), {fact}, fact)
        for fact, name, value in (("rotary dimension", "dim", 4), ("rotary theta", "theta", 5e5),
                                  ("rotary style", "halves", False), ("rotary positions", "rows", 63)):
            self.assertEqual(self.differing({**right, "rotary": {**right["rotary"], name: value}}), {fact})
        for name in right["sizes"]:
            self.assertEqual(self.differing({**right, "sizes": {**right["sizes"], name: 7}}), {name})
        shifted = copy.deepcopy(right)
        shifted["rotary"]["table"]["17"] = rope_row({**ZLAB, "rope_theta": 10100.0}, 17)
        self.assertEqual(self.differing(shifted), {"rotary angles"})

    def test_a_refusal_is_a_difference(self):
        lines = conform.compare({}, {"refused": "ValueError: no"}, "zlab")
        self.assertEqual([(line.state, line.fact) for line in lines], [(conform.DIFFERS, "the whole export")])


class Trained(Case):
    @unittest.skipIf(importlib.util.find_spec("yaml") is None, "needs PyYAML")
    def test_a_run_and_its_export_say_the_same(self):
        checkpoint = self.write("checkpoint", "config.yaml", RUN)
        run, export = trained.from_checkpoint(checkpoint, self.target), trained.from_export(self.export, self.target)
        facts = served(export)
        for settings in (run, export):
            lines = conform.compare(settings, {"facts": facts}, "zlab")
            self.assertEqual([line for line in lines if line.state == conform.DIFFERS], [])

    @unittest.skipIf(importlib.util.find_spec("yaml") is None, "needs PyYAML")
    def test_layer_ids_may_be_the_shards_or_the_checkpoints(self):
        checkpoint = self.write("checkpoint", "config.yaml", RUN.replace("{layer_ids: [1, 3]}", "{layer_ids: []}"))
        self.write("checkpoint", "config.json", ZLAB)
        settings = trained.from_checkpoint(checkpoint, self.target)
        self.assertEqual(settings["target_layer_ids"], [1, 3])
        self.assertIn("no shard is there", settings["source"])

    def test_both_layouts_are_read_alike(self):
        inner = {name: value for name, value in ZLAB.items() if name not in ("architectures", "block_size", "dflash_config")}
        theirs = self.write("speculators", "config.json", {
            "speculators_model_type": "dflash", "transformer_layer_config": inner, "block_size": 6, "mask_token_id": 9,
            "aux_hidden_state_layer_ids": [2, 4]})
        ours, other = read_export_config(self.export), read_export_config(theirs)
        for name in ("target_layer_ids", "mask_token_id", "block_size", "layer_types", "rope_theta", "head_dim"):
            self.assertEqual(ours[name], other[name], name)

    @unittest.skipIf(importlib.util.find_spec("yaml") is None, "needs PyYAML")
    def test_a_map_of_every_token_is_none(self):
        run = RUN.replace("kind: dflash", "kind: eagle3\n  style: llama\n  ttt_steps: 3\n  draft_vocab: map.safetensors")
        checkpoint = self.write("run-eagle3", "config.yaml", run)
        for tokens, kept in ((50, None), (49, list(range(49)))):
            with mock.patch.object(trained, "kept_ids", return_value=list(range(tokens))):
                settings = trained.from_checkpoint(checkpoint, self.target)
            self.assertEqual((settings["kept"], settings["draft_vocab_size"]), (kept, tokens))

    def test_eagle3_of_both_styles_is_specforge(self):
        inner = {name: value for name, value in ZLAB.items() if name not in ("architectures", "block_size", "dflash_config")}
        for number, name in enumerate(("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM")):
            settings = read_export_config(self.write(f"eagle3-{number}", "config.json", {
                **inner, "architectures": [name], "draft_vocab_size": 50,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}))
            self.assertEqual((settings["kind"], settings["layout"], settings["target_layer_ids"]),
                             ("eagle3", "specforge", [1, 3]))

    def test_faults_name_the_file(self):
        with self.assertRaisesRegex(InputError, "speculators_model_type is 'peagle'"):
            read_export_config(self.write("eagle", "config.json", {"speculators_model_type": "peagle"}))
        with self.assertRaisesRegex(InputError, "config.json: no .*rope_theta"):
            read_export_config(self.write("short", "config.json", {**ZLAB, "rope_theta": None}))


class Program(Case):
    def run_tool(self, *options):
        printed = io.StringIO()
        with mock.patch.object(sys, "argv", ["conformance.py", "--target", self.target, *options]), \
                contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return conformance.main(), printed.getvalue()

    def test_missing_servers_are_skipped_and_said(self):
        empty = os.path.join(self.folder, "empty")
        os.makedirs(empty)
        status, printed = self.run_tool("--vllm", empty, "--sglang", empty, self.export)
        self.assertEqual(status, 77, printed)
        self.assertIn("vLLM: SKIPPED", printed)
        self.assertIn("SGLang: SKIPPED", printed)

    def test_statuses(self):
        right = served(trained.from_export(self.export, self.target))
        answer = {"server": "vLLM", "version": "1", "transformers": "2", "results": [{"facts": right}]}
        with mock.patch.object(conform, "ask", lambda *_: answer):
            self.assertEqual(self.run_tool(self.export)[0], 0)
            right["mask_token_id"] = 1
            status, printed = self.run_tool(self.export)
        self.assertEqual(status, 1, printed)
        self.assertIn("DIFFERS   mask token", printed)

    def test_what_is_no_export_is_refused(self):
        status, printed = self.run_tool(self.folder)
        self.assertEqual(status, 2, printed)
        self.assertIn("config.json", printed)
        status, printed = self.run_tool("--servers", "tgi", self.export)
        self.assertEqual(status, 2, printed)


if __name__ == "__main__":
    unittest.main()
