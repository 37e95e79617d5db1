# shellcheck shell=bash
# Shared by tests that hold layouts of a model to one rank: $model has a configuration, $model.ini, and $last is the step
# whose checkpoint has the digest. Source it behind lib.sh; $least lines are seen of a run at the least.

seen() { # FOLDER: digest and losses
    "$mt" inspect "$1/checkpoints/step-$(printf %08d "$last")" 2>/dev/null | grep -i digest
    grep -oE '"(valid_)?loss":[0-9.]+' "$1/metrics.jsonl"
}
hold() { # MODEL: with one rank, to which others are held
    model=$1 n=0
    run 1
    check "$model: a digest, losses of steps and of evaluations" [ "$(wc -l <$model.1.txt)" -ge $least ]
}
run() { # RANKS KEY=VALUE...
    local ranks=$1 start=() dir
    shift
    n=$((n + 1))
    dir=$model.$n
    [ "$ranks" = 1 ] || start=("$root/scripts/launch.sh" -n "$ranks" --)
    "${start[@]}" "$mt" --config $model.ini run.dir=$dir "$@" >/dev/null 2>err.txt || bad "$model $*: $(grep -m1 error err.txt)"
    seen $dir >$dir.txt
    [ $n = 1 ] || check "$model: $ranks ranks, $*: $(diff $model.1.txt $dir.txt | head -3)" cmp -s $model.1.txt $dir.txt
}
differs() { # KEY=VALUE...: each does something to the losses
    for key in "$@"; do
        "$mt" --config $model.ini run.dir=other model.$key >/dev/null 2>err.txt || bad "$key: $(grep -m1 error err.txt)"
        seen other >other.txt
        check "$key changes nothing" [ "$(wc -l <other.txt)" -ge $least -a "$(tail -1 other.txt)" != "$(tail -1 $model.1.txt)" ]
        rm -rf other
    done
}
