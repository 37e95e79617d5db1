#!/usr/bin/env bash
# Random models in random layouts against one rank (test/fuzz/README.md): as many as CI has time for, of one of six seeds
# that are always the same (turn.sh).
cd "$(dirname "$0")/.." || exit 1
exec /usr/bin/python3 test/fuzz/layouts --seed "${SEED:-$((1 + $(test/turn.sh 6)))}" --count "${COUNT:-30}" --refused 15 --jobs 2
