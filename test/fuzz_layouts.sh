#!/usr/bin/env bash
# Random models in random layouts against one rank (test/fuzz/README.md): as many as CI has time for, of one of three seeds
# that are always the same (turn.sh).
cd "$(dirname "$0")/.." || exit 1
exec /usr/bin/python3 test/fuzz/layouts --seed "${SEED:-$((1 + $(test/turn.sh 3)))}" --count "${COUNT:-60}" --refused 30 --jobs 2
