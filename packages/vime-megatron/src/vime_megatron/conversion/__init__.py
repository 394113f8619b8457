"""Conversion of weights between file formats."""
