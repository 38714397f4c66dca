"""Models in GGUF files: weights, architecture, tokenizer and chat template."""

from ccjax.loading.gguf.architecture import config_of
from ccjax.loading.gguf.reader import GgufFile, open_gguf
from ccjax.loading.gguf.text import text_of
from ccjax.loading.gguf.weights import load_gguf

__all__ = ["GgufFile", "config_of", "load_gguf", "open_gguf", "text_of"]
