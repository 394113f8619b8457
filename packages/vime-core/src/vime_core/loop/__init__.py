"""The run loop: prompts to samples to gradients to weights, every arrow recorded."""
