#!/usr/bin/env python3
"""What vLLM and SGLang would run of dtrain's exports, and that a broken export is noticed.

    served_exports.py [DTRAIN] [--vllm WHERE] [--sglang WHERE] [--lines]

For each setting that can be served a drafter is trained for two steps on a made-up shard and exported in every
layout; tools/conformance.py's comparison must find each as trained, and each export that --allow-unservable let
through, or that was broken on purpose, different in exactly the facts named here. WHERE as in conformance.py;
default: the environment variables DTRAIN_VLLM and DTRAIN_SGLANG, else this Python. Closes with the line "N passed, N failed";
exit status 77: torch, h5py or both servers are missing.
"""

import argparse
import copy
import json
import os
import shutil
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tools"))

try:
    import check_traces
    from make_golden import resolved, to_yaml
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import served_eagle3
from dtrain_tools import conform, trained

SLIDING, FULL = "sliding_attention", "full_attention"
LAYOUTS = ("zlab", "specforge", "speculators")
WINDOWS = {"layer_types": [SLIDING, SLIDING], "sliding_window": 20}
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 20}
# drafter keys, target, layouts. The sizes of the target are taken where none is given.
SERVED = {
    "all full": ({}, "untied", LAYOUTS),
    "all full, tied head": ({"block_size": 16}, "tied", LAYOUTS),
    "all sliding": (WINDOWS, "untied", LAYOUTS),
    "mixed": (MIXED, "untied", ("zlab", "specforge")),
    "yarn, theta 1e7": ({"rope_scaling": "yarn", "rope_factor": 4.0, "rope_theta": 1e7,
                         "max_position_embeddings": 256}, "untied", LAYOUTS),
    "linear": ({"rope_scaling": "linear", "rope_factor": 2.0}, "tied", LAYOUTS),
    "Markov head": ({"markov_rank": 8}, "untied", ("speculators",)),
    "Markov head, from the anchor": ({"markov_rank": 6, "predict_from_anchor": True}, "tied", ("speculators",)),
    "own sizes": ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48,
                   "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "block_size": 3}, "untied", LAYOUTS),
}  # fmt: skip
# What --allow-unservable lets through: drafter keys, layout, {server: facts that differ}.
ALLOWED = {
    "window from the anchor": ({**WINDOWS, "window_origin": "anchor"}, "zlab",
                               {"vllm": {"layer 0", "layer 1"}, "sglang": {"layer 0", "layer 1"}}),
    "not causal": ({**WINDOWS, "sliding_window_non_causal": True}, "zlab",
                   {"vllm": {"layer 0", "layer 1"}, "sglang": {"layer 0", "layer 1"}}),
    "not causal, speculators": ({**WINDOWS, "sliding_window_non_causal": True}, "speculators", {"vllm": set()}),
    "mixed, speculators": (MIXED, "speculators", {"vllm": {"layer 1"}}),
}  # fmt: skip


def put(path, value):
    """A change of config.json: the value at a path like dflash_config.mask_token_id; None: taken away."""
    def change(config):
        *above, name = path.split(".")
        for part in above:
            config = config[part]
        if value is None:
            config.pop(name)
        else:
            config[name] = value
    return change


WHOLE = {"the whole export"}
# Breaks of an all-sliding drafter: the layout, what is changed, {server: facts that differ}.
BROKEN = {
    "layer ids one up": ("zlab", put("dflash_config.target_layer_ids", [2, 3, 4, 6, 7]),
                         {"vllm": {"captured layers"}, "sglang": {"captured layers"}}),
    "layer ids in the other numbering": ("speculators", put("aux_hidden_state_layer_ids", [1, 2, 3, 5, 6]),
                                         {"vllm": {"captured layers"}}),
    "one layer id too few": ("zlab", put("dflash_config.target_layer_ids", [1, 2, 3, 5]), {"vllm": WHOLE, "sglang": WHOLE}),
    "theta": ("zlab", put("rope_theta", 1e6), {"vllm": {"rotary theta", "rotary angles"},
                                               "sglang": {"rotary theta", "rotary angles"}}),
    "another class": ("zlab", put("architectures", ["DFlash2DraftModel"]), {"sglang": {"draft model class"}}),
    "scaled logits": ("zlab", put("logit_scale", 0.5), {"vllm": {"logits"}, "sglang": set()}),
    "theta left out": ("zlab", put("rope_theta", None), {"vllm": {"rotary theta", "rotary angles"},
                                                        "sglang": {"rotary theta", "rotary angles"}}),
    "scaling": ("speculators", put("transformer_layer_config.rope_scaling", {"rope_type": "linear", "factor": 2.0}),
                {"vllm": {"rotary angles"}}),
    "partial rotation": ("zlab", put("partial_rotary_factor", 0.5),
                         {"vllm": {"rotary dimension", "rotary angles"}, "sglang": {"rotary dimension", "rotary angles"}}),
    "interleaved": ("zlab", put("is_neox_style", False), {"vllm": {"rotary style"}, "sglang": {"rotary style"}}),
    "mask token": ("zlab", put("dflash_config.mask_token_id", 89), {"vllm": {"mask token"}, "sglang": {"mask token"}}),
    "mask token, speculators": ("speculators", put("mask_token_id", 89), {"vllm": {"mask token"}}),
    "no mask token": ("zlab", put("dflash_config.mask_token_id", None), {"vllm": WHOLE, "sglang": WHOLE}),
    "window": ("zlab", put("sliding_window", 19), {"vllm": {"layer 0", "layer 1"}, "sglang": {"layer 0", "layer 1"}}),
    "windows switched off": ("zlab", put("use_sliding_window", False), {"vllm": WHOLE, "sglang": WHOLE}),
    "full, not sliding": ("zlab", put("layer_types", [SLIDING, FULL]), {"vllm": {"layer 1"}, "sglang": {"layer 1"}}),
    "causal flag left out": ("speculators", put("sliding_window_non_causal", None), {"vllm": {"layer 0", "layer 1"}}),
    "causal flag for all": ("zlab", put("dflash_config.causal", False), {"vllm": {"layer 0", "layer 1"}, "sglang": set()}),
    "block size": ("zlab", put("block_size", 7), {"vllm": set(), "sglang": {"drafts a block"}}),
    "number of drafts": ("speculators", put("speculators_config.proposal_methods", [{"speculative_tokens": 8}]),
                         {"vllm": {"drafts a block"}}),
    "from the anchor": ("speculators", put("sample_from_anchor", True), {"vllm": WHOLE}),
    "norm epsilon": ("zlab", put("rms_norm_eps", 1e-6), {"vllm": {"norm epsilon"}, "sglang": {"norm epsilon"}}),
    "head_dim": ("zlab", put("head_dim", 16), {"vllm": WHOLE, "sglang": WHOLE}),
    "draft vocabulary": ("speculators", put("draft_vocab_size", 50), {"vllm": WHOLE}),
    "few positions": ("zlab", put("max_position_embeddings", 16), {"vllm": set(), "sglang": {"rotary positions"}}),
}  # fmt: skip


# ---- making exports ----------------------------------------------------------------------------------


def must_run(*command):
    status, output = check_traces.run(command)
    if status != 0:
        raise RuntimeError(f"{' '.join(command[1:])}: status {status}\n{output}")


def vocabulary(dtrain, folder, size):
    """-> the map of that many tokens."""
    path = os.path.join(folder, f"vocabulary-{size}.safetensors")
    if not os.path.exists(path):
        must_run(dtrain, "vocab", "--size", str(size), "--out", path, os.path.join(folder, "pre_norm.h5"))
    return path


def train(dtrain, folder, drafter, target):
    """-> a checkpoint of two steps."""
    place = tempfile.mkdtemp(dir=folder)
    own = {"kind": "eagle3"} if drafter.get("kind") == "eagle3" else {"mask_token_id": 90, "layers": 2}
    config = resolved({"loss": {"kl": 1.0}, "drafter": {"init_std": 0.15, **own}})
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta"):
        config["drafter"].pop(name, None)
    config["drafter"].update(copy.deepcopy(drafter))
    config["run"].update({"dir": os.path.join(place, "run"), "max_steps": 2, "epochs": 2, "compute": "fp32"})
    config["target"].update({"path": f"target-{target}", "name": "made-up"})
    if own.get("kind") != "eagle3":
        config["target"].pop("layer_ids", None)
    config["data"].update({"seq_len": 64, "rows_per_step": 3, "train": ["pre_norm.h5"]})
    path = os.path.join(folder, "case.yaml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_yaml(config))
    must_run(dtrain, "--config", path)
    return os.path.join(place, "run", "checkpoints", "step-00000002")


class Exports:
    """Everything that is asked, with what is expected of it."""

    def __init__(self, dtrain, folder):
        self.dtrain, self.folder, self.jobs = dtrain, folder, {"tied": [], "untied": []}

    def add(self, name, checkpoint, target, layout, differs, *words):
        out = os.path.join(tempfile.mkdtemp(dir=self.folder), layout)
        must_run(self.dtrain, "export", "--checkpoint", checkpoint, "--format", layout, "--out", out, *words)
        settings = trained.from_checkpoint(checkpoint, os.path.join(self.folder, f"target-{target}"))
        if settings["kind"] == "dflash" and layout == "specforge":
            layout = "zlab"
        job = {"folder": out, "layout": layout, "kind": settings["kind"], "block_size": settings.get("block_size") or 2}
        self.jobs[target].append((f"{name} ({layout})", job, settings, differs))
        return out

    def add_served(self):
        for name, (drafter, target, layouts) in SERVED.items():
            checkpoint = train(self.dtrain, self.folder, drafter, target)
            for layout in layouts:
                self.add(f"{name} {layout}", checkpoint, target, layout, {"vllm": set(), "sglang": set()})
        for name, (drafter, layout, differs) in ALLOWED.items():
            checkpoint = train(self.dtrain, self.folder, drafter, "untied")
            self.add(f"allowed: {name}", checkpoint, "untied", layout, differs, "--allow-unservable")

    def train_eagle3(self, drafter, target, size):
        keys = {"kind": "eagle3", **drafter}
        if size is not None:
            keys["draft_vocab"] = vocabulary(self.dtrain, self.folder, size)
        return train(self.dtrain, self.folder, keys, target)

    def add_eagle3(self):
        for name, (drafter, target, size, layouts) in served_eagle3.SERVED.items():
            checkpoint = self.train_eagle3(drafter, target, size)
            for layout in layouts:
                at_vllm = served_eagle3.DEFAULT_LAYERS if layout == "specforge" else set()
                self.add(f"{name} {layout}", checkpoint, target, layout, {"vllm": at_vllm, "sglang": set()})
        for name, (drafter, differs) in served_eagle3.ALLOWED.items():
            checkpoint = self.train_eagle3(drafter, "untied", None)
            self.add(f"allowed: {name}", checkpoint, "untied", "specforge", differs, "--allow-unservable")
        checkpoint = self.train_eagle3({"fc_norm": True, "norm_output": True, "rope_theta": 20000.0}, "untied", 30)
        for name, (layout, change, differs) in served_eagle3.BROKEN.items():
            change(self.add(f"broken: eagle3, {name}", checkpoint, "untied", layout, differs))

    def add_broken(self):
        checkpoint = train(self.dtrain, self.folder, {**WINDOWS, "rope_theta": 20000.0}, "untied")
        for name, (layout, change, differs) in BROKEN.items():
            out = self.add(f"broken: {name}", checkpoint, "untied", layout, differs)
            path = os.path.join(out, "config.json")
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
            change(config)
            with open(path, "w", encoding="utf-8") as file:
                json.dump(config, file)


# ---- asking ------------------------------------------------------------------------------------------


def judge(server, answer, jobs, show):
    """-> passed, failed."""
    counts = [0, 0]
    for (name, job, settings, expected), result in zip(jobs, answer["results"]):
        if server not in expected or (server == "sglang" and job["layout"] == "speculators"):
            continue
        lines = conform.compare(settings, result, job["layout"])
        differs = {line.fact for line in lines if line.state == conform.DIFFERS}
        wrong = differs != expected[server]
        counts[wrong] += 1
        print(f"{'FAIL' if wrong else 'ok':<5} {answer['server']} {answer['version']}: {name}"
              + (f": expected to differ: {sorted(expected[server])}" if wrong else ""))
        for line in lines:
            if show or wrong or line.state == conform.DIFFERS:
                print(f"    {line}")
    return counts


def ask_all(exports, arguments):
    """-> passed, failed."""
    totals = [0, 0]
    for server in conform.SERVERS:
        for target, jobs in exports.jobs.items():
            answer = conform.ask(server, getattr(arguments, server), os.path.join(exports.folder, f"target-{target}"),
                                 [job for _, job, _, _ in jobs])
            if "missing" in answer:
                print(f"skipped: {answer['server']}: {answer['missing']}")
                break
            totals = [a + b for a, b in zip(totals, judge(server, answer, jobs, arguments.lines))]
    return totals


def any_server(arguments):
    answers = [conform.ask(server, getattr(arguments, server), HERE, []) for server in conform.SERVERS]
    missing = [answer for answer in answers if "missing" in answer]
    if len(missing) == len(answers):
        print("\n".join(f"skipped: {answer['server']}: {answer['missing']}" for answer in missing))
    return len(missing) < len(answers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dtrain", nargs="?", default=os.environ.get("DTRAIN"), help="the binary")
    parser.add_argument("--vllm", default=os.environ.get("DTRAIN_VLLM"))
    parser.add_argument("--sglang", default=os.environ.get("DTRAIN_SGLANG"))
    parser.add_argument("--kind", choices=["dflash", "eagle3"], help="only drafters of this kind")
    parser.add_argument("--lines", action="store_true", help="print every fact, not only those that differ")
    arguments = parser.parse_args()
    if not arguments.dtrain:
        parser.error("name the binary")
    if not any_server(arguments):
        return 77
    folder = tempfile.mkdtemp()
    for kind in ("tied", "untied"):
        check_traces.write_target(os.path.join(folder, f"target-{kind}"), kind == "untied")
    check_traces.write_shard(os.path.join(folder, "pre_norm.h5"), "pre_norm")
    exports = Exports(os.path.abspath(arguments.dtrain), folder)
    if arguments.kind != "eagle3":
        exports.add_served()
        exports.add_broken()
    if arguments.kind != "dflash":
        exports.add_eagle3()
    passed, failed = ask_all(exports, arguments)
    if failed == 0:
        shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed" + (f" (files in {folder})" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
