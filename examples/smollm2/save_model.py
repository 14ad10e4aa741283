#!/usr/bin/env python3
"""Saves a GGUF model as a Hugging Face directory (dequantised, fp32), so that others load it faster.

    save_model.py --gguf FILE.gguf --out OUT
"""

import argparse
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))

from dtrain_tools.target_model import Target, load_tokenizer  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description="save a GGUF model as a Hugging Face directory")
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    target = Target(None, args.gguf, device="cpu", dtype="float32")
    model = target.model
    if hasattr(model.config, "quantization_config"):  # the saved weights are plain
        del model.config.quantization_config
    model.hf_quantizer = None
    model.to(torch.float32).save_pretrained(args.out + ".tmp")
    load_tokenizer(None, args.gguf).save_pretrained(args.out + ".tmp")
    os.rename(args.out + ".tmp", args.out)


if __name__ == "__main__":
    main()
