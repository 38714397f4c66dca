"""The chunk-cache: the index of variants, their placement in tiers, how a prefill loads them, and which of the KV that
it computed is captured. The engine drives all of it.
"""
