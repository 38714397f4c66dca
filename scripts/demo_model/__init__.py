"""Training, measuring and packing of the embedded model, and its documents; what `train_demo.py` runs."""
