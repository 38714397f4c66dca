"""What the OpenAPI document says of request bodies besides the types of their fields: ranges, shapes and an example."""

from __future__ import annotations

from typing import Any


def _object(required: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*required], "properties": required | others}


_STRING = {"type": "string"}
_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"}
_PART = _object({"type": {"const": "text"}, "text": _STRING})
_CONTENT = {"anyOf": [_STRING, {"type": "array", "items": _PART, "minItems": 1}]}
_CALL = _object({"type": {"const": "function"}, "function": _object({"name": _NAME, "arguments": _STRING})}, id=_STRING)
_MESSAGE = {
    "anyOf": [
        _object({"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": _CONTENT}),
        _object({"role": {"const": "assistant"}, "tool_calls": {"type": "array", "items": _CALL, "minItems": 1}}),
        _object({"role": {"const": "tool"}, "tool_call_id": _STRING, "content": _CONTENT}),
        _object({"role": {"const": "function"}, "name": _STRING, "content": _CONTENT}),
    ]
}
_FUNCTION = _object({"name": _NAME}, description=_STRING, parameters={"type": "object"})
_TOKENS = {"items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SOME = {"minLength": 1}
NARROWER: dict[str, dict[str, Any]] = {
    "messages": {"items": _MESSAGE, "minItems": 1},
    "functions": {"items": _FUNCTION},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "min_tokens": {"minimum": 0},
    "prompt_logprobs": {"minimum": 0, "maximum": 20},
    "n": {"minimum": 1, "maximum": 16},
    "allowed_token_ids": _TOKENS,
    "stop_token_ids": {"items": _TOKENS["items"]},
    "bad_words": {"items": {"type": "string", "pattern": "\\S"}},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "guided_choice": {"items": {"type": "string", **_SOME}, "minItems": 1},
    "guided_regex": _SOME,
    "guided_grammar": _SOME,
    "regex": _SOME,
    "ebnf": _SOME,
    "grammar": _SOME,
    "max_completion_tokens": {"minimum": 1},
    "quality_target": {"minimum": 0, "maximum": 1},
    "timeout_s": {"exclusiveMinimum": 0},
    "ttl_s": {"exclusiveMinimum": 0},
    "priority": {"minimum": -1000, "maximum": 1000},
    "reuse": {"enum": ["off", "exact", "bounded", "fast"]},
    "document_ids": {"minItems": 1},
    "tokens": {"items": _TOKENS["items"]},
    "text": {"pattern": "\\S"},
}
"""Field -> what its values have to be besides their type, wherever a body has it."""

_QUESTION = {"role": "user", "content": "Who bakes bread?"}
_DOCUMENT = {"id": "dino", "text": "Dino bakes bread in Naples, every morning."}
EXAMPLES: dict[str, dict[str, Any]] = {
    "ChatBody": {"messages": [_QUESTION], "documents": [_DOCUMENT], "max_tokens": 16},
    "CompletionBody": {"prompt": "Dino bakes", "max_tokens": 16, "retrieval": False},
    "ResponsesBody": {"input": "Who bakes bread?", "documents": [_DOCUMENT], "max_output_tokens": 16},
    "TokenizeBody": {"messages": [_QUESTION]},
    "DetokenizeBody": {"tokens": [1, 2, 3]},
    "EmbeddingsBody": {"input": ["Dino bakes bread."]},
    "WarmBody": {"documents": [_DOCUMENT]},
    "PinBody": {"ttl_s": 600},
}
"""Class of a body -> a body that is accepted."""


def narrow(schemas: dict[str, Any]) -> None:
    """Adds what `NARROWER` says to the schemas of bodies, in place."""
    for schema in schemas.values():
        for name, value in schema.get("properties", {}).items():
            for part in value.get("anyOf", [value]):
                kind = part.get("type")
                wanted = NARROWER.get(name, {})
                is_list, is_object = {"items", "minItems"} & wanted.keys(), "additionalProperties" in wanted
                fits = "array" if is_list else "object" if is_object else None
                if kind not in (None, "null") and (kind == fits or (fits is None and kind not in ("array", "object"))):
                    part.update(wanted)
