"""Kernels that come with vLLM, offered to the provider ``cuda`` of contracts; each module imports vLLM when asked."""
