"""Model structures: what turns a HF configuration into a Megatron model."""
