#!/usr/bin/env python3
"""The tables of docs/published.md, from what bench_published prints.

  build/bench/bench_published --moves --fit | bench/published/page.py [--check]

A table stands between "<!-- table NAME -->" and "<!-- end -->". With --check nothing is written, and a page that
differs is an error.
"""
import pathlib
import sys

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "published.md"

# the tables of bench_published, in its order
NAMES = ["rows", "errors", "moves", "errors-unfitted", "errors-fitted", "errors-others", "simumax-rows",
         "errors-simumax", "planned", "errors-planned", "memory", "errors-memory"]

# of the table "summary": which lines of which table, by which name
SUMMARY = [("errors", "dense", "dense"), ("errors", "mixtures", "mixtures"), ("errors", "both", "both"),
           ("errors-others", "dense", "dense, by constants fitted to the other models"),
           ("errors-others", "mixtures", "mixtures, the same"),
           ("errors-unfitted", "dense", "dense, by constants before any fit"),
           ("errors-unfitted", "mixtures", "mixtures, the same"),
           ("errors-simumax", "both", "SimuMax's machine, one rate of its own"),
           ("errors-planned", "by the planner", "dense rows in 16 bits, by the planner itself")]


def read_tables(text):
    tables, inside = [], False
    for line in text.splitlines():
        row = line.startswith("|")
        if row and not inside:
            tables.append([])
        if row:
            tables[-1].append(line)
        inside = row
    if len(tables) != len(NAMES):
        sys.exit(f"page.py: {len(tables)} tables came, {len(NAMES)} were expected: bench_published --moves --fit")
    return dict(zip(NAMES, tables))


def summary(tables):
    lines = tables["errors"][:2]
    for table, row, name in SUMMARY:
        found = [l for l in tables[table] if l.startswith(f"| {row} |")]
        lines.append(found[0].replace(row, name, 1))
    return lines


def filled(page, tables):
    out, skip = [], False
    for line in page.splitlines():
        if line == "<!-- end -->":
            skip = False
        if not skip:
            out.append(line)
        if line.startswith("<!-- table "):
            out += tables[line.split()[2]]
            skip = True
    return "\n".join(out) + "\n"


def main():
    tables = read_tables(sys.stdin.read())
    tables["summary"] = summary(tables)
    page = PAGE.read_text()
    new = filled(page, tables)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new)
    elif new != page:
        sys.exit("docs/published.md is out of date: make published")


main()
