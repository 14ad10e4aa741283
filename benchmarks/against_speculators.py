#!/usr/bin/env python3
"""The same optimizer step in the published `speculators` package and in dtrain, on one GPU in one run.

    python3 benchmarks/against_speculators.py --dtrain build/dtrain [--anchors 512,1024-mix,3072,2048] [--ours steps.json]

Needs torch, transformers, triton and speculators (collect_peer.py brings the last to a machine without a network).
The peer is speculators' own DFlash draft model, mask, attention, fused loss and metrics, driven as its trainer does:
fp32 parameters under bf16 autocast, gradients clipped, AdamW. Where a choice was open, the one that is better for the
peer was taken: frozen embedding and heads in bf16 (its trainer leaves them in fp32), AdamW's fused implementation, the
row already on the GPU. One thing is not as it has it: it compiles its whole forward pass; here its decoder layers, norms and
mask are compiled and the rest is not. That takes a fraction of the time, and torch before 2.12 can not trace its loss, whose
kernels are the same outside of a compiled graph. Sizes are compiled one by one, as fixed shapes.
Both train rows of documents of the same lengths and masks from their own random weights: behind a number of anchors,
-mix has short documents, 60 % supervised, -few the same with fewer valid anchors than asked for; without a mark every
token is supervised. -loss is the loss alone, from the layers' output to its gradient, which bench_loss times for dtrain.
With --go FILE the peer compiles first, in at most 70 GiB, and measures as soon as FILE is there.
"""
import argparse
import gc
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/dtrain-peer-cache")
os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/dtrain-peer-cache/triton")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")

import numpy as np
import torch

import made_up
import step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, RATE = 7.0, 1e-5
WARM_UP, LEAST_STEPS = 3, 5
BEFORE_GO = 70 * 2**30  # bytes
SAME_LOSS = ["--set", "loss.normalize=count", "--set", "loss.slot_mask=each"]


def say(text):
    print(f"[{time.perf_counter():7.1f}] {text}", flush=True)


# ---- the peer ----------------------------------------------------------------------------------------


def layer_config(model):
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=model["vocab"], hidden_size=model["hidden"], intermediate_size=model["intermediate"],
        num_hidden_layers=made_up.DRAFTER_LAYERS, num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"], head_dim=model["head_dim"], rms_norm_eps=1e-6,
        max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        layer_types=["full_attention"] * made_up.DRAFTER_LAYERS, attention_bias=False,
        attention_dropout=0.0, pad_token_id=None)
    # Their default; it has no backward pass on a CPU, where only this script is tried out.
    layers._attn_implementation = "simple_flex_attention" if DEVICE == "cuda" else "eager"
    return layers


def peer_model(model):
    """Their draft model: trainable parameters in fp32 as they initialise them, frozen ones in bf16."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(model), draft_vocab_size=model["vocab"],
        block_size=made_up.BLOCK, target_hidden_size=model["hidden"], mask_token_id=0,
        aux_hidden_state_layer_ids=[layer + 1 for layer in model["layer_ids"]])
    with torch.device(DEVICE):
        draft = DFlashDraftModel(config)

    def frozen(values):
        return torch.nn.Parameter(values, requires_grad=False)

    def matrix():
        return torch.randn(model["vocab"], model["hidden"], dtype=torch.bfloat16, device=DEVICE).mul_(0.02)

    draft.embed_tokens.weight, draft.lm_head.weight = frozen(matrix()), frozen(matrix())
    draft.verifier_lm_head.weight = frozen(draft.lm_head.weight.clone())
    draft.verifier_norm.weight = frozen(torch.ones(model["hidden"], dtype=torch.bfloat16, device=DEVICE))
    return draft.train()


def compile_parts(draft, backend):
    """Decoder layers and norms instead of the whole forward pass. Their mask compiles itself."""
    torch._dynamo.config.recompile_limit = 64
    compiled = type(draft).forward
    type(draft).forward = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    for part in [*draft.layers, draft.norm, draft.hidden_norm, draft.verifier_norm]:
        part.compile(backend=backend, dynamic=False)


def one_row(documents, tokens):
    """Supervision and document of each token of a row, of the first documents that fit."""
    masks, owners = np.zeros(tokens, np.uint8), np.zeros(tokens, np.int64)
    at = number = 0
    for length, mask in documents:
        if at + length <= tokens:
            masks[at:at + length] = 1 if mask is None else mask
            owners[at:at + length] = number
            at, number = at + length, number + 1
    owners[at:] = number  # unsupervised
    return masks, owners


def peer_batch(model, tokens, marks):
    """A packed row as their data loader hands it over."""
    planes = len(model["layer_ids"])
    masks, owners = one_row(step.documents_for(marks, tokens)[1], tokens)
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    states = torch.randn(tokens, planes + 1, model["hidden"], dtype=torch.bfloat16, device=DEVICE)
    batch = {
        "hidden_states": states[:, :planes].flatten(1).contiguous(),
        "verifier_last_hidden_states": states[:, planes].contiguous(),
        "input_ids": torch.randint(3, model["vocab"], (tokens,), device=DEVICE),
        "loss_mask": torch.tensor(masks, device=DEVICE),
        "document_ids": torch.tensor(owners, device=DEVICE),
        "position_ids": torch.tensor(np.arange(tokens) - starts[owners], device=DEVICE),
    }
    return {name: tensor[None] for name, tensor in batch.items()}


class Peer:
    """Model, optimizer and row, and a step as their trainer's loop has it."""

    def __init__(self, model, tokens, backend):
        from speculators.losses import resolve_loss_config

        self.draft = peer_model(model)
        compile_parts(self.draft, backend)
        self.trainable = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=RATE, weight_decay=0.0, fused=True)
        self.model, self.tokens = model, tokens
        self.take_row([])
        self.loss = resolve_loss_config("kl_div", "fused" if DEVICE == "cuda" else "eager")

    def take_row(self, marks):
        self.batch = None  # so that its memory can be used again
        self.batch = peer_batch(self.model, self.tokens, marks)

    def step(self, anchors):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            _, loss, metrics = self.draft(**self.batch, loss_config=self.loss, gamma=GAMMA, max_anchors=anchors)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()
        return loss, metrics

    def layers_only(self, anchors):
        """The layers forth and back at this size, without logits: what has to be compiled, in little memory."""
        draft, batch = self.draft, self.batch
        tokens, hidden = batch["input_ids"].shape[1], draft.hidden_size
        rows = anchors * made_up.BLOCK
        mask, _, _, _ = draft._build_attention_mask(batch["loss_mask"], anchors, batch["document_ids"], DEVICE)
        position = torch.arange(tokens + rows, device=DEVICE)[None] % tokens
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            x = torch.zeros(1, rows, hidden, dtype=torch.bfloat16, device=DEVICE)
            context = draft.hidden_norm(draft.fc(batch["hidden_states"]))
            embeddings = draft.rotary_emb(batch["hidden_states"], position)
            for layer in draft.layers[:2]:
                x = layer(hidden_states=x, target_hidden=context, attention_mask=mask, position_ids=position,
                          use_cache=False, position_embeddings=embeddings)
            x = draft.norm(x)
        x.sum().backward()
        self.optimizer.zero_grad()

    def loss_alone(self, anchors):
        """From the layers' output to its gradient, as in its forward pass and behind it."""
        from speculators.models.dflash.metrics import compute_metrics

        draft, block, states = self.draft, made_up.BLOCK, self.batch["verifier_last_hidden_states"]
        tokens, rows = states.shape[1], anchors * block
        positions = (torch.randperm(tokens - block, device=DEVICE)[:anchors, None]
                     + torch.arange(block, device=DEVICE)).flatten()
        mask = torch.ones(1, rows, dtype=torch.uint8, device=DEVICE)
        mask[:, ::block] = 0
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            with torch.no_grad():
                if rows < tokens:
                    targets = draft.verifier_lm_head(draft.verifier_norm(states[:, (positions - 1) % tokens]))
                else:
                    every = draft.verifier_lm_head(draft.verifier_norm(states))
                    targets = torch.roll(every, 1, dims=1)[:, positions]
            logits = draft.lm_head(self.hidden)
            loss, metrics = compute_metrics(logits, targets, mask, block, gamma=GAMMA, loss_config=self.loss)
        loss.backward()
        self.hidden.grad = None
        return loss, metrics

    def prepare_loss(self, anchors):
        hidden = torch.randn(1, anchors * made_up.BLOCK, self.draft.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        self.hidden = hidden.requires_grad_()

    def seconds(self, anchors, steps, work):
        """Seconds of each step, the first loss, and the share of slots that were scored."""
        seconds, first, scored = [], None, None
        for number in range(steps):
            synchronize()
            begin = time.perf_counter()
            loss, metrics = work(anchors)
            synchronize()
            seconds.append(time.perf_counter() - begin)
            if number == 0:
                first = float(loss.detach())
                scored = float(metrics["full_acc_total"]) / (anchors * made_up.BLOCK)
        return seconds, first, scored


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def clear(peer):
    peer.optimizer.zero_grad()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def attempt(result, work):
    """Runs work(); what stops it becomes a text in the result, since what comes behind still runs."""
    try:
        work()
    except torch.OutOfMemoryError as error:
        result["failed"] = "out of memory: " + " ".join(str(error).split()[:40])
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"


def compile_before(peer, sizes, go):
    """Compiles in little memory until everything is compiled or `go` is there. A step with many block rows has too
    many logits for that; then only its layers are compiled, and its small parts while it is measured."""
    if DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, BEFORE_GO / total))
    for anchors in sizes:
        if go.exists():
            break
        result, begin = {}, time.perf_counter()
        small = anchors * made_up.BLOCK <= 2 * peer.batch["input_ids"].shape[1]
        attempt(result, lambda: peer.step(anchors) if small else peer.layers_only(anchors))
        synchronize()
        clear(peer)
        say(f"{anchors} anchors: compiled in {time.perf_counter() - begin:.1f} s {result.get('failed', '')}")
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def run_peer(peer, anchors, marks):
    """One row of the table; its steps, or what stopped it. Used is what the whole device has in use at most: nothing
    else may run."""
    peer.take_row(marks)
    work = peer.step
    if "loss" in marks:
        peer.prepare_loss(anchors)
        work = peer.loss_alone
    clear(peer)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    memory, result, begin = step.DeviceMemory(), dict(anchors=anchors, marks=marks), time.perf_counter()

    def measure():
        seconds, result["loss"], result["scored"] = peer.seconds(anchors, WARM_UP + LEAST_STEPS,
                                                                 work)
        result.update(milliseconds=1e3 * statistics.median(seconds[WARM_UP:]), seconds=seconds)

    attempt(result, measure)
    memory.close()
    result["wall"] = time.perf_counter() - begin
    if DEVICE == "cuda":
        result["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        result["used_gib"] = (memory.base + memory.peak) / 2**30 if memory.nvml else None
    clear(peer)
    return result


# ---- dtrain ------------------------------------------------------------------------------------------


def run_ours(arguments, name, anchors, marks):
    folder = pathlib.Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    target, shard = step.prepare(folder, arguments.model, marks, arguments.tokens)
    config, run = step.write_config(folder, name, target, shard, anchors, arguments.tokens, DEVICE, marks)
    steps, startup, memory = step.run_steps([os.path.abspath(arguments.dtrain), "--config", str(config), *SAME_LOSS],
                                            run, WARM_UP + LEAST_STEPS, arguments.limit)
    if not steps:
        return dict(setting=name, failed=step.last_lines(run))
    plan = step.planned_gib(arguments.dtrain, config)
    return step.summarise(name, steps, startup, memory, plan, arguments.tokens)


def describe(size, peer, ours):
    def number(result, key, form):
        return form.format(result[key]) if result and result.get(key) is not None else "-"

    line = (f"{size:>9s} anchors | speculators {number(peer, 'milliseconds', '{:7.1f}')} ms, allocated "
            f"{number(peer, 'allocated_gib', '{:.1f}')} GiB, reserved "
            f"{number(peer, 'reserved_gib', '{:.1f}')} GiB, extra {number(peer, 'extra_gib', '{:.1f}')} GiB, used {number(peer, 'used_gib', '{:.1f}')} GiB, first loss "
            f"{number(peer, 'loss', '{:.4f}')}, scored {number(peer, 'scored', '{:.4f}')}")
    if ours:
        line += (f" | dtrain {number(ours, 'milliseconds', '{:7.1f}')} ms, used "
                 f"{number(ours, 'peak_gib', '{:.1f}')} GiB")
        if "milliseconds" in peer and "milliseconds" in ours:
            floor = f"{ours['milliseconds'] / ours['floor']:.2f} of the floor, " if ours["floor"] else ""
            line += (f" | time {ours['milliseconds'] / peer['milliseconds']:.3f} of the peer's, {floor}first loss "
                     f"{ours['loss'][0]:.4f}, at most {max(ours['anchors']):.0f} anchors")
    for who, result in (("speculators", peer), ("dtrain", ours)):
        if result and "failed" in result:
            line += f" | {who}: {result['failed']}"
    return line


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", help="runs it too, in turn with the peer")
    parser.add_argument("--ours", help="results of step.py --json from the same machine; what is there is not run again")
    parser.add_argument("--model", default="v4", choices=list(made_up.MODELS))
    parser.add_argument("--anchors", default="512,1024,2048,1024-mix,1024-few,1024-loss,3072")
    parser.add_argument("--tokens", type=int, default=step.TOKENS)
    parser.add_argument("--go", help="file to wait for before measuring")
    parser.add_argument("--seconds", type=float, default=1e9, help="no size begins later than this after the first")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--folder", default="/dev/shm/dtrain-step", help="for dtrain's inputs")
    parser.add_argument("--limit", type=float, default=90, help="seconds that a run of dtrain may take")
    parser.add_argument("--json", help="file for all results")
    return parser.parse_args()


def main():
    arguments = parse()
    sizes = [(word, *step.parse_setting(f"{arguments.model}-{word}")[1:]) for word in arguments.anchors.split(",")]
    peer = Peer(made_up.MODELS[arguments.model], arguments.tokens, arguments.backend)
    parameters = sum(p.numel() for p in peer.trainable)
    say(f"torch {torch.__version__}, {parameters / 1e9:.3f} G trainable parameters")
    if arguments.go:
        go = pathlib.Path(arguments.go)
        compile_before(peer, list(dict.fromkeys(anchors for _, anchors, _ in sizes)), go)
        say("waiting")
        while not go.exists():
            time.sleep(0.05)
        say("measuring")
    results, begin = [], time.perf_counter()
    for size, anchors, marks in sizes:
        if time.perf_counter() - begin > arguments.seconds:
            say(f"{size} anchors: not run, {arguments.seconds:.0f} s are over")
            continue
        result = run_peer(peer, anchors, marks)
        name = f"{arguments.model}-{size}"
        earlier = json.loads(pathlib.Path(arguments.ours).read_text()) if arguments.ours else []
        ours = {r["setting"]: r for r in earlier}.get(name)
        if ours is None and arguments.dtrain and "loss" not in marks:
            ours = run_ours(arguments, name, anchors, marks)
        say(describe(size, result, ours))
        results.append(dict(speculators=result, dtrain=ours))
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    faults = [r["speculators"]["failed"] for r in results if r["speculators"].get("failed")]
    return 0 if all(f.startswith("out of memory") for f in faults) else 1


if __name__ == "__main__":
    sys.exit(main())
