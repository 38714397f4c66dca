"""Coordination of engines on one store: who computes which chunk, and what other processes stored or removed."""
