"""Gives a checkpoint with random weights a tokenizer that has a text for every id.

    python3 tools/h200/widen_tokenizer.py MODEL [SIZE]

Writes MODEL/tokenizer.json: the shipped model's, with an artificial word for each further id below SIZE, by default the
vocabulary of MODEL/config.json. A server sends text; if ids had no text, clients could not count streamed tokens.
"""

import json
import sys
from pathlib import Path

SHIPPED = Path(__file__).resolve().parent.parent.parent / "crates" / "kvant-cli" / "model" / "tokenizer.json"


def main():
    folder = Path(sys.argv[1])
    size = int(sys.argv[2]) if len(sys.argv) > 2 else json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads(SHIPPED.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = set(vocabulary.values()) | {token["id"] for token in tokenizer["added_tokens"]}
    # GPT-2 represents a space by this letter.
    vocabulary.update({f"\u0120{id}": id for id in range(size) if id not in known})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    print(f"{folder / 'tokenizer.json'}: {len(vocabulary)} words")


if __name__ == "__main__":
    main()
