#!/usr/bin/env bash
# debug.dump: a second implementation casts the operands of products of 8 bits, and has the same codes and factors; the
# product that it makes of them in float64 is the one that was written, up to the rounding of the result.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
make_tiny
base=(model.arch=llama model.layers=3 model.hidden=128 model.heads=4 model.ffn=128 model.seq=32 train.steps=3 train.stop_at=1
    train.global_batch=4 run.precision=fp8 debug.dump=layers.1.mlp.fc2.weight)
for recipe in tensorwise blockwise mxfp8 nvfp4; do
    make_ini $recipe.ini "${base[@]}" run.fp8=$recipe
    "$mt" --config $recipe.ini run.dir=$recipe >/dev/null 2>$recipe.err || bad "$recipe: $(grep -m1 error $recipe.err)"
    why=$(/usr/bin/python3 "$root/test/tools/dump_check.py" $recipe $recipe/dump-0.safetensors 2>&1)
    check "$recipe: $(tail -1 <<<"$why")" [ "$why" = "ok" ]
done
cp -r tensorwise spoilt
printf '\x11' | dd of=spoilt/dump-0.safetensors bs=1 seek=$(($(stat -c %s spoilt/dump-0.safetensors) / 2)) conv=notrunc 2>/dev/null
check "one other byte is found" [ "$(/usr/bin/python3 "$root/test/tools/dump_check.py" tensorwise spoilt/dump-0.safetensors 2>&1)" != ok ]
"$root/scripts/launch.sh" -n 2 -- "$mt" --config tensorwise.ini run.dir=two parallel.pp=2 >/dev/null 2>two.err
check "of two stages one has it: $(ls two | xargs) $(grep -m1 error two.err)" [ "$(cd two && echo dump-*)" = dump-0.safetensors ]
expect 0 "no product of 8 bits is by 'layers.9.x'" "$mt" --config tensorwise.ini run.dir=none debug.dump=layers.9.x
check "and nothing is written" [ ! -e none/dump-0.safetensors ]
expect 2 "only the CPU's products with precision = fp8 are written" "$mt" --config tensorwise.ini run.precision=bf16 run.fp8=tensorwise run.dir=no
finish
