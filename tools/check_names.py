#!/usr/bin/env python3
"""Fails when two types of a crate have the same name.

    tools/check_names.py [CRATE ...]

Reads crates/CRATE/src (default: of every crate) and compares the names of all structs, enums, traits, unions and type
aliases, including private ones and the ones of unit tests. Associated types may repeat, and NAME_stub.rs repeats the
names of the module that it replaces. Other exceptions are listed in ALLOWED.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Names that may repeat, with the reason.
ALLOWED = {
    "kvant": {
        "Call": "the validated call of each operation, always written with its module: `attend::Call`",
        "AttendKernel": "the kernels of a backend, one enum in each backend's `attend/route.rs`",
        "LinearKernel": "the kernels of a backend, one enum in each backend's `linear`",
    },
}

TYPE = re.compile(r"^(?P<indent>\s*)(?:pub(?:\([^)]*\))?\s+)?(?:unsafe\s+)?(?P<kind>struct|enum|trait|union|type)\s+(?P<name>[A-Za-z_]\w*)")


def types(crate):
    """Every type of a crate: name -> ['path:line']."""
    found = defaultdict(list)
    for path in sorted((ROOT / "crates" / crate / "src").rglob("*.rs")):
        if path.stem.endswith("_stub"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = TYPE.match(line)
            # An indented `type` is an associated one, or local to a function.
            if match and not (match["kind"] == "type" and match["indent"]):
                found[match["name"]].append(f"{path.relative_to(ROOT)}:{number}")
    return found


def main():
    repeated = 0
    for crate in sys.argv[1:] or sorted(path.name for path in (ROOT / "crates").iterdir() if (path / "src").is_dir()):
        for name, places in sorted(types(crate).items()):
            if len(places) > 1 and name not in ALLOWED.get(crate, {}):
                print(f"{crate}: {name} is the name of {len(places)} types: {', '.join(places)}")
                repeated += 1
    sys.exit(1 if repeated else 0)


if __name__ == "__main__":
    main()
