"""Clients and frameworks with their default settings: no field that they send may be refused.

The shipped model writes nonsense, so that only forms are checked. Packages that are not installed are named."""

import asyncio
import importlib.metadata
import os

from .serving import Server

NAME = "rustdoc-11m"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Vec"}]


def weather(city: str) -> str:
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
    stream = client.chat.completions.create(
        **chat, stream=True, stream_options={"include_usage": True}, extra_body={"prompt_cache_retention": "24h"}
    )
    assert list(stream)[-1].usage.completion_tokens == 4


def with_anthropic(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
    tool = {"name": "weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(model=NAME, max_tokens=4, system=system, tools=[tool], messages=MESSAGES)
    assert message.stop_reason in ("max_tokens", "end_turn")


def with_litellm(url):
    import litellm

    litellm.telemetry = False
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    options = dict(api_base=f"{url}/v1", api_key="secret", max_tokens=4, messages=MESSAGES)
    answer = litellm.completion(model=f"openai/{NAME}", tools=tools, **options)
    assert answer.usage.completion_tokens == 4
    assert list(litellm.completion(model=f"openai/{NAME}", stream=True, **options))
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
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="secret")
    for kind in [OpenAIChatModel, OpenAIResponsesModel]:
        agent = Agent(kind(NAME, provider=provider), tools=[weather], model_settings={"max_tokens": 4})
        agent.run_sync("Vec")


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
                # The answer is cut on purpose.
                assert "max_output_tokens" in str(error), error

    asyncio.run(run())


def with_smolagents(url):
    from smolagents import OpenAIServerModel

    model = OpenAIServerModel(NAME, api_base=f"{url}/v1", api_key="secret", max_tokens=4)
    model([{"role": "user", "content": [{"type": "text", "text": "Vec"}]}])


def with_ollama(url):
    import ollama

    client = ollama.Client(host=url, headers={"authorization": "Bearer secret"})
    assert client.list().models[0].model == NAME
    options = {"num_predict": 4, "temperature": 0}
    whole = client.chat(model=NAME, messages=MESSAGES, tools=[weather], options=options)
    chunks = client.chat(model=NAME, messages=MESSAGES, tools=[weather], options=options, stream=True)
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert client.generate(model=NAME, prompt="Vec", options=options).done


# Distribution, and what runs.
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
}


def run(kvant):
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "true")
    done, missing = [], []
    with Server(kvant, "--api-key", "secret") as server:
        for name, client in CLIENTS.items():
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
                continue
            client(server.url)
            done.append(f"{name} {version}")
    return f"{', '.join(done)} run" + (f"; not installed: {', '.join(missing)}" if missing else "")
