#!/usr/bin/env bash
# The commit of this source, with +changes where what is compiled differs from it. Nothing where there is no git, or where
# the source lies in a folder of another repository.
cd "$(dirname "$0")/.." || exit
[ "$(git rev-parse --show-prefix 2>/dev/null)$?" = 0 ] || exit 0
commit=$(git rev-parse --short=12 HEAD 2>/dev/null) || exit 0
git diff --quiet HEAD -- src cuda main.c Makefile 2>/dev/null || commit+=+changes
echo "$commit"
