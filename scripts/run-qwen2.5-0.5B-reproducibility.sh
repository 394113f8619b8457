#!/usr/bin/env bash
# The published recipe: Qwen2.5-0.5B on GSM8K, reproducible bit for bit. See docs/reproducibility.md.
#   MODEL=DIR DATA=DIR [BACKEND=NAME] [OUTPUT=DIR] scripts/run-qwen2.5-0.5B-reproducibility.sh [vime run's options]
# It starts one process, `vime run`, and touches no other.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config="$root/configs/qwen2.5-0.5B-gsm8k.toml"
: "${MODEL:?set MODEL to the directory of Qwen2.5-0.5B-Instruct}" "${DATA:?set DATA to the directory of GSM8K}"
settings=(
  --set "model.directory.path='$MODEL'"
  --set "data.parquet.path='$DATA/train.parquet'"
  --set "evaluation.parquet.path='$DATA/test.parquet'"
)
backend=()
if [ "${BACKEND:-}" = FLASHINFER ]; then
  echo "BACKEND=FLASHINFER is refused: its decode kernel has other bits than its prefill (docs/gpu.md, FlashInfer)," >&2
  echo "so a response's log-probs would depend on the batch. Leave BACKEND out; \`vime verify batch\` judges others." >&2
  exit 2
elif [ -n "${BACKEND:-}" ]; then
  backend=(--vllm-attention-backend "$BACKEND")
else
  echo "Attention backend: vLLM's own choice for this machine; the recipe's FLASHINFER depends on the batch." >&2
fi
exec vime run "$config" "${settings[@]}" ${OUTPUT:+--output "$OUTPUT"} \
  --deterministic-mode --vllm-enable-deterministic-inference "${backend[@]}" "$@"
