"""What runs inside the engine's processes. Importing these modules needs vLLM."""
