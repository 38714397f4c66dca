"""Runs the model on its devices: prefills in packs, decode steps over the page pool, sampling and warm-up.

Works with plans and pages; variants, lower tiers and answers belong to the layers above.
"""
