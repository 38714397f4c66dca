"""The made-up harbour town that `ccjax evaluate` asks about; the embedded model was trained on others like it."""
