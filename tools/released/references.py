"""The references: transformers in f32 on dequantised weights, and llama.cpp, on a GGUF file.

Requires the packages of requirements.txt.
"""

import json
import os
import random
import socket
import unicodedata
import urllib.request
from importlib import metadata

os.environ.update({"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"})

import torch
import transformers
import xllamacpp

from . import texts

PACKAGES = ["torch", "transformers", "gguf", "xllamacpp"]
CONTEXT = 2048
# Recorded logits per position: of the most probable tokens, and of random ones.
TOP, RANDOM = 8, 8


class Transformers:
    """A GGUF file in transformers."""

    def __init__(self, path):
        source = {"pretrained_model_name_or_path": os.path.dirname(path), "gguf_file": os.path.basename(path)}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()

    def encode(self, text, special=False):
        return self.tokenizer(text, add_special_tokens=special).input_ids

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render(self, messages, tools, is_prompt):
        """The text, or None if the template rejects the conversation."""
        options = {"tools": tools, "add_generation_prompt": is_prompt, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception:  # A template may fail in any way.
            return None

    def logits(self, ids):
        """[T, vocabulary]"""
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].float()

    def greedy(self, ids, count):
        """The most probable tokens up to the end of the answer, and the margin of each over the second."""
        prompt = torch.tensor([ids])
        options = {"max_new_tokens": count, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        answer = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        best = [step[0].float().topk(2).values for step in answer.logits]
        return answer.sequences[0, len(ids) :].tolist(), [(first - second).item() for first, second in best]


class LlamaCpp:
    """A GGUF file in llama.cpp's server, in this process."""

    def __init__(self, path, threads=2):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        options = xllamacpp.CommonParams()
        options.model.path, options.n_ctx, options.n_parallel = path, CONTEXT, 1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.hostnames, options.port, options.verbosity = ["127.0.0.1"], port, 0
        self.server = xllamacpp.Server(options)

    def ask(self, path, body):
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def encode(self, text):
        return self.ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def greedy(self, ids, count):
        """For each of the most probable tokens: the best (id, log probability)."""
        body = {"prompt": ids, "n_predict": count, "temperature": 0, "n_probs": TOP, "cache_prompt": False}
        answer = self.ask("/completion", body | {"return_tokens": True})
        steps = [[(entry["id"], entry["logprob"]) for entry in step["top_logprobs"]]
                 for step in answer["completion_probabilities"]]
        # The server reports no probabilities of tokens that end within a character.
        shown = [step[0][0] for step in steps]
        assert answer["tokens"][: len(shown)] == shown, "choose a prompt whose answer has whole characters"
        return steps


def logits(ids, rows, every):
    """Logits of a text at some positions, and the log-sum-exp of all logits there."""
    chance = random.Random(1)
    at = list(range(0, len(ids), every))
    chosen = [row.topk(TOP).indices.tolist() + chance.sample(range(len(row)), RANDOM) for row in rows[at]]
    values = [[round(row[id].item(), 5) for id in some] for row, some in zip(rows[at], chosen)]
    sums = [round(row.double().logsumexp(0).item(), 5) for row in rows[at]]
    return {"tokens": ids, "at": at, "ids": chosen, "logits": values, "sums": sums}


def token_ids(name, model, llama_cpp):
    """The ids of each string. If the references differ, texts.DIFFERENCES must specify the correct one."""
    found, differences = [], texts.DIFFERENCES[name]
    for text in texts.STRINGS:
        form = texts.NORMALISED.get(name)
        normal = unicodedata.normalize(form, text) if form else text
        ids = {"transformers": model.encode(normal), "llama.cpp": llama_cpp.encode(normal)}
        differ = ids["transformers"] != ids["llama.cpp"]
        assert differ == (text in differences), f"{name}: {text!r} must be in texts.DIFFERENCES, or not be there: {ids}"
        found.append([text, ids[differences[text][0] if differ else "transformers"]])
    return found


def answer(model, llama_cpp, question, count):
    """The answer of transformers, and llama.cpp's with its errors."""
    text = question.get("text")
    if text is None:
        text = model.render(texts.messages(question), None, True)
    ids = model.encode(text, special="text" in question)
    tokens, margins = model.greedy(ids, count)
    start = model.decode(ids)
    pieces = [model.decode(ids + tokens[: end + 1])[len(start) :] for end in range(len(tokens))]
    theirs = llama_cpp.greedy(ids, count)
    right = model.logits(ids + [step[0][0] for step in theirs])[len(ids) - 1 : -1].log_softmax(-1)
    return {
        "question": question,
        "ids": ids,
        "tokens": tokens,
        "margins": [round(margin, 4) for margin in margins],
        "text": pieces[-1],
        "ends": [len(piece.rstrip("\ufffd")) for piece in pieces],
        "llama_cpp": {
            "tokens": [step[0][0] for step in theirs],
            "gaps": [round(step[0][1] - step[1][1], 4) for step in theirs],
            "errors": [round(max(abs(row[id].item() - x) for id, x in step), 4) for row, step in zip(right, theirs)],
        },
    }


def make(name, path, length, every):
    """The golden data of a model, and its logits of the whole text."""
    model, llama_cpp = Transformers(path), LlamaCpp(path)
    has_template = model.tokenizer.chat_template is not None
    questions = texts.QUESTIONS if has_template else texts.CONTINUATIONS
    chats = {name: model.render(*chat) for name, *chat in texts.chats()} if has_template else {}
    ids = model.encode(texts.long_text(), special=True)[:length]
    rows = model.logits(ids)
    return {
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "logits": logits(ids, rows, every),
        "token_ids": token_ids(name, model, llama_cpp),
        "chats": chats,
        "answers": [answer(model, llama_cpp, question, 64) for question in questions],
    }, rows
