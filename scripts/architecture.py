#!/usr/bin/python3
"""Draws docs/architecture.svg, the folders of the source on floors and the way of a batch through them, and writes the
table "Layers" of docs/architecture.md.

All of it is read from the source. A folder stands above those that it includes. What it may include is the array of
scripts/check-layers.sh; what it is, the page says, in the table's second column. The picture's numbers are the eight hops of
that page. With --check nothing is written, and a table or a picture that is out of date is an error.
"""
import html
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "architecture.svg"
LAYERS = ROOT / "scripts" / "check-layers.sh"
WIDTH, BOX_W, GAP_X, GAP_Y, MARGIN = 1000, 296, 16, 34, 16  # pixels
TITLE_H, LINE_H, LETTER_W = 36, 15, 5.75                    # of a box's name, a line of its text and a letter of that
COLORS = {"floor": "#f4f4f1", "box": "#ffffff", "edge": "#b8b8b0", "text": "#222222", "way": "#c0392b", "arrow": "#d5d5ce"}


def section(heading):
    """The text below a heading of the page, up to the next one."""
    return PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def table(heading):
    """Cells of the rows of the table below a heading of the page, without its head."""
    rows = [line.strip("| ").split(" | ") for line in section(heading).splitlines() if line.startswith("|")]
    return rows[2:]


def folder(name):
    return ROOT / name if name == "cuda" else ROOT / "src" / name


def check_folders(what, names):
    """Each folder of the source is in a list, and nothing else is."""
    there = {f.name for f in (ROOT / "src").iterdir() if f.is_dir()} | {"cuda"}
    for name in sorted(there ^ set(names)):
        sys.exit(f"architecture: {what} lacks {folder(name).relative_to(ROOT)}" if name in there else
                 f"architecture: {what} names '{name}', and there is no such folder")


def rooms():
    """{folder: what it is} of the page, without what is in parentheses there"""
    found = {re.match(r"`(\w+)`", row[0]).group(1): re.sub(r"\s*\((\[.*?\]\(.*?\)|[^()]*)\)", "", row[1]) for row in table("Layers")}
    check_folders("the table 'Layers' of docs/architecture.md", found)
    check_folders("the table 'Map' of docs/architecture.md",
                  re.findall(r"`(?:src/)?(\w+)/?`", " ".join(row[0] for row in table("Map") if re.match("`(src/|cuda)", row[0]))))
    return found


def allowed():
    """{folder: (those that it may include, libraries that it alone includes)} of check-layers.sh"""
    text = LAYERS.read_text()
    may = {name: row.split() for name, row in re.findall(r'\[(\w+)\]="([^"]*)"', text)}
    libraries = re.findall(r"^only (\w+) \S+ '?src/(\w+)/", text, re.M)
    return {name: (row, [library for library, owner in libraries if owner == name]) for name, row in may.items()}


def in_words(name, may):
    """The cell of a row of the table."""
    some = sorted({other for row, _ in may.values() for other in row} - {name})  # (that anybody includes)
    listed, libraries = may[name]
    rest = [other for other in some if other not in listed]
    words = ", ".join(listed) or "none"
    if len(rest) <= 3:
        words = "all" + (" but " + ", ".join(rest) if rest else "")
    return "; ".join([words] + ([", ".join(libraries)] if libraries else []))


def page():
    """The page, with its table of layers as check-layers.sh has them."""
    may = allowed()
    text = PAGE.read_text()
    for row in table("Layers"):
        name = re.match(r"`(\w+)`", row[0]).group(1)
        if name not in may:
            sys.exit(f"architecture: scripts/check-layers.sh does not say what '{name}' may include")
        text = text.replace(f"| {' | '.join(row)} |\n", f"| {row[0]} | {row[1]} | {in_words(name, may)} |\n")
    return text


def includes(names):
    """{folder: the folders that its files include}"""
    found = {}
    for name in names:
        text = "".join(f.read_text() for f in folder(name).iterdir() if f.suffix in (".c", ".h", ".cc", ".cu", ".cuh", ".def"))
        found[name] = set(re.findall(r'^#include ["<](\w+)/', text, re.M)) & set(names) - {name}
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


def place(floor, text):
    """{folder: (x, y, width, height, lines of its text)}, the highest floor first, and the height of all"""
    boxes = {}
    y = MARGIN
    for level in range(max(floor.values()), -1, -1):
        row = sorted(n for n in floor if floor[n] == level)
        width = min(BOX_W, (WIDTH - 2 * MARGIN - GAP_X * (len(row) - 1)) / len(row))
        left = (WIDTH - len(row) * width - GAP_X * (len(row) - 1)) / 2
        lines = {name: textwrap.wrap(text[name], int((width - 20) / LETTER_W), break_on_hyphens=False) for name in row}
        height = TITLE_H + LINE_H * max(len(l) for l in lines.values())
        for i, name in enumerate(row):
            boxes[name] = (left + i * (width + GAP_X), y, width, height, lines[name])
        y += height + GAP_Y
    return boxes, y - GAP_Y + MARGIN


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
    boxes, height = place(floors(below), text)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{height}" fill="{COLORS["floor"]}"/>']
    for a, b in direct(below):
        (ax, ay, aw, ah, _), (bx, by, bw, _, _) = boxes[a], boxes[b]
        out.append(f'<path d="M{ax + aw / 2:.0f} {ay + ah:.0f} L{bx + bw / 2:.0f} {by:.0f}" stroke="{COLORS["arrow"]}" '
                   f'stroke-width="1.5"/>')
    way = {}
    for number, name in stations(text):
        way.setdefault(name, []).append(number)
    for name, (x, y, width, box_height, lines) in boxes.items():
        out.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{box_height}" rx="6" fill="{COLORS["box"]}" '
                   f'stroke="{COLORS["way" if name in way else "edge"]}"/>')
        out.append(f'<text x="{x + 10:.0f}" y="{y + 20}" font-size="14" font-weight="bold" fill="{COLORS["text"]}">{name}</text>')
        for i, line in enumerate(lines):
            out.append(f'<text x="{x + 10:.0f}" y="{y + 38 + LINE_H * i}" font-size="11" fill="{COLORS["text"]}">'
                       f'{html.escape(line)}</text>')
        for i, number in enumerate(reversed(way.get(name, []))):
            cx = x + width - 14 - 22 * i
            out.append(f'<circle cx="{cx:.0f}" cy="{y + 14}" r="9" fill="{COLORS["way"]}"/><text x="{cx:.0f}" y="{y + 18}" '
                       f'font-size="11" fill="#ffffff" text-anchor="middle">{number}</text>')
    return "\n".join(out + ["</svg>", ""])


for path, made in ((PAGE, page()), (PICTURE, draw())):
    if "--check" not in sys.argv:
        path.write_text(made)
    elif not path.exists() or path.read_text() != made:
        sys.exit(f"architecture: {path.relative_to(ROOT)} is out of date: make pictures")
