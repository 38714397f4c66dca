"""What reuse costs in answers: questions over passages, ways to answer them through the public engine, scores.

Imports nothing on its own; the metric library is an optional extra.
"""
