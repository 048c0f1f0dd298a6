"""The Python packages openai and anthropic: every route, streams and errors."""

from .serving import Server


def with_openai(url):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    name = client.models.list().data[0].id
    assert client.models.retrieve(name).id == name

    options = dict(model=name, prompt="# Fearless Concurrency\n", max_tokens=20, temperature=0)
    whole = client.completions.create(**options, logprobs=2, echo=True)
    logprobs = whole.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == whole.usage.total_tokens
    text = client.completions.create(**options).choices[0].text
    assert whole.choices[0].text == options["prompt"] + text
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == 20

    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Vec"}]
    options = dict(model=name, messages=messages, max_completion_tokens=20, temperature=0)
    chat = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, n=2)
    assert len(chat.choices) == 2 and len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    content = chat.choices[0].message.content
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    thoughts = client.chat.completions.create(**options, reasoning_effort="low").choices[0].message
    assert thoughts.reasoning_content and not thoughts.content

    options = dict(model=name, instructions="Be brief.", input="Vec", max_output_tokens=20, temperature=0)
    response = client.responses.create(**options)
    assert response.output_text and response.usage.output_tokens == 20
    with client.responses.stream(**options) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == response.output_text

    # The package requests base64 by default.
    options = dict(model=name, input=["Vec", "String"])
    vectors = client.embeddings.create(**options)
    numbers = client.embeddings.create(**options, encoding_format="float")
    for a, b in zip(vectors.data, numbers.data, strict=True):
        assert abs(sum(x * x for x in a.embedding) - 1) < 1e-4
        assert sum(x * y for x, y in zip(a.embedding, b.embedding, strict=True)) > 0.999
    assert len(client.embeddings.create(**options, dimensions=8).data[1].embedding) == 8

    for call, error in [
        (lambda: client.completions.create(model=name, prompt="a", suffix="b"), openai.BadRequestError),
        (lambda: client.completions.create(model="other", prompt="a"), openai.NotFoundError),
        (lambda: client.with_options(api_key="wrong").models.list(), openai.AuthenticationError),
    ]:
        try:
            call()
        except error as refused:
            assert refused.request_id
        else:
            raise AssertionError(f"{error} expected")


def with_anthropic(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
    options = dict(model="rustdoc-11m", max_tokens=20, system="Be brief.", messages=[{"role": "user", "content": "Vec"}])
    # Newer versions of the package have no parameter for it.
    options["extra_body"] = {"temperature": 0}
    message = client.messages.create(**options)
    assert message.usage.output_tokens == 20 and message.stop_reason == "max_tokens"
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == message.content[0].text
    assert text == message.content[0].text
    thoughts = client.messages.create(**options, thinking={"type": "enabled", "budget_tokens": 1024})
    assert thoughts.content[0].type == "thinking"
    counted = client.messages.count_tokens(**{key: options[key] for key in ("model", "system", "messages")})
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    try:
        client.messages.create(**{**options, "extra_body": {"unknown": 1}})
    except anthropic.BadRequestError as refused:
        assert "unknown" in str(refused)
    else:
        raise AssertionError("BadRequestError expected")


def run(kvant):
    with Server(kvant, "--api-key", "secret", "--pooling", "mean") as server:
        with_openai(server.url)
        with_anthropic(server.url)
    return "openai and anthropic agree"
