#!/usr/bin/env python3
"""Trains the published speculators package's DFlash drafter on dtrain's feature shards. real_input.py starts it.

    python3 benchmarks/peer_training.py SETTINGS.json

Theirs: the model, its attention mask and anchors, fused loss and metrics, and the step as their trainer has it: fp32 parameters
under bf16 autocast, gradients clipped at 1, AdamW of torch. Given, so that both train the same: rows and their order
(packed_rows.py), initial weights drawn as dtrain draws them, and dtrain's learning rate of each step. In the peer's favour: heads
are kept in bf16 (their trainer converts them in every step), AdamW is the fused one, and all features lie on the GPU.
Decoder layers and norms are compiled (see against_speculators.py). The process compiles, writes `ready` into its folder, waits for
the file `go` of the settings when they name one, then trains and writes result.json; every checkpoint is an export in z-lab layout.
"""
import json
import math
import os
import pathlib
import sys
import time

import numpy as np
import torch

import against_speculators
import packed_rows

DEVICE = against_speculators.DEVICE


def say(text):
    print(f"[{time.perf_counter():7.1f}] {text}", flush=True)


def learning_rate(s, step):
    """As trainer/schedule.c: steps count from 1."""
    warm_up = round(s["warmup_ratio"] * s["steps"])
    if step <= warm_up:
        return s["lr"] * step / warm_up
    return s["lr"] * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (s["steps"] - warm_up)))


def build_model(s, target):
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=target["vocab_size"], hidden_size=target["hidden_size"], intermediate_size=target["intermediate_size"],
        num_hidden_layers=s["layers"], num_attention_heads=target["num_attention_heads"],
        num_key_value_heads=target["num_key_value_heads"], head_dim=target["head_dim"],
        rms_norm_eps=target["rms_norm_eps"], max_position_embeddings=target["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": target["rope_theta"]},
        layer_types=["full_attention"] * s["layers"], attention_bias=False, attention_dropout=0.0, pad_token_id=None)
    layers._attn_implementation = "simple_flex_attention" if DEVICE == "cuda" else "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=target["vocab_size"], block_size=s["block_size"],
        target_hidden_size=target["hidden_size"], mask_token_id=s["mask_token_id"],
        aux_hidden_state_layer_ids=[layer + 1 for layer in s["layer_ids"]])
    return DFlashDraftModel(config)


def set_weights(draft, s):
    """Frozen weights are the target's; trained ones are drawn as dtrain draws them."""
    from safetensors import safe_open

    with safe_open(pathlib.Path(s["target"]) / "head.safetensors", "pt") as file:
        names = set(file.keys())
        embed, norm = file.get_tensor("embed_tokens.weight").float(), file.get_tensor("norm.weight").float()
        head = file.get_tensor("lm_head.weight").float() if "lm_head.weight" in names else embed

    def frozen(values):
        return torch.nn.Parameter(values, requires_grad=False)

    heads = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    draft.embed_tokens.weight, draft.verifier_norm.weight = frozen(embed), frozen(norm)
    draft.lm_head.weight, draft.verifier_lm_head.weight = frozen(head.to(heads)), frozen(head.to(heads))
    generator = torch.Generator().manual_seed(s["seed"])
    for parameter in draft.parameters():
        if parameter.requires_grad and parameter.ndim == 2:
            parameter.data.normal_(0.0, s["init_std"], generator=generator)
        elif parameter.requires_grad:
            parameter.data.fill_(1.0)
    return draft.to(DEVICE).train()


class Rows:
    """All tokens and all rows of the run on the device."""

    def __init__(self, s):
        documents = packed_rows.read_documents(s["train"])
        rows = packed_rows.training_rows(documents, s["seq_len"], s["seed"], s["steps"])
        self.row_tokens = [int(documents.length[row].sum()) for row in rows]
        self.valid = [packed_rows.valid_anchors(documents, row) for row in rows]
        shape, seq_len = documents.states[0].shape[1:], s["seq_len"]
        self.states = torch.empty(documents.tokens, *shape, dtype=torch.bfloat16, device=DEVICE)
        at = 0
        for part in documents.states:
            self.states[at:at + len(part)] = torch.from_numpy(part.view(np.int16)).view(torch.bfloat16)
            at += len(part)
        self.ids = torch.from_numpy(documents.ids.astype(np.int64)).to(DEVICE)
        self.mask = torch.from_numpy(documents.mask).to(DEVICE)
        index = np.zeros((len(rows), seq_len), np.int32)
        document, position = np.full_like(index, -1), np.zeros_like(index)
        for number, row in enumerate(rows):
            parts = packed_rows.row_indices(documents, row)
            for out, values in zip((index, document, position), parts):
                out[number, :len(values)] = values
        self.index, self.document, self.position = (torch.from_numpy(a).to(DEVICE) for a in (index, document, position))

    def batch(self, number):
        index, document = self.index[number].long(), self.document[number].long()
        states = self.states[index] if DEVICE == "cuda" else self.states[index].float()
        batch = {
            "hidden_states": states[:, :-1].flatten(1), "verifier_last_hidden_states": states[:, -1],
            "input_ids": self.ids[index], "loss_mask": self.mask[index] * (document >= 0),
            "document_ids": document, "position_ids": self.position[number].long(),
        }
        return {name: tensor[None] for name, tensor in batch.items()}

    def bytes(self):
        tensors = (self.states, self.ids, self.mask, self.index, self.document, self.position)
        return sum(t.numel() * t.element_size() for t in tensors)


def made_up_batch(s, target):
    tokens, hidden = s["seq_len"], target["hidden_size"]
    states = torch.randn(tokens, len(s["layer_ids"]) + 1, hidden, device=DEVICE).to(torch.bfloat16)
    batch = {
        "hidden_states": states[:, :-1].flatten(1), "verifier_last_hidden_states": states[:, -1],
        "input_ids": torch.randint(3, 100, (tokens,), device=DEVICE),
        "loss_mask": torch.ones(tokens, dtype=torch.uint8, device=DEVICE),
        "document_ids": torch.arange(tokens, device=DEVICE) // 300, "position_ids": torch.arange(tokens, device=DEVICE) % 300,
    }
    return {name: tensor[None] for name, tensor in batch.items()}


class Peer:
    def __init__(self, s, target):
        from speculators.losses import resolve_loss_config

        self.s, self.target = s, target
        self.draft = set_weights(build_model(s, target), s)
        if DEVICE == "cuda":
            against_speculators.compile_parts(self.draft, "inductor")
        self.trained = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=s["lr"], betas=tuple(s["betas"]), eps=1e-8, weight_decay=0.0,
                                           fused=True)
        self.loss = resolve_loss_config("kl_div", "fused" if DEVICE == "cuda" else "eager")

    def step(self, batch, rate, update=True):
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            _, loss, metrics = self.draft(**batch, loss_config=self.loss, gamma=self.s["gamma"],
                                          max_anchors=self.s["anchors"])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        if update:
            self.optimizer.step()
        return loss, metrics

    def export(self, folder):
        """z-lab layout, bf16, as both servers and dtrain read it."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous()
                   for name, p in self.draft.named_parameters() if p.requires_grad}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(export_config(self.s, self.target), indent=1))


def export_config(s, target):
    return {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
        "block_size": s["block_size"],
        "dflash_config": {"mask_token_id": s["mask_token_id"], "target_layer_ids": s["layer_ids"]},
        "num_target_layers": target["num_hidden_layers"], "num_hidden_layers": s["layers"],
        **{name: target[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                                           "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size")},
        "hidden_act": "silu", "rope_scaling": None, "is_neox_style": True, "attention_bias": False,
        "layer_types": ["full_attention"] * s["layers"], "sliding_window": None, "use_sliding_window": False,
        "max_window_layers": s["layers"], "tie_word_embeddings": True, "dtype": "bfloat16",
    }


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def target_sizes(folder):
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    config = config.get("text_config", config)
    config.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta"))
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


def compile_all(peer, s, target):
    """Two steps on made-up values without an update, after which nothing is compiled any more."""
    begin, batch = time.perf_counter(), made_up_batch(s, target)
    for _ in range(2):
        peer.step(batch, 0.0, update=False)
    synchronize()
    peer.optimizer.zero_grad()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return time.perf_counter() - begin


def train(peer, s, rows, out):
    """-> seconds and loss by step, at each checkpoint; the clock stands still while one is written."""
    marks, losses, clock, last = [], [], 0.0, set(s["checkpoints"]) | {s["steps"]}
    torch.manual_seed(s["seed"])  # of their anchors
    synchronize()
    begin = time.perf_counter()
    for step in range(1, s["steps"] + 1):
        loss, metrics = peer.step(rows.batch(step - 1), learning_rate(s, step))
        losses.append((step, loss.detach(), metrics["eal_sum"], metrics["eal_total"]))  # read at the end: that waits
        if step in last:
            synchronize()
            clock += time.perf_counter() - begin
            marks.append([step, clock])
            say(f"step {step}, {clock:.2f} s, loss {float(loss.detach()):.4f}")
            peer.export(out / "checkpoints" / f"step-{step:08d}")
            begin = time.perf_counter()
    return marks, [[step, float(loss), float(tokens / blocks)] for step, loss, tokens, blocks in losses]


def main():
    s = json.loads(pathlib.Path(sys.argv[1]).read_text())
    out, begin = pathlib.Path(s["out"]), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    if DEVICE == "cpu":
        torch.set_num_threads(s.get("threads", 2))
    target = target_sizes(s["target"])
    peer = Peer(s, target)
    built = time.perf_counter() - begin
    compiled, fault = 0.0, None
    if DEVICE == "cuda":
        try:
            compiled = compile_all(peer, s, target)
        except Exception as error:  # acceptance can still be compared, time can not
            fault = f"{type(error).__name__}: {' '.join(str(error).split()[:60])}"
            say(f"compilation failed, going on without: {fault}")
            torch.compiler.set_stance("force_eager")
            peer.optimizer.zero_grad()
            torch.cuda.empty_cache()
    say(f"built in {built:.1f} s, first steps in {compiled:.1f} s")
    (out / "ready").write_text("")
    while s.get("go") and not pathlib.Path(s["go"]).exists():
        time.sleep(0.05)
    begin = time.perf_counter()
    rows = Rows(s)
    synchronize()
    loaded, resident = time.perf_counter() - begin, rows.bytes()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    marks, losses = train(peer, s, rows, out)
    result = dict(settings=s, build_seconds=built, compile_seconds=compiled, load_seconds=loaded, marks=marks, losses=losses,
                  seconds=marks[-1][1], row_tokens=rows.row_tokens, valid_anchors=rows.valid, torch=torch.__version__, not_compiled=fault)
    if DEVICE == "cuda":
        result["allocated_gib"] = (torch.cuda.max_memory_allocated() - resident) / 2**30
        result["reserved_gib"] = (torch.cuda.max_memory_reserved() - resident) / 2**30
    partial = out / "result.json.tmp"
    partial.write_text(json.dumps(result))
    os.replace(partial, out / "result.json")


if __name__ == "__main__":
    main()
