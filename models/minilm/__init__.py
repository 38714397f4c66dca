"""Sentence encoder of the BERT family for retrieval. It knows no documents, no index and no server."""

from ccjax.models.minilm.config import BertConfig
from ccjax.models.minilm.encoder import SentenceEncoder

__all__ = ["BertConfig", "SentenceEncoder"]
