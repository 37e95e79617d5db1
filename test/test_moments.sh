#!/usr/bin/env bash
# optim.moments = bf16: half the bytes of moments in memory and in checkpoints, one run in every layout and after a stop,
# and checkpoints of either kind that a run of the other goes on from.
. "$(dirname "$0")/lib.sh"
make_tiny
run() { "$mt" --config tiny.ini run.dir="$1" train.steps=20 "${@:2}" >/dev/null 2>"$1.err"; }
ranks() { "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini run.dir="$2" train.steps=20 "${@:3}" >/dev/null 2>"$2.err"; }
copy() { rm -rf "$2" && cp -r "$1" "$2"; }
narrow=optim.moments=bf16

run wide
run plain $narrow
check "a run ends: $(grep -m1 error plain.err)" [ "$(losses plain | wc -l)" -eq 20 ]
check "its first loss is that of moments in fp32" [ "$(losses plain | head -1)" = "$(losses wide | head -1)" ]
check "later ones are near, and others" awk -v a="$(losses plain | tail -1 | cut -f2 -d' ')" -v b="$(losses wide | tail -1 | cut -f2 -d' ')" \
    'BEGIN { d = a - b; exit !(a > 0 && b > 0 && d != 0 && d < 0.02 && d > -0.02) }'

# ---- every layout, and a run that was stopped
run half $narrow train.stop_at=9
run half $narrow
check "stopped and resumed: $(grep -m1 error half.err)" same_run half plain 20
while read -r n name words; do
    ranks "$n" "$name" $narrow $words
    check "$name: $(grep -m1 error $name.err)" same_run "$name" plain 20
done <<'EOL'
3 zero parallel.zero=1 train.micro_batch=5 parallel.overlap_param=true
6 cut parallel.tp=2 parallel.zero=1 train.micro_batch=5 checkpoint.async=true
EOL
copy zero moved
rm -rf moved/checkpoints/step-00000020
"$mt" --config tiny.ini run.dir=moved $narrow train.steps=20 >/dev/null 2>moved.err
check "a run on three ranks goes on on one: $(grep -m1 error moved.err)" [ "$(digest moved 20)" = "$(digest plain 20)" ]

# ---- bytes
bytes() { "$mt" plan --config tiny.ini --json "$@" 2>/dev/null | grep -o "\"$figure\":[0-9]*" | head -1 | cut -d: -f2; }
figure=moments
check "plan: $(bytes $narrow) bytes of moments, half of $(bytes)" [ $((2 * $(bytes $narrow))) -eq "$(bytes)" ]
more=$(bytes $narrow)
figure=total
check "and as much less in all" [ $(($(bytes) - $(bytes $narrow))) -eq "$more" ]
size() { du -bc "$1"/checkpoints/step-00000020/shard-* | tail -1 | cut -f1; }
check "a checkpoint: $(size plain) bytes of $(size wide)" awk "BEGIN { r = $(size plain) / $(size wide); exit !(r > 0.66 && r < 0.68) }"
"$mt" inspect plain/checkpoints/step-00000020 >kinds.txt 2>&1
check "inspect says what moments are in" grep -q ' value m (BF16) v (BF16)$' kinds.txt

copy plain damaged
shard=damaged/checkpoints/step-00000020/shard-00000.safetensors
printf Z | dd of=$shard bs=1 seek=$(($(stat -c %s $shard) - 1)) conv=notrunc status=none
"$mt" inspect damaged/checkpoints/step-00000020 >damaged.txt 2>&1
check "a damaged moment is named: $(grep -m1 error damaged.txt)" grep -q "error (checkpoint).*; tensor 'v/[^']*'$" damaged.txt

# ---- either kind goes on from the other's checkpoint, where that is asked for
copy wide refused
expect 4 "optim.moments was 'fp32' and is 'bf16'" "$mt" --config tiny.ini run.dir=refused $narrow train.steps=30
for from in wide plain; do
    to=$([ $from = wide ] && echo bf16 || echo fp32)
    for n in 1 3; do
        copy $from $from-$n
        rm -rf $from-$n/checkpoints/step-00000020
        "$root/scripts/launch.sh" -n $n -- "$mt" --config tiny.ini run.dir=$from-$n --override optim.moments optim.moments=$to \
            train.steps=20 parallel.zero=1 train.micro_batch=5 >/dev/null 2>$from-$n.err
        check "$from goes on in $to on $n: $(grep -m1 error $from-$n.err)" [ "$(losses $from-$n | wc -l)" -eq 20 ]
    done
    check "the same on three ranks: $(digest $from-1 20)" [ "$(digest $from-1 20)" = "$(digest $from-3 20)" ]
    check "and another run than before" [ "$(digest $from-1 20)" != "$(digest $from 20)" ]
done

# ---- moments in the host's memory, and a pipeline rank without a parameter: it saves and goes on like the others
empty=(model.layers=2 parallel.pp=3 'parallel.layout=Ett||L' train.micro_batch=5 train.steps=6 train.eval_every=0 parallel.timeout_s=60)
three() { "$root/scripts/launch.sh" -n 3 -- "$mt" --config tiny.ini run.dir="$1" "${empty[@]}" "${@:2}" >/dev/null 2>"$1.err"; }
three on-host optim.states=host train.stop_at=3
three on-host optim.states=host
three on-device
check "states on the host, saved and gone on with: $(grep -m1 error on-host.err)" same_run on-host on-device 6
# (with moments of 16 bits its files have fewer chunks of checksums than with fp32 ones, which all ranks count alike)
wide=(model.hidden=256 train.stop_at=1 $narrow)
three narrow-on-device "${wide[@]}"
three narrow-on-host optim.states=host "${wide[@]}"
check "the same with moments of 16 bits: $(grep -m1 error narrow-on-host.err)" same_run narrow-on-host narrow-on-device 1
finish
