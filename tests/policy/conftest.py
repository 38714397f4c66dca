"""Hypothesis settings of the policy tests: the same examples on every run, no time limit, nothing written to disk."""

from hypothesis import settings

settings.register_profile("policy", derandomize=True, deadline=None, database=None)
settings.load_profile("policy")
