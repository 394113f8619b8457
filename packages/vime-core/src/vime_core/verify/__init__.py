"""Verdicts: what was promised, compared bit for bit, with what was covered and where it first fails."""
