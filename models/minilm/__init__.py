"""Sentence encoder of the BERT family for retrieval. It knows no documents, no index and no server."""

from models.minilm.config import BertConfig
from models.minilm.encoder import SentenceEncoder

__all__ = ["BertConfig", "SentenceEncoder"]
