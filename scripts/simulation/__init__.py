"""Parts of `scripts/simulate.py`."""
