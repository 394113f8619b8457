"""Determinism policies: what a run promises, what that asks of each process, and whether it can be kept here."""
