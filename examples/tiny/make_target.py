#!/usr/bin/env python3
"""Trains the tiny target of this example and saves it as a Hugging Face model directory.

    python make_target.py --out model

The result is committed (model/), so nobody has to run this; it is here so that the model has no
secret. A byte-level Qwen3 model (6 layers, hidden size 128) learns text.txt, one document a line.
The last HELD_OUT lines are never trained on: validation prompts of the drafter come from them.
Needs torch, transformers and tokenizers. Owns nothing else: shards are made by make_shards.py.
"""

import argparse
import json
import os
import random
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
HELD_OUT = 119  # documents at the end of text.txt that are never trained on
BOS, EOS, MASK, PAD, VOCAB = 256, 257, 258, 259, 260
# A "user" message is the start of a document and the "assistant" message its end.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}\n"
)


def model_config():
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=320, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=2048, tie_word_embeddings=True, attention_bias=False,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, initializer_range=0.02)


def byte_alphabet():
    """The usual printable stand-in for each of the 256 bytes, as byte-level tokenizers use it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars, spare = {}, 256
    for byte in range(256):
        if byte in plain:
            chars[byte] = chr(byte)
        else:
            chars[byte] = chr(spare)
            spare += 1
    return chars


def save_tokenizer(folder):
    """Token id = byte value; no merges."""
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<bos>", "<eos>", "<mask>", "<pad>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>",
                                        mask_token="<mask>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    assert tokenizer.encode("Az 1<eos>", add_special_tokens=False) == [65, 122, 32, 49, EOS]
    tokenizer.save_pretrained(folder)


def batch_of(lines):
    """-> input_ids, labels [documents, longest]; padding is labelled -100."""
    rows = [[BOS, *line.encode(), EOS] for line in lines]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    return ids, ids.masked_fill(ids == PAD, -100)


def epoch_batches(lines, size, rng):
    """Documents of similar length together, in random order."""
    order = sorted(range(len(lines)), key=lambda i: len(lines[i]) + rng.random() * 40)
    batches = [[lines[i] for i in order[at:at + size]] for at in range(0, len(order), size)]
    rng.shuffle(batches)
    return batches


@torch.no_grad()
def held_out_loss(model, lines):
    total = count = 0.0
    for at in range(0, len(lines), 32):
        ids, labels = batch_of(lines[at:at + 32])
        tokens = int((labels[:, 1:] != -100).sum())
        total += model(input_ids=ids, labels=labels).loss.item() * tokens
        count += tokens
    return total / count


def train(model, lines, held_out, args):
    rng = random.Random(args.seed)
    steps = args.epochs * len(epoch_batches(lines, args.batch, rng))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": norms, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps, pct_start=0.05)
    started = time.time()
    for epoch in range(args.epochs):
        for batch in epoch_batches(lines, args.batch, rng):
            ids, labels = batch_of(batch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.3f} "
              f"held-out {held_out_loss(model, held_out):.3f} nats/byte {time.time() - started:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description="train the tiny target")
    parser.add_argument("--out", default=os.path.join(HERE, "model"))
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with open(os.path.join(HERE, "text.txt"), encoding="ascii") as file:
        lines = file.read().splitlines()
    model = Qwen3ForCausalLM(model_config())
    train(model, lines[:-HELD_OUT], lines[-HELD_OUT:], args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    save_tokenizer(args.out)
    with open(os.path.join(args.out, "config.json"), encoding="utf-8") as file:
        print(json.load(file)["architectures"], sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
