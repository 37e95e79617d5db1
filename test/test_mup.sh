#!/usr/bin/env bash
# Runs with optim.mup_base (docs/mup.md): a model that goes out to Hugging Face has its multiplier in the last norm and
# computes the same without it, and so does one that comes in; what no class can say, and another base on resume, is
# refused by one line. What muP does to a model: test_mup.c.
. "$(dirname "$0")/lib.sh"
make_tiny
common=(train.steps=3 optim.lr=0.01 model.hidden=64 model.heads=4 model.seq=32)
make_ini llama.ini model.arch=llama model.tied=false "${common[@]}"
make_ini gpt2.ini model.arch=gpt2 "${common[@]}"
make_ini gemma.ini model.arch=llama model.tied=true model.norm_eps=1e-6 model.activation=geglu model.block_norms=both \
    model.embed_scale=8 model.window=8,0 model.attention_softcap=5 model.final_softcap=3 model.head_dim=16 "${common[@]}"
make_ini granite.ini model.arch=llama model.tied=true model.embed_scale=8 model.residual_scale=0.3 model.attention_scale=0.2 \
    model.logits_scale=0.5 "${common[@]}"
awk 'BEGIN { srand(2); for (r = 0; r < 3; r++) { for (i = 0; i < 30; i++) printf "%d ", rand() * 256; print "" } }' >ids.txt

train() { "$mt" --config "$1.ini" run.dir="$2" "${@:3}" >/dev/null 2>err.txt || bad "$*: $(grep -m1 error err.txt)"; }
logits() { "$mt" eval --run "$1" --ids ids.txt --logits "$1.npy" 2>err.txt || bad "$1: $(grep -m1 error err.txt)"; }
convert() { "$mt" convert --from "$1" --to "$2" --format "$3" >/dev/null 2>err.txt || bad "$*: $(grep -m1 error err.txt)"; }
close_to() { # the largest difference of two files of logits is below a 100,000th of the largest logit
    /usr/bin/python3 - "$1" "$2" <<'EOP'
import array, sys
def values(name):
    data = open(name, "rb").read()
    head = 10 + int.from_bytes(data[8:10], "little")
    return array.array("f", data[head:])
a, b = map(values, sys.argv[1:])
most = max(map(abs, a))
sys.exit(not (len(a) == len(b) > 1000 and most > 0 and max(abs(x - y) for x, y in zip(a, b)) < 1e-5 * most))
EOP
}

for model in llama gpt2 gemma granite; do
    for base in 16 24; do # a power of two times as wide: nothing is rounded
        run=$model.$base
        train $model $run optim.mup_base=$base
        convert $run $run.hf hf
        convert $run.hf $run.plain megatrain
        logits $run
        logits $run.plain
        if [ $base = 16 ] && [ $model != gemma ]; then # (whose norm is stored less 1)
            check "$run: logits after out and in" cmp -s $run.npy $run.plain.npy
        fi
        check "$run: logits are near those after out and in" close_to $run.npy $run.plain.npy
        train $model $run.from checkpoint.load=$run.hf optim.lr=0 optim.warmup=0 train.steps=1
        train $model $run.into checkpoint.load=$run.hf optim.lr=0 optim.warmup=0 train.steps=1 optim.mup_base=32
        check "$run: a folder comes into a run with a base, losses $(losses $run.from) and $(losses $run.into)" awk '
            FNR == NR { loss = $2; next } { d = $2 - loss; n++ } END { exit !(n == 1 && d < 1e-6 && d > -1e-6) }' \
            <(losses $run.from) <(losses $run.into)
    done
done
train llama usual
check "a base makes a difference" test "$(losses usual)" != "$(losses llama.16)"
train llama same optim.mup_base=64
check "that of the model itself makes none" same_tensors usual same 3
convert llama.16 a.gguf gguf
convert llama.16.plain b.gguf gguf
tail -c 100000 a.gguf >a.tail
tail -c 100000 b.gguf >b.tail
check "GGUF holds the same weights" cmp -s a.tail b.tail

train llama mtp optim.mup_base=16 model.mtp_layers=1
expect 2 "has model.mtp_layers = 1 beside optim.mup_base = 16" "$mt" convert --from mtp --to no --format hf
train llama scores optim.mup_base=16 optim.mup_head_dim=4
expect 2 "has scores as muP with optim.mup_head_dim = 4" "$mt" convert --from scores --to no --format hf
expect 2 "has scores as muP with optim.mup_head_dim = 4" "$mt" --config llama.ini run.dir=no checkpoint.load=llama.16.hf \
    optim.mup_base=16 optim.mup_head_dim=4
expect 4 "optim.mup_base was '16' and is '32'" "$mt" --config llama.ini run.dir=llama.16 optim.mup_base=32 train.stop_at=4
finish
