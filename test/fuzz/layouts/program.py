"""The program under test: its runs, and what they leave behind."""
import json
import math
import os
import pathlib
import re
import signal
import struct
import subprocess
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[3]
LAUNCH = str(ROOT / "scripts" / "launch.sh")
TIMES = re.compile(r"^(step_ms|tokens_per_s|mfu|tflops|memory_bytes|time|compute_ms|wait_ms|lag|lag_ms|slowest_rank|save\w*|bubble\w*)$")


class Hang(Exception):
    """A command had no end."""


@dataclass
class Ended:
    command: list
    status: int
    out: str
    err: str

    def error(self):
        """Error and hint as they were printed, without the rank that spoke."""
        lines = [re.sub(r"^\[rank \d+\] ", "", line) for line in self.err.splitlines()]
        first = next((i for i, line in enumerate(lines) if re.match("megatrain: (error|bug)", line)), None)
        return "" if first is None else "\n".join(lines[first:])


def descendants(pid):
    """Of a process, by the system's table of parents."""
    parents = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = pathlib.Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def stop(process):
    """Launcher and ranks: each rank has a process group of its own."""
    for pid in descendants(process.pid) + [process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Program:
    """binary: megatrain's path. limit_s: what no command may take."""

    def __init__(self, binary, limit_s):
        self.binary, self.limit_s = binary, limit_s
        self.environment = {k: v for k, v in os.environ.items()
                            if k not in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")}
        self.environment |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

    def run(self, folder, *words, ranks=1):
        command = [self.binary, *map(str, words)]
        if ranks > 1:
            command = [LAUNCH, "-n", str(ranks), "--", *command]
        process = subprocess.Popen(command, cwd=folder, env=self.environment, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            stop(process)
            out, err = process.communicate()
            raise Hang(f"no end in {self.limit_s:g} s\n" + err.strip()) from None
        return Ended(command, process.returncode, out, err)


# ---- what a run leaves behind


def metrics(folder):
    """The lines of a run, without times; numbers as they were written, so that NaN is not equal to a number."""
    lines = []
    for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line, parse_float=str, parse_constant=str)
        lines.append({k: v for k, v in record.items() if not TIMES.match(k)})
    return lines


def memory_bytes(folder):
    """Of each step."""
    lines = map(json.loads, (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [line["memory_bytes"] for line in lines if "memory_bytes" in line]


def read_shard(path):
    """{key: bytes} of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    body = data[8 + size:]
    return {k: body[slice(*v["data_offsets"])] for k, v in header.items() if k != "__metadata__"}


def put_piece(whole, shape, piece, data, size):
    """A piece's rows into a whole tensor of elements of so many bytes."""
    first, cols = piece["offset"] + [0], shape[1] if len(shape) > 1 else 1
    own = piece["shape"][1] if len(shape) > 1 else 1
    for r in range(piece["shape"][0]):
        at = size * ((first[0] + r) * cols + (first[1] if len(shape) > 1 else 0))
        whole[at:at + size * own] = data[size * r * own:size * (r + 1) * own]


def key_of(piece):
    """Where a piece stands in its file (docs/checkpoints.md)."""
    name = piece["name"] if piece["state"] == "value" else f"{piece['state']}/{piece['name']}"
    return name if piece["shape"] == piece["global"] else name + "#" + ",".join(map(str, piece["offset"]))


def checkpoint(folder):
    """All that a run's last checkpoint holds of training's state: whole tensors, shifts, counters."""
    last = max((pathlib.Path(folder) / "checkpoints").glob("step-*"))
    manifest = json.loads((last / "manifest.json").read_text())
    shards = {f["name"]: read_shard(last / f["name"]) for f in manifest["files"]}
    whole = {}
    for piece in manifest["pieces"]:
        shape, data = piece["global"], shards[piece["file"]][key_of(piece)]
        size = len(data) // math.prod(piece["shape"])  # (moments may be of 16 bits)
        tensor = whole.setdefault((piece["state"], piece["name"]), bytearray(size * math.prod(shape)))
        put_piece(tensor, shape, piece, data, size)
    state = {f"{kind} of {name}": bytes(data) for (kind, name), data in whole.items()}
    state |= {f"shift of {p['name']}": p["shift"] for p in manifest["parameters"]}
    state |= {k: manifest[k] for k in ("step", "samples", "tokens", "blocks", "counters")}
    return state


# ---- token files and questions

GIVEN = ("[abc].*", "asked.jsonl")  # to each case
WORDS = "ships tides harbours lamps of the and under seven grey birds wind over salt ropes".split()


def make_tokens(program, folder):
    """a, b to train on, c to evaluate on: documents of 1 to 60 words, ended."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents, step in (("a", 700, 7), ("b", 400, 11), ("c", 19, 5)):
        text = []
        for d in range(documents):
            count = 1 + d * step % 23 * (d % 3)
            text.append(" ".join(WORDS[(d * step + i * i) % len(WORDS)] for i in range(count)))
        (folder / f"{name}.txt").write_text("\n\n".join(text) + "\n")
        ended = program.run(folder, "preprocess", "--input", f"{name}.txt", "--tokenizer", "byte", "--output", name,
                            "--append-eod", "--split-blank-lines", "--force")
        if ended.status:
            raise SystemExit("layouts: no token files: " + ended.err)
    (folder / "asked.jsonl").write_text("".join(json.dumps({"query": f"seven {WORDS[i]}", "choices": WORDS[i:i + 3], "gold": 1}) + "\n"
                                                for i in range(5)))
