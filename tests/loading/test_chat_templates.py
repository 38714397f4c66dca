"""A model whose chat template fails with a plain question is refused before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ccjax.errors import ConfigError
from ccjax.loading.model import load_prompt_builder, read_model_files
from tests.server.test_startup import Refusal, refusal
from tests.server.tiny_model import write_tiny_model

__all__ = ["refusal"]

FAILING = {
    "{{ raise_exception('only robots speak here') }}": "only robots speak here",
    "{{ messages[0].parts[0] }}": "parts",
    "{{ messages[0].content | round }}": "",
    "{{ 1 // (messages | length - 1) }}": "zero",
    "{{ 'the same for all' }}": "",
}


def model_with(template: str, directory: Path) -> Path:
    write_tiny_model(directory, ["Who?"])
    (directory / "model.safetensors").unlink()
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return directory


@pytest.mark.parametrize("template", FAILING)
def test_a_template_that_fails_with_a_question_is_refused(template: str, tmp_path: Path) -> None:
    directory = model_with(template, tmp_path / "model")
    with pytest.raises(ConfigError, match="chat template") as refused:
        load_prompt_builder(directory)
    assert FAILING[template] in str(refused.value)
    assert str(directory) in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="chat template"):
        read_model_files(directory)
    usable = model_with("{{ messages[0].content }}", tmp_path / "other")
    assert load_prompt_builder(directory, tokenizer=usable) is not None


def test_a_start_says_so_in_one_line(tmp_path: Path, refusal: Refusal) -> None:
    directory = model_with("{{ raise_exception('only robots speak here') }}", tmp_path / "model")
    line = refusal(["--model", str(directory), "--port", "0"])
    assert line.startswith("ccjax serve: error: --model: wanted a chat template") and "only robots speak here" in line
