#!/usr/bin/env bash
# Mixtures of experts from outside: config/mixtral-tiny.ini trains; a run that was stopped and resumed, recomputed, cut
# over data-parallel and pipeline ranks gives the bits of the run that was not; evaluation, generation, inspection; plan's
# parameters and FLOP against a count by hand; what is refused, with which words.
. "$(dirname "$0")/lib.sh"
make_tiny
mkdir -p data
for i in bin idx; do cp a.$i data/tiny.$i; done
cp a.crc data/tiny.crc 2>/dev/null
ini=$root/config/mixtral-tiny.ini
small=(model.layers=2 model.hidden=32 model.seq=32 model.ffn=64 moe.ffn=24 moe.shared_ffn=16 model.dropout=0.1
    train.steps=6 optim.warmup=2 train.eval_every=0 checkpoint.every=3 train.global_batch=8)
run() { "$mt" --config "$ini" run.dir="$1" "${small[@]}" "${@:2}" >/dev/null 2>"$1.err"; }

"$mt" --config "$ini" run.dir=first train.steps=2 optim.warmup=1 train.eval_every=0 >/dev/null 2>first.err
check "the configuration of the repository trains: $(tail -1 first.err)" [ "$(losses first | wc -l)" -eq 2 ]

run whole
check "the whole run ends: $(tail -1 whole.err)" [ "$(losses whole | wc -l)" -eq 6 ]
run half train.stop_at=3
run half
check "3 + 3 losses are the 6" same_losses half whole
check "3 + 3 tensors are the 6's" same_tensors half whole 6
ranks() { # DIR WORDS..., on $count ranks
    "$root/scripts/launch.sh" -n "$count" -- "$mt" --config "$ini" run.dir="$1" "${small[@]}" "${@:2}" >/dev/null 2>"$1.err"
}
count=2

# Experts on several ranks: begun with one ep, gone on with another, on other ranks, and by one rank
ranks spread parallel.ep=2 parallel.zero=1 train.micro_batch=2 train.stop_at=3
check "two ranks with four experts each: $(tail -1 spread.err)" [ "$(losses spread | wc -l)" -eq 3 ]
cp -r spread back
run back
check "their checkpoint resumes on one rank" same_run back whole 6
count=4
ranks spread parallel.ep=4 parallel.tp=2 train.micro_batch=2
check "and on four with two experts each, tp 2: $(tail -1 spread.err)" same_run spread whole 6
ranks inside parallel.ep=2 parallel.etp=2 parallel.zero=1 train.micro_batch=2 train.stop_at=3
cp -r inside within
run within
check "four ranks with halves of four experts each, gone on with by one: $(tail -1 inside.err)" same_run within whole 6
ranks node parallel.ep=4 parallel.zero=1 train.micro_batch=2 moe.dispatcher=node debug.ranks_per_host=2 debug.comm_check=true
check "four ranks on two hosts, rows from host to host: $(tail -1 node.err)" same_run node whole 6
ranks one_host parallel.ep=4 parallel.zero=1 train.micro_batch=2 moe.dispatcher=node
check "and on the one that there is: $(tail -1 one_host.err)" same_run one_host whole 6
check "plan says what crosses the network: $("$mt" plan --config "$ini" "${small[@]}" --world 4 parallel.ep=4 train.micro_batch=2 \
    moe.dispatcher=node debug.ranks_per_host=2 2>&1 | grep '^hosts')" grep -qE '^hosts   2 for each 4 ranks .* goes to 1\.57 of them .*at most to 2; ' \
    <("$mt" plan --config "$ini" "${small[@]}" --world 4 parallel.ep=4 train.micro_batch=2 moe.dispatcher=node debug.ranks_per_host=2 2>&1)
expect 2 "hosts have unequal parts of a group of ep x etp = 4 x 1 ranks" "$mt" plan --config "$ini" "${small[@]}" --world 4 \
    parallel.ep=4 train.micro_batch=2 moe.dispatcher=node debug.ranks_per_host=3
ranks inside parallel.tp=2 parallel.etp=4 train.micro_batch=2
check "and by four with quarters of all" same_run inside whole 6
"$root/scripts/launch.sh" -n 2 -- "$mt" eval --config "$ini" run.dir=whole "${small[@]}" parallel.ep=2 >eval2.txt 2>&1
"$mt" eval --config "$ini" run.dir=whole "${small[@]}" >eval1.txt 2>&1
check "evaluated on two ranks: $(tail -1 eval2.txt)" \
    [ "$(grep -oE 'loss [0-9.]+' eval1.txt)" = "$(grep -oE 'loss [0-9.]+' eval2.txt)" ]

expect 0 "loss" "$mt" eval --config "$ini" run.dir=whole "${small[@]}"
"$mt" generate --run whole --prompt 'Line 1 of a ' --tokens 8 >text.out 2>/dev/null
check "generation" [ -s text.out ]
"$mt" inspect whole/checkpoints/step-00000006 >inspect.txt 2>&1
for shape in 'router.weight *F32 \[8, 32\]' 'experts.fc1.weight *F32 \[384, 32\]' 'experts.fc2.weight *F32 \[256, 24\]' \
    'shared.fc1.weight *F32 \[32, 32\]' 'shared.fc2.weight *F32 \[32, 16\]'; do
    check "inspect shows $shape" grep -q "layers.1.mlp.$shape" inspect.txt
done

# By hand, D 32, 8 heads of 4 and 2 of keys, E 8 of ffn 24, k 2, shared 16, 257 words: a layer has norms 2 D, qkv
# (8 + 4) 4 D, proj 8 4 D, router E D, experts 3 E 24 D, shared 3 16 D; the model 2 layers, two tables and a norm
layer=$((2 * 32 + 12 * 4 * 32 + 32 * 32 + 8 * 32 + 3 * 8 * 24 * 32 + 3 * 16 * 32))
all=$((2 * layer + 2 * 257 * 32 + 32))
active=$((all - 2 * (8 - 2) * 3 * 24 * 32))
"$mt" plan --config "$ini" "${small[@]}" >plan.txt 2>&1
commas() { sed -e ':a' -e 's/\B[0-9]\{3\}\>/,&/' -e 'ta' <<<"$1"; }
check "plan's parameters: $(grep parameters plan.txt | head -1)" \
    grep -qF "$(commas $all) parameters, $(commas $active) of them active for a token" plan.txt
check "plan's experts" grep -qF "8 experts, 2 a token, of ffn 24 in 2 of 2 layers; shared expert of ffn 16" plan.txt
flop=$((6 * (active - 257 * 32) + 12 * 2 * 8 * 4 * 32)) # a token: 6 N + 12 L C T, N without the table of the input
check "plan's FLOP of a token: $(grep '6 N' plan.txt)" grep -q "6 N + 12 L C T.* $(((flop + 500) / 1000))k " plan.txt

# With a latent of 12 experts have matrices of 12 columns instead of 32, and a layer two more of 12 x 32.
latent=12
all=$((all - 2 * (3 * 8 * 24 * (32 - latent) - 2 * 32 * latent)))
active=$((all - 2 * (8 - 2) * 3 * 24 * latent))
"$mt" plan --config "$ini" "${small[@]}" moe.latent=$latent >plan.txt 2>&1
check "plan's parameters with a latent: $(grep parameters plan.txt | head -1)" \
    grep -qF "$(commas $all) parameters, $(commas $active) of them active for a token" plan.txt
check "plan's latent" grep -qF "of ffn 24 in 2 of 2 layers, between latents of 12; shared expert" plan.txt
flop=$((6 * (active - 257 * 32) + 12 * 2 * 8 * 4 * 32))
check "plan's FLOP with a latent: $(grep '6 N' plan.txt)" grep -q "6 N + 12 L C T.* $(((flop + 500) / 1000))k " plan.txt

# Rows to experts and back, forward and backward, of 2 blocks and 2 micro-batches of N 64, k 3, on 2 ranks with 4 experts
# each. On the average half of N k rows go to the other rank;
# at most all go there, and 2 N min(4, k) come back. They have D numbers, or those of a latent. (A head on a GPU has a width that is a multiple of 8.)
rows=$((64 * 3 / 2))
for device in cpu cuda cuda-latent; do
    width=32 latent=0
    [ $device = cuda-latent ] && width=8 latent=8
    "$mt" plan --config "$ini" --world 2 "${small[@]}" parallel.ep=2 train.micro_batch=2 moe.topk=3 model.heads=4 \
        run.precision=fp32 run.device=${device%-*} moe.latent=$latent >plan-$device.txt 2>&1
    check "plan's rows to experts, $device: $(grep all-to-all plan-$device.txt)" \
        grep -qE "ep all-to-all +16 +$(commas $((16 * rows * width * 4))) +if experts get equally many rows; at most $(commas $((48 * rows * width * 4)))$" plan-$device.txt
done

refuse() { # TEXT WORDS...
    expect 2 "$1" "$mt" --config "$ini" run.dir=refused "${@:2}"
    check "nothing is left of a refused run" [ ! -e refused ]
}
refuse "sinkhorn balances by itself, without a loss" moe.balance=sinkhorn
refuse "forced balance has no loss" moe.balance=forced
refuse "more experts than there are: at most 8" moe.topk=9
refuse "ep must divide experts" parallel.ep=3
refuse "give moe.experts; take parallel.ep=1" moe.experts=0 parallel.ep=2
refuse "beside experts tp needs sp" parallel.tp=2 parallel.sp=false
refuse "give moe.experts; take parallel.etp=1" moe.experts=0 parallel.etp=2
refuse "etp must divide the width of an expert" parallel.etp=3
refuse "etp must divide tp_blocks" parallel.etp=2 parallel.tp_blocks=1
refuse "take parallel.order=tp-cp-ep-dp-pp" parallel.pp=2 parallel.ep=2 parallel.order=tp-cp-ep-pp-dp
refuse "tp must divide micro_batch x seq_blocks, here 1 x 4" parallel.tp=8 train.micro_batch=1 parallel.seq_blocks=4
refuse "groups must divide experts; take moe.groups=2, or moe.groups=4" moe.groups=3
refuse "the list is about 3 blocks, the model has 4" moe.every=0,1*2
refuse "only a mixture has it: give moe.experts" moe.experts=0
run whole moe.topk=1
check "another topk is another run (got $?)" grep -qF "moe.topk was '2' and is '1'" whole.err

# Experts of limited capacity: some choices are dropped, the same on all ranks, and counted; memory is that of the capacity
dropped() { grep -o '"expert_dropped":[^]]*' "$1/metrics.jsonl"; }
full=(moe.capacity=1 train.micro_batch=4)
run limited "${full[@]}"
check "of 4 experts' rows for 2 layers some are dropped in each step: $(tail -1 limited.err)" \
    [ "$(dropped limited | grep -cE '\[[1-9][0-9]*,[1-9][0-9]*$')" -eq 6 ]
check "without a capacity nothing is said of it" [ -z "$(dropped whole)" ]
run wide moe.capacity=8
check "with room for all rows none is dropped" [ "$(dropped wide | sort -u)" = '"expert_dropped":[0,0' ]
check "and the run is that without a capacity" same_losses wide whole
count=4
ranks limited4 "${full[@]}" parallel.tp=2 parallel.ep=4 train.micro_batch=2 parallel.zero=1
check "ranks drop the same: $(tail -1 limited4.err)" same_run limited4 limited 6
check "and count it" [ "$(dropped limited4)" = "$(dropped limited)" ]
# By hand: 4 samples of 32 rows, 2 choices each: 256 rows, or 8 experts x 4 samples x ceil(0.5 x 32 x 2 / 8) = 128; of a row
# are kept 32 inputs, 2 x 24 before and 24 behind the activation, 32 outputs, in fp32, and the choice's number
saves() { "$mt" plan --config "$ini" "${small[@]}" train.micro_batch=4 "$@" 2>&1 | awk '/saves between/ { gsub(",", ""); print $6 }'; }
less=$(($(saves) - $(saves moe.capacity=0.5)))
check "a capacity takes the memory of its rows alone: $less bytes less" \
    [ $less -eq $((2 * 128 * (4 * (32 + 48 + 24 + 32) + 4))) ]

# A rank's experts have room for all rows that can come, or for so many times an even share: 2 samples of 32 rows, 2 choices
check "plan says for how many: $("$mt" plan --config "$ini" "${small[@]}" parallel.ep=2 --world 2 2>&1 | grep '^experts')" \
    grep -qF 'with room for 192 rows of a layer and micro-batch; even is 128, the most that can come 256' \
    <("$mt" plan --config "$ini" "${small[@]}" train.micro_batch=2 parallel.ep=2 moe.slack=1.5 --world 2 2>&1)
check "or of what a schedule passes on at once" \
    grep -qF 'with room for 96 rows of a layer and part of a micro-batch; even is 64, the most that can come 128' \
    <("$mt" plan --config "$ini" "${small[@]}" train.micro_batch=2 parallel.ep=2 moe.slack=1.5 --world 4 parallel.pp=2 \
        parallel.schedule=chimera-bhalf 2>&1)
count=2
ranks roomy parallel.ep=2 train.micro_batch=2 moe.slack=1.9
check "room that suffices changes nothing: $(tail -1 roomy.err)" same_run roomy whole 6
ranks tight parallel.ep=2 train.micro_batch=2 moe.slack=1
status=$?
check "without room the run ends with 9, got $status: $(tail -1 tight.err)" [ $status -eq 9 ]
check "and says so" grep -qF "step 1: a rank's experts got more rows than moe.slack=1 has room for" tight.err
ranks redone parallel.ep=2 train.micro_batch=2 moe.slack=1 moe.overflow=redo
check "or does the step again in pieces: $(tail -1 redone.err)" same_run redone whole 6
check "which is said" grep -qF "step 1: a rank's experts got more rows than moe.slack=1 has room for, done again in pieces" redone.err
check "and in how many" grep -qF "the most that can come 256; beyond it in 2 pieces" \
    <("$mt" plan --config "$ini" "${small[@]}" train.micro_batch=2 parallel.ep=2 moe.slack=1 moe.overflow=redo --world 2 2>&1)
expect 2 "raise parallel.seq_blocks, train.micro_batch or moe.slack" "$mt" plan --config "$ini" "${small[@]}" --world 2 \
    parallel.ep=2 train.micro_batch=1 parallel.seq_blocks=1 moe.slack=1 moe.overflow=redo
# what GPUs have room for where nothing is said is never what a start is refused for
plan_on_gpus() { # SCHEDULE: what is said of slack
    "$mt" plan --config "$ini" "${small[@]}" run.device=cuda --world 16 parallel.pp=2 parallel.ep=8 moe.experts=8 \
        train.micro_batch=2 train.global_batch=64 run.reproducible=run optim.clip=0 model.tied=false parallel.schedule="$1" 2>&1 | grep -c "slack"
}
for schedule in $("$mt" simulate --schedule none --stages 2 --microbatches 4 2>&1 | sed -n 's/^hint: schedules: \(.*\);.*/\1/p') 2bw+split; do
    check "$schedule on GPUs: no word of slack" [ "$(plan_on_gpus "$schedule")" -eq 0 ]
done
ranks loose parallel.ep=2 train.micro_batch=2 moe.slack=1 moe.overflow=drop run.reproducible=run
check "or drops rows, and counts them: $(tail -1 loose.err)" \
    [ "$(dropped loose | grep -cE '\[[1-9][0-9]*,[1-9][0-9]*$')" -eq 6 ]

# Where an evaluation ends within a balance unit, the unit is what samples there are: what a run's weights lose on 6 samples
# of units of 4 is what they lose on the first 4 and, as a unit of 2, on the others
sample() { tail -c +$((32 * $1 + 1)) big.txt | head -c $((32 * $2 + 1)) >"$3.txt" && "$mt" preprocess --input "$3.txt" \
    --tokenizer byte --output "$3" >/dev/null 2>&1; }
sample 0 6 six && sample 0 4 four && sample 4 2 two && sample 5 1 one || bad "cut the samples"
limited=(moe.capacity=0.5 moe.unit=4 train.micro_batch=4)
loss() { # FILE WORDS..., on $count ranks
    "$root/scripts/launch.sh" -n "$count" -- "$mt" eval --config "$ini" run.dir=units "${small[@]}" "${limited[@]}" \
        data.valid="$@" 2>eval.err | sed -n 's/^loss //p'
}
count=1
run units "${limited[@]}"
for drop in probs position; do
    whole=$(loss six moe.drop=$drop) first=$(loss four moe.drop=$drop)
    rest=$(loss two moe.drop=$drop moe.unit=2 train.micro_batch=2)
    check "drop = $drop: 6 samples lose $whole, 4 of them $first, 2 $rest" \
        awk -v w="$whole" -v a="$first" -v b="$rest" 'BEGIN { d = (4 * a + 2 * b) / 6 - w; exit !(a && b && d < 2e-6 && d > -2e-6) }'
    alone=$(loss one moe.drop=$drop moe.unit=1 train.micro_batch=1)
    check "drop = $drop: one sample loses $alone" [ -n "$alone" -a "$(loss one moe.drop=$drop)" = "$alone" ]
    count=2
    layouts=('parallel.ep=2' 'parallel.tp=2 train.micro_batch=8')
    [ $drop = probs ] || layouts=('parallel.cp=2 parallel.ep=2' 'parallel.pp=2')
    for words in "${layouts[@]}"; do
        # shellcheck disable=SC2086  # words
        check "drop = $drop, 2 ranks, $words: $(grep -m1 error eval.err)" [ "$(loss six moe.drop=$drop $words)" = "$whole" ]
    done
    count=1
done
# and they take no room: of 16 samples 15 fill up
alone=$(loss one moe.capacity=0 moe.unit=1 train.micro_batch=1)
count=2
filled=$(loss one moe.capacity=0 moe.slack=1 parallel.ep=2 train.micro_batch=8 train.global_batch=16)
check "an evaluation of one sample has room: $filled, $(grep -m1 error eval.err)" [ -n "$alone" -a "$filled" = "$alone" ]

# Generation has no units: without balance and capacity runs of units of 1 and 4 are one run, and say the same
for unit in 1 4; do run unit$unit moe.balance=none moe.aux_coeff=0 moe.unit=$unit train.micro_batch=4; done
say() { "$mt" generate --run "$1" --prompt Line --tokens 12 2>"$1.say"; }
check "runs that differ in moe.unit alone" same_run unit1 unit4 6
ones=$(say unit1 | od -c) fours=$(say unit4 | od -c)
check "generate from units of 4: $(grep -m1 error unit4.say)" [ "$(wc -c <<<"$ones")" -gt 40 -a "$ones" = "$fours" ]
check "and of a run with a capacity" [ "$(say units | wc -c)" -gt 8 ]

# Benchmarks without luck: experts take turns
run turns moe.balance=forced moe.aux_coeff=0
check "forced balance is even" [ "$(grep -o '"expert_load":[^]]*' turns/metrics.jsonl | sort -u)" = '"expert_load":[1,1' ]

# Balanced by a loss a router keeps all experts busy; a bias follows the load; ranks see the same loads
loads() { grep -o '"expert_load":.*' "$1/metrics.jsonl"; }
worst() { loads "$1" | tail -1 | grep -oE '[0-9.]+' | sort -g | tail -1; }
small=("${small[@]/train.steps=6/train.steps=40}")
small=("${small[@]/checkpoint.every=3/checkpoint.every=0}")
even=(optim.lr=1e-2 moe.router=sigmoid)
run left "${even[@]}" moe.balance=none moe.aux_coeff=0
run aux "${even[@]}" moe.balance=aux moe.aux_coeff=0.1
run bias "${even[@]}" moe.balance=bias moe.bias_rate=0.02 moe.aux_coeff=0
run sinkhorn "${even[@]}" moe.balance=sinkhorn moe.aux_coeff=0 moe.unit=4
count=2
ranks bias2 "${even[@]}" moe.balance=bias moe.bias_rate=0.02 moe.aux_coeff=0 parallel.ep=2 train.micro_batch=2
for how in aux bias sinkhorn; do
    check "$how: the busiest expert has $(worst $how) of the mean, left alone $(worst left)" \
        awk -v a="$(worst $how)" -v b="$(worst left)" 'BEGIN { exit !(a < b && a < 2) }'
done
check "two ranks count the loads of one" [ "$(loads bias)" = "$(loads bias2)" ]
finish
