"""The test suite of the package openai, from its source, against the server.

openai_plugin.py lists the exclusions: tests of stored objects, which this server does not have, and fields that it
rejects with 400.
"""

import os

from .serving import Server, pytest, sdist

VERSION = "3.54.0"
FILES = ["chat/test_completions.py", "test_completions.py", "test_models.py", "test_responses.py"]


def run(kvant):
    source = sdist("openai", VERSION, "")
    tests = [os.path.join("tests", "api_resources", file) for file in FILES]
    plugin = os.path.dirname(os.path.abspath(__file__))
    with Server(kvant, "--name", "rustdoc-11m", "--name", "*", "--context", "192") as server:
        environment = {"TEST_API_BASE_URL": f"{server.url}/v1", "PYTHONPATH": plugin}
        return pytest(["-p", "openai_plugin", *tests], source, environment)
