"""Triton kernels for NVIDIA GPUs: the provider ``cuda``."""
