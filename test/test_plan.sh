#!/usr/bin/env bash
# What `megatrain plan` prints against closed forms: bytes of state a rank, and bytes that each communicator sends. That a
# run takes and sends what is planned, test_layouts and test_memory show.
. "$(dirname "$0")/lib.sh"

cat >plan.ini <<'EOI'
[model]
layers = 3
hidden = 64
heads = 8
seq = 32
[data]
train = a
[parallel]
bucket_mb = 1
[train]
global_batch = 16
micro_batch = 2
steps = 10
EOI
make_tiny

cat >closed.py <<'EOP'
"""closed.py RANKS TP SP ZERO MODEL KIND <plan's output: prints what differs from the closed forms."""
import re
import sys

ranks, tp, sp, zero = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "true", sys.argv[4] == "1"
model, kind = sys.argv[5:]
text = sys.stdin.read()
dp, layers, hidden, head_dim, tokens = ranks // tp, 3, 64, 8, 2 * 32
micro_batches = 16 // 2 // dp
bad, seen = [], 0


def number(s):
    return int(s.replace(",", ""))


def column(name):
    found = re.search(rf"^ +{re.escape(name)} +([\d,]+)", text, re.M)
    return number(found[1]) if found else 0


def calls(name):
    found = re.search(rf"^ +{re.escape(name)} +([\d,]+) +([\d,]+)$", text, re.M)
    return (number(found[1]), number(found[2])) if found else (0, 0)


def want(what, got, expected):
    global seen
    seen += 1
    if got != expected:
        bad.append(f"{what}: {got}, not {expected}")


def between(what, got, least, most):
    global seen
    seen += 1
    if not least <= got <= most:
        bad.append(f"{what}: {got}, not in {least} to {most}")


line = re.search(r"([\d.]+) bytes of state a parameter of the rank \(([\d,]+)\); (\d+) buckets?, ([\d,]+) elements", text)
parameters, buckets, padding = number(line[2]), int(line[3]), number(line[4])
held = parameters + padding
cut = dp if zero else 1

# bytes of state: weights and gradients whole, what the optimizer alone needs in a slice
sixteen = kind == "bf16"
gradient = 8 if kind == "layout" else 4
whole, sliced = (6, 12) if sixteen else (4 + gradient, 8)
state = sum(column(n) for n in ("weights (fp32)", "their 16-bit copy", "gradients", "gradients (64-bit fixed point)", "moments"))
want("bytes of state", state, held * whole + held * sliced // cut)
want("bytes of state a parameter", line[1], f"{state / parameters:.3f}")
ahead = ("of the host: " if sixteen else "") + "batches read ahead"  # (its sixteen bits are those of a GPU)
want(ahead, column(ahead), 2 * 16 // dp * (32 + 1) * 4)


def part(bytes_whole, g):
    """What a rank of g sends in a gather or a reduce-scatter; a sum is both."""
    return bytes_whole * (g - 1) // g



reduce = "sum-i64" if kind == "layout" else "reduce-tree"
scatter = "reduce-scatter-i64" if kind == "layout" else "reduce-scatter-tree"
if dp > 1 and zero:
    want("dp " + scatter, calls("dp " + scatter), (buckets, part(gradient * held, dp)))
    want("dp all-gather", calls("dp all-gather"), (buckets, part((2 if sixteen else 4) * held, dp)))
elif dp > 1:
    # with integers, the counted tokens and the loss go by the same operation
    statistics = (1, 2 * part(24, dp)) if kind == "layout" else (0, 0)
    want("dp " + reduce, calls("dp " + reduce), (buckets + statistics[0], 2 * part(gradient * held, dp) + statistics[1]))
rows = 4 * tokens * hidden  # of a micro-batch, whole
if tp > 1 and sp:  # two pairs of a column and a row product a layer, the table, the head
    want("sp all-gather", calls("sp all-gather"), ((6 * layers + 3) * micro_batches, (6 * layers + 3) * micro_batches * part(rows, tp)))
    want("sp reduce-scatter-tree", calls("sp reduce-scatter-tree"),
         ((4 * layers + 2) * micro_batches, (4 * layers + 2) * micro_batches * part(rows, tp)))
elif tp > 1:
    n = (4 * layers + 2) * micro_batches
    qk = model != "gpt2" and kind != "layout"  # gradients of norms of heads, with the padding around them
    got = calls("tp reduce-tree")
    want("tp reduce-tree, calls", got[0], n + qk)
    least = n * 2 * part(rows, tp) + (2 * part(4 * layers * 2 * head_dim, tp) if qk else 0)
    between("tp reduce-tree, bytes", got[1], least, least + qk * 2 * part(4 * padding, tp))
if tp > 1 and sp and kind == "layout":  # gradients of what every rank has whole, from its own rows
    norms = (2 * layers + 1) * hidden * (2 if model == "gpt2" else 1)
    biases_positions = 2 * layers * hidden + 32 * hidden if model == "gpt2" else 0
    least = norms + biases_positions
    between("sp sum-i64", calls("sp sum-i64")[1], 2 * part(8 * least, tp), 2 * part(8 * (least + padding), tp))
sharing = tp // 2 if model == "gqa" else 1  # ranks of a kv head
if sharing > 1:  # its k and v are gathered, their gradients summed
    n = layers * micro_batches
    whole_head = 4 * 2 * tokens * head_dim
    want("kv all-gather", calls("kv all-gather"), (n, n * part(whole_head, sharing)))
    want("kv reduce-tree", calls("kv reduce-tree"), (n, n * 2 * part(whole_head, sharing)))
for b in bad:
    print(b)
sys.exit(bool(bad) or seen < 2)
EOP

llama=(model.arch=llama model.qk_norm=true model.tied=false model.ffn=256)
gqa=("${llama[@]}" model.kv_heads=2)
gpt2=(model.tied=true model.bias=true)
count=0
while read -r n tp sp zero model kind; do
    declare -n keys=$model
    words=("${keys[@]}" parallel.tp="$tp" parallel.zero="$zero")
    [ "$tp" = 1 ] || words+=(parallel.sp="$sp")
    case $kind in
    bf16) words+=(run.device=cuda run.precision=bf16) ;;
    *) words+=(run.device=cpu run.reproducible="$kind") ;;
    esac
    "$mt" plan --config plan.ini --world "$n" "${words[@]}" >plan.txt 2>&1
    check "$n ranks, tp $tp, sp $sp, zero $zero, $model, $kind: $(python3 closed.py "$n" "$tp" "$sp" "$zero" "$model" "$kind" <plan.txt 2>&1 | tail -3)" \
        python3 closed.py "$n" "$tp" "$sp" "$zero" "$model" "$kind" <plan.txt
    count=$((count + 1))
done <<'EOL'
1 1 false 0 gpt2 layout
2 1 false 1 gpt2 layout
2 1 false 0 gpt2 layout
2 2 true 0 gpt2 layout
4 2 true 1 gpt2 layout
8 4 false 1 gpt2 layout
8 2 true 1 llama layout
8 8 true 0 llama layout
4 4 false 0 llama run
8 8 true 0 gqa layout
8 4 false 1 gqa run
4 2 true 0 gqa layout
8 1 false 1 llama run
4 1 false 0 gpt2 run
8 4 true 1 gpt2 run
4 1 false 1 gpt2 bf16
8 1 false 1 llama bf16
4 1 false 0 llama bf16
EOL
finish
