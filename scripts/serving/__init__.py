"""What `scripts/serve.py` is made of: its options, what it says, and how it runs a cluster."""
