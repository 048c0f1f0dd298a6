"""Adds tiktoken vocabularies to the ones of `gguf_vocabularies.py`: Mistral's tekken and OpenAI's o200k (gpt-oss).

    pip install gguf tiktoken
    pip download --no-deps mistral-common && unzip mistral_common-*.whl 'mistral_common/data/tekken_*.json'
    npm pack js-tiktoken && tar xzf js-tiktoken-*.tgz package/dist/ranks/o200k_base.js
    python tools/gguf_tiktoken.py mistral_common/data/tekken_240911.json package/dist/ranks/o200k_base.js

Their ranks are converted to tokens and merges of a GGUF file; tiktoken encodes the texts with the vocabularies' own
expressions. The tests of kvant-models compare every vocabulary that they find.
"""

import argparse
import base64
import json
import shutil
from pathlib import Path

import gguf
import tiktoken

ROOT = Path(__file__).resolve().parent.parent
TEKKEN_TOKENS = 130072  # 131072 less 1000 special ones, which come first


def letters():
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


LETTERS = letters()


def text(token):
    return "".join(LETTERS[byte] for byte in token)


def parts(token, ranks):
    """The two tokens that the last merge joins to this one."""
    pieces = [bytes([byte]) for byte in token]
    while len(pieces) > 2:
        best = min(range(len(pieces) - 1), key=lambda i: ranks.get(pieces[i] + pieces[i + 1], 1 << 60))
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces


def write(out, name, ranks, pattern, first):
    """Vocabulary, texts and ids. `first` is the id of the token of rank 0."""
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    tokens = sorted(ranks, key=ranks.get)
    writer = gguf.GGUFWriter(out / f"{name}.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([f"<SPECIAL_{i}>" for i in range(first)] + [text(token) for token in tokens])
    writer.add_token_types([3] * first + [1] * len(tokens))
    pairs = [parts(token, ranks) for token in tokens if len(token) > 1]
    writer.add_token_merges([f"{text(left)} {text(right)}" for left, right in pairs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    texts = out / "llama-bpe.gguf.inp"
    shutil.copyfile(texts, out / f"{name}.gguf.inp")
    cases = texts.read_text().split("\n__ggml_vocab_test__\n")
    lines = [" ".join(str(id + first) for id in encoding.encode(case)) for case in cases]
    (out / f"{name}.gguf.out").write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tekken", type=Path)
    parser.add_argument("o200k", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "target/gguf-vocabularies")
    args = parser.parse_args()
    tekken = json.loads(args.tekken.read_text())
    tokens = tekken["vocab"][:TEKKEN_TOKENS]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in tokens}
    write(args.out, "tekken", ranks, tekken["config"]["pattern"], 1000)
    source = args.o200k.read_text()
    o200k = json.loads(source[source.index("{") : source.rindex("}") + 1])
    ranks = {}
    for line in o200k["bpe_ranks"].splitlines():
        _, start, *tokens = line.split(" ")
        ranks.update({base64.b64decode(token): int(start) + i for i, token in enumerate(tokens)})
    write(args.out, "gpt-4o", ranks, o200k["pat_str"], 0)


if __name__ == "__main__":
    main()
