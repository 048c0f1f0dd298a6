"""Checks texts that grammars allowed with Python's jsonschema: each must be JSON that its schema accepts.

    KVANT_GRAMMAR_TEXTS=target/texts.jsonl cargo test -p kvant-engine --test grammars
    python3 tools/check_grammar_texts.py target/texts.jsonl

It needs the packages jsonschema and rfc3339-validator (for times).
"""

import json
import re
import sys

import jsonschema

LEAP_SECOND = re.compile(r"(?<=:[0-5][0-9]):60")


def main(path):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    texts = 0
    for line in open(path, encoding="utf-8"):
        schema, text = json.loads(line)
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        # The grammar of times allows a leap second at any time, as RFC 3339's does; validators check the date.
        value = json.loads(LEAP_SECOND.sub(":59", text))
        errors = [error.message for error in validator.iter_errors(value)]
        if errors:
            sys.exit(f"{text}\nis not of {json.dumps(schema)}:\n{errors[0]}")
        texts += 1
    if not texts:
        sys.exit(f"{path} has no texts")
    print(f"{texts} texts follow their schemas")


if __name__ == "__main__":
    main(sys.argv[1])
