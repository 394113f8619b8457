"""Experts spread over ranks: every route keeps its own row, so that where an expert runs changes no bit."""
