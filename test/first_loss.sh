#!/usr/bin/env bash
# GPT-2 124M at its real size: the first loss equals PyTorch's in float64 with the same weights, and is what random
# logits give (test/tools/gpt2_first_loss.py). Needs python3-torch; 20 s.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
program=${BUILD:-build}/test/tools/first_loss

if make -s -C "$root" -j"$(nproc)" "$program" >make.log 2>&1; then
    ok
else
    tail -20 make.log
    bad "test/tools/first_loss.c does not compile"
    finish
fi
/usr/bin/python3 "$root/test/tools/gpt2_first_loss.py" "$root/$program" >out.txt 2>&1
status=$?
case $status in
0) ok; cat out.txt ;;
77) skip "GPT-2 124M's first loss against PyTorch: $(sed 's/^skipped: //' out.txt)" ;;
*) bad "GPT-2 124M's first loss (exit $status):"; tail -20 out.txt ;;
esac
finish
