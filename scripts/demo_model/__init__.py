"""Training, evaluation and export of the embedded model, and its documents; used by `train_demo.py`."""
