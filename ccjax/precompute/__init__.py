"""Computes the KV of a whole collection of documents ahead of traffic, with several processes, into a store that
servers reuse. Imports nothing on its own.
"""
