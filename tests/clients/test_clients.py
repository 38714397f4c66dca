"""Real clients, unmodified but for the base URL, against `ccjax serve` with its default model: `make test-clients`.

SmolLM2 follows instructions badly; so tools are required where that is an option of the client, and what is checked is
the form of what comes back, not its sense.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.clients

MODEL = "smollm2"
NODE = Path(os.environ.get("CCJAX_CLIENTS_NODE", ""))
"""Where make installed the packages of package.json."""
START_S = 600
QUESTION = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    name: str
    country: str


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """A server in a process of its own, with room for the prompts of agents."""
    command = [sys.executable, "-u", "-m", "ccjax", "serve", "--port", "0", "--no-warmup"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ours) as process:  # compiled as users have it
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()  # the only line, once the server is ready
            yield next(word for word in ready.split() if word.startswith("http://")).rstrip("/.") + "/v1"
        finally:
            process.terminate()
            process.communicate(timeout=START_S)


@pytest.fixture(autouse=True)
def environment(base_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("OPENAI_API_KEY", "none"), ("OPENAI_BASE_URL", base_url), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_openai(base_url: str) -> None:
    from openai import OpenAI

    client = OpenAI()
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=64,
    ) as stream:
        call, *_ = stream.get_final_completion().choices[0].message.tool_calls or ()
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and isinstance(arguments["city"], str)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"parsed_arguments"})]},
        {"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)},
    ]
    again = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=16)
    assert again.choices[0].message.content is not None or again.choices[0].message.tool_calls
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city."}],
        response_format=City,
        max_tokens=128,
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert client.responses.create(model=MODEL, input="Say hi.", max_output_tokens=16).output_text


def test_langchain_agent(base_url: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, max_tokens=64)
    bound = model.bind_tools([tool(weather)], tool_choice="required")
    call, *_ = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "weather" and isinstance(call["args"]["city"], str)
    assert isinstance(ChatOpenAI(model=MODEL, max_tokens=128).with_structured_output(City).invoke("Name a city."), City)


def test_langgraph_agent(base_url: str) -> None:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=MODEL, max_tokens=48), [tool(weather)], system_prompt="Be brief.")
    messages = agent.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 6})["messages"]
    assert messages[-1].type == "ai"


def test_llama_index(base_url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model=MODEL, api_base=base_url, api_key="none", is_chat_model=True, max_tokens=96)
    assert model.chat([ChatMessage(role="user", content="Say hi.")]).message.content
    assert "".join(part.delta or "" for part in model.stream_chat([ChatMessage(role="user", content="Say hi.")]))


def test_haystack(base_url: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    generator = OpenAIChatGenerator(
        model=MODEL,
        api_base_url=base_url,
        tools=[create_tool_from_function(weather)],
        generation_kwargs={"tool_choice": "required", "max_tokens": 64},
    )
    (reply,) = generator.run([ChatMessage.from_user(QUESTION)])["replies"]
    assert reply.tool_calls[0].tool_name == "weather" and isinstance(reply.tool_calls[0].arguments["city"], str)


def test_litellm(base_url: str) -> None:
    import litellm

    how = {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none", "max_tokens": 64}
    answer = litellm.completion(
        messages=[{"role": "user", "content": QUESTION}], tools=[TOOL], tool_choice="required", **how
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"]
    parts = litellm.completion(messages=[{"role": "user", "content": "Say hi."}], stream=True, **how)
    assert "".join(part.choices[0].delta.content or "" for part in parts)


def test_instructor_in_its_default_mode(base_url: str) -> None:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI())
    city = client.chat.completions.create(
        model=MODEL, response_model=City, messages=[{"role": "user", "content": "Name a city."}], max_tokens=128
    )
    assert isinstance(city, City)


def test_pydantic_ai_with_an_output_type(base_url: str) -> None:
    from pydantic_ai import Agent

    agent = Agent(f"openai-chat:{MODEL}", output_type=City, model_settings={"max_tokens": 128})
    assert isinstance(agent.run_sync("Name a city.").output, City)


def test_pydantic_ai_with_a_tool(base_url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.usage import UsageLimits

    agent = Agent(f"openai-chat:{MODEL}", model_settings={"max_tokens": 48})

    @agent.tool_plain
    def weather_in(city: str) -> str:
        """The weather in a city."""
        return weather(city)

    assert isinstance(agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=6)).output, str)


def test_openai_agents_over_responses(base_url: str) -> None:
    import agents

    called = []

    @agents.function_tool
    def weather_in(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return weather(city)

    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(tool_choice="required", max_tokens=64)
    agent = agents.Agent(name="helper", tools=[weather_in], model=MODEL, model_settings=settings)
    result = asyncio.run(agents.Runner.run(agent, QUESTION, max_turns=4))
    assert called and isinstance(result.final_output, str)


def test_llm(base_url: str, tmp_path: Path) -> None:
    settings = tmp_path / "llm"
    settings.mkdir()
    known = f"- model_id: local\n  model_name: {MODEL}\n  api_base: {base_url}\n"
    (settings / "extra-openai-models.yaml").write_text(known)
    done = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "local", "-o", "max_tokens", "16", "Say hi."],
        env=os.environ | {"LLM_USER_PATH": str(settings), "LLM_LOAD_PLUGINS": ""},  # the model's package is one
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("script", ["openai", "ai_tool", "ai_object"])
def test_javascript(base_url: str, script: str) -> None:
    if shutil.which("node") is None or not (NODE / "node_modules").is_dir():
        pytest.skip("needs node and the packages of tests/clients/package.json: make test-clients")
    source = Path(__file__).with_name(f"{script}.mjs")
    target = NODE / source.name
    target.write_text(source.read_text())
    done = subprocess.run(["node", str(target), MODEL], cwd=NODE, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def test_nothing_that_the_clients_sent_was_refused(base_url: str) -> None:
    def reasons() -> set[str]:
        metrics = httpx.get(base_url.removesuffix("/v1") + "/metrics").text
        return set(re.findall(r'^ccjax_request_errors_total\{reason="(\w+)"\}', metrics, re.MULTILINE))

    assert reasons() <= {"cancelled"}
    assert httpx.post(f"{base_url}/chat/completions", json={"messages": []}).status_code == 400
    assert "invalid_request" in reasons()
