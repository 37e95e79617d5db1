#!/usr/bin/env bash
# scripts/gpu-check.sh without a GPU: its own ways with stand-ins for programs, sanitizer and PyTorch; then the real
# benchmarks, tiny, on the emulator (EMU: where it was built).
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
emu=$(realpath "$root/${EMU:-${BUILD:-build}/emu}")
export TMPDIR=$work # (what is killed cleans nothing up)
check_script() { bash "$root/scripts/gpu-check.sh" --out "$work/out.json" "$@" >out.txt 2>err.txt; }
json() { python3 -c "import json; j = json.load(open('$work/out.json')); x = ($1); print(x)" 2>&1; }
is() { # WHAT EXPRESSION WANT
    local got
    got=$(json "$2")
    check "$1: $2 is $got, not $3" [ "$got" = "$3" ]
}

# ---- stand-ins
mkdir fake
program() { printf '#!/usr/bin/env bash\n%s\n' "$2" >"fake/$1"; chmod +x "fake/$1"; }
program megatrain 'echo "megatrain 0 with \"quotes\""'
# shellcheck disable=SC2016
program steps 'echo "Stand-in GPU"; echo "second line"
while [ $# -gt 0 ]; do [ "$1" != --json ] || echo "{\"device\":\"Stand-in GPU\",\"tokens_s\":2e3}" >"$2"; shift; done'
# shellcheck disable=SC2016
program rooflines 'echo a; echo b; echo linear_fwd
while [ $# -gt 0 ]; do [ "$1" != --json ] || echo "{\"ops\":[]}" >"$2"; shift; done'
program test_cuda_good 'echo "3 passed, 0 failed, 1 skipped"'
# shellcheck disable=SC2016
program python 'case $1 in -c) exit 0 ;; esac
while [ $# -gt 0 ]; do [ "$1" != --json ] || echo "{\"tokens_s\": 1000.0}" >"$2"; shift; done'
# runs the program, and objects to racecheck of one named bad; refuses when told to
# shellcheck disable=SC2016
program sanitizer '[ -z "$REFUSE" ] || { echo "========= Error: Device not supported"; exit 1; }
case "$*" in *racecheck*bad*) echo "========= Error: Race reported"; exit 42 ;; esac
exec "${@: -1}"'
export PROGRAMS=$PWD/fake MEGATRAIN=$PWD/fake/megatrain SANITIZER=$PWD/fake/sanitizer PYTHON=$PWD/fake/python

check_script --peer --only tests,sanitizer,rooflines,steps,peer --tiny
check "all good: exit 0, got $?" grep -q '^all correct' out.txt
is name "j['name'], j['gpu'], j['version']" "('stand-in-gpu', 'Stand-in GPU', 'megatrain 0 with \"quotes\"')"
is verdict "j['correct'], j['finished'], j['tiny'], j['quick']" "(True, True, True, False)"
is tests "[(t['test'], t['status'], t['passed'], t['failed'], t['skipped']) for t in j['tests']]" \
    "[('test_cuda_good', 'ok', 3, 0, 1)]"
is sanitizer "[(r['tool'], r['status']) for r in j['sanitizer']]" \
    "[('memcheck', 'ok'), ('racecheck', 'ok'), ('initcheck', 'ok'), ('synccheck', 'ok')]"
is peer "[(p['round'], p['megatrain']['tokens_s'] / p['torch']['tokens_s']) for p in j['peer']]" \
    "[(1, 2.0), (2, 2.0), (3, 2.0)]"
is parts "sorted(j['seconds']), j['cpu_gpu'], j['rooflines']" \
    "(['peer', 'rooflines', 'sanitizer', 'steps', 'tests'], None, {'ops': []})"

REFUSE=1 check_script --only sanitizer
check "no sanitizer here is no failure" [ $? -eq 0 ]
is refusal "'Device not supported' in j['sanitizer_refused']['why'], j['sanitizer']" "(True, [])"

program test_cuda_bad 'echo "3 passed, 0 failed"'
check_script --only sanitizer
check "what the sanitizer finds is a failure: exit 1, got $?" grep -q 'something is wrong' out.txt
is race "[(r['tool'], r['test']) for r in j['sanitizer'] if r['status'] != 'ok']" "[('racecheck', 'test_cuda_bad')]"
check_script --quick --only sanitizer
check "the quick one has memcheck alone: exit 0" [ $? -eq 0 ]
is quick "{r['tool'] for r in j['sanitizer']}" "{'memcheck'}"
# shellcheck disable=SC2016
for text in 'echo "3 passed, 1 failed"' 'echo "3 passed, 1 failed"; exit 1' 'exit 0' \
    'echo "3 passed, 0 failed"; kill -9 $$'; do
    program test_cuda_bad "$text"
    check_script --tiny --only tests
    check "a test that does '$text' fails: exit 1, got $?" [ "$(json "j['correct']")" = False ]
done
program test_cuda_bad 'sleep 5; echo "3 passed, 0 failed"'
# shellcheck disable=SC2016
program timeout 'exec /usr/bin/timeout "$1" "$2" 1 "${@:4}"'
PATH=$PWD/fake:$PATH check_script --tiny --only tests
check "what ran out of time did not finish: exit 3, got $?" grep -q 'did not finish' out.txt
is unfinished "[t['status'] for t in j['tests']], j['correct'], j['finished']" "(['unfinished', 'ok'], True, False)"
# --minutes: what no time is left for is not begun; what is killed at any moment leaves all that was done
rm fake/timeout
program test_cuda_bad 'sleep 60; echo "3 passed, 0 failed"'
check_script --tiny --minutes 0.5 --only tests,steps,long
check "no time is left: exit 3, got $?" grep -q 'did not finish' out.txt
is "no time" "[t['status'] for t in j['tests']], [r['status'] for r in j['more_steps']], j['steps'], j['minutes']" \
    "(['unfinished', 'unbegun'], ['unbegun'], [], 0.5)"
rm fake/test_cuda_bad
# shellcheck disable=SC2016
program megatrain 'echo "megatrain 0"
for k in "$@"; do
    case $k in run.dir=*) mkdir -p "${k#*=}"; echo "{\"step\":1,\"loss\":2}" >"${k#*=}/metrics.jsonl" ;; esac
done'
some=tests,steps,rooflines,candidates,slice,variants,eager,long,shared,host,counters,peer,sanitizer
done_parts() { grep -os '"seconds":{[^}]*}' "$work/out.json" | head -1 | grep -o '":' | wc -l; } # one more than there are
check_script --tiny --minutes 9 --only $some
check "all parts: exit 0, $(tail -1 err.txt)$(tail -1 out.txt)" grep -q '^all correct' out.txt
is "all parts" "sorted(j['seconds']) == sorted('$some'.split(',')) == sorted(j['begun'])" True
is runs "[(r['run'], r['status'], r['metrics'][0]['loss']) for r in j['runs']][::6]" \
    "[('slice-bf16', 'ok', 2), ('slice-host', 'ok', 2)]"
is more "[(r['run'], r['steps']['tokens_s']) for r in j['more_steps']]" \
    "[$(printf "('%s', 2000.0), " eager 'T 512' 'llama, bf16' 'llama, tensorwise' 'llama, blockwise' \
        'states on the host, 4 micro-batches')('T 32', 2000.0)]"
check "what parts printed is in the log" grep -q 'linear_fwd' out.log
has="{'tests': j['tests'], 'steps': j['steps'], 'rooflines': j['rooflines'], 'slice': j['runs'], 'peer': j['peer']}"
# (behind each part; behind every other one at a commit without FULL=1)
first=$("$root/test/turn.sh" 2) by=2
[ -z "${FULL:-}" ] || first=0 by=1
for i in $(seq "$first" "$by" ${FULL:+1}9); do
    rm -f out.json
    bash "$root/scripts/gpu-check.sh" --out "$work/out.json" --tiny --minutes 9 --only $some >out.txt 2>err.txt &
    pid=$!
    for _ in $(seq 1200); do
        [ "$(done_parts)" -le $((i % 10 + 1)) ] || break
        kill -0 $pid 2>/dev/null || break
        sleep .05
    done
    sleep .0$((i * 7 % 10))
    kill -9 $pid 2>/dev/null
    wait $pid 2>/dev/null
    is "killed behind part $((i % 10 + 1))" "all(dict($has).get(p, True) for p in j['seconds']), len(j['seconds']) > $((i % 10))" \
        "(True, True)"
done

program steps 'echo "no GPU at all" >&2; exit 2'
check_script --tiny
check "without a GPU: exit 2" [ $? -eq 2 ]
check "without a GPU: the reason" grep -q 'no GPU at all' err.txt
check_script --nonsense
check "usage: exit 2" [ $? -eq 2 ]

# ---- the benchmarks on the emulator
export PROGRAMS=$emu MEGATRAIN=$emu/megatrain
unset SANITIZER PYTHON
if [ ! -x "$emu/steps" ]; then
    skip "benchmarks on the emulator: $emu/steps is not built"
    finish
fi
EMU_DEVICES=2 check_script --tiny --only ranks
check "several GPUs: exit 0, $(tail -1 err.txt)$(tail -1 out.txt)" grep -q '^all correct' out.txt
is layouts "j['ranks']" "{'status': 'ok', 'layouts': 4}"
is links "j['links']['gpus'], j['links']['predicted_gb_s'], [c['call'] for c in j['links']['calls']]" \
    "(2, 360, ['reduce-tree', 'reduce-scatter-tree', 'all-gather', 'exchange'])"
is sent "[c['bytes'] for c in j['links']['calls']]" "[262144, 131072, 131072, 131072]"
is rates "all(c['gb_s'] > 0 and abs(c['share'] * 360 - c['gb_s']) < 1e-6 for c in j['links']['calls'])" True
EMU_DEVICES=1 EMU_CLOSED=0 check_script --tiny --only nccl,ranks,one_gpu
check "one GPU: says so, $(grep 'skipped' out.txt | head -1)" grep -q 'ranks on GPUs: 1 GPU, two or more are needed' out.txt
is "one GPU" "j['ranks']['status'], j['links'], j['correct']" "('skipped', None, True)"
is "one GPU, NCCL" "j['nccl']['status'], len(j['nccl']['calls']), all(c['us'] > 0 for c in j['nccl']['calls'])" \
    "('ok', 6, True)"
is "one GPU, shared" "[(p['what'], p['status'], p['layouts']) for p in j['one_gpu']]" \
    "[('calls', 'ok', 0), ('links', 'ok', 0), ('layouts', 'ok', $([ -n "${FULL:-}" ] && echo 26 || echo 3))]"
check "rooflines at full size lack memory" "$emu/rooflines" --room
check_script --tiny --only rooflines,steps,candidates,variants,cpu_gpu
check "on the emulator: exit 0, $(tail -1 err.txt)$(tail -1 out.txt)" grep -q '^all correct' out.txt
is emulated "j['gpu'], len(j['steps']), j['cpu_gpu']['status'], len(j['cpu_gpu']['runs'])" \
    "('Emulated GPU', 2, 'ok', 10)"
is rooflines "len({o['op'] for o in j['rooflines']['ops']}) > 30" True
is times "all(o['ms'] > 0 for o in j['rooflines']['ops'])" True
is products "{o['op'] for o in j['rooflines_autotuned']['ops']} == {'linear_fwd', 'linear_dx', 'linear_dw'}" True
is "products beside" "j['rooflines_beside']['left_free'], {o['op'] for o in j['rooflines_beside']['ops']} == {'linear_fwd', 'linear_dx', 'linear_dw'}" "(1, True)"
is bound "{o['bound'] for o in j['rooflines']['ops']} >= {'matrix', 'short'}" True
is steps "all(j['steps'][0][k] > 0 for k in ('tokens_s', 'ms', 'ms_without_graphs', 'plan_bytes'))" True
is profile "{'attention_bwd', 'adamw', 'xent_row'} <= {o['op'] for o in j['steps'][0]['profile']['ops']}" True
is mixture "{'permute_rows', 'unpermute_bwd', 'grouped_fwd', 'grouped_dw'} <= {o['op'] for o in j['steps'][1]['profile']['ops']}" True
is shares "abs(sum(o['share'] for o in j['steps'][0]['profile']['ops']) - 1) < 1e-6" True
is idle "[0 <= p['idle_share'] < 1 and abs(p['idle_share'] * p['span_ms'] - p['gaps_ms']) < 1e-6 * p['span_ms']
    and p['steps'] == 2 for p in [s['profile'] for s in j['steps']]]" "[True, True]"
is variants "[(s['arch'], s['kv_heads'], s['vocab']) == ('llama', 1, 300) and (s['precision'], s['states'], s['micro_batches'])
    for s in [r['steps'] for r in j['more_steps']][:4]]" \
    "[('bf16', 'device', 1), ('tensorwise', 'device', 1), ('blockwise', 'device', 1), ('bf16', 'host', 4)]"
is candidates "[(m['model'], {c['op'] for c in m['candidates']} == {'linear_fwd', 'linear_dx', 'linear_dw'}) for m in j['candidates']]" \
    "[('tiny', True), ('tiny-moe', True)]"
is algorithms "all(len(c['algorithms']) >= 2 and c['algorithms'][0]['same_bits'] and all(a['runs'] and a['ms'] > 0 for a in c['algorithms'])
    for m in j['candidates'] for c in m['candidates'])" True
is "other bits" "any(not a['same_bits'] for m in j['candidates'] for c in m['candidates'] for a in c['algorithms'])" True
is "one projection" "{(o['op'], o['model']) for o in j['rooflines']['ops'] if o['case'] == 'causal, of one projection'} == {
    (a, m) for a in ('attention_fwd', 'attention_bwd') for m in ('tiny, B2 T32', 'T 128')}" True
is skewed "{o['op'] for o in j['rooflines']['ops'] if o['model'] == '4 experts, skewed'} >= {'grouped_fwd', 'grouped_dw'}" True
is loss "j['steps'][0]['last_loss'] < j['steps'][0]['first_loss']" True
finish
