"""Computes passages before a question needs them."""
