"""Compilation of the kernels for chips that are not at hand; see scripts/kernels_aot.py."""
