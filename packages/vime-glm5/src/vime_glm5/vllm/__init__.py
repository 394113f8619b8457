"""GLM-5 in vLLM: an own model class, with caches and metadata of its own, from the contract's operations."""
