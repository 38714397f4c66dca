"""Sentence encoder of the BERT family for retrieval."""

from ccjax.models.minilm.config import BertConfig
from ccjax.models.minilm.encoder import SentenceEncoder

__all__ = ["BertConfig", "SentenceEncoder"]
