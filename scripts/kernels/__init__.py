"""Compilation of the kernels for chips that are not present; see scripts/kernels_aot.py."""
