"""Encodes texts as sentence vectors: tokenizer, padding to buckets and the jitted encoder."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from ccjax.models.minilm import model
from ccjax.models.minilm.config import BertConfig
from ccjax.models.minilm.load import load_params

LENGTH_BUCKETS = (16, 32, 64, 96, 128, 160, 192, 224, 256, 384, 512)
BATCH_BUCKETS = (1, 4, 16)


class SentenceEncoder:
    """A loaded sentence-transformers model of BERT type, on the default device. Thread-safe."""

    def __init__(self, directory: str | Path) -> None:
        """Loads config, weights and tokenizer.

        Args:
          directory: holds config.json, model.safetensors, tokenizer.json and the sentence-transformers files.

        Raises:
          ValueError: a file is missing, broken, or describes a model that is not supported.
        """
        directory = Path(directory)
        self.config = config = BertConfig.from_directory(directory)
        self._params = load_params(directory / "model.safetensors", config)
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the Rust library raises a bare Exception for a missing or malformed file
            raise ValueError(f"{directory / 'tokenizer.json'}: wanted a tokenizer, got: {error}") from None
        # tokenizer.json has a limit of its own (128 for all-MiniLM-L6-v2); that of sentence_bert_config.json applies.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._whole = Tokenizer.from_str(self._tokenizer.to_str())
        self._tokenizer.enable_truncation(config.max_seq_length)
        self._lengths = (*(n for n in LENGTH_BUCKETS if n < config.max_seq_length), config.max_seq_length)
        self._embed = jax.jit(functools.partial(model.sentence_embeddings, config=config))

    @property
    def dim(self) -> int:
        """Length of a sentence vector."""
        return self.config.d_model

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, control tokens included, also of those that `encode` leaves out."""
        if self.config.lower_case:
            texts = [text.lower() for text in texts]
        return [len(encoding.ids) for encoding in self._whole.encode_batch(list(texts))]

    def known_share(self, text: str) -> float:
        """Share of a text's characters, without blanks, that are in words of the vocabulary; in languages that the
        model does not know they are single, in pieces of words, or unknown."""
        text = text.lower() if self.config.lower_case else text
        tokens = self._whole.encode(text, add_special_tokens=False)
        sizes, unknown = collections.Counter(tokens.word_ids), self._whole.token_to_id("[UNK]")
        known = 0
        for number, word, (start, end) in zip(tokens.ids, tokens.word_ids, tokens.offsets, strict=True):
            is_word = sizes[word] == 1 and number != unknown and (end - start > 1 or not text[start:end].isalpha())
            known += (end - start) * is_word
        return known / max(1, sum(end - start for start, end in tokens.offsets))

    def windows(self, text: str) -> list[str]:
        """A text in parts of at most `max_seq_length` tokens, which `encode` reads whole; only long words are cut."""
        tokens = self._whole.encode(text.lower() if self.config.lower_case else text, add_special_tokens=False)
        starts, most = [0], self.config.max_seq_length - 2
        while len(tokens.ids) - starts[-1] > most:
            end = starts[-1] + most
            words = range(end, starts[-1], -1)
            starts.append(next((at for at in words if tokens.word_ids[at] != tokens.word_ids[at - 1]), end))
        places = [*(tokens.offsets[at][0] for at in starts[1:]), len(text)]
        return [text[start:end] for start, end in zip([0, *places], places, strict=False)]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """One L2-normalised vector per text: float32 [len(texts), dim], in the given order.

        Texts over `max_seq_length` tokens are truncated. Texts of similar length share a batch; other texts and padding
        change a vector by no more than float32 rounding.
        """
        if isinstance(texts, str):
            raise ValueError("texts: wanted a sequence of strings, got one string")
        if self.config.lower_case:
            texts = [text.lower() for text in texts]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        vectors = np.empty((len(encoded), self.dim), np.float32)
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
        for start in range(0, len(order), BATCH_BUCKETS[-1]):
            rows = order[start : start + BATCH_BUCKETS[-1]]
            shape = (_bucket(len(rows), BATCH_BUCKETS), _bucket(len(encoded[rows[-1]]), self._lengths))
            ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
            for slot, row in enumerate(rows):
                ids[slot, : len(encoded[row])] = encoded[row]
                mask[slot, : len(encoded[row])] = True
            vectors[rows] = np.asarray(self._embed(self._params, ids, mask))[: len(rows)]
        return vectors


def _bucket(size: int, buckets: Sequence[int]) -> int:
    return next(bucket for bucket in buckets if bucket >= size)
