"""The tests of llama.cpp's server that do not concern its own formats, from the source of the package llama-cpp-python.

llama_cpp_plugin.py starts `kvant serve` instead of llama-server. Excluded are tests of

- texts of a specific model, counts of its tokens, its ids, and texts as keys of biases;
- template variables that transformers does not have, such as today's date;
- routes and fields that only llama.cpp has: slots, timings, progress of prompts, /props, verbose answers, its router,
embeddings, infill, LoRA, MCP, built-in tools, and grammars in its own syntax;
- images and audio;
- errors that differ: here, no messages at all and images give 400, and two consecutive answers do not;
- an OpenAI client whose address lacks `/v1`;
- CORS: llama.cpp allows every origin, kvant none by default.
"""

import os

from .serving import pytest, sdist

VERSION = "0.3.36"
FOLDER = "vendor/llama.cpp/"
TESTS = {
    "test_compat_anthropic.py": "not image and not vision and not empty_messages and not thinking_with_reasoning_model",
    "test_compat_oai_responses.py": "not telemetry",
    "test_security.py": "api_key and not static and not openai_library or public",
    "test_chat_completion.py": "invalid_chat_completion_req and not messages7 or test_logprobs and not stream or logit_bias or multiple_choices"
    " or mutual_exclusion",
    "test_completion.py": "stream_with_openai_library and not stops or consistent_result or different_result"
    " or (logit_bias and not False) or cancel_request",
    "test_tokenize.py": "detokenize or pieces",
    "test_template.py": "add_generation_prompt",
}


def run(kvant):
    tests = os.path.join(sdist("llama-cpp-python", VERSION, FOLDER), "tools", "server", "tests")
    plugin = os.path.dirname(os.path.abspath(__file__))
    environment = {"KVANT": kvant, "PYTHONPATH": os.pathsep.join([plugin, tests])}
    outcomes = []
    for file, chosen in TESTS.items():
        options = ["--noconftest", "-p", "llama_cpp_plugin", "-k", chosen, os.path.join("unit", file)]
        outcomes.append(f"{file}: {pytest(options, tests, environment)}")
    return "\n  ".join(["", *outcomes])
