"""Compares what servers would run of an export with what was trained, a line a fact.

Asks each server through its probe (probe_vllm.py, probe_sglang.py) in a process of its own. Owns the
comparison; what was trained comes from trained.py.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile

from dtrain_tools.rotary import rope_row
from dtrain_tools.trained import SWITCHES

OK, DIFFERS, NOT_READ = "OK", "DIFFERS", "NOT READ"
HERE = os.path.dirname(os.path.abspath(__file__))
SERVERS = {"vllm": "probe_vllm.py", "sglang": "probe_sglang.py"}


@dataclasses.dataclass
class Line:
    state: str
    fact: str
    text: str

    def __str__(self):
        return f"  {self.state:<9} {self.fact:<20} {self.text}"


def ask(server, where, target, exports):
    """-> what the probe wrote. where: a Python program, or folders of packages joined by ':', or None."""
    environment, python = dict(os.environ), sys.executable
    if where and os.path.isfile(where):
        python = where
    elif where:
        environment["PYTHONPATH"] = where
    with tempfile.TemporaryDirectory() as folder:
        jobs, out = os.path.join(folder, "jobs.json"), os.path.join(folder, "out.json")
        with open(jobs, "w", encoding="utf-8") as file:
            json.dump({"target": os.path.abspath(target), "exports": exports}, file)
        done = subprocess.run([python, os.path.join(HERE, SERVERS[server]), jobs, out], env=environment,
                              capture_output=True, text=True)
        if not os.path.exists(out):
            raise RuntimeError(f"the probe of {server} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        with open(out, encoding="utf-8") as file:
            return json.load(file)


# ---- the facts, in words -----------------------------------------------------------------------------


def attention_words(window, causal, origin="query"):
    reach = "all context" if window is None else f"window {window} from the {origin}"
    return f"{reach}, {'causal' if causal else 'both ways'} in the block"


def trained_attention(settings, layer):
    if settings["layer_types"][layer] == "full_attention":
        return attention_words(None, False)
    return attention_words(settings["sliding_window"], not settings.get("sliding_window_non_causal"),
                           settings.get("window_origin", "query"))


def trained_sizes(settings):
    hidden = settings["hidden_size"]
    return {"hidden_size": hidden, "heads": settings["num_attention_heads"],
            "kv_heads": settings["num_key_value_heads"], "head_dim": settings["head_dim"],
            "intermediate_size": settings["intermediate_size"],
            "fc_inputs": len(settings["target_layer_ids"]) * hidden, "vocab_size": settings["vocab_size"]}


def words(values):
    return " ".join(map(str, values))


# ---- the comparison ----------------------------------------------------------------------------------


class Comparison:
    def __init__(self, settings, facts, layout):
        self.settings, self.facts, self.layout, self.lines = settings, facts, layout, []

    def same(self, fact, trained, runs, equal=None, note=""):
        if runs is None:
            self.lines.append(Line(NOT_READ, fact, f"trained {trained}{note and '; ' + note}"))
        elif trained == runs if equal is None else equal:
            self.lines.append(Line(OK, fact, f"{trained}{note and ' (' + note + ')'}"))
        else:
            self.lines.append(Line(DIFFERS, fact, f"trained {trained}, runs {runs}{note and ' (' + note + ')'}"))

    def compare(self):
        # A probe may build a class without asking which one the export names.
        self.same("draft model class", self.facts["architecture"], self.facts.get("named", self.facts["architecture"]))
        self.same("layers", self.settings["num_hidden_layers"], len(self.facts["attention"]))
        for layer, served in enumerate(self.facts["attention"][:self.settings["num_hidden_layers"]]):
            self.same(f"layer {layer}", *self._layer(layer, served))
        own = words(self.facts["captured_own"])
        self.same("captured layers", words(self.settings["target_layer_ids"]), words(self.facts["captured"]) or "none",
                  note=f"outputs of layers; {own} in its own numbers")
        self._blocks()
        self._rotary()
        for name, size in trained_sizes(self.settings).items():
            self.same(name, size, self.facts["sizes"][name], note="" if self.facts["sizes"][name] else "the target's")
        eps = self.settings["rms_norm_eps"]
        self.same("norm epsilon", eps, words(self.facts["eps"]),
                  all(abs(served - eps) <= 1e-6 * eps for served in self.facts["eps"]))
        self.same("activation", "silu", self.facts["activation"])
        self.same("bias", False, self.facts["bias"])
        self.same("logits", "the head's", self.facts.get("logits") or "the head's")
        self._vocabulary()
        self._weights()
        return self.lines

    def _layer(self, layer, served):
        return trained_attention(self.settings, layer), attention_words(**served)

    def _blocks(self):
        settings = self.settings
        first = 0 if settings.get("sample_from_anchor") else 1
        drafts = settings["block_size"] - first
        self.same("first draft", f"slot {first}", f"slot {self.facts.get('first_draft', 1)}")  # DFlash has no other
        self.same("drafts a block", drafts, self.facts["drafts"], note="" if self.facts["drafts"] is not None
                  else f'give it "num_speculative_tokens": {drafts}')
        self.same("mask token", settings["mask_token_id"], self.facts["mask_token_id"])
        self.same("Markov head", f"rank {settings.get('markov_rank') or 0}", f"rank {self.facts.get('markov_rank', 0)}")

    def _rotary(self):
        settings, served = self.settings, self.facts["rotary"]
        self.same("rotary dimension", settings["head_dim"], served["dim"])
        self.same("rotary theta", f"{settings['rope_theta']:g}", f"{served['theta']:g}")
        self.same("rotary style", "rotate-half", "rotate-half" if served["halves"] else "interleaved")
        scaling = settings.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        named = "plain" if kind == "default" else f"{kind} {scaling['factor']:g}"
        worst = self._table_error(served["table"])
        self.same("rotary angles", named, f"a table that is off by {worst:.1e}", worst <= 1.0,
                  note=f"cos and sin at positions {words(served['table'])}")
        needed = min(settings["max_position_embeddings"], settings["target_positions"])  # none is past the target's
        rows = served["rows"]
        self.same("rotary positions", f"{needed}", f"{rows}", rows >= needed)

    def _table_error(self, table):
        """Largest error of cos or sin over what fp32 angles explain."""
        worst = 0.0
        for position, row in table.items():
            expected = rope_row(self.settings, int(position))
            if len(expected) != len(row):
                return float("inf")
            error = max(abs(ours - theirs) for ours, theirs in zip(expected, row))
            worst = max(worst, error / (1e-4 + 3e-7 * int(position)))
        return worst

    def _vocabulary(self):
        own = "own" if self.layout == "speculators" else "target"
        names = {"own": "the export's copy", "target": "the target's"}
        for part in ("embedding", "head"):
            self.same(part, names[own], names[self.facts[part]])
        self.same("draft vocabulary", self.settings["vocab_size"], self.facts["draft_vocab"],
                  note="" if self.facts["draft_vocab"] else "always the target's")
        self.same("vocabulary map", "none", self.facts["vocabulary_map"])

    def _weights(self):
        self.same("type", "bfloat16", None, note="it takes the target's (--dtype)")
        self.same("quantization", "none", self.facts["quantization"] or "none")
        self.same("tensors", "all taken", f"without {words(self.facts['ignored'])}", not self.facts["ignored"])
        self.same("weights", "all set", f"unset: {words(self.facts['unset'])}", not self.facts["unset"])


class Eagle3Comparison(Comparison):
    """Layers are causal in every server; beside the rest there are norms that may be left out, and the draft vocabulary."""

    def _layer(self, layer, served):
        sliding = self.settings["layer_types"][layer] == "sliding_attention"
        return tuple("all before it" if window is None else f"the last {window}"
                     for window in (self.settings["sliding_window"] if sliding else None, served["window"]))

    def _blocks(self):
        settings, facts = self.settings, self.facts
        drafts = settings.get("drafts")
        if drafts is not None:
            self.same("drafts", drafts, facts["drafts"], note="" if facts["drafts"] is not None
                      else f"tell it to make {drafts}")
        for name in ("head_norms", *SWITCHES):
            self.same(name.replace("_", " "), settings[name], facts["switches"][name])

    def _vocabulary(self):
        own = "own" if self.layout == "speculators" else "target"
        names = {"own": "the export's copy", "target": "the target's"}
        self.same("embedding", names[own], names[self.facts["embedding"]])
        self.same("head", names["own"], names[self.facts["head"]])
        kept = self.settings["kept"]
        self.same("draft vocabulary", self.settings["draft_vocab_size"], self.facts["draft_vocab"])
        whole = self.facts["kept"] is None or self.facts["kept"] == list(range(self.settings["vocab_size"]))
        self.same("vocabulary map", "none" if kept is None else f"{len(kept)} tokens",
                  "none" if self.facts["kept"] is None else "others",
                  whole if kept is None else kept == self.facts["kept"])


def compare(settings, result, layout):
    """-> lines of one export at one server."""
    if "refused" in result:
        return [Line(DIFFERS, "the whole export", f"refused: {result['refused']}")]
    if "unread" in result["facts"]:
        return [Line(NOT_READ, "the whole export", result["facts"]["unread"])]
    kind = Eagle3Comparison if settings.get("kind") == "eagle3" else Comparison
    return kind(settings, result["facts"], layout).compare()
