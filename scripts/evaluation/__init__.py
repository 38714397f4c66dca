"""What `scripts/evaluate.py` asks and how it shows what came of it."""
