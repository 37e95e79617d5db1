"""Mixed real text from this machine: prose, code, documentation, many scripts. For check_tokenizer.py and bench/."""
import bz2
import gzip
import lzma
import os

PLACES = [  # kind, folder, endings of names, share
    ("code", "/usr/lib/python3", ".py", 0.15), ("code", "/usr/lib/python3.11", ".py", 0.15),
    ("code", "/usr/include", ".h", 0.15), ("code", "/usr/share/perl", (".pl", ".pm"), 0.1),
    ("prose", "/usr/share/common-licenses", "", 0.05), ("prose", "/usr/share/doc", "", 0.25),
    ("prose", "/usr/share/man/man1", ".gz", 0.1),
    ("scripts", "/usr/share/man", ".gz", 0.1), ("scripts", "/usr/share/i18n/locales", "", 0.2),
    ("scripts", "/usr/share/unicode", (".txt", ".bz2"), 0.1)]


def read_text(path):
    """The file's text, unpacked, at most 1 MiB of it; None if it is not UTF-8 or not there."""
    opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], open)
    try:
        with opener(path, "rb") as f:
            text = f.read(1 << 20).decode("utf-8")
    except (OSError, UnicodeDecodeError, EOFError, lzma.LZMAError):
        return None
    return None if "\0" in text else text


def of_this_machine(limit, kinds=("code", "prose", "scripts")):
    """(path, text) of files: about `limit` bytes, in an order that does not change."""
    texts = []
    for kind, folder, endings, share in PLACES:
        size = 0
        for root, folders, names in os.walk(folder) if kind in kinds else []:
            folders.sort()
            for name in sorted(names):
                text = read_text(os.path.join(root, name)) if size < share * limit and name.endswith(endings) else None
                if text:
                    texts.append((os.path.join(root, name), text))
                    size += len(text.encode())
    return texts
