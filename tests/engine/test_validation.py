"""Settings and requests out of range: each is refused, and the error names the argument, what was wanted and got."""

from __future__ import annotations

import math

import pytest

from ccjax.engine import EngineConfig, Request, SamplingParams
from ccjax.errors import ConfigError, RequestError
from ccjax.requests import LONGEST_FLOW, MOST_PRIORITY
from tests.engine.helpers import TinyModel

MODEL = TinyModel(seed=2)

SETTINGS = {
    "alpha": [-1.0],
    "cached_documents": [0],
    "disk_kv_dtype: wanted one of": ["int4", "fp8", None],
    "dtype": ["float16"],
    "fixes_positions: wanted True or False": [1],
    "flow_share": [0.0, math.inf, "4"],
    "focus_rule": ["middle"],
    "focus_window": [0],
    "gpu_memory_utilization: wanted a share above 0, at most 1": [0, 0.0, -1, 1.1, math.nan, "0.9", True],
    "host_cache_bytes": [0],
    "max_decode_gap_ms": [-1.0, math.nan, "200"],
    "max_model_len": [0, True],
    "max_num_batched_tokens": [1.5],
    "max_num_seqs": [0],
    "max_queue": [0, 1.5],
    "max_retries": [-1, True, 1.0, None],
    "order_after_s": [-1.0, math.inf, True, "1"],
    "pin_share": ["half"],
    "quantization: wanted one of ('int8', 'fp8') or None, got 'int4'": ["int4"],
    "ranking_layers": [(), 1, "01", (1, 1), (0, -1), (0, 1.5)],
    "recompute_ratio": [1.5],
    "shadow_ratio: wanted a share from 0 to 1": [1.5],
    "shadow_target: wanted a share from 0 to 1": [1.5],
    "share_computation: wanted True or False, got 1": [1],
    "store": [3],
    "strategy": ["magic"],
    "tensor_parallel_size: wanted a positive integer, got": [0, None, True],
}


def each(table: dict[str, list]) -> pytest.MarkDecorator:
    """Runs a test with the name of every argument, each of its values and the beginning of the error's message."""
    cases = [(key.partition(":")[0], value, key) for key, values in table.items() for value in values]
    return pytest.mark.parametrize(
        ("name", "value", "message"),
        [(name, value, key if key != name else f"{name}: wanted") for name, value, key in cases],
    )


@each(SETTINGS)
def test_invalid_setting_is_named_in_the_error(name, value, message):
    shared = {"store": "file:///x", "store_index": "sqlite:///x.db"} if name == "order_after_s" else {}
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**shared, **{name: value})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "abacus"}, "attention: .*abacus"),
        ({"fixes_positions": False, "device_cache_bytes": 8 << 20}, "fixes_positions: wanted True with device_cache_"),
        ({"max_model_len": 5000}, "max_model_len"),
        ({"store": "ftp://somewhere"}, "ftp"),
        ({"store": "file:///x", "order_after_s": 1.0}, "store_index"),
        ({"store_index": "redis://host"}, "store_index: wanted a store that it is the index of, got none"),
        ({"store": "file:///x", "store_index": 5}, "store_index: wanted a URL such as .*, got int"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: wanted a divisor of the model's 8 attention heads, got 3"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size: wanted at most 8, the cpu devices here, got 16"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        MODEL.engine(**settings)


REQUESTS = {
    "flow: wanted a string of at most 256 characters": [7, "x" * (LONGEST_FLOW + 1)],
    "priority: wanted an integer from -1000 to 1000": ["1", True, 1.0, MOST_PRIORITY + 1, -MOST_PRIORITY - 1],
    "quality_target: wanted a number from 0 to 1": [-0.1, 1.1, "high", True, math.nan],
    "reuse": ["sometimes"],
    "timeout_s: wanted a positive number of seconds": [0, -1.0, math.inf, math.nan, True, "1"],
}


@each(REQUESTS)
def test_invalid_request_field_is_named_in_the_error(name, value, message):
    with pytest.raises(RequestError) as caught:
        Request(prompt="x", **{name: value})
    assert caught.value.argument == name and str(caught.value).startswith(message) and len(str(caught.value)) < 200


def test_extreme_values_of_request_fields_are_accepted():
    Request(prompt="x", priority=-MOST_PRIORITY, flow="x" * LONGEST_FLOW, timeout_s=1e-9)
    Request(prompt="x", priority=MOST_PRIORITY, flow="", timeout_s=1)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("a text", "documents: wanted a list"),
        ([5], r"documents\[0\]: wanted a mapping"),
        ([{"text": "a"}, {"title": "b"}], r"documents\[1\]"),
        ([{"text": 7}], r"documents\[0\]"),
    ],
)
def test_invalid_documents_are_named_in_the_error(documents, message):
    with pytest.raises(RequestError, match=message):
        Request(prompt="Who?", documents=documents)


SAMPLING = {
    "ignore_eos: wanted true or false, got 1": [1],
    "logprobs": [99],
    "max_new_tokens": ["5", 2.5, 0],
    "n": [0, -1, 17, True, None, 2.0],
    "seed": [1.5, -1],
    "stop": ["END", (3,), ("",)],
    "temperature": ["x", 5.0, math.nan],
    "top_p": [0.0],
}


@each(SAMPLING)
def test_invalid_sampling_parameter_is_named_in_the_error(name, value, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(message) and ", got" in str(caught.value)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[1, 2]], "segments: wanted at least a system and a question"),
        ([[1], []], r"segments\[1\]: wanted at least one token"),
        ([[1], [], [2]], r"segments\[1\]: wanted at least one token"),
        ([[1], [97]], r"segments\[1\]: wanted token ids from 0 to 96, got 97"),
        ([[1], [-1]], r"got -1"),
        ([[1], ["a"]], r"segments\[1\]: wanted integers, got 'a'"),
        ([[True], [1]], r"segments\[0\]: wanted integers, got True"),
        ([1, 2, 3], r"segments\[0\]: wanted a list of token ids, got 1"),
    ],
)
def test_invalid_segments_are_named_in_the_error(segments, message):
    with MODEL.engine() as engine:
        with pytest.raises(RequestError, match=message):
            engine.generate_from_tokens(segments)
        assert engine.generate_from_tokens([[1], [2]], max_new_tokens=1).token_ids
