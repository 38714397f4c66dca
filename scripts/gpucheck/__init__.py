"""What scripts/gpu_check.py checks and times on a GPU. Each suite is one module with `run` and `tables`."""
