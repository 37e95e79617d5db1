#!/usr/bin/env python3
"""Checks a page of `megatrain report` (or an SVG picture) by itself: check_page.py FILE

Every tag is closed in order; nothing is fetched from anywhere; ids are unique and those referred to exist; pictures have
a title and a description; tables have a caption and headers with a scope; the colours of text and lines have contrast
enough to both grounds (4.5 and 3).
"""
import re
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input"}
bad = []


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.ids, self.refs, self.svgs, self.tables = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.attributes(tag, dict(attrs))

    def handle_startendtag(self, tag, attrs):
        self.attributes(tag, dict(attrs))

    def attributes(self, tag, attrs):
        for name, value in attrs.items():
            if name in ("src", "href", "action", "data", "poster", "srcset") or name.startswith("on"):
                bad.append(f"<{tag} {name}={value}>")
        if "id" in attrs:
            self.ids.append(attrs["id"])
        self.refs += attrs.get("aria-labelledby", "").split()
        self.refs += re.findall(r"url\(#([^)]*)\)", " ".join(v or "" for v in attrs.values()))
        if tag == "svg" and attrs.get("aria-hidden") != "true":
            self.svgs.append({"role": attrs.get("role"), "has": set()})
        if tag in ("title", "desc") and "svg" in self.open and self.svgs:
            self.svgs[-1]["has"].add(tag)
        if tag == "table":
            self.tables.append(set())
        if self.tables and "table" in self.open:
            self.tables[-1].add(tag)
        if tag == "th" and attrs.get("scope") not in ("row", "col"):
            bad.append("a <th> without scope")

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            bad.append(f"</{tag}> closes another tag, line {self.getpos()[0]}")


def luminance(color):
    color = color if len(color) == 6 else "".join(c * 2 for c in color)
    parts = [int(color[i:i + 2], 16) / 255 for i in (0, 2, 4)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def check_colors(text):
    schemes = re.findall(r":root\{([^}]*)\}", text)
    if len(schemes) != 2:
        bad.append(f"{len(schemes)} colour schemes")
    for number, scheme in enumerate(schemes):
        colors = dict(re.findall(r"--([a-z0-9]+):#([0-9a-f]+)", scheme))
        for name, color in colors.items():
            least = 4.5 if name in ("ink", "dim") else 3 if re.fullmatch(r"c\d", name) else 0
            for ground in ("paper", "soft"):
                if least and not contrast(color, colors[ground]) >= least:
                    bad.append(f"scheme {number}: {name} on {ground}: {contrast(color, colors[ground]):.2f}")


def main():
    text = open(sys.argv[1], "rb").read().decode("utf-8", errors="strict")
    page = Page()
    page.feed(text)
    page.close()
    bad.extend(f"<{tag}> is never closed" for tag in page.open)
    bad.extend(f"id {i} twice" for i in set(page.ids) if page.ids.count(i) > 1)
    bad.extend(f"no id {r}" for r in page.refs if r not in page.ids)
    bad.extend("a picture without role, title or desc" for s in page.svgs
               if s["role"] != "img" or s["has"] != {"title", "desc"})
    bad.extend("a table without caption or headers" for t in page.tables if not {"caption", "th", "thead"} <= t)
    for word in ("http://", "https://", "@import", "url(//", "fetch(", "XMLHttpRequest", "innerHTML", "nan", "inf "):
        found = text.replace('"http://www.w3.org/2000/svg"', "").lower().count(word.lower())
        if found:
            bad.append(f"'{word}' {found} times")
    if not page.svgs:
        bad.append("no picture")
    if text.startswith("<svg"):
        xml.etree.ElementTree.fromstring(text)
    else:
        check_colors(text)
    for line in bad:
        print(line)
    print(f"{len(page.svgs)} pictures, {len(page.tables)} tables, {len(bad)} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
