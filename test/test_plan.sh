#!/usr/bin/env bash
# What `megatrain plan` prints against closed forms: bytes of state a rank, and bytes that each communicator sends; of a
# pipeline what its ranks hold and send. That a run takes and sends what is planned, test_layouts, test_memory and
# test_pipeline show.
. "$(dirname "$0")/lib.sh"

# holds WHAT PROGRAM...: the program ends well; else what it says of it
holds() {
    local what=$1 said
    shift
    if said=$("$@" 2>&1); then ok; else bad "$what: $(tail -3 <<<"$said")"; fi
}
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

cat >wants.py <<'EOP'
"""What the two programs below expect."""
import sys

bad, seen = [], 0


def want(what, got, expected):
    between(what, got, expected, expected)


def between(what, got, least, most):
    global seen
    seen += 1
    if not least <= got <= most:
        bad.append(f"{what}: {got}, not {least}" + (f" to {most}" if least != most else ""))


def finish(least):
    """Prints what differs; fails for that, and where fewer things than this were looked at."""
    for b in bad:
        print(b)
    sys.exit(bool(bad) or seen < least)
EOP

cat >closed.py <<'EOP'
"""closed.py RANKS TP SP ZERO MODEL KIND <plan's output: prints what differs from the closed forms."""
import re
import sys

from wants import between, finish, want

ranks, tp, sp, zero = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "true", sys.argv[4] == "1"
model, kind = sys.argv[5:]
text = sys.stdin.read()
dp, layers, hidden, head_dim, tokens = ranks // tp, 3, 64, 8, 2 * 32
micro_batches = 16 // 2 // dp


def number(s):
    return int(s.replace(",", ""))


def column(name):
    found = re.search(rf"^ +{re.escape(name)} +([\d,]+)", text, re.M)
    return number(found[1]) if found else 0


def calls(name):
    found = re.search(rf"^ +{re.escape(name)} +([\d,]+) +([\d,]+)$", text, re.M)
    return (number(found[1]), number(found[2])) if found else (0, 0)


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
want(ahead, column(ahead), 2 * 16 // dp * (32 + 1) * 4 + (8 << 20 if sixteen else 0))  # (page-locked: at least that)


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
rows = (2 if sixteen else 4) * tokens * hidden  # of a micro-batch, whole
if tp > 1 and sp:  # two pairs of a column and a row product a layer, the table, the head
    want("sp all-gather", calls("sp all-gather"), ((6 * layers + 3) * micro_batches, (6 * layers + 3) * micro_batches * part(rows, tp)))
    sums = "sp exchange" if sixteen else "sp reduce-scatter-tree"
    want(sums, calls(sums), ((4 * layers + 2) * micro_batches, (4 * layers + 2) * micro_batches * part(rows, tp)))
elif tp > 1:
    n = (4 * layers + 2) * micro_batches
    qk = model != "gpt2" and kind != "layout"  # gradients of norms of heads, with the padding around them
    if sixteen:
        want("tp exchange", calls("tp exchange"), (2 * n, n * 2 * part(rows, tp)))
        n = 0
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
finish(2)
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
    "$mt" plan --config plan.ini --world "$n" "${words[@]}" --all >plan.txt 2>&1
    holds "$n ranks, tp $tp, sp $sp, zero $zero, $model, $kind" python3 closed.py "$n" "$tp" "$sp" "$zero" "$model" "$kind" <plan.txt
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
8 4 true 1 gpt2 bf16
4 4 false 0 llama bf16
EOL

# ---- pipelines: 16 blocks, 4 micro-batches of 2 samples a pipeline rank and more

cat >pipeline.py <<'EOP'
"""pipeline.py PP DP MICROBATCHES SCHEDULE CHUNKS GOLDEN <plan's output: prints what differs from the closed forms."""
import re
import sys

from wants import between, finish, want

pp, dp, m = (int(x) for x in sys.argv[1:4])
schedule, chunks = sys.argv[4], int(sys.argv[5])
text = sys.stdin.read()
hidden, layers, seq, vocab = 64, 16, 32, 257
padded = 384  # a multiple of 8 blocks of 16
message = 4 * 2 * seq * hidden
two_way, wave = schedule.startswith("chimera"), schedule in ("zb-v", "v-half", "v-min", "dualpipev", "hanayo")
stages = pp * chunks


def row(name):
    line = re.search(rf"^ +{re.escape(name)} +(.*)$", text, re.M)
    return [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) +[\d.]+ (?:[KMGT]i)?B", line[1])] if line else []


def rank_of(replica, stage):
    turn, r = divmod(stage, pp)
    return pp - 1 - r if replica or (wave and turn % 2) else r


# who holds what
held = [[] for _ in range(pp)]
for replica in range(1 + two_way):
    for stage in range(stages):
        held[rank_of(replica, stage)].append((stage, replica))
lines = [[int(x) for x in re.findall(r"\d+", found.replace(",", ""))] for found in
         re.findall(r"^  (?:pp rank \d+ )? +(\d+ +[01] +\d+ +\d+ +[\d,]+ +[\d,]+)(?: +[\d,]+ +[\d,]+)?", text, re.M)]
of_rank, at = [], 0
for r in range(pp):
    of_rank.append(lines[at:at + len(held[r])])
    at += len(held[r])
    want(f"stages of rank {r}", sorted((q[0], q[1]) for q in of_rank[r]), sorted(held[r]))
want("lines of stages", len(lines), at)

# weights: a block, the table and positions on the first stage, norm and head on the last, which is the table again unless
# the rank has it already
block = 4 * hidden * hidden + 8 * hidden * hidden + (3 + 1 + 4 + 1) * hidden + 4 * hidden
weights = row("weights (fp32)")
for r in range(pp):
    count = 0
    for stage, replica in held[r]:
        count += block * layers // stages
        count += (padded + seq) * hidden if stage == 0 else 0
        count += 2 * hidden if stage == stages - 1 else 0
        count += padded * hidden if stage == stages - 1 and (0, replica) not in held[r] else 0
    between(f"weights of rank {r}", weights[r], 4 * count, 4 * count + 4 * 64 * (4 + 12 * layers))

# messages: between stages of different ranks one activation forth and one gradient back for each micro-batch
sent = [0] * pp
for replica in range(1 + two_way):
    for stage in range(stages - 1):
        a, b = rank_of(replica, stage), rank_of(replica, stage + 1)
        if a != b:
            sent[a] += message * m // (1 + two_way)
            sent[b] += message * m // (1 + two_way)
all_sent = sum(sent)
tables = text.split("communication of one step")[1:]
for table in tables:
    names, found = table.split("\n", 1)[0], re.search(r"^ +pp exchange +([\d,]+) +([\d,]+)$", table, re.M)
    ranks = range(pp) if "every rank" in names else [int(x) for x in re.findall(r"pp rank (\d+)", names)]
    for r in ranks:
        want(f"bytes sent by rank {r}", int(found[2].replace(",", "")), sent[r])
        between(f"exchanges of rank {r}", int(found[1].replace(",", "")), sent[r] // message // 2,
                2 * all_sent // message)
        sent[r] = -1
want("ranks whose messages are shown", sent, [-1] * pp)

# units in flight and what is saved of them
flight = [[q[3] for q in stage] for stage in of_rank]
saves = row("saves between forward and backward")
if schedule == "1f1b":
    want("in flight", flight, [[min(m, pp - r)] for r in range(pp)])
elif schedule == "gpipe":
    want("in flight", flight, [[m]] * pp)
if schedule in ("1f1b", "gpipe"):
    want("saves", saves, [flight[r][0] * (of_rank[r][0][4] + of_rank[r][0][5]) for r in range(pp)])
golden = [line.split("\t") for line in open(sys.argv[6])]
golden = [g for g in golden if g[0] == {"v-min": "v-min-raw", "hanayo": "hanayo-w1-direct"}.get(schedule, schedule)
          and g[1:3] == [str(pp), str(m)]]
if wave:
    want("rows of the golden table", len(golden), 1)
    to_w, to_i = ([int(x) for x in golden[0][column].split(",")] for column in (10, 11))
    for r in range(pp):
        each_i, each_w = ([q[k] for q in of_rank[r]] for k in (4, 5))
        between(f"units in flight on rank {r}", to_w[r], max(flight[r]), sum(flight[r]))
        most = to_w[r] * max(each_w) + to_i[r] * max(each_i)
        if len(set(each_i)) == len(set(each_w)) == 1:
            want(f"saves of rank {r}", saves[r], most)
        else:  # blocks of two sizes leave gaps
            between(f"saves of rank {r}", saves[r], max(to_w[r] * min(each_w), to_i[r] * min(each_i)), most * 6 // 5)

# boundary buffers: whole messages, at least one to receive and one to send
buffers = row("buffers between stages")
for r in range(pp):
    want(f"parts of messages in the buffers of rank {r}", buffers[r] % message, 0)
    between(f"buffers of rank {r}", buffers[r] // message, 2, 2 * m * chunks * (1 + two_way))
finish(5 * pp)
EOP
golden=$root/test/golden/schedules.tsv
while read -r pp dp m schedule chunks; do
    words=(model.layers=16 "${gpt2[@]}" parallel.pp="$pp" parallel.schedule="$schedule" train.global_batch=$((2 * m * dp)))
    [ "$chunks" = 1 ] || words+=(parallel.vpp="$chunks")
    "$mt" plan --config plan.ini --world $((pp * dp)) "${words[@]}" run.device=cpu --all >plan.txt 2>&1
    args=("$pp" "$dp" "$m" "$schedule" "$chunks" "$golden")
    holds "pp $pp, dp $dp, $m micro-batches, $schedule x $chunks" python3 pipeline.py "${args[@]}" <plan.txt
done <<'EOL'
4 1 16 1f1b 1
4 1 2 1f1b 1
2 2 8 1f1b 1
4 1 8 gpipe 1
4 1 8 interleaved 2
2 1 8 interleaved 4
4 1 8 bfs 2
4 1 8 zb-h1 1
2 2 8 zb-v 2
4 1 8 zb-v 2
4 1 16 v-half 2
4 1 8 v-min 2
4 1 8 dualpipev 2
4 2 8 hanayo 2
4 1 8 chimera 1
2 2 8 chimera 1
EOL

# ---- the large mixtures that come along, on 16, 64 and 256 GPUs: what a rank holds and sends for its experts

cat >mixture.py <<'EOP'
"""mixture.py WORLD MODEL <JSON of the plan> <its text>: prints what differs from a count by hand."""
import json
import re
import sys

from wants import between, finish, want

world, plan, text = int(sys.argv[1]), json.load(open(sys.argv[3])), open(sys.argv[4]).read()
# (small: norms of queries and keys, sinks, biases that all ranks have: of attention, router and experts' fc2)
layers, D, heads, kv, C, F, E, K, V, small, pp, slack, batch, total, active = {
    "mixtral-8x7b": (32, 4096, 32, 8, 128, 14336, 8, 2, 32000, 0, 4, 2, 1024, 46_702_792_704, 12_879_925_248),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 768, 128, 8, 151936, 256, 2, 2, 1024, 30_532_122_624, 3_353_032_704),
    "gpt-oss-20b": (24, 2880, 64, 8, 64, 2880, 32, 4, 201088, 64 + 5120 + 2880 + 32 + 32 * 2880, 1, 2, 512, 20_914_757_184, 4_187_440_704),
}[sys.argv[2]]
T, ep, blocks, dp = 4096, 8, layers // pp, world // pp
want("ranks", len(plan["ranks"]), pp)

# of a block: two norms, qkv, proj, the router; 3 F D an expert, of which a rank has E / ep
attention = (heads + 2 * kv) * C * D + heads * C * D + small
bias = 2 * F if sys.argv[2] == "gpt-oss-20b" else 0  # of an expert's fc1; fc2's is D
dense_block, experts_block = 2 * D + attention + E * D, (3 * F * D + bias) * E // ep
want("parameters", plan["parameters"], total)
want("parameters of the parts", layers * (dense_block + experts_block * ep) + 2 * V * D + D, total)
want("active parameters", plan["active_parameters"], active)
want("active parameters of the parts", total - layers * (E - K) * (3 * F * D + bias + (D if bias else 0)), active)
for r, rank in enumerate(plan["ranks"]):
    dense = blocks * dense_block + (V * D if r == 0 else 0) + (V * D + D if r == pp - 1 else 0)
    experts, states = blocks * experts_block, blocks * E  # states: the routers' biases
    held, own = dense + experts + states, dense // dp + experts * ep // dp + states
    want(f"gradients of rank {r}", rank["gradients"], 2 * rank["weights_16_bit"])
    want(f"moments of rank {r}", rank["moments"], 2 * rank["weights"])
    # buckets end at multiples of 64 numbers for each slice
    between(f"16-bit weights of rank {r}", rank["weights_16_bit"], 2 * held, 2 * held + 2 * 64 * dp * 4 * blocks)
    between(f"fp32 weights of rank {r}", rank["weights"], 4 * own, 4 * own + 4 * 64 * 4 * blocks)

# rows: K of each token travel, but those of a rank's own experts, there and back, forward, again for recomputation, and
# backward; a rank's experts have room for twice an even share
want("room", int(re.search(r"with room for ([\d,]+) rows", text)[1].replace(",", "")), slack * T * K)
sent = [tuple(int(x.replace(",", "")) for x in found) for found in
        re.findall(r"^ +tp-ep all-to-all +([\d,]+) +([\d,]+) +if .* at most ([\d,]+)$", text, re.M)]
calls = 5 * blocks * (batch // dp)
for found in sent:
    rows = calls * T * K * D * 2
    want("all-to-all, calls, bytes, and bytes at most", found, (calls, rows * (ep - 1) // ep, rows // 5 * (3 + 2 * slack)))
finish(7 + 4 * pp)
EOP
while read -r model world; do
    "$mt" plan --config "$root/config/$model.ini" --world "$world" --device h100 --json >plan.json 2>&1
    "$mt" plan --config "$root/config/$model.ini" --world "$world" --device h100 --all >plan.txt 2>&1
    holds "$model on $world GPUs" python3 mixture.py "$world" "$model" plan.json plan.txt
    check "$model fits $world of 80 GB" grep -q "fits 80 GB: yes" plan.txt
done <<'EOL'
mixtral-8x7b 64
mixtral-8x7b 256
qwen3-30b-a3b 64
qwen3-30b-a3b 256
gpt-oss-20b 16
gpt-oss-20b 256
EOL

# ---- Llama 3 at its published scale: parameters counted from the shapes, and the smallest and the largest world that the
# file's first line names

while read -r model layers hidden ffn least most; do
    embed=$((128256 * hidden)) # (table and head; a layer: two norms, q and output, k and v of 8 heads of 128, three of the ffn)
    want=$((2 * embed + hidden + layers * (2 * hidden + 2 * hidden * hidden + 2 * 1024 * hidden + 3 * hidden * ffn)))
    check "$model's first line names $least to $most" grep -q "Fits $least to $(sed 's/....*/&/; s/\(.\)\(...\)$/\1,\2/' <<<"$most") GPUs" \
        <(head -1 "$root/config/$model.ini")
    for world in "$least" 64 "$most"; do
        plan=$model-$world.txt
        "$mt" plan --config "$root/config/$model.ini" --world "$world" --device h100 --all >$plan 2>&1
        check "$model fits $world" grep -q "fits 80 GB: yes" $plan
        check "$model has $want parameters" [ "$(sed -n 's/^ *\([0-9,]*\) parameters$/\1/p' $plan | tr -d ,)" = "$want" ]
    done
done <<'EOL'
llama3-8b 32 4096 14336 8 1024
llama3-70b 80 8192 28672 64 2048
EOL

# ---- DeepSeek-V3 at its published scale, counted from its shapes

cat >deepseek.py <<'EOP'
"""deepseek.py <JSON of the plan> <its text>: prints what differs from a count by hand."""
import json
import re
import sys

from wants import between, finish, want

plan, text = json.load(open(sys.argv[1])), open(sys.argv[2]).read()
L, D, H, V, T, pp, dp, ep = 61, 7168, 128, 129280, 4096, 16, 128, 64
latents = 1536 * D + 1536 + H * (128 + 64) * 1536 + (512 + 64) * D + 512 + H * (128 + 128) * 512 + D * H * 128
block, expert = latents + 2 * D, 3 * D * 2048
mixture = 256 * D + expert  # router, shared expert
main = L * block + 3 * 3 * D * 18432 + 58 * (mixture + 256 * expert) + 2 * V * D + D
mtp = 3 * D + 2 * D * D + block + mixture + 256 * expert  # norms, projection of two rows, a block
total = main + mtp
active = total - 59 * (256 - 8) * expert
want("latent attention of a block", latents, 187_107_328)
want("parameters without prediction of further tokens", main, 671_026_404_352)
want("parameters", (plan["parameters"], total), (682_636_472_320, 682_636_472_320))
want("active parameters", (plan["active_parameters"], active), (38_240_382_976, 38_240_382_976))
flop = 6 * active + 6 * (L + 1) * H * (128 + 64 + 128) * T  # (one table is looked up, the head is gone through twice)
want("FLOP of a token", re.search(r"6 N \+ 12 L C T.* (\d+)G ", text)[1], str(round(flop / 1e9)))

# a rank in the middle has four blocks with experts
dense, experts, states = 4 * (block + mixture), 4 * expert * 256 // ep, 4 * 256
held, own, rank = dense + experts + states, dense // dp + experts * ep // dp + states, plan["ranks"][2]
between("16-bit weights", rank["weights_16_bit"], 2 * held, 2 * held + 2 * 64 * dp * 16)
between("fp32 weights", rank["weights"], 4 * own, 4 * own + 4 * 64 * 16)
# kept between forward and backward, of 14 units: the input of each block; the last one's output is sent
want("saves", rank["saves"], 14 * 4 * T * D * 2)
finish(8)
EOP
# (as DeepSeek cut it, on 8 hosts)
wide=(parallel.ep=64 moe.dispatcher=node parallel.seq_blocks=16 parallel.schedule=1f1b parallel.vpp=1 parallel.overlap_moe=false)
"$mt" plan --config "$root/config/deepseek-v3.ini" --world 2048 --device h100 "${wide[@]}" --json >plan.json 2>&1
"$mt" plan --config "$root/config/deepseek-v3.ini" --world 2048 --device h100 "${wide[@]}" --all >plan.txt 2>&1
holds "DeepSeek-V3" python3 deepseek.py plan.json plan.txt
check "DeepSeek-V3 fits 2048 of 80 GB" grep -q "fits 80 GB: yes" plan.txt
# experts of 64 ranks on 8 hosts: 7 others of the host by tp-ep, the same 7 by ep-host; in fp32 tp sends no messages
check "pairs of ranks count" grep -q ", with 14 pairs of ranks on a host)$" plan.txt
cat >rows.py <<'EOP'
"""rows.py <JSON of a plan of many kinds of ranks> <its text>: a row a rank, with the JSON's figures in units."""
import json
import sys

from wants import finish, want

ranks = json.load(open(sys.argv[1]))["ranks"]
lines = open(sys.argv[2]).read().split("\nbytes of one rank ")[1].split("\n")
heads = lines[0].replace("in 16 bits", "weights_16_bit").replace("buffers", "boundary").replace("ahead", "read_ahead").split()
unit = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
for rank, line in zip(ranks, lines[1:]):
    cells = line[20:].split()
    for head, value, name in zip(heads, cells[::2], cells[1::2]):
        want(f"pp rank {rank['pp_rank']}, {head}", value, f"{rank[head] / unit[name]:#.3g}".rstrip("."))
want("ranks", (len(ranks), lines[16][:13], len(heads)), (16, "  pp rank 15 ", 10))
want("columns", max(map(len, lines[:17])) <= 132, True)
finish(16 * 10 + 2)
EOP
holds "a row a rank" python3 rows.py plan.json plan.txt

# ---- who is in which group, in both orders of axes

for order in tp-cp-ep-dp-pp tp-cp-ep-pp-dp; do
    "$mt" plan --config plan.ini --world 8 model.layers=4 parallel.tp=2 parallel.pp=2 parallel.order=$order 2>&1 | grep '^groups ' >$order
done
has() { check "$1: '$2' in: $(cat "$1")" grep -qE "^groups  $2( |,|$)" "$1"; }
has tp-cp-ep-dp-pp '\(0 1\) \(2 3\) \(4 5\) \(6 7\)   tp'
has tp-cp-ep-dp-pp '\(0 2\) \(1 3\) \(4 6\) \(5 7\)   dp'
has tp-cp-ep-dp-pp '\(0 4\) \(1 5\) \(2 6\) \(3 7\)   pp'
has tp-cp-ep-pp-dp '\(0 1\) \(2 3\) \(4 5\) \(6 7\)   tp'
has tp-cp-ep-pp-dp '\(0 4\) \(1 5\) \(2 6\) \(3 7\)   dp'
has tp-cp-ep-pp-dp '\(0 2\) \(1 3\) \(4 6\) \(5 7\)   pp'
# ---- what it is for; whether that is enough; short lines of many ranks; the same as JSON
plan() { "$mt" plan --config plan.ini "$@" 2>err.txt; }
if [ "$(plan | grep -m1 ^device)" = "device  cpu, fp32 (this machine has no GPU; --device h100 plans for one)" ]; then ok
else check "the device: $(plan | grep -m1 ^device)" grep -q "^device  cuda, bf16 (this machine's" <(plan); fi
check "a device that was asked for" grep -qx "device  cpu, fp32" <(plan run.device=cpu)
check "--device" grep -qx "device  h100, bf16" <(plan --device h100 run.device=cpu)
unmeasured="warning: times of Gated DeltaNet are estimates: its kernels have not been measured"
delta=(--config "$root/config/qwen3-next-tiny.ini" --world 2 --device h100 model.vocab=512)
check "what nobody measured" [ "$("$mt" plan "${delta[@]}" 2>&1 >/dev/null)" = "$unmeasured" ]
check "nor of other layouts" [ "$("$mt" plan "${delta[@]}" --search 2>&1 >/dev/null | grep -cx "$unmeasured")" = 1 ]
mamba=(--config plan.ini --device h100 model.mixer=mamba2 model.mamba_heads=8)
check "nor Mamba-2" grep -qx "${unmeasured/Gated DeltaNet/Mamba-2}" <("$mt" plan "${mamba[@]}" 2>&1 >/dev/null)
check "and of other models not" [ -z "$(plan --device h100 2>&1 >/dev/null)" ]
check "it fits" grep -q "^fits 80 GB: yes (.* of 79.6 GiB, and up to 768 MiB for CUDA's libraries)$" <(plan --device h100)
large=(model.layers=40 model.hidden=4096 model.heads=32 model.seq=2048 train.micro_batch=1)
check "it does not" grep -q "^fits 40 GB: no (" <(plan --device a100-40 "${large[@]}")
check "the answer comes first" [ "$(plan --device h100 | sed 's/[ :].*//' | head -3 | tr '\n' ' ')" = "fits a a " ]
check "a guess for this machine" grep -qE "^10 steps take (less than a second|about [0-9.]+m?[0-9]*s to [0-9.]+m?[0-9]*s) on the [0-9]+ processors? of this machine \(a guess" \
    <(plan run.device=cpu | head -1)
"$mt" plan --config "$root/config/llama3-70b.ini" --world 64 --device h100 >brief.txt 2>/dev/null
mv llama3-70b-64.txt long.txt
check "tables of many kinds are short: $(wc -l <brief.txt), $(wc -l <long.txt)" [ "$(wc -l <brief.txt)" -lt 100 -a "$(wc -l <long.txt)" -gt 100 ]
check "--all says more of the same" sh -c "grep -E '^(fits|a step|a rank|device|model|layout|groups|  total)' brief.txt | cut -c1-40 >a.txt
    [ \$(wc -l <a.txt) -gt 9 ] && grep -vE '^  total' a.txt | while IFS= read -r line; do grep -qF \"\$line\" long.txt || exit 1; done"
check "numbers as people write them" [ "$(grep -cE '[0-9]e[+-][0-9]' brief.txt)" -eq 0 ]
check "nothing of that without --device" [ "$(plan run.device=cpu | grep -c fits)" -eq 0 ]
expect 2 "device 'tpu' is none that is known" "$mt" plan --config plan.ini --device tpu
printf '[device]\nmemory_mib = 12288\n' >own.ini
check "a device of one's own" grep -q "^fits there: yes (.* of 12.0 GiB, " <(plan --device own.ini)
expect 2 "no file 'other.ini'" "$mt" plan --config plan.ini --device other.ini
plan --world 512 parallel.tp=16 model.heads=16 model.hidden=128 train.global_batch=64 >many.txt
check "512 ranks: lines of groups have $(grep '^groups' many.txt | cut -d')' -f1-9 | wc -L) columns" grep -qE \
    "^groups  \(0 1 \.\.\. 15\) \(16 17 \.\.\. 31\) (\([0-9. ]*\) )*\.\.\. 32 of 16   tp" many.txt
cat >same.py <<'EOP'
"""same.py <text of the plan> <its JSON>: the same figures."""
import json, re, sys
text, j = open(sys.argv[1]).read(), json.load(open(sys.argv[2]))
numbers = lambda name: [int(n.replace(",", "")) for n in re.findall(r" ([\d,]+) +[\d.]+ [KMGT]?i?B", re.search(rf"^ +{name} .*", text, re.M)[0] + " ")]
rows = {"weights": r"weights \(fp32\)", "gradients": "gradients", "moments": "moments", "saves": "saves between", "scratch": "scratch of",
        "total": "total", "op_bytes": "bytes read", "comm_bytes": "bytes sent",
        "comm_beside_ops": " of it beside ops of a unit"}
bad = [k for k, name in rows.items() if numbers(name) != [r[k] for r in j["ranks"]] or not j["ranks"]]
bad += [] if j["largest_total"] == max(r["total"] for r in j["ranks"]) and j["world"] == 4 and j["tp"] == 2 and j["dp"] == 2 else ["head"]
bad += [] if f'{j["parameters"]:,} parameters' in text and j["fits"] is True and j["device"] == "a100" else ["device"]
print(" ".join(bad))
sys.exit(bool(bad))
EOP
layout=(--world 4 parallel.tp=2 --device a100)
plan "${layout[@]}" >plan.txt
plan "${layout[@]}" --json >plan.json
check "communicators count: $(grep fits plan.txt)" grep -q ", and up to 2.36 GiB for CUDA's libraries and 4 communicators, with 1 pair of ranks on a host)$" plan.txt
check "no pairs without messages" grep -q "libraries and 4 communicators)$" <(plan "${layout[@]}" run.precision=fp32)
holds "JSON has what the table has" /usr/bin/python3 same.py plan.txt plan.json

# ---- FLOP of a token: the formula that mfu uses, with causal attention, is what the ops count
flop() { awk -v row="$1" 'index($0, row) { v = $(NF - 1); u = substr(v, length(v)); print v * (u == "G" ? 1e9 : u == "M" ? 1e6 : 1e3) }' flop.txt; }
for m in arch=gpt2 "arch=gpt2 model.tied=false" arch=llama "arch=llama model.kv_heads=4" "arch=llama model.tied=true" \
    "arch=llama model.attention=mla model.kv_lora_rank=128 model.qk_nope_head_dim=32 model.qk_rope_head_dim=16" \
    "arch=llama model.attention=mla model.kv_lora_rank=128 model.attention_gate=true model.bias=true" \
    "arch=llama model.window=8" "arch=llama model.window=8,300*2,0 model.sinks=true model.attention_gate=true" \
    "arch=llama model.window=128 model.attention=mla model.kv_lora_rank=128"; do
    plan model.layers=6 model.hidden=512 model.seq=512 model.vocab=20000 model.$m train.micro_batch=1 >flop.txt
    check "$m: $(flop 'causal half') of the formula, $(flop 'counted op by op') of the ops" awk -v a="$(flop 'causal half')" \
        -v b="$(flop 'counted op by op')" 'BEGIN { exit !(a > 1e7 && a / b < 1.03 && a / b > 0.97) }'
done

# ---- recomputation by layer: what a layer keeps adds up, so a list saves what its layers do; in the tables the three kinds
# are those that the keys give
cat >again.py <<'EOP'
import json
import re

from wants import finish, want


def plan(kind):
    return json.load(open(f"again-{kind}.json"))


def saves(kind):
    return max(r["saves"] for r in plan(kind)["ranks"])


for kind in "none", "selective", "full":
    of, all_of_it = plan(kind)["recompute"][kind], plan(kind)
    want(f"{kind}: saves", of["saves"], saves(kind))
    want(f"{kind}: total", of["total"], all_of_it["largest_total"])
    want(f"{kind}: the same in the others' plans", plan("none")["recompute"][kind] == of, True)
none, some, full = (saves(k) for k in ("none", "selective", "full"))
want("less is kept", none > some > full, True)
want("2 of 6 layers", 6 * (none - saves("full*2,none")), 2 * (none - full))
want("each kind", 6 * (none - saves("none*1,full*2,selective")), 2 * (none - full) + 3 * (none - some))
want("the last goes on", saves("selective*2,full"), saves("selective*2,full*4"))
flop = {k: plan("none")["recompute"][k]["flop"] for k in ("none", "selective", "full")}
want("FLOP of full", flop["full"] > 1.2 * flop["none"] and flop["selective"] < 1.02 * flop["none"], True)
table = re.findall(r"^  (none|selective|full) .* ([\d.]+) %", open("again.txt").read(), re.M)
want("FLOP in the table", len(table), 3)
for kind, more in table:
    want(f"{kind}: FLOP in the table", float(more), round(100 * (flop[kind] / flop["none"] - 1), 1))
finish(17)
EOP
for kind in none selective full full\*2,none none\*1,full\*2,selective selective\*2,full selective\*2,full\*4; do
    plan model.arch=llama model.layers=6 model.hidden=128 train.recompute="$kind" --json >"again-$kind.json"
done
plan model.arch=llama model.layers=6 model.hidden=128 >again.txt
holds "recomputation by layer" python3 again.py

# ---- a checkpoint: what is said of each rank's file is what the file has
sizes() { # PLAN.json RUN: of each rank, 0 where it has none
    local of said rank=0
    for said in $(sed -n 's/.*"checkpoint_shards":\[\([0-9,]*\)\].*/\1/p' "$1" | tr ',' ' '); do
        of=$2/checkpoints/step-00000001/shard-$(printf %05d $rank).safetensors
        [ "$(stat -c %s "$of" 2>/dev/null || echo 0)" -eq "$said" ] || return 1
        rank=$((rank + 1))
    done
    [ $rank -gt 0 ] && [ "$(ls "$2"/checkpoints/step-00000001/shard-* | wc -l)" -le $rank ]
}
export OMP_NUM_THREADS=1
# what a step takes: all of it named, a picture, what would help; none where no device is named
"$mt" plan --config plan.ini --world 4 --device "$root/config/devices/h100.ini" --json --ops --advise --svg step.svg \
    parallel.pp=2 model.layers=4 >plan.json
check "the shares of a predicted step are all of it" python3 - <<'EOP'
import json
p = json.load(open("plan.json"))["predicted"]
b = p["besides_ms"]
assert b["evaluations"] == b["host"] == 0 and b["checkpoints"] is None and p["all_ms"] == p["step_ms"]
assert abs(sum(p["ms"].values()) / p["step_ms"] - 1) < 1e-6 and p["tokens_per_s_gpu"] * 4 / p["tokens_per_s"] == 1
assert 0 < p["mfu"] < 1 and p["bound"] in p["ms"] and p["ms"][p["bound"]] == max(p["ms"].values())
assert sum(o["ms"] for o in p["ops"].values()) < p["step_ms"]
assert all(a["step_ms"] < p["step_ms"] and abs(1 - a["step_ms"] / p["step_ms"] - a["saves"]) < 1e-9 for a in p["advice"])
assert [a["step_ms"] for a in p["advice"]] == sorted(a["step_ms"] for a in p["advice"]) and len(p["advice"]) <= 3
EOP
# a step of many micro-batches is drawn to be read: no wider than a page, letters as large as elsewhere, numbers that fit
# into their bars, the first micro-batch and the last
picture() { # MICROBATCHES RANKS
    "$mt" plan --config plan.ini --world "$2" --device "$root/config/devices/h100.ini" --svg "many-$1.svg" model.layers="$2" \
        parallel.pp="$2" train.micro_batch=1 train.global_batch="$1" >/dev/null 2>err.txt || return
    python3 - "many-$1.svg" "$1" "$2" <<'EOP'
import re, sys, xml.etree.ElementTree as tree
svg, units, ranks = tree.parse(sys.argv[1]).getroot(), int(sys.argv[2]), int(sys.argv[3])
ns = "{http://www.w3.org/2000/svg}"
_, _, width, height = map(float, svg.get("viewBox").split())
assert 600 <= width <= 1130 and height <= 160 + 2 * (30 * ranks + 34), (width, height)
style = "".join(e.text for e in svg.iter(ns + "style"))
assert min(map(float, re.findall(r"font(?:-size)?: *([0-9.]+)px", style))) >= 11
assert not any("font-size" in e.attrib or "transform" in e.attrib for e in svg.iter() if e.tag != ns + "pattern")
bars, numbers, kept = [], [], {}
for e in svg:
    if e.tag == ns + "rect" and re.fullmatch("[fbiw][0-3]", e.get("class") or "") and len(e): bars.append(e)
    elif e.tag == ns + "text" and (e.get("class") or "").startswith("n "):
        numbers.append(e.text)
        assert float(bars[-1].get("width")) > 6 * len(e.text), (e.text, bars[-1].get("width"))
for b in bars:
    x, w = float(b.get("x")), float(b.get("width"))
    assert 64 <= x and x + w <= width, (x, w)
    kept.setdefault(b.get("y"), []).append((x, x + w))
for row in kept.values():
    row.sort()
    assert all(a[1] <= b[0] + 0.02 for a, b in zip(row, row[1:])), row
assert {"0", str(units - 1)} <= set(numbers) and len(numbers) >= 0.5 * len(bars), (len(numbers), len(bars))
EOP
}
for sizes in "8 4" "128 4" "128 8" "512 8"; do
    holds "a picture of ${sizes% *} micro-batches, ${sizes#* } ranks" picture $sizes
done
# every configuration that is shipped has a step, of which nothing is left out
for file in "$root"/config/*.ini; do
    model=$(basename "$file" .ini)
    case $model in
    deepseek-v3) world=2048 ;; llama3-70b | mixtral-8x7b | qwen3-30b-a3b | qwen3-next-80b-a3b | nemotron-3-nano | kimi-linear-48b) world=64 ;; llama3-8b-128k) world=32 ;;
    gpt-oss-20b) world=16 ;; gpt2-124m | llama-1b | llama3-8b) world=8 ;; *) world=1 ;;
    esac
    words=()
    grep -q '^vocab' "$file" || words=(model.vocab=50304)
    [ $model != mixtral-tiny ] || words+=(model.heads=6) # (its heads of 12 are for the CPU: on a GPU a multiple of 8)
    "$mt" plan --config "$file" --world $world --device "$root/config/devices/h100.ini" --json "${words[@]}" \
        >plan.json 2>plan.txt
    check "$model on $world GPUs takes a time: $(tail -1 plan.txt)" python3 - <<'EOP'
import json
p = json.load(open("plan.json"))["predicted"]
assert 0 < p["step_ms"] < 1e6 and 0 < p["mfu"] < 1 and 0 < p["tokens_per_s_gpu"] < 1e7
assert all(ms > 0 for ms in p["ms"].values()) and abs(sum(p["ms"].values()) / p["step_ms"] - 1) < 1e-9
EOP
    [ $model != deepseek-v3 ] || check "$model fits $world GPUs as it is shipped" grep -q '"fits":true' plan.json
done
best=$("$mt" plan --config "$root/config/nemotron-3-nano.ini" --world 64 --device h100 --json 2>/dev/null)
other=$("$mt" plan --config "$root/config/nemotron-3-nano.ini" --world 64 --device h100 --json parallel.tp=1 parallel.pp=4 \
    parallel.ep=16 train.recompute=selective 2>/dev/null)
check "Nemotron 3 Nano: experts of one machine, and scans made once" python3 - "$best" "$other" <<'EOP'
import json, sys
best, other = (json.loads(text) for text in sys.argv[1:])
assert best["fits"] and best["predicted"]["step_ms"] < 0.7 * other["predicted"]["step_ms"]
EOP
check "Nemotron 3 Nano has as many parameters as transformers counts" grep -q " 31,577,937,344 parameters, " \
    <("$mt" plan --config "$root/config/nemotron-3-nano.ini" --world 64 --device h100 2>/dev/null)
expect 2 "is about one layout" "$mt" plan --config plan.ini --world 4 --device "$root/config/devices/h100.ini" --search --ops
sed '$a disk_gb_s = 0.5\nstep_us = 300' "$root/config/devices/h100.ini" >disk.ini
"$mt" plan --config plan.ini --world 4 --device ./disk.ini --json data.valid='b: a c: a' train.eval_every=50 train.eval_samples=32 \
    checkpoint.every=25 >plan.json
check "what a run does besides" python3 - <<'EOP'
import json
plan = json.load(open("plan.json"))
p = plan["predicted"]
b = p["besides_ms"]
want = {"evaluations": 2 * 2 * p["evaluation_batch_ms"] / 50, "checkpoints": 1e3 * plan["checkpoint_bytes"] / 0.5e9 / 25, "host": 0.3}
assert all(abs(b[k] / want[k] - 1) < 1e-5 for k in want) and plan["checkpoint_bytes"] == sum(plan["checkpoint_shards"]), (b, want)
assert abs((p["step_ms"] + sum(b.values())) / p["all_ms"] - 1) < 1e-5
EOP
# states of the optimizer in the host's memory: 12 bytes of a parameter each way over the link, and no more of the device's
sed 's/^host_link_gb_s = .*/host_link_gb_s = 40\nlink_share = 1/' "$root/config/devices/h100.ini" >link.ini
for states in device host; do
    "$mt" plan --config "$root/config/llama3-8b.ini" --world 8 --device ./link.ini --json parallel.tp=1 parallel.zero=1 \
        model.vocab=128256 optim.states=$states >states-$states.json
done
check "states on the host take the link's time, and none of the GPU's memory" python3 - <<'EOP'
import json
was, now = (json.load(open(f"states-{k}.json")) for k in ("device", "host"))
rank = now["ranks"][0]
share = rank["moments"] / 8
assert rank["weights"] == 4 * share and was["ranks"][0]["moments"] == rank["moments"] and share >= now["parameters"] / 8
assert was["ranks"][0]["total"] - rank["total"] == 12 * share and was["memory_on_host"] == now["memory_on_host"] is True
assert now["states_on_host"] and not was["states_on_host"]
took = now["predicted"]["ms"]["optimizer"]
assert abs(took / (1e3 * 12 * share / 40e9) - 1) < 0.01, took
assert abs(now["predicted"]["step_ms"] - was["predicted"]["step_ms"] - (took - was["predicted"]["ms"]["optimizer"])) < 1
EOP
check "the picture is whole" grep -q '^</svg>' step.svg
"$mt" plan --config plan.ini --world 4 --json >plan.json
check "no device, no time" grep -q '"predicted":null' plan.json
for option in "--svg step.svg" "--ops" "--advise" "--ops --json"; do
    expect 2 "is about a predicted step, and none is predicted" "$mt" plan --config plan.ini --world 4 $option
done
for layout in "1" "4 parallel.zero=1" "4 parallel.tp=2" "2 parallel.pp=2 model.layers=4"; do
    ranks=${layout%% *} words=(${layout#"$ranks"} train.stop_at=1)
    "$mt" plan --config plan.ini --world $ranks --json "${words[@]}" >plan.json 2>/dev/null
    rm -rf sized
    "$root/scripts/launch.sh" -n $ranks -- "$mt" --config plan.ini run.dir=sized "${words[@]}" 2>sized.err
    check "$layout: bytes of the shards: $(tail -1 sized.err)" sizes plan.json sized
    bytes=$(cat sized/checkpoints/step-00000001/shard-* | wc -c)
    check "$layout: $bytes in all" grep -q "\"checkpoint_bytes\":$bytes," plan.json
done
# --search: what it says of its best layout is what plan says of it, to the byte
search() { "$mt" plan --search --config plan.ini "$@" >search.json 2>search.err; }
chosen() {
    python3 - <<'EOP'
import json
print(json.load(open("search.json"))["best"][0]["layout"])
EOP
}
same_bytes() {
    python3 - <<'EOP'
import json, sys
s, p = json.load(open("search.json"))["best"][0], json.load(open("chosen.json"))
same_time = all(abs(s[k] / p["predicted"][k] - 1) < 1e-5 for k in ("step_ms", "tokens_per_s_gpu", "mfu"))
same_time &= s["bound"] == p["predicted"]["bound"]
sys.exit(not (s["bytes"] == p["largest_total"] + p["library_bytes"] and same_time and p["fits"]))
EOP
}
for asked in "4" "4 parallel.tp=2" "2 train.recompute=full parallel.pp=2" "8 model.layers=4"; do
    words=(${asked#* }) ranks=${asked%% *}
    [ "$asked" = "$ranks" ] && words=()
    search --world $ranks --device h100 --json "${words[@]}"
    check "search $asked: $(tail -1 search.err)" test -s search.json
    "$mt" plan --config plan.ini --world $ranks --device h100 --json "${words[@]}" $(chosen) >chosen.json 2>search.err
    check "search $asked: bytes and time of the best" same_bytes
done
# Halves of the world, what the run's tokens take and cost, and where a layout stands: by hand
search --max-world 4 --device h100 --json --price 3 train.micro_batch=1 --compare \
    "parallel.tp=2 train.micro_batch=1; parallel.tp=3; parallel.pp=2 parallel.schedule=zb-v"
check "worlds, price and others: $(tail -1 search.err)" test -s search.json
"$mt" plan --config plan.ini --world 4 --device h100 --json parallel.tp=2 parallel.zero=1 train.micro_batch=1 >chosen.json 2>search.err
check "worlds" python3 - <<'EOP'
import json
s = json.load(open("search.json"))
worlds = s["worlds"]
assert [w["world"] for w in worlds] == [4, 2, 1] and worlds[0]["step_ms"] == s["best"][0]["step_ms"]
assert all(a["step_ms"] > 0 and a["layout"] for a in worlds)
EOP
check "tokens and price" python3 - <<'EOP'
import json
s = json.load(open("search.json"))
for r in s["best"] + s["worlds"]:
    seconds = s["tokens"] / (r["tokens_per_s_gpu"] * r["world"])
    assert abs(r["run_s"] / seconds - 1) < 1e-5, (r["run_s"], seconds)
    assert abs(r["cost"] / (seconds / 3600 * r["world"] * 3) - 1) < 1e-5, r["cost"]
EOP
check "others" python3 - <<'EOP'
import json
s, p = json.load(open("search.json")), json.load(open("chosen.json"))
two, three, none = s["compared"]
assert abs(two["step_ms"] / p["predicted"]["step_ms"] - 1) < 1e-5 and two["bytes"] == p["largest_total"] + p["library_bytes"]
assert "slower" in two["reason"] and 1 <= two["faster"] <= s["dry_runs"] and 0 < two["possible"] <= s["legal"]
assert all(o["reason"].startswith("refused: ") and o["step_ms"] is None for o in (three, none))
assert "parallel.tp = '3'" in three["reason"] and "zb-v" in none["reason"], (three["reason"], none["reason"])
EOP
refused() { # exit status, text, words
    search "${@:3}"
    [ $? -eq $1 ] && grep -q "$2" search.err && [ "$(grep -c 'error' search.err)" -eq 1 ]
}
check "memory for nothing" refused 4 "the least that one takes is" --world 4 --device h100 --memory 1MB
check "no layout divides" refused 2 "no layout of this model divides 7 ranks" --world 7 --device h100
check "an unknown device" refused 2 "none that is known" --world 4 --device nosuch
check "no device" refused 2 "none is named" --world 4
check "no ranks" refused 2 "on how many ranks" --device h100
check "too many others" refused 2 "takes up to 8 layouts" --world 4 --device h100 --compare "$(printf "parallel.tp=1;%.0s" {1..9})"
check "a compared word that is no key" refused 2 "'parallel.recompute'" --world 4 --device h100 --compare "parallel.recompute=1"
check "a compared word that is no value" refused 2 "parallel.tp" --world 4 --device h100 --compare "parallel.tp=2; parallel.tp=no"
check "a compared word that is none" refused 2 "tp8" --world 4 --device h100 --compare "tp8"
check "a compared word that is too long" refused 2 "a word of" --world 4 --device h100 --compare "parallel.layout=$(printf 't%.0s' {1..200})"
check "two numbers of ranks" refused 2 "both say how many ranks" --world 4 --max-world 8 --device h100
for option in "--best 5" "--price 0" "--memory 1GB" "--max-world 4" "--compare parallel.tp=2"; do
    expect 2 "is about a search" "$mt" plan --config plan.ini $option
done
search --world 2 --device h100 --json --price 0
check "a price of nothing costs nothing" grep -q '"cost":0,' search.json
search --world 2 --device h100 --json
check "no price, no cost" grep -q '"cost":null' search.json
check "no amount" refused 2 "no amount of memory" --world 4 --device h100 --memory 8x

# Products of 8 bits that a GPU does not have: `plan` says of each device what a run there would say at its start, and a
# search proposes none of it.
eights=(model.hidden=128 model.ffn=256 model.heads=4 model.vocab=512 run.precision=fp8 run.fp8_keep=0)
of() { "$mt" plan --config plan.ini --world 1 --device "$1" "${eights[@]}" "${@:2}" 2>&1 >plan.txt | head -1; }
has() { # recipe, devices...
    local recipe=$1 name
    for name in "$root"/config/devices/*.ini; do
        name=$(basename "$name" .ini)
        if [[ " ${*:2} " == *" $name "* ]]; then [ -z "$(of "$name" run.fp8="$recipe")" ] || echo "$name: no $recipe"
        else [[ $(of "$name" run.fp8="$recipe") == *" has "*products* ]] || echo "$name: has $recipe"; fi
    done >wrong.txt
    [ ! -s wrong.txt ]
}
hopper=(h100 h100-nvl h100-pcie h200) blackwell=(b200 b300 gb200 gb300)
check "GPUs with one factor a tensor" has tensorwise 4090 5090 l40s rtx-pro-6000 "${hopper[@]}" "${blackwell[@]}"
check "GPUs with blocks of 128: $(cat wrong.txt)" has blockwise "${hopper[@]}"
check "GPUs with blocks of 32: $(cat wrong.txt)" has mxfp8 "${blackwell[@]}"
words="mxfp8 has products on compute capability 10.0 and 10.3 alone, not on h100 (9.0)"
check "in one line, which a run says, too" [ "$(of h100 run.fp8=mxfp8)" = "megatrain: error (configuration): $words" ]
check "of what has no fp8" grep -qF "a100 has no products of fp8" <(of a100)
check "a search refuses it" refused 2 "$words" --world 4 --device h100 "${eights[@]}" run.fp8=mxfp8
check "and finds what there is" [ "$(search --world 4 --device b200 --json "${eights[@]}" run.fp8=mxfp8; grep -c '"best":\[{' search.json)" = 1 ]
search --world 4 --device h100 --json "${eights[@]}" --compare "run.fp8=mxfp8"
check "another's recipe, too" grep -qF "refused: $words" search.json
sed '/^capability/d' "$root/config/devices/h100.ini" >any.ini
check "where a file does not say which GPU it is, nothing is refused" [ -z "$(of ./any.ini run.fp8=mxfp8)" ]
finish
