"""Runs the model on its devices: prefills in packs, decode steps over the page pool, sampling and warm-up.

Knows plans and pages; no store below the device tier, no variant and no answer.
"""
