"""schemathesis: thousands of requests made from /openapi.json. No response is a 5xx, and each matches its schema."""

import os
import re
import subprocess
import sys
import tempfile

from .serving import Server

# Requests of each route and phase.
EXAMPLES = int(os.environ.get("KVANT_SCHEMA_EXAMPLES", "1200"))
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
]


def run(kvant):
    options = ["--name", "rustdoc-11m", "--name", "*", "--context", "48", "--max-sequences", "32"]
    schemathesis = os.path.join(os.path.dirname(sys.executable), "schemathesis")
    with Server(kvant, *options) as server, tempfile.TemporaryDirectory() as folder:
        command = [schemathesis, "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS), "--workers", "4"]
        command += ["--max-examples", str(EXAMPLES), "--seed", "1", "--continue-on-failure", "--no-color", "--warnings", "off"]
        command += ["--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing", "--request-timeout", "120"]
        outcome = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert outcome.returncode == 0, outcome.stdout[-12000:] + outcome.stderr[-2000:]
        server.settled()
    cases = re.search(r"([\d,]+) generated", outcome.stdout)
    return f"{cases.group(1) if cases else '?'} requests, no 5xx, every answer as its schema says"
