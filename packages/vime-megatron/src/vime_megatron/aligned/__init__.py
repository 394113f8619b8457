"""The trainer side of alignment contracts: Megatron modules built from the contract's operations."""
