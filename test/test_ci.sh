#!/usr/bin/env bash
# .ci/run with stand-ins for its lanes: each failure again at the end of its output, then the totals of all lanes.
. "$(dirname "$0")/lib.sh"
mkdir -p .ci test/emu bin build/test-logs/counts-earlier
cp "$root/.ci/run" .ci/run
echo '5 5 5 1' >build/test-logs/counts-earlier/test_of_an_earlier_run
stand_in() { # FILE: a script from standard input
    { echo '#!/bin/bash'; cat; } >"$1"
    chmod +x "$1"
}
echo 'echo 0' | stand_in test/turn.sh
echo 'exit 1' | stand_in test/emu/passed.sh
# a lane with programs that count as test/run.sh does; FAILS: the lane in which one fails
stand_in bin/make <<'M'
lane=$1 fails=0
echo "output of $lane"
case $lane in
lint) [ "$FAILS" != lint ] || { echo "lint: a line is too long"; echo "make: *** [Makefile:1: lint] Error 1"; exit 2; } ;;
test-launchers) # the second one of two lanes, which ends after the first
    sleep 1
    echo "the end of $lane"
    [ "$FAILS" != $lane ] || { echo "make: *** [Makefile:1: $lane] Error 1"; exit 2; } ;;
test | asan)
    build=build
    [ $lane = test ] || build=build-asan
    [ "$FAILS" != $lane ] || fails=2
    counts=$build/test-logs/counts-$lane
    mkdir -p $counts
    echo "10 $fails 1 0.5" >$counts/test_one
    { [ $fails = 0 ] || echo "FAIL: the early check of $lane"; seq 30; echo "the end of $lane's log"; } >$build/test-logs/test_one.log
    echo "processor seconds of programs: 0"
    echo "10 passed, $fails failed, 1 skipped"
    [ $fails = 0 ] || { echo "make: *** [Makefile:1: $lane] Error 1"; exit 2; } ;;
esac
M
ci() { PATH=$work/bin:$PATH FAILS=$1 .ci/run >out.txt 2>&1 </dev/null; }
at_end() { tail -25 out.txt | grep -qxF -- "$1"; } # LINE
last_is() { [ "$(tail -1 out.txt)" = "$1" ]; }

ci nowhere
check "all lanes pass: exit $?" [ $? -eq 0 ]
check "totals of all lanes: $(tail -1 out.txt)" last_is '20 passed, 0 failed, 2 skipped'
check "each lane's output once" [ "$(grep -cx 'output of test-slow' out.txt)" -eq 1 ]
check "a lane beside another is waited for" grep -qx 'the end of test-launchers' out.txt
for lane in test asan; do
    ci $lane
    check "$lane fails: exit $?" [ $? -eq 1 ]
    check "$lane fails: lanes after it run" grep -qx 'output of cuda-12' out.txt
    check "$lane fails: its program's failure again" at_end "    FAIL: the early check of $lane"
    check "$lane fails: the end of that log" at_end "    the end of $lane's log"
    check "$lane fails: the lane is named" at_end "== $lane, failed"
    check "$lane fails: totals of all lanes: $(tail -1 out.txt)" last_is '20 passed, 2 failed, 2 skipped'
done
ci test-launchers
check "a lane beside another fails: exit $?" [ $? -eq 1 ]
check "a lane beside another fails: it is named" at_end "== test-launchers, failed"
ci lint
check "lint fails: exit $?" [ $? -eq 1 ]
check "lint fails: what it printed again" at_end '    lint: a line is too long'
check "lint fails: it counts as one failure: $(tail -1 out.txt)" last_is '20 passed, 1 failed, 2 skipped'
finish
