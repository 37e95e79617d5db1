#!/usr/bin/env bash
# turn.sh N: which N-th of a long list is tried, 0 to N - 1: by the commit, so that CI comes to all of it in time. TURN=K
# chooses another.
: "${1:?usage: turn.sh N}"
commit=$("$(dirname "${BASH_SOURCE[0]}")/../scripts/commit.sh")
commit=${commit%%+*}
echo "$((${TURN:-0x${commit:-0}} % $1))"
