#!/usr/bin/env bash
# The main job on real text: fetch prose, train a vocabulary, make token files, train a small GPT, evaluate it
# beside xz and bzip2, and show what it writes before and after.
#
#   TEXT=path          your own text file instead of the distribution's packages
#   DEMO_MINUTES=6.5   time for training
#   DEMO_BYTES=n       use only the last n bytes of the text
#   DEMO_DIR=runs/demo where the run is kept
#   DEMO_PRECISION=    fp32 or bf16; by default bf16 where the processor multiplies its numbers, which is faster
set -euo pipefail
export LC_ALL=C # awk prints a decimal point
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build}
minutes=${DEMO_MINUTES:-6.5}
data=data/demo
run=${DEMO_DIR:-runs/demo}
config=config/demo.ini
started=$SECONDS
bold='' plain=''
[ ! -t 1 ] || bold=$'\033[1m' plain=$'\033[0m'
say() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }
mt() { ./megatrain "$@"; }

# Markdown and plain text of a package's documentation, one file after the other, in the order of names.
package_text() {
    local package=$1 dir
    dir=$(mktemp -d)
    (cd "$dir" && chmod 755 . && apt-get download -q "$package" >/dev/null 2>&1) || { rm -rf "$dir"; return 1; }
    dpkg -x "$dir"/*.deb "$dir/x"
    find "$dir/x/usr/share/doc" \( -name '*.md' -o -name '*.md.gz' \) | sort | while read -r f; do
        case $f in *.gz) zcat "$f" ;; *) cat "$f" ;; esac
    done
    rm -rf "$dir"
}

# An earlier demo's run makes room for this one; nothing else does.
check_run() {
    [ -z "$(ls -A "$run" 2>/dev/null)" ] || grep -qsx 'name = demo' "$run/config.ini" || {
        echo "demo: '$run' is there and is no run of the demo: remove it, or give another DEMO_DIR" >&2
        exit 2
    }
}

get_text() {
    mkdir -p "$data"
    if [ -n "${TEXT:-}" ]; then
        [ -r "$TEXT" ] || { echo "demo: cannot read TEXT='$TEXT'" >&2; exit 3; }
        [ "$TEXT" -ef "$data/text.txt" ] || cp "$TEXT" "$data/text.txt"
    elif [ ! -s "$data/anarchism.txt" ]; then
        say "Fetching prose: the Debian package 'anarchism' (an FAQ, 12 MB of English, GPL-2 / FDL)"
        if ! package_text anarchism >"$data/anarchism.tmp" || [ ! -s "$data/anarchism.tmp" ]; then
            rm -f "$data/anarchism.tmp"
            echo "demo: no package source in reach. Give a text of your own, at least 300 kB:" >&2
            echo "demo:   make demo TEXT=path/to/book.txt" >&2
            exit 3
        fi
        mv "$data/anarchism.tmp" "$data/anarchism.txt"
    fi
    [ -n "${TEXT:-}" ] || cp "$data/anarchism.txt" "$data/text.txt"
    if [ -n "${DEMO_BYTES:-}" ]; then
        tail -c "$DEMO_BYTES" "$data/text.txt" >"$data/text.tmp"
        mv "$data/text.tmp" "$data/text.txt"
    fi
}

check_run
get_text
size=$(stat -c %s "$data/text.txt")
valid=$((size / 10)); [ $valid -gt 500000 ] && valid=500000
vocab=4096; [ "$size" -lt 4000000 ] && vocab=1024

say "Splitting"
"$BUILD/split_text" "$data/text.txt" "$data/train.txt" "$data/valid.txt" $valid

say "Vocabulary of $vocab and token files"
mt tokenizer train --input "$data/train.txt" --vocab-size $vocab --output "$data/tokenizer.json" --force
for part in train valid; do
    mt preprocess --force --input "$data/$part.txt" --tokenizer "$data/tokenizer.json" --output "$data/$part" --append-eod
done

# Only VDPBF16PS makes 16 bits faster than 32 on a CPU; there the same minutes are enough for more steps.
why="of DEMO_PRECISION" precision=${DEMO_PRECISION:-}
if [ -z "$precision" ]; then
    precision=fp32 why="this processor has no instruction for products of bf16 numbers"
    if grep -q '^bf16 dots *\(amx, \)\?vdpbf16, fma' <<<"$(mt doctor)"; then
        precision=bf16 why="this processor multiplies bf16 numbers faster than fp32, by VDPBF16PS"
    fi
fi

rm -rf "$run"
common=("run.dir=$run" "run.precision=$precision")
say "Training in $precision: $why"
say "Ten steps, to see how fast this machine is"
mt --config $config "${common[@]}" train.stop_at=10
ms=$(sed -n 's/.*"step_ms": *\([0-9]*\).*/\1/p' "$run/metrics.jsonl" | sort -n | sed -n 5p)
steps=$(awk -v m="$minutes" -v ms="$ms" 'BEGIN { n = int(m * 60000 / ms); print n < 40 ? 40 : n }')
prompt="The most important thing about freedom is"
before=$(mt generate --run "$run" --prompt "$prompt" --tokens 60 --temperature 0.8 --top-k 40 --seed 1)

say "Training: $steps steps of about $ms ms"
mt --config $config "${common[@]}" train.steps="$steps" log.every=$((steps / 20 + 1))

say "Validation: $(stat -c %s "$data/valid.txt") bytes of text that training has not seen"
report=$(mt eval --config $config "${common[@]}" train.steps="$steps" train.eval_samples=0)
bpb=$(sed -n 's/^bits_per_byte //p' <<<"$report")
packed() { "$@" <"$data/valid.txt" | wc -c | awk -v n="$(stat -c %s "$data/valid.txt")" '{ printf "%.3f", 8 * $1 / n }'; }
printf '  %-28s %s bits per byte\n' "this model" "$bpb" "xz -9e" "$(packed xz -9e -c)" "bzip2 -9" "$(packed bzip2 -9 -c)"

say "Before (10 steps)"
echo "$before"
say "After ($steps steps)"
mt generate --run "$run" --prompt "$prompt" --tokens 120 --temperature 0.8 --top-k 40 --seed 1
say "Done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s. The curve: $run/loss.svg"
echo "   To Hugging Face: ./megatrain convert --from $run --to demo-hf --format hf (gguf: to llama.cpp)"
