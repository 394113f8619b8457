"""The RL algorithm as small pure functions: seeds, advantages, losses, reduction, packing.

Only the modules that compute on tensors import torch; importing this package does not.
"""
