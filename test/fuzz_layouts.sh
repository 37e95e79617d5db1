#!/usr/bin/env bash
# Random models in random layouts against one rank (test/fuzz/README.md): as many as CI has time for, always the same.
cd "$(dirname "$0")/.." || exit 1
exec /usr/bin/python3 test/fuzz/layouts --seed "${SEED:-1}" --count "${COUNT:-100}" --refused 50 --jobs 2
