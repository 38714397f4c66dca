"""What engines on one store agree on: who computes which chunk, and what has been stored or removed by others."""
