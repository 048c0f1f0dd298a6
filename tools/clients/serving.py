"""A running `kvant serve`, and plain requests to it."""

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DOWNLOADS = os.path.join(ROOT, "target", "server-clients")
TEXT = os.path.join(ROOT, "models", "rustdoc-valid.txt")
# The shipped model was not trained for conversations.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '# ' + message.role + '\\n\\n' + (message.content or '') + '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '# assistant\\n\\n' }}{% endif %}"
    "{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}"
)
# A template of a family without delimiters of calls and without reasoning, so that a required call comes immediately.
CALLS_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} has parameters\n{% endfor %}"
    "{% for message in messages %}<|start_header_id|>{{ message.role }}\n\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '\n\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant\n\n' }}{% endif %}"
)


class Server:
    """`kvant serve` with the shipped model, or another one with a template, on a free port; a context manager."""

    def __init__(self, kvant, *options, template=TEMPLATE, model=None, user=None):
        self.command = [kvant, "serve", *([model] if model else []), "--port", "0", *options]
        self.template = tempfile.NamedTemporaryFile("w", suffix=".jinja")
        if template and not model:
            self.template.write(template)
            self.template.flush()
            # Also readable by another user.
            os.chmod(self.template.name, 0o644)
            self.command += ["--chat-template", self.template.name]
        self.lines, self.user = [], user

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, user=self.user)
        self.url = None
        while self.url is None:
            line = self.process.stderr.readline()
            assert line, f"the server has ended: {' '.join(self.lines)}"
            self.lines.append(line)
            found = re.search(r"listening on (http://(\S+):(\d+))", line)
            if found:
                self.url, self.host, self.port = found.group(1), found.group(2), int(found.group(3))
        # Keeps the pipe empty.
        self.log = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.log.start()
        return self

    def __exit__(self, kind, *_):
        if kind is None and self.process.poll() is None:
            assert self.stop() == 0, "a drain without requests ends with 0"
        self.process.kill()
        self.process.wait()

    def stop(self, limit=60):
        """Sends SIGTERM and returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit)

    def connect(self, timeout=120):
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def request(self, path, body=None, timeout=120):
        """The status and the JSON (or text) of a response: to a POST with a body, or to a GET."""
        connection = self.connect(timeout)
        try:
            headers = {"content-type": "application/json"}
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = "json" in response.headers.get("content-type", "")
            return response.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def metrics(self):
        """The metrics without prefixes and labels. The label of finish reasons becomes part of the name:
        `request_success_total.REASON`."""
        values = {}
        for line in self.request("/metrics")[1].splitlines():
            found = re.match(r"(?:vllm:|kvant:)?(\w+)\{([^}]*)\} (\S+)", line)
            if found and "le=" not in line:
                reason = re.search(r'finished_reason="(\w+)"', line)
                values[found.group(1) + (f".{reason.group(1)}" if reason else "")] = float(found.group(3))
        return values

    def settled(self, limit=60):
        """Waits until no request runs, and checks that no request holds a page."""
        deadline = time.monotonic() + limit
        while True:
            metrics = self.metrics()
            busy = ["num_requests_running", "num_requests_waiting", "num_requests_paused", "kv_cache_request_bytes"]
            if all(metrics[name] == 0 for name in busy):
                return metrics
            assert time.monotonic() < deadline, {name: metrics[name] for name in busy}
            time.sleep(0.05)

    def memory(self):
        """Resident bytes."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sdist(name, version, folder):
    """The files under `folder` of a package's source, unpacked into target/. Downloads them the first time."""
    import tarfile

    stem = f"{name.replace('-', '_')}-{version}"
    root = os.path.join(DOWNLOADS, stem)
    if not os.path.exists(root):
        archive = os.path.join(DOWNLOADS, f"{stem}.tar.gz")
        if not os.path.exists(archive):
            pip = [os.path.join(DOWNLOADS, "venv", "bin", "python"), "-m", "pip", "download", "-q", "--no-deps"]
            subprocess.run([*pip, "--no-binary", name, f"{name}=={version}", "-d", DOWNLOADS], check=True)
        with tempfile.TemporaryDirectory(dir=DOWNLOADS) as unpacked, tarfile.open(archive) as tar:
            members = [member for member in tar if member.name.startswith(f"{stem}/{folder}")]
            tar.extractall(unpacked, members, filter="data")
            os.rename(os.path.join(unpacked, stem), root)
    return os.path.join(root, folder)


def pytest(arguments, cwd, env):
    """Runs pytest and returns its summary, such as `123 passed, 4 deselected`."""
    import sys

    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", *arguments]
    run = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    lines = run.stdout.strip().splitlines()
    assert run.returncode == 0, "\n".join(lines[-60:]) + run.stderr
    return re.sub(r" in [\d.]+s.*", "", lines[-1]).strip("= ")
