"""All fields of the request schemas of OpenAI, vLLM, SGLang and llama.cpp's server: which are refused here, and which
have no effect and are accepted. All others are fields of this server's bodies; names that nobody has are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ccjax.errors import RequestError

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"

SOURCES = {
    "openai": "openai-python 3.57.0, openai/types",
    "vllm": "vllm-project/vllm: 002032ee2b18 (chat, completions), 010a69cea9ac (responses), 030ea52effcb (tokenize), "
    "020638a6b026 (embeddings); guided_* are those of 0.10",
    "sglang": "sgl-project/sglang 004c82e07d87, entrypoints/openai/protocol.py",
    "llama.cpp": "ggml-org/llama.cpp 00dc8057ab28, tools/server/README.md",
}
"""Where the names of `FIELDS` were taken from."""

_LLAMA_CPP = """
    temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl n_cache_reuse stream
    stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau
    mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt
    return_tokens samplers timings_per_token return_progress sse_ping_interval post_sampling_probs response_fields lora
"""
_VLLM = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern
"""
_SGLANG = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids
    stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params custom_params
    custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
    disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority
"""
FIELDS: dict[str, dict[str, str]] = {
    CHAT: {
        "openai": """
            audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
            messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
            prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
            safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
            top_logprobs top_p user verbosity web_search_options
        """,
        "vllm": _VLLM
        + """
            messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
            parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
            chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
        """,
        "sglang": _SGLANG
        + """
            messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids
            return_meta_info reasoning_effort reasoning task continue_final_message separate_reasoning stream_reasoning
            chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids
        """,
        "llama.cpp": _LLAMA_CPP
        + "messages response_format chat_template_kwargs reasoning_format thinking_forced_open parse_tool_calls "
        "parallel_tool_calls tools tool_choice",
    },
    COMPLETIONS: {
        "openai": """
            best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
            stream stream_options suffix temperature top_p user
        """,
        "vllm": _VLLM + "prompt suffix prompt_embeds",
        "sglang": _SGLANG + "prompt best_of echo suffix json_schema custom_labels",
        "llama.cpp": _LLAMA_CPP + "prompt",
    },
    RESPONSES: {
        "openai": """
            access_programs background background_options context_management conversation image include input
            instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls
            previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
            safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs
            top_p truncation user
        """,
        "vllm": """
            background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
            parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text
            tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output
            prompt_cache_key request_id mm_processor_kwargs priority cache_salt enable_response_messages
            previous_input_messages previous_response structured_outputs repetition_penalty seed stop ignore_eos
            vllm_xargs
        """,
        "sglang": """
            background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls
            previous_response_id reasoning service_tier store stream temperature text tool_choice tools top_logprobs
            top_p truncation user chat_template_kwargs request_id session_id priority extra_key cache_salt
            ngram_corpus_id frequency_penalty presence_penalty stop top_k min_p repetition_penalty
        """,
    },
    EMBEDDINGS: {
        "openai": "dimensions encoding_format input model user",
        "vllm": """
            model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs cache_salt
            input add_special_tokens add_generation_prompt continue_final_message chat_template chat_template_kwargs
            media_io_kwargs messages encoding_format embed_dtype endianness dimensions use_activation
        """,
        "sglang": """
            input model encoding_format dimensions user rid priority lora_path embed_override_token_id embed_overrides
        """,
    },
    TOKENIZE: {
        "vllm": """
            model prompt add_special_tokens return_token_strs messages add_generation_prompt continue_final_message
            chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools
        """,
        "sglang": """
            model prompt messages tools tool_choice reasoning_effort continue_final_message chat_template_kwargs
            add_special_tokens
        """,
        "llama.cpp": "content add_special parse_special with_pieces",
    },
    DETOKENIZE: {"vllm": "model tokens", "sglang": "model tokens skip_special_tokens", "llama.cpp": "tokens"},
}
"""Path -> API -> the fields of its body."""

HARMLESS = frozenset(
    """
    metadata prediction prompt_cache_key prompt_cache_options prompt_cache_retention service_tier store stream_options
    max_tool_calls background_options request_id session_id rid extra_key custom_labels return_token_offsets
    return_mm_kwargs kv_transfer_params ec_transfer_params stream_interval guided_decoding_backend media_io_kwargs
    mm_processor_kwargs images_config max_dynamic_patch min_dynamic_patch use_audio_in_video
    return_cached_tokens_details separate_reasoning stream_reasoning bootstrap_host bootstrap_port bootstrap_room
    routed_dp_rank disagg_prefill_dp_rank data_parallel_rank ngram_corpus_id n_keep n_cache_reuse id_slot cache_prompt
    timings_per_token return_progress sse_ping_interval dynatemp_exponent repeat_last_n dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers xtc_threshold mirostat_tau mirostat_eta user priority cache_salt
    """.split()
)
"""Fields that any value may have: they say how the answer is computed, or concern what is refused or not here."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "echo": (False,),
    "enable_response_messages": (False,),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "input_ids": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "lora": ([],),
    "lora_path": (),
    "min_keep": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "previous_input_messages": (),
    "previous_response": (),
    "prompt_embeds": (),
    "reasoning": ({},),
    "reasoning_format": ("none", "auto"),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "response_fields": ([],),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "samplers": (),
    "session_params": ({},),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "suffix": ("",),
    "t_max_predict_ms": (0,),
    "task": (),
    "thinking_forced_open": (False,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Fields that would change an answer, with the values besides null under which they do not."""

REFUSED_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {"add_special_tokens": (False,)},
    COMPLETIONS: {
        "add_special_tokens": (True,),
        "functions": ([],),
        "max_completion_tokens": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
    },
    RESPONSES: {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "function_call": (),
        "functions": ([],),
        "image": (),
        "messages": (),
        "n": (1,),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
    },
    EMBEDDINGS: {
        "add_generation_prompt": (False,),
        "add_special_tokens": (True,),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "embed_dtype": ("float32",),
        "embed_override_token_id": (),
        "embed_overrides": (),
        "endianness": ("native", "little"),
        "input_type": (),
        "messages": (),
        "normalize": (True,),
        "padding": ("do_not_pad",),
        "truncate_prompt_tokens": (),
        "truncation_side": ("right",),
        "use_activation": (True,),
    },
    TOKENIZE: {
        "add_special": (),
        "content": (),
        "parse_special": (False,),
        "tool_choice": ("auto",),
        "with_pieces": (),
    },
    DETOKENIZE: {"skip_special_tokens": (False,)},
}
"""Path -> the same besides `REFUSED`, or instead of it."""


def refused_of(path: str) -> dict[str, tuple[Any, ...]]:
    """Field -> the values besides null without effect, for the bodies of a path."""
    return REFUSED | REFUSED_OF[path]


def refuse_unsupported(given: Mapping[str, Any] | None, path: str) -> None:
    """Refuses fields besides the known ones that would change the answer; names that nobody has are ignored.

    Raises:
      RequestError: names the first one.
    """
    neutral = refused_of(path)
    for name, value in (given or {}).items():
        if name not in neutral or value is None:
            continue
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral[name]):
            shown = " or ".join(repr(other) for other in neutral[name]) or "none"
            raise RequestError(name, f"not supported by this server: wanted {shown}, got {_short(value)}")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
