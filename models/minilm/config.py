"""Shapes and options of a BERT-type sentence encoder, read from a sentence-transformers directory.

Unsupported options are rejected here; the message names file and key.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

Pooling = Literal["mean", "cls"]


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Static, hashable description of the encoder.

    Attributes:
      max_seq_length: longest input in tokens, including [CLS] and [SEP]; longer ones are truncated.
      pooling: `mean` over the tokens of the attention mask, or the [CLS] token.
      lower_case: whether texts are lowercased before tokenization.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    num_positions: int
    num_segments: int
    max_seq_length: int
    layer_norm_eps: float = 1e-12
    pooling: Pooling = "mean"
    lower_case: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "max_seq_length", "num_segments"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: wanted a positive integer, got {getattr(self, field)}")
        if self.max_seq_length > self.num_positions:
            raise ValueError(f"max_seq_length: wanted at most {self.num_positions}, got {self.max_seq_length}")
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: wanted a divisor of d_model={self.d_model}, got {self.num_heads}")

    @classmethod
    def from_directory(cls, directory: Path) -> BertConfig:
        """The configuration of a sentence-transformers `directory`.

        Reads config.json and, where present, sentence_bert_config.json, modules.json with the pooling module's
        config.json, and config_sentence_transformers.json.

        Raises:
          ValueError: a file or key is missing, or the model is not BERT with mean or [CLS] pooling.
        """
        raw = _read_json(directory / "config.json")
        for key, wanted in (("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if raw.get(key, wanted) != wanted:
                raise ValueError(f"{directory / 'config.json'} {key}: wanted {wanted!r}, got {raw[key]!r}")
        sentence = _read_json(directory / "sentence_bert_config.json", optional=True)
        prompts = _read_json(directory / "config_sentence_transformers.json", optional=True)
        if prompts.get("default_prompt_name") is not None:
            raise ValueError(
                f"{directory / 'config_sentence_transformers.json'} default_prompt_name: wanted null (prompts are not "
                f"supported), got {prompts['default_prompt_name']!r}"
            )
        try:
            num_positions = int(raw["max_position_embeddings"])
            return cls(
                vocab_size=int(raw["vocab_size"]),
                d_model=int(raw["hidden_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=int(raw["num_attention_heads"]),
                d_ff=int(raw["intermediate_size"]),
                num_positions=num_positions,
                num_segments=int(raw["type_vocab_size"]),
                max_seq_length=min(int(sentence.get("max_seq_length") or num_positions), num_positions),
                layer_norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
                pooling=_pooling(directory),
                lower_case=bool(sentence.get("do_lower_case", False)),
            )
        except KeyError as error:
            raise ValueError(f"{directory / 'config.json'}: the key {error} is missing") from None


def _pooling(directory: Path) -> Pooling:
    modules = _read_json(directory / "modules.json", optional=True)
    for module in modules or ():
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ValueError(f"{directory / 'modules.json'}: wanted Transformer, Pooling and Normalize, got {kind!r}")
    paths = [module["path"] for module in modules or () if str(module["type"]).endswith(".Pooling")]
    if not paths:
        return "mean"
    path = directory / paths[0] / "config.json"
    raw = _read_json(path)
    modes = [key for key, value in raw.items() if key.startswith("pooling_mode") and value]
    if modes == ["pooling_mode_mean_tokens"]:
        return "mean"
    if modes == ["pooling_mode_cls_token"]:
        return "cls"
    raise ValueError(f"{path}: wanted pooling_mode_mean_tokens or pooling_mode_cls_token alone, got {modes}")


def _read_json(path: Path, optional: bool = False) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ValueError(f"{path}: wanted a file of a sentence-transformers directory, found none") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: wanted JSON, got: {error}") from None
