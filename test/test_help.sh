#!/usr/bin/env bash
# Help in all its forms: on a screen of 24 lines and 80 columns, as a manual page that roff reads without a warning, as
# completion in a bash that somebody types into. All three must know every command, option and key.
. "$(dirname "$0")/lib.sh"
"$mt" --help >help.txt
mapfile -t commands < <(sed -n '/^commands/,/^$/s/^  \(\S.\{15\}\) .*/\1/p' help.txt | sed 's/ *$//')
check "commands: ${#commands[@]}" [ ${#commands[@]} -ge 12 ]
"$mt" config explain | sed -n 's/^\([a-z]*\.[^ ]*\) = .*/\1/p' >keys.txt
check "keys: $(wc -l <keys.txt)" [ "$(wc -l <keys.txt)" -gt 100 ]

# ---- a screen
screen() { # NAME FILE
    check "help of $1 has $(wc -l <"$2") lines" [ "$(wc -l <"$2")" -le 24 -a "$(wc -l <"$2")" -ge 3 ]
    check "help of $1 has lines of $(wc -L <"$2") columns" [ "$(wc -L <"$2")" -le 80 ]
}
screen megatrain help.txt
: >options.txt
for c in "${commands[@]}"; do
    "$mt" $c --help >one.txt
    screen "$c" one.txt
    sed -n 's/^  \(--[a-z0-9-]*\).*/\1/p' one.txt | sed "s/^/$c:/" >>options.txt
done
check "options: $(wc -l <options.txt)" [ "$(wc -l <options.txt)" -gt 20 ]

# ---- the manual
"$mt" help --man >megatrain.1
if command -v man >/dev/null; then
    MANWIDTH=100 LC_ALL=C.UTF-8 man --warnings -E UTF-8 -l megatrain.1 >man.txt 2>warnings.txt
    check "man: exit $?, $(head -3 warnings.txt)" [ ! -s warnings.txt -a -s man.txt ]
    sed -i 's/.\x08//g' man.txt
    for c in "${commands[@]}"; do check "the manual has no $c" grep -q "^   megatrain $c$" man.txt; done
    while IFS=: read -r c o; do check "the manual has no $o of $c" grep -qE "^ +$o( |$)" man.txt; done <options.txt
    while read -r k; do check "the manual has no $k" grep -qE "^ +${k//./\\.}( |$)" man.txt; done <keys.txt
    for s in 0 2 3 4 5 6 7 8 9 10 11 75; do check "the manual has no status $s" grep -qE "^ +$s +[a-z]" man.txt; done
    # every variable that the program reads, but those of tests, of launch.sh, and the shell's PATH
    sed -n '/^ENVIRONMENT/,/^FILES/p' man.txt >environment.txt
    variables=$({ grep -rhoE 'getenv\("[A-Z_]+' "$root"/src "$root"/cuda
        grep -oE '(value_of|have|number|need)\(e, "[A-Z_]+' "$root/src/boot/boot.c"; } | sed 's/.*"//' | sort -u |
        grep -vE '^(PATH|MEGATRAIN_(LAUNCHER_.*|.*_FAULT)|(SLURM|OMPI|PMI|PMIX|MPI|TORCHELASTIC)_.*)$')
    check "variables: $(wc -w <<<"$variables")" [ "$(wc -w <<<"$variables")" -ge 12 ]
    for v in $variables; do check "the manual has no $v" grep -qw "$v" environment.txt; done
    check "hyphens are hyphens" grep -q -- "--append-eod" man.txt
else skip "the manual: no man"; fi
if command -v mandoc >/dev/null; then
    mandoc -Tlint -W warning megatrain.1 | grep -v "missing date" >lint.txt # a page made at any time has none
    check "mandoc: $(head -3 lint.txt)" [ ! -s lint.txt ]
else skip "mandoc's opinion: no mandoc"; fi

# ---- completion, asked as readline asks
"$mt" help --bash >completion.bash
check "bash reads it" bash -n completion.bash
touch some.ini 'a file.txt'
mkdir -p folder
# answer WORD...: the last one is completed
answer() {
    bash --norc -c '. ./completion.bash; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _megatrain 2>/dev/null
        [ ${#COMPREPLY[@]} -eq 0 ] || printf "%s\n" "${COMPREPLY[@]}"' bash megatrain "$@"
}
all_of() { # WANTED(sorted, by blanks) WORD...
    local got
    got=$(answer "${@:2}" | LC_ALL=C sort | tr '\n' ' ')
    check "completion of '${*:2}': '$got', not '$1'" [ "${got% }" = "$1" ]
}
all_of "tokenize tokenizer" tok
all_of "train" tokenizer ""
all_of "plan preprocess" p
all_of "jsonl" preprocess --format = j
all_of "--tokenizer" preprocess --tok
all_of "" generate --tokens ""
all_of "auto cpu cuda" train --config some.ini run.device =
all_of "cuda" --config some.ini run.device = cu
all_of "run.device=cuda" --config some.ini run.device=cu
all_of "true" --config some.ini checkpoint.async = t
all_of "model.head_bias= model.head_dim= model.heads=" --config some.ini model.head
all_of "" --config some.ini train.steps =
all_of "check" config ch
all_of "run.device=" config run.dev
all_of "train" help tokenizer ""
all_of "" help train ""
all_of "tokenize tokenizer" help tok
all_of "model.head_bias model.head_dim model.heads" config explain model.head
all_of "--help" doctor --h
all_of "zb-h1 zb-h1-int zb-h2 zb-v" train --config some.ini parallel.schedule = zb
all_of "hanayo" simulate --schedule h
all_of "cpu" plan --device c
for c in "${commands[@]}"; do
    answer ${c%% *} >/dev/null
    check "completion knows $c" grep -q "\"$c\") words=" completion.bash
done
while IFS=: read -r c o; do check "completion knows $o of $c" grep -qx -- "$o" <(answer $c "$o"); done <options.txt
check "completion knows every key" cmp -s <(answer --config some.ini "" | sed 's/=$//' | sort) <(sort keys.txt)

# ---- and typed: what arrives after the tabs
cat >typed.py <<'EOP'
import os, pty, re, select, sys, time
pid, fd = pty.fork()
if pid == 0:
    os.environ.update(PS1="$ ", TERM="dumb", INPUTRC="/dev/null")
    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
seen = b""
def until(text, seconds=20):
    global seen
    end = time.time() + seconds
    while text not in seen and time.time() < end:
        if select.select([fd], [], [], 0.1)[0]:
            seen += os.read(fd, 65536)
    found, seen = text in seen, seen.split(text, 1)[-1]
    return found
os.write(fd, b". ./completion.bash; megatrain() { printf 'GOT'; printf '<%s>' \"$@\"; echo; }; echo REA''DY\n")
if not until(b"READY"): sys.exit("no bash")
bad = 0
for keys, want in [
    ("prep\t --form\tj\t", "<preprocess><--format><jsonl>"),
    ("--conf\tsome\t run.dev\tcu\t", "<--config><some.ini><run.device=cuda>"),
    ("tokenizer \t--inp\t a\\ \t", "<tokenizer><train><--input><a file.txt>"),
    ("config exp\tmodel.lay\t", "<config><explain><model.layers>"),
    ("tokenize --tokenizer so\t", "<tokenize><--tokenizer><some.ini>"),
    ("inspect fol\t", "<inspect><folder/>"),
    ("--config some.ini data.train=fol\t", "<--config><some.ini><data.train=folder/>"),
]:
    until(b"$ ", 5)
    os.write(fd, ("megatrain " + keys + "\n").encode())
    if not until(("GOT" + want).encode()):
        bad += 1
        print("typed %r, want %s, saw %r" % (keys, want, seen[-300:]))
os.write(fd, b"exit\n")
sys.exit(bad)
EOP
if /usr/bin/python3 -c 'import pty' 2>/dev/null; then
    /usr/bin/python3 typed.py >typed.txt 2>&1
    check "typed: exit $?, $(head -5 typed.txt)" [ ! -s typed.txt ]
else skip "typing: no python3"; fi
finish
