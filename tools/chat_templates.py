#!/usr/bin/env python3
"""Renders conversations with transformers, for the test `chat_templates` of kvant-models.

    tools/chat_templates.py [--all]

Writes crates/kvant-models/tests/golden/chat/templates.json from the templates in the same folder. With --all, also writes
target/chat-templates/expected.json from the templates of llama.cpp, which the source package of llama-cpp-python on PyPI
carries; pip downloads it on the first run. Requires transformers and jinja2, and no model.
"""

import argparse
import datetime
import itertools
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from transformers.utils import chat_template_utils

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "crates/kvant-models/tests/golden/chat"
TARGET = ROOT / "target/chat-templates"
PACKAGE = "llama-cpp-python==0.3.36"
FOLDER = "vendor/llama.cpp/models/templates/"

# strftime_now returns this time, in UTC. The day has one digit.
NOW = 1780625045

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def call(name, arguments, id="call00001"):
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def tool(name, description, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool(
    "get_weather",
    'The weather of a place, e.g. "Zürich" & <Bern>',
    {
        "place": {"type": "string", "description": "City"},
        "days": {"type": "integer", "description": "How many", "default": 3},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    ["place"],
)
SEARCH = tool(
    "search",
    "Searches.",
    {
        "query": {"type": ["string", "null"], "description": "A query"},
        "filter": {
            "type": "object",
            "description": "Nested",
            "properties": {"tags": {"type": "array", "items": {"type": "string"}}, "exact": {"type": "boolean"}},
            "required": ["tags"],
        },
        "limit": {"type": "number", "minimum": 0.5, "maximum": 1e22},
    },
    ["query", "filter"],
)

HELLO = {"role": "user", "content": "Hello, who are you?"}
SYSTEM = {"role": "system", "content": "You are terse.\n"}
ASKED = {"role": "user", "content": "Weather in Zürich?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", {"place": "Zürich", "days": 2})]}
RESULT = {"role": "tool", "content": '{"temperature": 21.5}', "tool_call_id": "call00001", "name": "get_weather"}

CONVERSATIONS = {
    "hello": [HELLO],
    "system": [SYSTEM, HELLO],
    "developer": [{"role": "developer", "content": "Answer in French."}, HELLO],
    "turns": [HELLO, {"role": "assistant", "content": " I am kvant. "}, {"role": "user", "content": "  Thanks\n\n"}],
    "system turns": [
        SYSTEM, HELLO, {"role": "assistant", "content": "A model."}, {"role": "user", "content": "Of what?"},
        {"role": "assistant", "content": "Of text, it's \"quoted\"."},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Three."}]},
        {"role": "user", "content": [{"type": "text", "text": "Four?"}]},
    ],
    "reasoning": [
        HELLO,
        {"role": "assistant", "content": "A model.", "reasoning_content": "They want\nto know."},
        {"role": "user", "content": "Sure?"},
    ],
    "reasoning last": [SYSTEM, HELLO, {"role": "assistant", "content": "A model.", "reasoning_content": "Hm."}],
    "inline reasoning": [
        HELLO,
        {"role": "assistant", "content": "<think>\nThey want to know.\n</think>\n\nA model."},
        {"role": "user", "content": "Sure?"},
    ],
    "call": [ASKED, CALLED],
    "call and text": [ASKED, {**CALLED, "content": "Let me look."}, RESULT],
    "result": [SYSTEM, ASKED, CALLED, RESULT],
    "answered": [ASKED, CALLED, RESULT, {"role": "assistant", "content": "It is 21.5 °C."}, {"role": "user", "content": "Ok"}],
    "two calls": [
        ASKED,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Two places.",
            "tool_calls": [
                call("get_weather", {"place": "Zürich"}),
                call("search", {"query": None, "filter": {"tags": ["a", "b'c"], "exact": True}, "limit": 1.0}, "call00002"),
            ],
        },
        RESULT,
        {"role": "tool", "content": "nothing\n", "tool_call_id": "call00002", "name": "search"},
    ],
    "arguments as a string": [ASKED, {**CALLED, "tool_calls": [call("get_weather", '{"place": "Zürich"}')]}, RESULT],
    "unicode": [{"role": "user", "content": "日本語 🦀 \u00a0\u2028 é e\u0301 \t\\ \"' <|im_end|> {{ x }} {% y %}"}],
    "empty": [{"role": "user", "content": ""}],
    "two users": [HELLO, {"role": "user", "content": "And again"}],
    "starts with assistant": [{"role": "assistant", "content": "Welcome."}, HELLO],
}

TOOLS = {"none": None, "one": [WEATHER], "two": [WEATHER, SEARCH]}
THINKING = {"default": {}, "on": {"enable_thinking": True, "thinking": True}, "off": {"enable_thinking": False, "thinking": False}}


def grid():
    for (messages, tools, thinking), prompt in itertools.product(
        itertools.product(CONVERSATIONS, TOOLS, THINKING), [False, True]
    ):
        yield {"messages": messages, "tools": tools, "thinking": thinking, "add_generation_prompt": prompt}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc)


def render(template, case):
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[CONVERSATIONS[case["messages"]]],
            tools=TOOLS[case["tools"]],
            chat_template=template,
            add_generation_prompt=case["add_generation_prompt"],
            **TOKENS,
            **THINKING[case["thinking"]],
        )
        return {"text": texts[0]}
    except Exception as error:  # A template may fail in any way.
        return {"error": f"{type(error).__name__}: {error}"}


def write(path, templates, cases):
    rendered = {}
    for name, source in sorted(templates.items()):
        rendered[name] = [render(source, case) for case in cases]
        failed = sum("error" in result for result in rendered[name])
        print(f"{name}: {len(cases)} cases, {failed} refused by the template", file=sys.stderr)
    data = {
        "now": NOW, "tokens": TOKENS, "conversations": CONVERSATIONS, "tools": TOOLS, "thinking": THINKING,
        "cases": cases, "expected": rendered,
    }
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")


def llama_cpp():
    """The templates of llama.cpp by name, downloaded once."""
    TARGET.mkdir(parents=True, exist_ok=True)
    if not any(TARGET.glob("*.jinja")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*command, "--dest", str(TARGET), PACKAGE], check=True)
        [archive] = TARGET.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                if FOLDER in member.name and member.name.endswith(".jinja"):
                    (TARGET / Path(member.name).name).write_bytes(files.extractfile(member).read())
        archive.unlink()
    return {path.stem: path.read_text() for path in TARGET.glob("*.jinja")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="also the templates of llama.cpp")
    args = parser.parse_args()
    chat_template_utils.datetime = Clock
    own = {path.stem: path.read_text() for path in GOLDEN.glob("*.jinja")}
    short = [case for case in grid() if (case["tools"], case["thinking"]) in {("none", "default"), ("two", "on"), ("one", "off")}]
    write(GOLDEN / "templates.json", own, [case for case in short if case["add_generation_prompt"] != (case["tools"] == "one")])
    if args.all:
        write(TARGET / "expected.json", llama_cpp(), list(grid()))


if __name__ == "__main__":
    main()
