#!/usr/bin/env python3
"""PyTorch of PyPI for the CPU, in a virtual environment of its own: the peer of bench/run.py beside Debian's.

  bench/torch_here.py [--version V] [FOLDER]      by default build/torch; prints the path of its python

PyPI's wheel is built for CUDA: its requirements are gigabytes, of which `import torch` on a CPU needs only those whose
libraries it is linked against. Which ones depends on the version, so they are found out: the wheel is installed without
its requirements, then those of Python alone, and then, as long as the import names a library that is missing, the
package whose name holds the library's.
"""
import argparse
import os
import re
import subprocess
import sys
import venv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def pip(python, *words):
    done = subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode: # (what it says besides is of requirements that are left out on purpose)
        sys.exit(f"bench/torch_here.py: pip install {' '.join(words)} failed:\n{done.stdout[-800:]}")


def requirements(python, package, extras=()):
    """Of a package that is installed, as pip takes them; without those of another system or another extra."""
    code = ("import importlib.metadata as m, sys\nfrom pip._vendor.packaging.requirements import Requirement as R\n"
            "for r in map(R, m.requires(sys.argv[1]) or []):\n"
            "    if not r.marker or any(r.marker.evaluate({'extra': e}) for e in sys.argv[2:]):\n"
            "        print(r.name + '[' + ','.join(r.extras) + ']' + str(r.specifier))")
    text = subprocess.run([python, "-c", code, package, "", *extras], check=True, capture_output=True, text=True).stdout
    return [line.replace("[]", "") for line in text.splitlines()]


def unfolded(python, wanted):
    """With the requirements of packages that only stand for others, by their extras, in their place."""
    for requirement in wanted:
        found = re.match(r"([\w.-]+)\[(.+)\]", requirement)
        if not found:
            yield requirement
            continue
        pip(python, "--no-deps", requirement)
        yield from requirements(python, found.group(1), found.group(2).split(","))


def of_cuda(requirement):
    return re.match(r"(nvidia|cuda|triton)", requirement, re.I) is not None


def missing_library(python):
    """Its name, as cublas of libcublas.so.13, or a symbol that the system's has not; None once all is there."""
    done = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    found = re.search(r"lib([\w-]+?)\.so[.\d]*: cannot open shared object|undefined symbol: (\w+)", done.stderr)
    if not found:
        sys.exit("bench/torch_here.py: import torch fails:\n" + done.stderr[-800:])
    return found.group(1) or found.group(2)


def bare(name):
    """cublasLt, nvidia-cublas: what both are called."""
    return re.sub(r"[^a-z]", "", name.lower().removeprefix("nvidia-"))


def provider(library, candidates):
    """The package whose name begins as the library does, for the longest stretch: cusparseLt is not in cusparse."""
    def shared(requirement):
        name = bare(re.split(r"[\[<>=!~ ]", requirement)[0].replace("-cu12", "").replace("-cu13", ""))
        return len(os.path.commonprefix([name, bare(library)]))

    best = max(candidates, key=shared, default="")
    return best if best and shared(best) >= 4 else None


def make(folder, version):
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(python):
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
        return python
    pip(python, "--no-deps", "torch" + (f"=={version}" if version else ""))
    wanted = requirements(python, "torch")
    pip(python, "numpy", *[r for r in wanted if not of_cuda(r)])
    left = list(unfolded(python, [r for r in wanted if of_cuda(r)]))
    while library := missing_library(python):
        package = provider(library, left)
        if not package:
            sys.exit(f"bench/torch_here.py: no requirement of torch seems to hold {library}")
        print(f"{library}: {package}", file=sys.stderr)
        pip(python, "--no-deps", package)
        left.remove(package)
    return python


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--version")
    parser.add_argument("folder", nargs="?", default=os.path.join(ROOT, "build", "torch"))
    options = parser.parse_args()
    print(make(os.path.abspath(options.folder), options.version))


if __name__ == "__main__":
    main()
