"""Clients and frameworks with their default settings: the server must accept every field that they send.

The shipped model writes nonsense, so only formats are checked. Packages that are not installed are listed."""

import asyncio
import importlib.metadata
import json
import os
import tempfile
import traceback
from typing import Literal

from .serving import CALLS_TEMPLATE, Server

NAME = "rustdoc-11m"
# Bounds the nonsense of the model.
CITIES = ["Bern", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Vec"}]
# Tokens of an answer that must be complete.
LONG = 400


def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"{city}: sunny"


def with_openai(url):
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    tool = openai.pydantic_function_tool(Weather)
    chat = dict(model=NAME, messages=MESSAGES, max_tokens=4)
    client.chat.completions.create(**chat, tools=[tool], store=True, verbosity="low", parallel_tool_calls=False)
    first = client.responses.create(model=NAME, input="Vec", max_output_tokens=4, store=True)
    client.responses.create(model=NAME, input="And?", max_output_tokens=4, previous_response_id=first.id)
    in_two_steps(client)
    stream = client.chat.completions.create(
        **chat, stream=True, stream_options={"include_usage": True}, extra_body={"prompt_cache_retention": "24h"}
    )
    assert list(stream)[-1].usage.completion_tokens == 4


def in_two_steps(client):
    """A call, its result, and the answer after it."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    options = dict(model=NAME, max_tokens=LONG, tools=tools)
    called = client.chat.completions.create(**options, messages=MESSAGES, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": weather(**json.loads(called.tool_calls[0].function.arguments))}
    client.chat.completions.create(**{**options, "max_tokens": 4}, messages=[*MESSAGES, called, result])

    options = dict(model=NAME, max_output_tokens=LONG, tools=[{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}])
    called = client.responses.create(**options, input="Vec", tool_choice="required")
    call = next(item for item in called.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": weather(**json.loads(call.arguments))}
    client.responses.create(**{**options, "max_output_tokens": 4}, input=[{"role": "user", "content": "Vec"}, *called.output, result])


def with_anthropic(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
    tool = {"name": "weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(model=NAME, max_tokens=4, system=system, tools=[tool], messages=MESSAGES)
    assert message.stop_reason in ("max_tokens", "end_turn")
    called = client.messages.create(model=NAME, max_tokens=LONG, tools=[tool], messages=MESSAGES, tool_choice={"type": "any"})
    call = next(block for block in called.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    turns = [*MESSAGES, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    client.messages.create(model=NAME, max_tokens=4, tools=[tool], messages=turns)
    asked = []

    @anthropic.beta_tool
    def rain(city: Literal["Bern", "Rome"]) -> str:
        """Whether it rains in a city."""
        asked.append(city)
        return "no"

    options = dict(model=NAME, max_tokens=LONG, messages=MESSAGES, tool_choice={"type": "any"}, max_iterations=2)
    list(client.beta.messages.tool_runner(tools=[rain], **options))
    assert asked


def with_litellm(url):
    import litellm

    litellm.telemetry = False
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    options = dict(api_base=f"{url}/v1", api_key="secret", max_tokens=4, messages=MESSAGES)
    answer = litellm.completion(model=f"openai/{NAME}", tools=tools, **options)
    assert answer.usage.completion_tokens == 4
    assert list(litellm.completion(model=f"openai/{NAME}", stream=True, **options))
    forced = {**options, "max_tokens": LONG}
    called = litellm.completion(model=f"openai/{NAME}", tools=tools, tool_choice="required", **forced).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
    litellm.completion(model=f"openai/{NAME}", tools=tools, **{**options, "messages": [*MESSAGES, called, result]})
    try:
        long = [{"role": "user", "content": "a b c d " * 9000}]
        litellm.completion(model=f"openai/{NAME}", **{**options, "messages": long})
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("ContextWindowExceededError expected")


def with_langchain_openai(url):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=NAME, base_url=f"{url}/v1", api_key="secret", max_tokens=4, max_retries=0)
    chat.bind_tools([tool(weather)]).invoke("Vec")
    assert list(chat.stream("Vec"))
    from langchain_core.messages import HumanMessage, ToolMessage

    long = ChatOpenAI(model=NAME, base_url=f"{url}/v1", api_key="secret", max_tokens=LONG, max_retries=0)
    called = long.bind_tools([tool(weather)], tool_choice="required", strict=True).invoke("Vec")
    result = ToolMessage(weather(**called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"])
    chat.bind_tools([tool(weather)]).invoke([HumanMessage("Vec"), called, result])


def with_instructor(url):
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        rain: bool

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    for mode in [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]:
        ask = instructor.from_openai(client, mode=mode).chat.completions.create
        options = dict(model=NAME, messages=MESSAGES, response_model=City, max_tokens=200, max_retries=0)
        try:
            assert ask(**options, extra_body={"reasoning_effort": "none", "seed": 1}).rain in (True, False)
        except Exception as error:
            # The model can write white space up to the limit.
            assert "max_tokens length limit" in str(error), error


def with_pydantic_ai(url):
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart, UserPromptPart
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(BaseModel):
        city: Literal["Bern", "Rome"]

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="secret")
    call = ToolCallPart("weather", {"city": "Bern"}, tool_call_id="call_1")
    result = ToolReturnPart("weather", "sunny", tool_call_id="call_1")
    history = [ModelRequest([UserPromptPart("Vec")]), ModelResponse([call]), ModelRequest([result])]
    for kind in [OpenAIChatModel, OpenAIResponsesModel]:
        model = kind(NAME, provider=provider)
        agent = Agent(model, tools=[weather], model_settings={"max_tokens": 4})
        agent.run_sync("Vec")
        agent.run_sync(message_history=history)
        # A typed answer is a required call.
        typed = Agent(model, output_type=Place, model_settings={"max_tokens": LONG})
        assert typed.run_sync("Vec").output.city in CITIES


def with_openai_agents(url):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    settings = agents.ModelSettings(max_tokens=4)

    async def run():
        for kind in [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]:
            model = kind(model=NAME, openai_client=client)
            tools = [agents.function_tool(weather)]
            agent = agents.Agent(name="a", instructions="A", tools=tools, model=model, model_settings=settings)
            try:
                await agents.Runner.run(agent, "Vec", max_turns=2)
            except agents.ModelBehaviorError as error:
                # The answer is truncated on purpose.
                assert "max_output_tokens" in str(error), error
            called = []

            @agents.function_tool
            def rain(city: Literal["Bern", "Rome"]) -> str:
                """Whether it rains in a city."""
                called.append(city)
                return "no"

            # After a forced call, the next step is free.
            settings_of_call = agents.ModelSettings(max_tokens=LONG, tool_choice="required")
            agent = agents.Agent(name="a", instructions="A", tools=[rain], model=model, model_settings=settings_of_call)
            try:
                await agents.Runner.run(agent, "Vec", max_turns=3)
            except agents.ModelBehaviorError as error:
                # The nonsense after the call can reach the limit.
                assert "max_output_tokens" in str(error), error
            assert called

    asyncio.run(run())


def with_smolagents(url):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(NAME, api_base=f"{url}/v1", api_key="secret", max_tokens=4)
    model([{"role": "user", "content": [{"type": "text", "text": "Vec"}]}])
    # It requests calls on its own, and an answer when no step is left.
    model = OpenAIServerModel(NAME, api_base=f"{url}/v1", api_key="secret", max_tokens=LONG)
    agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=2, verbosity_level=0)
    agent.run("Vec")


def with_ollama(url):
    import ollama

    client = ollama.Client(host=url, headers={"authorization": "Bearer secret"})
    assert client.list().models[0].model == NAME
    options = {"num_predict": 4, "temperature": 0}
    whole = client.chat(model=NAME, messages=MESSAGES, tools=[weather], options=options)
    chunks = client.chat(model=NAME, messages=MESSAGES, tools=[weather], options=options, stream=True)
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert client.generate(model=NAME, prompt="Vec", options=options).done
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}]}
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    assert client.chat(model=NAME, messages=[*MESSAGES, call, result], tools=[weather], options=options).done


def with_llm(url):
    import llm
    import yaml

    user = llm.user_dir()
    user.mkdir(parents=True, exist_ok=True)
    own = {"model_id": "kvant", "model_name": NAME, "api_base": f"{url}/v1", "api_key_name": "kvant", "supports_tools": True, "supports_schema": True}
    (user / "extra-openai-models.yaml").write_text(yaml.dump([own]))
    model = llm.get_model("kvant")
    model.key = "secret"
    assert model.prompt("Vec", stream=False, max_tokens=4).text() is not None
    assert list(model.prompt("Vec", max_tokens=4)) is not None
    city = json.loads(model.prompt("Vec", schema=SCHEMA, max_tokens=LONG).text())
    assert city["city"] in CITIES
    # It has no choice of tools: the call comes from an earlier turn of the conversation.
    conversation = model.conversation()
    first = conversation.prompt("Vec", tools=[weather], max_tokens=4)
    first.text()
    first.add_tool_call(llm.ToolCall(name="weather", arguments={"city": "Bern"}, tool_call_id="call_1"))
    result = llm.ToolResult(name="weather", output="sunny", tool_call_id="call_1")
    conversation.prompt("", tools=[weather], tool_results=[result], max_tokens=4).text()


# The distributions, and the functions that test them.
CLIENTS = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "litellm": with_litellm,
    "langchain-openai": with_langchain_openai,
    "instructor": with_instructor,
    "pydantic-ai-slim": with_pydantic_ai,
    "openai-agents": with_openai_agents,
    "smolagents": with_smolagents,
    "ollama": with_ollama,
    "llm": with_llm,
}


def run(kvant):
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "true")
    done, missing, failed = [], [], []
    with tempfile.TemporaryDirectory() as folder, Server(kvant, "--api-key", "secret", template=CALLS_TEMPLATE) as server:
        os.environ["LLM_USER_PATH"] = folder
        for name, client in CLIENTS.items():
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
                continue
            try:
                client(server.url)
                done.append(f"{name} {version}")
            except Exception:
                traceback.print_exc()
                failed.append(f"{name} {version}")
    assert not failed, f"{', '.join(failed)} failed; {', '.join(done)} run"
    return f"{', '.join(done)} run" + (f"; not installed: {', '.join(missing)}" if missing else "")
