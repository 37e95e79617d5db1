#!/usr/bin/env python3
"""Names of a table in the docs against those in what was written: check_names.py DOC HEADING FILE...

The table's first column has the names, in backquotes, behind the line of DOC that begins with HEADING. FILE: JSON, or a
JSON object a line. Of objects inside objects and lists names are joined by a dot. Every name of the files stands in the
table, and every name of the table in some file; prints those that do not.
"""
import json
import re
import sys


def names(value, prefix=""):
    if isinstance(value, list):
        return set().union(*(names(v, prefix) for v in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found = set()
    for key, v in value.items():
        found |= {prefix + key} | names(v, prefix + key + ".")
    return found


def table(doc, heading):
    found, began, rows = [], False, False
    for line in open(doc):
        began |= line.startswith(heading)
        rows |= began and line.startswith("| ---")
        if rows and not line.startswith("|"):
            break
        if rows and (match := re.match(r"\| `([^`]+)` \|", line)):
            found.append(match[1])
    return found


def values(path):
    text = open(path).read()
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def main():
    listed = table(*sys.argv[1:3])
    written = set().union(*(names(v) for path in sys.argv[3:] for v in values(path)))
    bad = sorted(written - set(listed)) + sorted(set(listed) - written)
    if len(listed) != len(set(listed)):
        bad.append("a name twice")
    for name in bad:
        print(f"{name}: {'only in the table' if name in listed else 'not in the table'}")
    print(f"{len(listed)} names")
    return 1 if bad or not listed else 0


if __name__ == "__main__":
    sys.exit(main())
