#!/usr/bin/env bash
# The recipe for a schedule in docs/adding.md, word for word: put into a copy of the source it compiles without a warning,
# is drawn and ranked, refuses the shapes that it says, and trains to the bits of one rank. (All recipes: make toys.)
. "$(dirname "$0")/lib.sh"
build=${BUILD:-build}

# The copy has the objects too, so that only what the recipe touches is compiled.
mkdir -p "tree/$build"
cp -a "$root/Makefile" "$root/main.c" "$root/src" "$root/test" tree
[ ! -d "$root/$build/src" ] || cp -a "$root/$build/src" "tree/$build"
check "the recipe finds its places" "$root/scripts/toys.py" --into tree "A schedule"
make -s -C tree -j"$(nproc)" CUDA=0 BUILD="$build" EXTRA_CFLAGS=-Werror megatrain >make.log 2>&1
check "it compiles: $(grep -m3 -E 'error|warning' make.log)" [ -x tree/megatrain ]
mt=$work/tree/megatrain

expect 0 "gpipe-pairs" "$mt" simulate --schedule gpipe-pairs --stages 4 --microbatches 8
expect 0 "gpipe-pairs" "$mt" simulate --compare --stages 4 --microbatches 8
expect 2 "an even number of micro-batches" "$mt" simulate --schedule gpipe-pairs --stages 4 --microbatches 7

make_tiny
make_ini pairs.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=32 train.global_batch=16 train.steps=4
"$mt" --config pairs.ini run.dir=one >/dev/null 2>&1
OMP_NUM_THREADS=1 "$root/scripts/launch.sh" -n 2 -- "$mt" --config pairs.ini run.dir=two parallel.pp=2 \
    parallel.schedule=gpipe-pairs >/dev/null 2>two.err
check "two ranks train as one: $(grep -m1 error two.err)" same_run two one 4
finish
