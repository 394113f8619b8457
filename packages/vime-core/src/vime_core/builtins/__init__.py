"""What vime_core itself registers, like any other plugin."""
