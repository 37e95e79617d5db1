#!/usr/bin/env bash
# preprocess from outside: the bytes of an independent writer (test/tools/preprocess.py) from text, paragraphs and JSON
# lines, plain and compressed, for any number of threads; damaged inputs; memory; jobs that are killed, or whose disk
# fails, at any file operation or moment and are started again. MEGATRAIN_FAULTS=all: at every operation.
all=${MEGATRAIN_FAULTS:-}
[ -z "$all" ] && [ -w /dev/shm ] && export TMPDIR=${TMPDIR:-/dev/shm} # where a sync takes no time
. "$(dirname "$0")/lib.sh"
py=/usr/bin/python3
$py -c '' 2>/dev/null && command -v gzip >/dev/null || { skip "no $py or no gzip"; finish; }
zstd=true
command -v zstd >/dev/null || { zstd=false; skip "zstd inputs: no program zstd"; }

# ---- inputs: prose, JSON lines, paragraphs; some of 1 to 3 MB, so that there are many chunks and long documents
$py - <<'EOP'
import json, random
r = random.Random(5)
words = ["alpha", "beta", "caf\u00e9", "42", "...", "it's", "\u65e5\u672c", "\U0001f600", "\"quoted\"", "back\\slash", "\t"]
def text(n): return " ".join(r.choice(words) for _ in range(n)) + r.choice(["", "\n", " \n\n"])
open("a.txt", "w").write(text(60000))
open("b.txt", "w").write(text(9))
open("empty.txt", "w")
blank = ["\n\n", "\n \t\n\n", "\n\r\n", "\r\n\r\n", "\r\n", "\n"]
parts = [text(r.choice([1, 5, 400])) + r.choice(blank) for _ in range(1500)]
parts.insert(700, text(250000))               # a paragraph of more than 1 MiB
parts.insert(900, "x" * 1100000 + "\n\n")      # and one without a blank
open("p.txt", "w").write("".join(parts))
with open("l.jsonl", "w") as f:
    for i in range(3000):
        n = 250000 if i == 1500 else r.choice([0, 1, 30])  # a line of more than 1 MiB
        o = {"id": i, "text": text(n) if n else "", "meta": {"a.b": text(3), "x": [{"text": 1}], "y": None}}
        f.write(json.dumps(o, ensure_ascii=r.random() < 0.5) + r.choice(["\n", "\n\n", " \r\n"]))
    f.write(json.dumps({"pad": "z" * 1200000, "text": "late", "meta": {"a.b": "deep"}}))
EOP
gzip -c a.txt >a.gz
{ gzip -c b.txt; gzip -9c p.txt; } >two.txt # two members, and a name that says nothing
gzip -c l.jsonl >l.gz
if $zstd; then
    zstd -qc a.txt >a.zst
    { zstd -qc b.txt; zstd -q19c p.txt; } >two.zst
    zstd -qc l.jsonl >l.zst
fi
cat b.txt p.txt >two.plain

run() { "$mt" preprocess --force --tokenizer byte --output "$@" >out.txt 2>err.txt; }
same() { cmp -s "$1.bin" "$2.bin" && cmp -s "$1.idx" "$2.idx"; }

# ---- as the other writer does it
# case NAME FORMAT KEY EOD OPTIONS -- FILES
case_of() {
    local name=$1 form=$2 key=$3 eod=$4 options=() threads
    shift 4
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    $py "$root/test/tools/preprocess.py" want "$form" "$key" "$eod" "$@" || { bad "the other writer: $name"; return; }
    [ "$eod" = 0 ] || options+=(--append-eod)
    for threads in 1 2 5; do
        run got --threads $threads "${options[@]}" --input "$@"
        check "$name, $threads threads: exit $? $(head -1 err.txt)" [ -s got.idx ]
        check "$name, $threads threads: other bytes" same want got
        check "$name leaves something: $(ls -d got.part 2>/dev/null)" [ ! -e got.part ]
        rm -rf got.*
    done
}
case_of "text" text - 0 -- a.txt empty.txt b.txt p.txt
case_of "text with ends" text - 1 -- a.txt b.txt empty.txt a.txt
case_of "paragraphs" paragraphs - 1 --split-blank-lines -- p.txt b.txt a.txt
case_of "JSON lines" jsonl text 1 --format jsonl -- l.jsonl
case_of "JSON lines, a nested key with a dot in its name" jsonl meta/a.b 1 --format jsonl --key 'meta.a\.b' -- l.jsonl
case_of "gzip" text - 1 -- a.gz two.txt b.txt
case_of "gzip, paragraphs" paragraphs - 0 --split-blank-lines -- two.txt
case_of "gzip, JSON lines" jsonl text 0 --format jsonl -- l.gz l.jsonl
if $zstd; then
    case_of "zstd" text - 1 -- a.zst two.zst a.gz
    case_of "zstd, JSON lines" jsonl text 1 --format jsonl -- l.zst
fi


# ---- JSON lines are told apart from text; so are they in a tokenizer's training
told() { # NAME FORMAT KEY OPTIONS -- FILES: the same as with that --format
    local name=$1 form=$2 key=$3 options=()
    shift 3
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    $py "$root/test/tools/preprocess.py" want "$form" "$key" 1 "$@" || { bad "the other writer: $name"; return; }
    run got --append-eod "${options[@]}" --input "$@"
    check "$name: exit $? $(head -1 err.txt)" same want got
    check "$name: that is said once" [ "$(grep -c 'holds JSON lines' err.txt)" = $([ "$form" = jsonl ] && echo 1 || echo 0) ]
    rm -rf got.*
}
told "JSON lines without --format" jsonl text -- l.jsonl l.gz
told "JSON lines with --split-blank-lines" jsonl text --split-blank-lines -- l.jsonl
told "text without --format" text - -- a.txt two.txt
{ echo '{'; cat b.txt; } >brace.txt
printf '{"a": [1, {"b": 2' >open.txt; printf '{"text": "x"} and more\n' >more.txt
told "text that begins with a brace" text - -- brace.txt more.txt
$py "$root/test/tools/preprocess.py" want text - 1 l.jsonl
run got --append-eod --format text --input l.jsonl
check "JSON lines as text, if asked for" same want got
run got --append-eod --key meta.a\\.b --input l.jsonl
check "--key alone means JSON lines: $(head -1 err.txt)" grep -q "idx: 3001 documents" out.txt
{ gzip -dc l.gz | head -900; cat brace.txt; } >mixed.txt
expect 3 "'mixed.txt': line " "$mt" preprocess --tokenizer byte --output bad --input mixed.txt
check "the way to have it as text is named" grep -q "hint: .*--format text" err.txt
$py - <<'EOP'
import json
open("texts.txt", "w").write("\n".join(json.loads(line)["text"] for line in open("l.jsonl") if line.strip()) + "\n")
EOP
train() { "$mt" tokenizer train --vocab-size 400 --output "$@" >out.txt 2>err.txt; }
train lines.json --input l.jsonl
check "a tokenizer of JSON lines: exit $? $(head -1 err.txt)" grep -q "holds JSON lines" err.txt
train packed.json --input l.gz --format jsonl --threads 3
check "and of compressed ones: exit $?" cmp -s lines.json packed.json
train piped.json --input - <l.gz
check "and of stdin: exit $?" cmp -s lines.json piped.json
train keyed.json --input l.jsonl --key meta.a\\.b
check "of another member: exit $?" eval '[ -s keyed.json ] && ! cmp -s lines.json keyed.json'
# (between two texts a line end may pair with a blank before it, which JSON lines do not know: so the ids, not the file)
"$mt" tokenize --tokenizer lines.json <texts.txt >ids.txt 2>err.txt
check "it encodes those texts: exit $?" [ "$(wc -w <ids.txt)" -gt 1000 ]
printf '{"text": "a"}\nb\n' >line.jsonl
expect 3 "'line.jsonl': line 2: column 1" "$mt" tokenizer train --input line.jsonl --format jsonl --vocab-size 300 \
    --output none.json
rm -f got.* keyed.json packed.json piped.json

# ---- stdin
run want --append-eod --input p.txt
run got --append-eod --input - <p.txt
check "stdin: exit $? $(head -1 err.txt)" same want got
cat two.txt | run got --append-eod --input -
run want --append-eod --input two.txt
check "stdin, a compressed pipe" same want got
run want --append-eod --input a.txt l.jsonl
(sleep 0.1; cat l.jsonl) | run got --append-eod --input a.txt - --save-every 1e-9
check "stdin beside a file, of JSON lines" same want got
check "nothing is left to go on with" [ ! -e got.part ]
rm -f got.* want.*

# ---- what is there stays
run got --input b.txt
cp got.bin kept.bin
expect 2 "'got.idx' is there already" "$mt" preprocess --tokenizer byte --output got --input a.txt
check "--force is named" grep -q -- "--force" err.txt
check "the files are as they were" cmp -s got.bin kept.bin
echo notes >mine.bin
expect 2 "'mine.bin' is there already" "$mt" preprocess --tokenizer byte --output mine --input a.txt
check "a file of others, too" [ "$(cat mine.bin)" = notes ]
expect 0 "" "$mt" preprocess --force --tokenizer byte --output got --input a.txt
check "with --force they are replaced" [ "$(stat -c %s got.bin)" -gt 10000 ]
mkdir -p corpora run1
expect 2 "there is no folder 'corpra'" "$mt" preprocess --tokenizer byte --output corpra/x --input b.txt
check "the one that is meant is named: $(tail -1 err.txt)" grep -q "did you mean 'corpora'" err.txt
expect 2 "did you mean 'corpora'" "$mt" tokenizer train --input b.txt --vocab-size 300 --output ./corpra/x.json
check "no folder is made" [ ! -e corpra ]
expect 0 "made the folder 'run2'" "$mt" preprocess --tokenizer byte --output run2/x --input b.txt
expect 0 "made the folder 'corpora/en'" "$mt" preprocess --tokenizer byte --output corpora/en/new/x --input b.txt
rm -rf corpora run1 run2 got.* kept.bin mine.bin

run got --append-eod --input a.txt empty.txt b.txt
check "3 documents, one of them empty: $(cat out.txt err.txt)" eval 'grep -q "idx: 3 documents" out.txt && grep -q "^1 of these documents is empty" err.txt'
check "as the index has them" grep -q "^documents 3$" <("$mt" inspect got)
rm -f got.*

# ---- damage: exit 3, file and offset, nothing left
damaged() { # TEXT FILE OPTIONS
    expect 3 "$1" "$mt" preprocess --tokenizer byte --output bad --input "$2" "${@:3}"
    check "damage of $2 is not named: $(head -1 err.txt)" grep -q "'$2'" err.txt
    check "damage of $2 leaves $(ls -d bad* 2>/dev/null)" [ -z "$(ls -d bad.* 2>/dev/null)" ]
}
for n in 3 15 200 $(($(stat -c %s a.gz) / 2)) $(($(stat -c %s a.gz) - 4)); do
    head -c "$n" a.gz >cut.gz
    damaged "at byte $n: the file ends too early" cut.gz
done
flip() { cp "$1" "$2" && printf "\\x$3" | dd of="$2" bs=1 seek="$4" conv=notrunc 2>/dev/null; }
flip a.gz flip.gz 00 $(($(stat -c %s a.gz) - 6)) # the checksum
damaged "incorrect data check" flip.gz
{ cat a.gz; echo rubbish; } >behind.gz
damaged "at byte " behind.gz
if $zstd; then
    for n in 5 300 $(($(stat -c %s a.zst) - 2)); do
        head -c "$n" a.zst >cut.zst
        damaged "at byte $n: the file ends too early" cut.zst
    done
    flip a.zst flip.zst 00 $(($(stat -c %s a.zst) - 3))
    damaged "checksum" flip.zst
fi
sed '900s/"text"/"test"/' l.jsonl | gzip -c >line.gz
damaged "line $(gzip -dc line.gz | grep -n '"test"' | cut -d: -f1): there is no member 'text'" line.gz --format jsonl
printf '{"a": {"b": 1}}' >key.jsonl
damaged "the member 'a.b' is not a string" key.jsonl --format jsonl --key a.b
damaged "the member 'a.b.c' leads through something that is not an object" key.jsonl --format jsonl --key a.b.c
printf '{"a": {"b": "x"}, "a": {"b": "y"}}' >key.jsonl
damaged "the member 'a.b' occurs twice" key.jsonl --format jsonl --key a.b
{ printf '{"text": "'; head -c 3000000 /dev/zero | tr '\0' 'a'; } >open.jsonl
damaged "line 1: column 3000011: a string does not end" open.jsonl --format jsonl
for k in '' a..b a. .a; do expect 2 "empty name" "$mt" preprocess --tokenizer byte --output bad --input key.jsonl --format jsonl --key "$k"; done

# ---- what is not its own is not removed
mkdir -p theirs.part theirs2.idx theirs3.bin
for f in theirs.part/tokens.txt theirs2.idx/x theirs3.bin/x; do echo text >$f; done
expect 5 "holds something else: 'tokens.txt'" "$mt" preprocess --tokenizer byte --output theirs --input b.txt
expect 5 "'theirs2.idx' is a folder" "$mt" preprocess --tokenizer byte --output theirs2 --input b.txt
expect 5 "'theirs3.bin' is a folder" "$mt" preprocess --tokenizer byte --output theirs3 --input b.txt
for suffix in bin idx crc; do
    mkfifo pipe.$suffix
    expect 5 "'pipe.$suffix' is not a regular file and is not replaced" "$mt" preprocess --tokenizer byte --output pipe --input b.txt
    check "pipe.$suffix is still one, and alone: $(echo pipe.*)" [ -p pipe.$suffix -a "$(echo pipe.*)" = pipe.$suffix ]
    rm pipe.*
done
ln -s nowhere link.idx
expect 5 "cannot follow link 'link.idx'" "$mt" preprocess --tokenizer byte --output link --input b.txt
rm link.*
check "files of others are gone" [ "$(cat theirs.part/tokens.txt theirs2.idx/x theirs3.bin/x)" = $'text\ntext\ntext' ]
check "beside them is something new" [ "$(ls -d theirs* | tr '\n' ' ')" = "theirs.part theirs2.idx theirs3.bin " ]
mkdir own.part && touch own.part/{tokens,lengths,index,sums,sums.tmp-1,lock,job.json.tmp-17} # a killed job's
run own --input b.txt
check "a killed job's folder is taken over: exit $? $(head -1 err.txt)" [ -s own.idx -a ! -e own.part ]

# ---- memory: one line, one document, many small ones; each 100 MB
peak() { # MIB command...
    $py -c 'import resource, subprocess, sys
s = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(s, kib // 1024, "MiB")
sys.exit(s or kib > int(sys.argv[1]) * 1024)' "$@" >peak.txt
}
bytes=100000000
[ -n "$all" ] && bytes=1000000000
{ printf '{"text":"'; yes 'many words and few lines' | tr '\n' ' ' | head -c $bytes; echo '"}'; } >long.jsonl
check "memory for a line of $bytes bytes" peak 100 "$mt" preprocess --force --tokenizer byte --output m --format jsonl --input long.jsonl
check "a long line is one document" grep -q "^documents 1$" <("$mt" inspect m)
$zstd && zstd -qf long.jsonl -o long.zst && rm long.jsonl &&
    check "memory for a text of $bytes bytes, compressed" peak 100 "$mt" preprocess --force --tokenizer byte --output m --input long.zst
rm -f long.* m.*
yes 'a b' | head -c $((bytes / 5)) | sed 's/$/\n/' >short.txt
check "memory for $((bytes / 20)) documents" peak 100 "$mt" preprocess --force --tokenizer byte --output m --split-blank-lines --input short.txt
check "all of them: $(cat peak.txt)" grep -q "^documents $((bytes / 20))$" <("$mt" inspect m)
rm -f short.txt m.*
"$mt" tokenizer train --input a.txt --vocab-size 300 --output bpe.json >/dev/null 2>&1
yes '天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。' | tr -d '\n' | head -c $((bytes / 5)) >wide.txt
check "memory for a text without a blank" peak 40 "$mt" preprocess --force --tokenizer bpe.json --output m --input wide.txt
rm -f wide.txt m.*

# ---- stopped and started again. Every chunk is made safe, so that there is something to stop at
job=(--append-eod --format jsonl --input l.jsonl l.gz --save-every 1e-9)
run want "${job[@]}"
check "the job to compare with: exit $?" [ -s want.idx ]
faulty() { MEGATRAIN_FILE_FAULT=$1 "$mt" preprocess --force --tokenizer byte --output got "${job[@]}" --threads 2 >out.txt 2>err.txt; }
faulty count
total=$(sed -n 's/^file operations: //p' err.txt)
check "there are file operations to fail at: $total" [ "${total:-0}" -gt 100 ]
step=29
[ -n "$all" ] && step=1
old() { for f in bin idx crc; do cp old.$f got.$f; done; }
run old --input b.txt
at_fault() { # ACTION N: whatever was there before, afterwards there is nothing that looks whole and is not
    rm -rf got.*
    [ $(($2 % 2)) -eq 0 ] && old
    faulty "$1@$2" 2>/dev/null # (where the shell says that it was killed)
    local status=$?
    case $1 in
    eintr) check "eintr@$2: exit $status $(head -1 err.txt)" [ $status -eq 0 ] ;;
    kill) check "kill@$2: exit $status" [ $status -eq 137 ] ;;
    *) [ $status -eq 0 ] || check "$1@$2: exit $status, $(head -1 err.txt)" [ "$status $(grep -c '^megatrain: error (storage)' err.txt)" = "5 1" ] ;;
    esac
    if [ -e got.idx ]; then
        check "$1@$2: the pair is neither the old one nor the new" eval 'same got want || same got old'
        check "$1@$2: inspect has doubts" "$mt" inspect got >out.txt 2>err.txt
    fi
    check "$1@$2: outside of got.part there is $(echo *)" [ -z "$(ls -d got.* 2>/dev/null | grep -v '^got\.\(bin\|idx\|crc\|part\)$')" ]
    # the old index goes before the tokens get their name: both are the new ones
    local ended=false
    [ "$1" = kill ] && [ -e got.part/job.json ] && [ -e got.idx ] && [ ! -e got.part/tokens ] && ended=true
    [ "$1" = eintr ] || run got "${job[@]}" --threads 3
    $ended && ends=$((ends + 1)) &&
        check "$1@$2: a job that was done is done again: $(head -1 err.txt)" grep -q "^the files are complete" err.txt
    check "$1@$2, then started again: exit $? $(head -1 err.txt)" same got want
    check "$1@$2, then started again: $(ls -d got.part 2>/dev/null)" [ ! -e got.part ]
}
ends=0
for action in kill enospc eio short eintr; do
    for ((n = 1; n <= total; n += step)); do at_fault $action $n; done
    [ $step = 1 ] || for ((n = total - 10; n <= total; n++)); do at_fault $action $n; done # where files get their names
done

check "one of the kills is behind the last rename: $ends" [ $ends -gt 0 ]

# kill -9 at any moment of the time that the job takes, again and again, until it is done; more rounds where it was too fast
rounds=2
[ -n "$all" ] && rounds=40
kills=0
rm -rf got.*
begun=${EPOCHREALTIME/./}
"$mt" preprocess --force --tokenizer byte --output got "${job[@]}" --threads 2 >out.txt 2>err.txt
takes_us=$((${EPOCHREALTIME/./} - begun))
for ((round = 0; round < rounds || (kills < rounds && round < 100); round++)); do
    rm -rf got.*
    for ((try = 0; try < 400; try++)); do
        "$mt" preprocess --force --tokenizer byte --output got "${job[@]}" --threads 2 >out.txt 2>err.txt &
        pid=$!
        sleep "$(printf '0.%06d' $((RANDOM * takes_us / 32768 % 1000000)))"
        [ $try -ge 20 ] || kill -9 $pid 2>/dev/null
        wait $pid 2>/dev/null && break
        kills=$((kills + 1))
        [ ! -e got.idx ] || same got want || bad "killed at a moment: a pair that is not whole"
    done
    check "killed $try times, then left alone" same got want
    check "nothing is left: $(ls -d got.part 2>/dev/null)" [ ! -e got.part ]
done
check "there were kills: $kills" [ $kills -ge $rounds ]

# Ctrl-C: said, and gone on from
catches() { # PID NUMBER: its handler of that signal is there (a shell that has not become the program yet has others)
    local mask
    [ "$(cat "/proc/$1/comm" 2>/dev/null)" = megatrain ] || return 1
    mask=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null)
    (((0x${mask:-0} >> ($2 - 1)) & 1))
}
interrupt() { # PID SIGNAL: as soon as it is caught; its exit status
    until catches "$1" "$(kill -l "${2:-INT}")" || ! kill -0 "$1" 2>/dev/null; do sleep 0.001; done
    kill "-${2:-INT}" "$1" 2>/dev/null
    wait "$1"
}
rm -rf got.*
mkfifo never
exec 9<>never # never ends
"$mt" preprocess --force --tokenizer byte --output got --input b.txt - <&9 >out.txt 2>err.txt &
interrupt $!
check "Ctrl-C while stdin gives nothing: exit $?" [ $? -eq 130 ]
check "it is said: $(cat err.txt)" grep -q "interrupted before 'got' was complete" err.txt
check "nothing is left: $(ls -d got* 2>/dev/null)" [ ! -e got.idx -a ! -e got.part ]
for s in TERM HUP; do
    # (SIGHUP counts also where the test itself runs under nohup)
    env --default-signal=$s "$mt" preprocess --force --tokenizer byte --output got --input b.txt - <&9 >out.txt 2>err.txt &
    interrupt $! $s
    check "SIG$s: exit $?" [ $? -eq 75 ]
    check "it is said: $(cat err.txt)" grep -q "stopped by SIG$s before 'got' was complete" err.txt
done
exec 9>&-
"$mt" preprocess --force --tokenizer byte --output got "${job[@]}" >out.txt 2>err.txt &
interrupt $!
status=$?
check "Ctrl-C: exit $status" [ $status -eq 130 -o $status -eq 0 ] # (it was done by then)
check "the way on is said: $(cat err.txt)" [ $status -eq 0 -o ! -e got.part -o -n "$(grep "hint: 'got.part' keeps what is done" err.txt)" ]
run got "${job[@]}"
check "it goes on to the same bytes" same got want
rm -rf got.*

# ---- which job is the same?
stop_at() { rm -rf got.*; faulty "kill@$((total * $1 / 100))" 2>/dev/null; }
"$mt" tokenizer train --input a.txt --vocab-size 280 --output t.json >/dev/null 2>&1
stop_at 50
check "a stopped job leaves its work" [ -s got.part/job.json ]
other() { # CODE TEXT OPTIONS: refused, and the work is kept
    expect "$1" "$2" "$mt" preprocess --output got "${@:3}"
    check "the work is kept" [ -s got.part/job.json ]
}
other 2 "other options: 'jsonl, key text, append eod', now 'jsonl, key text'" --tokenizer byte --format jsonl --input l.jsonl l.gz
other 3 "other tokenizer" --tokenizer t.json "${job[@]}"
other 3 "other inputs" --tokenizer byte --append-eod --format jsonl --input l.gz l.jsonl
cp -r got.part kept.part
run got "${job[@]}" --threads 1
check "the same job goes on" grep -q "^going on in got.part: [0-9]* documents" err.txt
check "and ends as one that was never stopped" same got want
cp -r kept.part got.part
"$mt" preprocess --force --tokenizer byte --output got "${job[@]}" >out.txt 2>err.txt &
pid=$!
while [ ! -e got.part/lock ] || ! kill -STOP $pid 2>/dev/null; do kill -0 $pid 2>/dev/null || break; sleep 0.001; done
if [ -e got.part ] && kill -0 $pid 2>/dev/null; then
    sleep 0.1
    "$mt" preprocess --force --tokenizer byte --output got "${job[@]}" >out2.txt 2>err2.txt
    status=$?
    [ ! -e got.part ] || check "two at a time: exit $status $(head -1 err2.txt)" [ $status -eq 5 ]
    kill -CONT $pid
fi
wait $pid
check "and the first of them ends well" same got want
rm -rf got.* kept.part

stop_at 65 # in the second input
touch l.gz # which changes, so to speak
run got "${job[@]}"
check "the input in progress has changed: $(head -1 err.txt)" grep -q "read again from its beginning" err.txt
check "and is read again" same got want
stop_at 65
touch l.jsonl
expect 3 "other inputs" "$mt" preprocess --force --tokenizer byte --output got "${job[@]}"
stop_at 20 # in the first
touch l.gz # not begun: its time does not matter
run got "${job[@]}"
check "an input that was not begun may change" grep -q "^going on" err.txt
check "and the bytes are the same" same got want
echo text >byte # no tokenizer's file
stop_at 60
echo other >byte
run got "${job[@]}"
check "a file named byte is not looked at: exit $? $(head -1 err.txt)" grep -q "^going on" err.txt
rm -rf byte got.*

# an input that is touched while the job runs, before its turn: what counts is what it was when it was opened
cp b.txt m.txt
cp p.txt q.txt
turns=(--append-eod --split-blank-lines --input p.txt m.txt q.txt --save-every 1e-9 --threads 2)
run turns "${turns[@]}"
MEGATRAIN_FILE_FAULT=count "$mt" preprocess --tokenizer byte --output got "${turns[@]}" >out.txt 2>err.txt
at=$(($(sed -n 's/^file operations: //p' err.txt) * 4 / 5))
reads() { readlink /proc/$pid/fd/* 2>/dev/null | grep -q "/$1\$"; } # is that file open?
for _ in {1..50}; do # until it is caught while it reads the first one
    rm -rf got.*
    MEGATRAIN_FILE_FAULT=kill@$at "$mt" preprocess --tokenizer byte --output got "${turns[@]}" >out.txt 2>err.txt &
    pid=$!
    until reads p.txt || ! kill -0 $pid 2>/dev/null; do :; done
    kill -STOP $pid 2>/dev/null
    reads p.txt && break
    kill -KILL $pid 2>/dev/null
    wait $pid 2>/dev/null
done
touch m.txt
kill -CONT $pid 2>/dev/null
wait $pid 2>/dev/null
check "it is stopped in the last input: exit $?" [ -s got.part/job.json ]
run got "${turns[@]}"
check "an input that was touched before its turn: exit $? $(head -1 err.txt)" grep -q "^going on" err.txt
check "and the bytes are the same" same got turns
rm -rf got.* turns.*

for file in tokens lengths job.json; do
    stop_at 60
    printf '\x07' | dd of=got.part/$file bs=1 seek=30 conv=notrunc 2>/dev/null
    run got "${job[@]}"
    check "damage of $file is seen: $(head -1 err.txt)" grep -q "warning: .*$file.*: the job starts from the beginning" err.txt
    check "damage of $file: from the beginning" same got want
done

# ---- what is seen meanwhile
if command -v script >/dev/null; then
    TERM=xterm script -qec "'$mt' preprocess --force --tokenizer t.json --output got --input p.txt p.txt p.txt p.txt p.txt p.txt p.txt p.txt" /dev/null >tty.txt </dev/null
    check "a terminal sees how far it is" grep -qE $'\r\e\\[K *[0-9.]+ %  .* of .*/s  .* tokens  .* left' tty.txt
    # going on in a compressed file: places in its text are no places in the file
    for i in $(seq 30); do cat l.gz; done >long.gz
    rm -rf got.*
    { MEGATRAIN_FILE_FAULT=kill@40 "$mt" preprocess --force --tokenizer byte --output got --format text --input long.gz --save-every 0.01; } >/dev/null 2>&1
    TERM=xterm script -qec "'$mt' preprocess --force --tokenizer byte --output got --format text --input long.gz --threads 1" /dev/null >tty.txt </dev/null
    check "a job in a compressed file goes on" grep -q '^going on' tty.txt
    check "with a speed above 0: $(tr '\r' '\n' <tty.txt | sed -n 2p)" grep -qE '%  .*  [0-9.]+ .?i?B/s  .* .*s left' tty.txt
    check "and never below" [ "$(grep -cE -- '-[0-9.]+ .?i?B/s' tty.txt)" = 0 ]
    rm -f long.gz got.*
else skip "the live line: no script(1)"; fi

# ---- what is no text is refused, unless it is meant
pre() { "$mt" preprocess --tokenizer byte --output "$1" --input "${@:2}"; }
no_text() { expect 3 "'x' is no text but $1" pre nt x; check "$1: nothing is left" [ ! -e nt.bin ]; }
printf 'PAR1rest' >x; no_text "Parquet"
check "the line that hands it over" grep -q "pyarrow.parquet as q.*'x' 'text' | megatrain preprocess --input -" err.txt
printf 'ARROW1\0\0rest' >x; no_text "Arrow"
printf '\377\377\377\377rest' >x; no_text "Arrow (a stream)"
cp "$mt" x; no_text "an executable"
printf 'PK\3\4rest' >x; no_text "a zip archive"
printf '\211PNG\r\n\32\n' >x; no_text "a picture"
printf '\377\376h\0i\0' >x; no_text "UTF-16 text"
head -c 300 /dev/zero >x; echo text >>x; no_text "holds many zero bytes"
expect 3 "'x' is no text" "$mt" tokenizer train --input x --vocab-size 300 --output nt.json
gzip -c x >x.gz
expect 3 "'x.gz' is no text but holds many zero bytes" pre nt x.gz
expect 3 "'-' is no text" pre nt - <x
printf 'PAR1rest' >x
expect 3 "'-' is no text but Parquet" pre nt - <x
check "of stdin the line leaves the file to the reader" grep -q "'FILE' 'text' | megatrain preprocess" err.txt
head -c 300 /dev/zero >x; echo text >>x
expect 3 "'x' is no text" pre nt x --force
expect 3 "'x' is no text" pre nt x --format text
check "the way out: $(tail -1 err.txt)" grep -q -- "--format bytes takes it as it is" err.txt
expect 0 "1 document" pre nt x --format bytes
check "with --format bytes they are kept: $(stat -c %s nt.bin)" cmp -s nt.bin <(sed 's/./&\x00/g; s/$/\n\x00/' x | head -c 610)
expect 0 "" "$mt" tokenizer train --input x --vocab-size 257 --output nt.json --format bytes
expect 2 "--key belongs to --format jsonl" pre nt x --format bytes --key text
printf 'PAR one\0two\n' >x # the beginning of a word, and a byte
expect 0 "1 document" pre nt2 x
# the lines that errors say, where pyarrow is
arrow=${PYARROW:-python3}
if "$arrow" -c 'import pyarrow' 2>/dev/null; then
    "$arrow" -c 'import pyarrow as a, pyarrow.parquet as p
t = a.table({"body": ["one \u00e9", None, "two\nlines"] * 50, "other": [1, 2, 3] * 50})
p.write_table(t, "t.parquet", row_group_size=7)
for name, new in ("t.arrow", a.ipc.new_file), ("t.stream", a.ipc.new_stream):
    with new(name, t.schema) as f: f.write_table(t, max_chunksize=11)
open("want.jsonl", "w").writelines("{\"body\":\"%s\"}\n" % s for s in ["one \u00e9", "", "two\\nlines"] * 50)'
    expect 0 "150 documents" pre rows want.jsonl --format jsonl --key body
    for table in t.parquet t.arrow t.stream; do
        expect 3 "'$table' is no text" pre none $table --key body
        sed -n 's/^hint: //; s/^\(python3 .*\) | megatrain .*/\1/p' err.txt | sed "s|^python3|$arrow|" >line.sh
        bash line.sh | "$mt" preprocess --input - --format jsonl --key body --tokenizer byte --output table --force >/dev/null 2>&1
        check "$table: the line of the error gives its text" cmp -s table.bin rows.bin
        check "$table: and its documents" cmp -s table.idx rows.idx
    done
else
    skip "reading Parquet and Arrow: $arrow has no pyarrow (PYARROW names another python)"
fi

# ---- a JSON list is not trained on, a byte order mark neither
printf '[\n {"text": "one"},\n {"text": "two"}]\n' >list.json
expect 3 "'list.json' is one JSON list, not a line for each document" "$mt" preprocess --input list.json --tokenizer byte --output listed
check "the way out: $(tail -1 err.txt)" grep -qF "jq -c '.[]' 'list.json' | megatrain preprocess --input -" err.txt
expect 3 "is one JSON list" "$mt" preprocess --input list.json --format jsonl --tokenizer byte --output listed
expect 3 "is one JSON list" "$mt" tokenizer train --input list.json --vocab-size 300 --output listed.json
check "nothing is left" [ ! -e listed.bin -a ! -e listed.json ]
expect 0 "" pre listed list.json --format text
cp listed.bin before.bin
for form in auto jsonl; do
    expect 3 "is one JSON list" pre listed list.json --force --format $form
    check "--force replaces files alone: $(grep hint err.txt)" grep -qF "jq -c '.[]' 'list.json' | megatrain preprocess" err.txt
    expect 3 "is one JSON list" "$mt" tokenizer train --input list.json --vocab-size 300 --output listed.json --force --format $form
done
check "and not before there are others" cmp -s listed.bin before.bin
expect 0 "" pre listed list.json --force --format text
check "text, said to be that" cmp -s listed.bin before.bin
printf '\xef\xbb\xbfhello' >marked.txt
printf '\xef\xbb\xbf{"text":"hello"}\n' >marked.jsonl
for f in "marked.txt" "marked.txt --format text" marked.jsonl "marked.jsonl --format jsonl"; do
    pre marked $f --force >/dev/null 2>err.txt
    check "$f: no byte order mark: $(head -1 err.txt)" cmp -s marked.bin <(printf 'h\0e\0l\0l\0o\0')
done
# ---- a line without its text: which members there are, and how such lines are left out
printf '{"id":1,"content":"a","text":"b"}\n{"id":2,"content":"c"}\n' >members.jsonl
expect 3 "'members.jsonl': line 2: there is no member 'text'" "$mt" preprocess --input members.jsonl --tokenizer byte --output members
check "its members: $(tail -1 err.txt)" grep -qF 'hint: the line has the members id, content: --key NAME takes another' err.txt
printf '{"id":1,"text":null}\n' >null.jsonl
expect 3 "'null.jsonl': line 1: the member 'text' is null" "$mt" tokenizer train --input null.jsonl --vocab-size 300 --output null.json
check "the way out: $(tail -1 err.txt)" grep -qF -- "--skip-missing passes over lines where it is missing or null" err.txt
echo '{"id":1,"text":5}' >number.jsonl
expect 3 "the member 'text' is not a string" "$mt" preprocess --input number.jsonl --skip-missing --tokenizer byte --output number
check "the way out: $(tail -1 err.txt)" grep -qF "jq -c 'select(.text | type == \"string\")'" err.txt

# ---- --skip-missing: such lines are no documents, in pieces as whole, and counted, also by a job that goes on
$py -c '
lines = ["{\"text\":\"line %d\"}" % i for i in range(90000)]
gaps = ["{\"id\":1}", "{\"text\":null,\"id\":2}", "{}", "{\"id\":\"%s\"}" % ("x" * 1500000), "{\"id\":{\"text\":\"no\"}}"]
open("full.jsonl", "w").write("\n".join(lines) + "\n")
for i, gap in enumerate(gaps * 2): lines.insert(9973 * i % 90000, gap)
open("gaps.jsonl", "w").write("\n".join(lines) + "\n")'
run full --append-eod --input full.jsonl
expect 0 "10 lines were passed over: the member 'text' is missing or null" \
    "$mt" preprocess --tokenizer byte --append-eod --input gaps.jsonl --skip-missing --output gaps
check "the lines with text give the same bytes" same gaps full
rm gaps.bin gaps.idx
gaps=(--tokenizer byte --append-eod --input gaps.jsonl --output gaps --save-every 1e-9 --force)
{ MEGATRAIN_FILE_FAULT=kill@30 "$mt" preprocess "${gaps[@]}" --skip-missing >/dev/null 2>&1; } 2>/dev/null
check "killed on the way, it has passed over some: $(grep -o '"missing_lines":[0-9]*' gaps.part/job.json | head -1)" \
    grep -qE '"done".*"missing_lines":[1-9].*"file_start"' gaps.part/job.json
expect 2 "other options: 'text or jsonl, key text, skip missing, append eod'" "$mt" preprocess "${gaps[@]}"
expect 0 "10 lines were passed over" "$mt" preprocess "${gaps[@]}" --skip-missing
check "and goes on to the same bytes" same gaps full
for f in full gaps; do "$mt" tokenizer train --skip-missing --input $f.jsonl --vocab-size 270 --output $f.json >/dev/null 2>$f.err; done
check "a tokenizer of them: $(cat gaps.err)" grep -q "^10 lines were passed over: the member 'text' is" gaps.err
check "is that of the lines with text" cmp -s full.json gaps.json
expect 3 "the input holds no text" "$mt" preprocess --tokenizer byte --input members.jsonl --key body --skip-missing --output none
check "as all were passed over: $(tail -1 err.txt)" grep -q "^hint: 2 lines were passed over, as the member 'body' is missing" err.txt
expect 2 "--skip-missing belongs to --format jsonl" "$mt" preprocess --tokenizer byte --input a.txt --format text --skip-missing --output none
finish
