#!/usr/bin/env bash
# Runs with any faults, one after the other, until the run is through: it must have the tensors (values, m, v), losses
# and norms of the run that nobody disturbed. Every start has another layout, on 1 to 8 ranks; every start but the last
# has a fault: ranks killed, stopped, told to end, all stopped for a while, the clock set, the disk full; and between
# starts files of the newest checkpoint are flipped, cut, lost or taken from another step.
#
#   test/soak/faults.sh                          20 faults and more: campaigns until there were so many (FAULTS=20)
#   SEED=7 test/soak/faults.sh                   others
#   SEED=7 CAMPAIGN=12 test/soak/faults.sh       that one alone again
#
# All is drawn from SEED and the campaign's number. Faults are placed by what a rank is at (src/base/fault.h), not by a
# clock, so a campaign repeats. What failed is kept in BUILD/soak.
. "$(dirname "$0")/../lib.sh"
seed=${SEED:-1} wanted=${FAULTS:-20} only=${CAMPAIGN:-}
keep=$root/${BUILD:-build}/soak
launch=$root/scripts/launch.sh
export OMP_NUM_THREADS=1
steps=24
eight='[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]' # digits of a checkpoint's name: what is being written has more
make_tiny
make_ini gpt2.ini model.layers=4 model.hidden=32 model.heads=4 model.seq=32 model.dropout=0.1 model.attention_dropout=0.1 \
    parallel.seq_blocks=8 parallel.attn_block=4 train.global_batch=8 train.steps=$steps train.eval_every=5 \
    optim.lr=3e-3 checkpoint.keep=0
sed -i 's/^every=.*/every=3/' gpt2.ini
cp gpt2.ini moe.ini
printf '%s\n' '[moe]' 'experts = 4' 'topk = 2' 'ffn = 24' 'balance = aux' 'aux_coeff = 0.1' >>moe.ini

# ranks and words of each layout
gpt2_layouts=('1' '2 tp=2' '2 zero=1' '2 pp=2' '2 cp=2' '3 pp=3 layout=Et|tt|tL' '4 pp=2 tp=2 schedule=zb-h1' '4 pp=4'
    '4 tp=2 zero=1 overlap_grad=true overlap_param=true' '4 cp=4 cp_comm=ring' '4 tp=4' '8 tp=2 pp=2 zero=1'
    '8 tp=2 cp=2 zero=1' '8 pp=4 zero=1')
moe_layouts=('1' '2 ep=2' '2 tp=2' '2 pp=2' '4 ep=4' '4 ep=2 zero=1' '4 ep=2 pp=2 schedule=zb-h1' '4 tp=2 zero=1'
    '8 ep=2 pp=2 zero=1' '8 ep=4 pp=2')

# ---- drawing ----

draw() { drawn=$((RANDOM % $1)); } # 0 to $1 - 1 (in the shell itself: a copy of it would draw the same again)
pick() { draw $#; shift $drawn; picked=$1; }

draw_layout() { # count, words
    local -n layouts=${model}_layouts
    local w
    pick "${layouts[@]}"
    read -r count picked <<<"$picked"
    words=()
    for w in $picked; do words+=("parallel.$w"); done
    pick false true
    words+=("checkpoint.async=$picked")
}
draw_place() { # place, as RANK:POINT:CALL
    local point
    pick 'met 1' 'load 1' step step step forward backward reduce norm update 'save 1' 'save 2' 'evaluate 1'
    read -r point place <<<"$picked"
    [ -n "$place" ] || { draw 6; place=$((drawn + 1)); }
    draw "$count"
    place=$drawn:$point:$place
}

# ---- a start ----

faketime=$(compgen -G '/usr/lib*/*/faketime/libfaketimeMT.so.1' || compgen -G '/usr/lib*/faketime/libfaketimeMT.so.1')
faketime=${faketime%%$'\n'*}
[ -n "$faketime" ] || skip "a clock that is set: no libfaketime (make deps-dev)"
mkfifo never
exec {never}<>never
pause() { read -rt "$1" -u $never; } # without a process
cat >rank.sh <<EOI
#!/bin/bash
echo \$\$ >"$work/pid.\$RANK"
[ ! -e "$work/clock" ] || export LD_PRELOAD=$faketime FAKETIME_TIMESTAMP_FILE=$work/clock FAKETIME_NO_CACHE=1 \
    FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_FORCE_MONOTONIC_FIX=0 # (the fix lets waits end at once)
exec "$mt" "\$@"
EOI
chmod +x rank.sh

begin() { # FAULT WORDS...: launcher
    rm -f pid.*
    injected=
    env ${1:+"MEGATRAIN_RANK_FAULT=$1"} timeout 150 "$launch" -n "$count" -- "$work/rank.sh" \
        --config "$work/$model.ini" run.dir="$dir" "${words[@]}" "${@:2}" >/dev/null 2>run.err &
    launcher=$!
}
finish_start() { # code; 124: no end in 150 s
    wait $launcher
    code=$?
    rm -f clock
    [ -z "$injected" ] && ! grep -q '^fault: ' run.err || faults=$((faults + 1))
}
pid_of() { cat "pid.$1" 2>/dev/null; }
# Waits for the rank that a fault stops: then is the time to do something. false: the run ended before it came there.
stopped_at() { # RANK
    while kill -0 $launcher 2>/dev/null; do
        stands_still "$(pid_of "$1")" && return
        pause 0.01
    done
    return 1
}
to_ranks() { kill -"$1" $(cat pid.*) 2>/dev/null; }

# ---- faults: each starts the run and leaves in `allowed` how it may end ----

patient=(parallel.freeze_s=600 parallel.stall_s=600) # nobody is judged while the script does something
fault_kill() {
    allowed=$([ $count -eq 1 ] && echo '0|137' || echo '0|7')
    begin "$place:kill" "${patient[@]}"
}
fault_stop() { # (a rank alone has nobody to watch it)
    [ $count -gt 1 ] || { fault_kill; return; }
    allowed='0|7'
    begin "$place:stop" parallel.freeze_s=1
}
fault_two() { # and a second one is killed with it
    local other
    [ $count -gt 1 ] || { fault_kill; return; }
    draw $((count - 1))
    other=$(((${place%%:*} + 1 + drawn) % count)) allowed='0|7|137'
    begin "$place:stop" "${patient[@]}"
    stopped_at "${place%%:*}" && kill -KILL "$(pid_of "$other")" "$(pid_of "${place%%:*}")" 2>/dev/null
}
signal_there() { # SIGNAL
    begin "$place:stop" "${patient[@]}"
    stopped_at "${place%%:*}" || return
    kill -"$1" "$(pid_of "${place%%:*}")"
    kill -CONT "$(pid_of "${place%%:*}")"
}
fault_end() { # asked to end
    pick TERM INT USR1
    allowed='0|75'
    signal_there "$picked"
}
fault_signal() { # ended
    pick HUP QUIT SEGV ABRT
    allowed=$([ $count -eq 1 ] && echo '0|75|1[0-9][0-9]' || echo '0|7|75')
    signal_there "$picked"
}
fault_doze() { # all stand still for longer than one alone may, some steps on (one that is stopped first would be judged)
    local have
    have=$(losses "$dir" 2>/dev/null | wc -l) allowed=0
    begin '' parallel.freeze_s=3 "train.stop_at=$soon"
    while [ "$(losses "$dir" 2>/dev/null | wc -l)" -lt $((have + 2)) ]; do
        kill -0 $launcher 2>/dev/null || return
        pause 0.01
    done
    to_ranks STOP
    pause 4
    to_ranks CONT
    injected=1
}
fault_clock() { # set on by an hour, or back
    [ -n "$faketime" ] || { fault_doze; return; }
    pick +3600 -7200
    allowed=0
    echo +0 >clock
    begin "$place:stop" "${patient[@]}" "train.stop_at=$soon"
    stopped_at "${place%%:*}" || return
    echo "$picked" >clock
    kill -CONT "$(pid_of "${place%%:*}")"
}
fault_disk() { # full, but for what one file or two take
    [ -n "$disk" ] || { fault_end; return; }
    draw 300
    allowed='0|5|75'
    dd if=/dev/zero of="$disk/ballast" bs=1024 count=$(($(df -k --output=avail "$disk" | tail -1) - drawn)) 2>/dev/null
    begin '' "${patient[@]}"
    wait $launcher
    rm "$disk/ballast"
    injected=1
}
mkdir disk
disk=$work/disk
if mount -t tmpfs -o size=24m soak disk 2>/dev/null; then trap 'umount "$disk"; rm -rf "$work"' EXIT
else disk=; skip "a full disk: nothing may be mounted here"; fi

# ---- files ----

# Of the newest checkpoint, if another one is there to go on from.
damage() {
    local all file other size
    all=("$dir"/checkpoints/step-$eight)
    [ ${#all[@]} -ge 2 ] && [ -e "${all[-1]}/manifest.json" ] || return
    file=("${all[-1]}"/*)
    pick "${file[@]}"
    file=$picked size=$(stat -c %s "$picked")
    draw $((size))
    pick flip cut lose swap
    case $picked in
    flip) draw $((size < 32768 ? size : 32768)); flip "$file" $((drawn * ((size + 32767) / 32768) % size)) ;;
    cut) draw 32768; truncate -s $((size * drawn / 32768)) "$file" ;;
    lose) rm "$file" ;;
    swap)
        other=${all[-2]}/$(basename "$file")
        [ -e "$other" ] && ! cmp -s "$other" "$file" && cp "$other" "$file" || rm "$file" ;;
    esac
    damages=$((damages + 1)) what+="; $picked $(basename "$file") of ${all[-1]##*/}"
    expect 4 '' "$mt" inspect "${all[-1]}"
}
flip() { # FILE OFFSET
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    # shellcheck disable=SC2059
    printf "\\x$(printf %x $((byte ^ 16)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

# ---- a campaign ----

start() { # with a fault
    draw_layout
    draw_place
    pick ${ONLY:-kill kill kill stop two end end signal signal doze clock disk}
    fault=$picked soon=$(($(newest_step) + 6))
    [ $soon -lt $steps ] || soon=$steps
    what="campaign $campaign, start $((++starts)): $fault at $place, $count ranks, ${words[*]}"
    fault_$fault
    finish_start
    said=$(grep -E "$line|^launch:" run.err | head -3) lines=$(grep -cE "$line" run.err)
    check "$what: exit $code, want $allowed: $said" grep -qE "^($allowed)$" <<<"$code"
    if [ $fault = two ] && [ $code -ne 0 ]; then # a surviving rank says it; where none is left, the launcher
        check "$what: exit $code and no line" [ -n "$said" ]
        [ $count -le 2 ] || check "$what: no error line: $said" [ "$lines" -ge 1 ]
    elif [ $count -gt 1 ]; then
        check "$what: $lines error lines: $said" [ "$lines" -eq $((code != 0)) ]
    fi
    [ -z "${VERBOSE:-}" ] || echo "$what: exit $code"
}
line='^megatrain: (error|stopped|interrupted)'

through() { [ -e "$dir/checkpoints/step-$(printf %08d $steps)/manifest.json" ]; }
newest_step() {
    local all=("$dir"/checkpoints/step-$eight)
    [ -e "${all[-1]}" ] && echo $((10#${all[-1]##*-})) || echo 0
}

campaign() {
    local failed_before=$failed
    RANDOM=$((seed * 1000 + campaign))
    starts=0 dir=${disk:-$work}/run code=1
    pick gpt2 moe
    model=$picked
    while ! through && [ $starts -lt 12 ]; do
        start
        draw 3
        through || [ $drawn -gt 0 ] || damage
    done
    draw_layout
    fault=none what="campaign $campaign, the last start on $count ranks, ${words[*]}"
    begin ''
    finish_start
    check "$what: exit $code, $(grep -m1 error run.err)" [ $code -eq 0 ]
    check "$what: tensors or losses of another run" same_run "$dir" undisturbed-$model $steps
    [ $failed -eq "$failed_before" ] || keep_failed
    rm -rf "$dir"
}
keep_failed() {
    local to=$keep/$seed-$campaign
    rm -rf "$to"
    mkdir -p "$to"
    cp -a "$dir" run.err "$to"
    echo "    again: SEED=$seed CAMPAIGN=$campaign test/soak/faults.sh; its folder: $to"
}

for model in gpt2 moe; do
    "$mt" --config $model.ini run.dir=undisturbed-$model >/dev/null 2>run.err
    check "$model undisturbed: $(grep -m1 error run.err)" same_run undisturbed-$model undisturbed-$model $steps
done
faults=0 damages=0 campaigns=0
echo "    seed $seed"
[ $failed -eq 0 ] || finish
for ((campaign = ${only:-1}; faults < wanted && failed < 10; campaign++)); do
    campaign
    campaigns=$((campaigns + 1))
    [ -z "$only" ] || break
done
echo "    seed $seed: $faults faults and $damages damaged files in $campaigns campaigns"
finish
