"""kvant's commands on a released model, as a user runs them."""

import itertools
import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from clients.serving import Server

from . import texts
from .compare import Mismatch

# Greedy, on the CPU, without rounding of activations or cache: the references do not round them either.
EXACT = ["--device", "cpu", "--kv", "f32", "--activations", "f32"]
TOKENS = 64


def logits(kvant, model, ids, path):
    """Writes the logits after each of the ids."""
    command = [kvant, "logits", "--model", model, *EXACT, "--tokens", " ".join(map(str, ids)), "--out", path]
    # A pass over all tokens would store the logits twice.
    subprocess.run([*command, "--step", "128"], check=True, stderr=subprocess.DEVNULL)


def generate(kvant, model, question):
    """The answer to a message, or the continuation of a text."""
    command = [kvant, "generate", "--model", model, *EXACT, "--temperature", "0", "--max-tokens", str(TOKENS), "--json"]
    if "text" in question:
        command.append("--prompt=" + question["text"])
    else:
        command += ["--chat", "--prompt=" + question["user"]]
        command += ["--system=" + question["system"]] if "system" in question else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["text"]


class Serving(Server):
    """`kvant serve` of a released model."""

    def __init__(self, kvant, model):
        super().__init__(kvant, model, *EXACT, "--context", "2048", template=False)

    def ask(self, path, body):
        status, answer = self.request(path, body, timeout=600)
        return answer if status == 200 else {"status": status, **answer}

    def token_ids(self, text):
        return self.ask("/tokenize", {"prompt": text, "add_special_tokens": False}).get("tokens")

    def render(self, chat, tools, is_prompt):
        """The rendered text, or None if it is rejected."""
        body = {"messages": as_sent(chat), "tools": tools or [], "add_generation_prompt": is_prompt}
        return self.ask("/apply-template", body).get("prompt")

    def answers(self, questions, stream):
        """`answer` to each question; all are sent concurrently."""
        with ThreadPoolExecutor(len(questions)) as threads:
            return list(threads.map(lambda question: self.answer(question, stream), questions))

    def answer(self, question, stream):
        """(text, number of the prompt's tokens)"""
        body = {"temperature": 0, "max_tokens": TOKENS, "stream": stream}
        if "text" in question:
            path, body = "/v1/completions", body | {"prompt": question["text"]}
        else:
            path, body = "/v1/chat/completions", body | {"messages": texts.messages(question)}
        if not stream:
            answer = self.ask(path, body)
            return content(answer["choices"][0]), answer["usage"]["prompt_tokens"]
        connection = self.connect(600)
        connection.request("POST", path, json.dumps(body | {"stream_options": {"include_usage": True}}),
                           {"content-type": "application/json"})
        text, prompt = "", None
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                text += "".join(content(choice) for choice in chunk["choices"])
                prompt = (chunk.get("usage") or {}).get("prompt_tokens", prompt)
        return text, prompt


def content(choice):
    """The text of a choice, streamed or not, of chat or completions."""
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def as_sent(chat):
    """Messages in OpenAI's format: arguments of calls are text there."""
    chat = json.loads(json.dumps(chat))
    for message in chat:
        for call in message.get("tool_calls", []):
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return chat


class Terminal:
    """A program in its own terminal, by tmux."""

    numbers = itertools.count()

    def __init__(self, command):
        # The server of the previous terminal may still be ending.
        self.socket = f"kvant-{os.getpid()}-{next(Terminal.numbers)}"
        self.run("-f", "/dev/null", "new-session", "-d", "-x", "250", "-y", "50", *command)

    def run(self, *arguments):
        done = subprocess.run(["tmux", "-u", "-L", self.socket, *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            raise Mismatch(f"tmux {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], stderr=subprocess.DEVNULL)

    def type(self, line):
        self.run("send-keys", "-l", line)
        self.run("send-keys", "Enter")

    def wait(self, pattern, seconds=120):
        """The match of a pattern in the contents of the terminal, without trailing spaces."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.run("capture-pane", "-p", "-J", "-S", "-500").rstrip()
            if found := re.search(pattern, shown, re.DOTALL):
                return found
            if time.monotonic() > deadline:
                raise Mismatch(f"the terminal must show {pattern!r}, got\n{shown}")
            time.sleep(0.2)


def chat(kvant, model, question):
    """The first answer of a conversation in a terminal. A base model gets the plain template."""
    options = ["--plain"] if "text" in question else []
    options += ["--system", question["system"]] if "system" in question else []
    message = question.get("user") or re.fullmatch(r"User: (.*)\n\nAssistant:", question["text"]).group(1)
    command = [kvant, "chat", model, *EXACT, "--temperature", "0", "--max-tokens", str(TOKENS), *options]
    with Terminal(command) as terminal:
        terminal.wait(r"(^|\n)>$")
        terminal.type(message)
        text = terminal.wait("> " + re.escape(message) + r" *\n(.*)\n\(\d+ tokens, [^\n]*\)\n+>$").group(1)
        terminal.type("/help")
        terminal.wait(r"/system TEXT")
        return text


def type_ahead(kvant, model):
    """Keys typed while an answer is written are not echoed in it, and form the next line."""
    # Ends on its own long after the keys have been typed.
    command = [kvant, "chat", model, "--plain", "--max-tokens", "120", "--context", "2048", "--temperature", "0.9", "--seed", "1"]
    with Terminal(command) as terminal:
        terminal.wait(r"(^|\n)>$")
        terminal.type("Write a long story.")
        terminal.wait(r"story\.\s+\S[^\n]{20}")
        terminal.run("send-keys", "-l", "/set seedx")
        terminal.run("send-keys", "BSpace", "Enter")
        # An incomplete line.
        terminal.run("send-keys", "-l", "/sys")
        shown = terminal.wait(r"story\. *\n(.*)\n\(\d+ tokens, [^\n]*\)\n+> /set seed *\n(.*)\n> /sys$")
        answer, report = shown.groups()
        if "/set" in answer or "/sys" in answer:
            raise Mismatch(f"keys are in the answer: {answer}")
        if "seed needs a number" not in report:
            raise Mismatch(f"the line that was typed ahead must run, got {report}")
        # The terminal echoes again after the chat.
        terminal.run("send-keys", "C-u")
        terminal.type("Write a long story, again.")
        terminal.wait(r"again\.\s+\S[^\n]{20}")
        terminal.run("send-keys", "C-c")
        terminal.wait(r"again\. *\n.*\n\(\d+ tokens, [^\n]*\)\n+>$")


def refusal(command):
    """The message of a command that must fail."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        raise Mismatch(f"{' '.join(command[1:3])} must fail")
    return done.stderr
