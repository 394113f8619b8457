"""Model sources: each ends in a HF model directory."""
