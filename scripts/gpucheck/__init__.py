"""Checks and timings of scripts/gpu_check.py on a GPU. Each suite is one module with `run` and `tables`."""
