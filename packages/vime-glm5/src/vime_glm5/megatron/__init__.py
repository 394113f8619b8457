"""GLM-5 in Megatron-core: its structure, its weights by HF names, and the trainer's side of its contracts."""
