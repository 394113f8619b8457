"""The trainer side of alignment contracts: Megatron modules built from the contract's operations."""

from vime_megatron.quiet import silence_megatron

silence_megatron()  # a side may be imported before the trainer
