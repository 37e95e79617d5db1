#!/usr/bin/python3
"""Draws docs/architecture.svg: the folders of the source on floors, and the way of a batch through them.

All of it is read from the source: a folder stands above those that it includes, its text is that of the table
"Layers" of docs/architecture.md, and the numbers are the eight hops of that page. With --check nothing is written, and
a picture that is out of date is an error.
"""
import html
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, BOX_H, GAP_X, GAP_Y, MARGIN, LINE = 1000, 66, 16, 34, 16, 26  # pixels; LINE: characters of text in a box's line
COLORS = {"floor": "#f4f4f1", "box": "#ffffff", "edge": "#b8b8b0", "text": "#222222", "way": "#c0392b", "arrow": "#d5d5ce"}


def table(heading):
    """Cells of the rows of the table below a heading of the page, without its head."""
    text = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def rooms():
    """{folder: what it is} of the page; a folder of the page that is not there is an error."""
    found = {re.match(r"`(\w+)`", row[0]).group(1): re.sub(r"\s*\((\[.*?\]\(.*?\)|[^()]*)\)", "", row[1]) for row in table("Layers")}
    missing = [name for name in found if not folder(name).is_dir()]
    if missing:
        sys.exit(f"architecture: docs/architecture.md names {missing}, and there is no such folder")
    return found


def folder(name):
    return ROOT / name if name == "cuda" else ROOT / "src" / name


def includes(names):
    """{folder: the folders that its files include}"""
    found = {}
    for name in names:
        text = "".join(f.read_text() for f in folder(name).iterdir() if f.suffix in (".c", ".h", ".cc", ".cu", ".cuh", ".def"))
        found[name] = set(re.findall(r'^#include "(\w+)/', text, re.M)) & set(names) - {name}
    return found


def floors(below):
    """{folder: floor}; a circle of folders is an error."""
    floor = {}

    def visit(name, way):
        if name in way:
            sys.exit("architecture: folders include each other: " + " -> ".join(way + [name]))
        if name not in floor:
            floor[name] = max((visit(b, way + [name]) + 1 for b in below[name]), default=0)
        return floor[name]

    for name in below:
        visit(name, [])
    # a folder stands right below the lowest that includes it
    for name in sorted(below, key=lambda n: -floor[n]):
        floor[name] = min((floor[a] - 1 for a in below if name in below[a]), default=floor[name])
    return floor


def stations(names):
    """[(number of the hop, folder)], each folder that a hop names, in its order"""
    found = []
    for number, where, _ in table("From file to changed weight in eight hops"):
        for name in re.findall(r"(?:^|[` /])(\w+)/", where.replace("src/", "")):
            if name in names and (number, name) not in found:
                found.append((number, name))
    return found


def place(floor):
    """{folder: (x, y, width)}, the highest floor first"""
    boxes = {}
    top = max(floor.values())
    for level in range(top + 1):
        row = sorted(n for n in floor if floor[n] == level)
        width = min(260, (WIDTH - 2 * MARGIN - GAP_X * (len(row) - 1)) / len(row))
        left = (WIDTH - len(row) * width - GAP_X * (len(row) - 1)) / 2
        for i, name in enumerate(row):
            boxes[name] = (left + i * (width + GAP_X), MARGIN + (top - level) * (BOX_H + GAP_Y), width)
    return boxes


def lines_of(text, characters):
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > characters and lines[-1]:
            lines.append("")
        lines[-1] = (lines[-1] + " " + word).strip()
    return lines if len(lines) <= 2 else [lines[0], lines[1][: characters - 1].rsplit(" ", 1)[0] + " \u2026"]


def direct(below):
    """The includes that do not follow from others."""
    reach = {}

    def all_below(name):
        if name not in reach:
            reach[name] = set().union(*[all_below(b) | {b} for b in below[name]])
        return reach[name]

    return [(a, b) for a in sorted(below) for b in sorted(below[a]) if not any(b in all_below(c) for c in below[a])]


def draw():
    text = rooms()
    below = includes(text)
    boxes = place(floors(below))
    height = max(y for _, y, _ in boxes.values()) + BOX_H + MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{height}" fill="{COLORS["floor"]}"/>']
    for a, b in direct(below):
        (ax, ay, aw), (bx, by, bw) = boxes[a], boxes[b]
        out.append(f'<path d="M{ax + aw / 2:.0f} {ay + BOX_H:.0f} L{bx + bw / 2:.0f} {by:.0f}" stroke="{COLORS["arrow"]}" '
                   f'stroke-width="1.5"/>')
    way = {}
    for number, name in stations(text):
        way.setdefault(name, []).append(number)
    for name, (x, y, width) in boxes.items():
        out.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BOX_H}" rx="6" fill="{COLORS["box"]}" '
                   f'stroke="{COLORS["way" if name in way else "edge"]}"/>')
        out.append(f'<text x="{x + 10:.0f}" y="{y + 20}" font-size="14" font-weight="bold" fill="{COLORS["text"]}">{name}</text>')
        for i, line in enumerate(lines_of(text[name], int((width - 16) / 5.6))):
            out.append(f'<text x="{x + 10:.0f}" y="{y + 38 + 15 * i}" font-size="11" fill="{COLORS["text"]}">'
                       f'{html.escape(line)}</text>')
        for i, number in enumerate(reversed(way.get(name, []))):
            cx = x + width - 14 - 22 * i
            out.append(f'<circle cx="{cx:.0f}" cy="{y + 14}" r="9" fill="{COLORS["way"]}"/><text x="{cx:.0f}" y="{y + 18}" '
                       f'font-size="11" fill="#ffffff" text-anchor="middle">{number}</text>')
    return "\n".join(out + ["</svg>", ""])


picture = draw()
if "--check" in sys.argv:
    if not PICTURE.exists() or PICTURE.read_text() != picture:
        sys.exit("architecture: docs/architecture.svg is out of date: make pictures")
else:
    PICTURE.write_text(picture)
