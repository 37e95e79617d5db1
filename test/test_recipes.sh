#!/usr/bin/env bash
# The recipe for a schedule in docs/pipeline.md, word for word: put into a copy of the source it compiles without a warning,
# is drawn and ranked, refuses the shapes that it says, and trains to the bits of one rank.
. "$(dirname "$0")/lib.sh"
build=${BUILD:-build}

# The copy has the objects too, so that only what the recipe touches is compiled.
mkdir -p "tree/$build"
cp -a "$root/Makefile" "$root/main.c" "$root/src" tree
[ ! -d "$root/$build/src" ] || cp -a "$root/$build/src" "tree/$build"

# Blocks of C under "To add a schedule". Their first line names the file; '...' parts what goes to two places of it: a row
# stands in the table, a prototype at a header's end, the rest before the table or at the end.
perl -0777 -e '
    my ($section) = <STDIN> =~ /^## To add a schedule\n(.*?)(?=^## |\z)/ms or die "no section\n";
    while ($section =~ /^```c\n(\/\* (\S+?)[:,].*?)^```$/msg) {
        my ($block, $path) = ($1, "tree/src/pipeline/$2");
        local @ARGV = $path;
        my $text = <>;
        for my $piece (split /^\.\.\.\n/m, $block) {
            my $table = qr/^const ScheduleKind schedule_table\[\] = \{\n/m;
            if ($piece =~ /^\s*\{/) { $text =~ s/($table)/$1$piece/ or die "$path: no table\n" }
            elsif ($path =~ /\.h$/) { $text =~ s/(#endif\n*)\z/$piece\n$1/ or die "$path: no end\n" }
            elsif ($text =~ $table) { $text =~ s/($table)/$piece\n$1/ }
            else { $text .= "\n$piece" }
        }
        open my $out, ">", $path or die "$path: $!\n";
        print $out $text;
        print "$path\n";
    }' <"$root/docs/pipeline.md" >places.txt || bad "the recipe finds its places"
check "three files: $(xargs <places.txt)" [ "$(sort -u places.txt | wc -l)" -eq 3 ]
make -s -C tree -j"$(nproc)" CUDA=0 BUILD="$build" EXTRA_CFLAGS=-Werror megatrain >make.log 2>&1
check "it compiles: $(grep -m3 -E 'error|warning' make.log)" [ -x tree/megatrain ]
mt=$work/tree/megatrain

expect 0 "gpipe-pairs" "$mt" simulate --schedule gpipe-pairs --stages 4 --microbatches 8
expect 0 "gpipe-pairs" "$mt" simulate --compare --stages 4 --microbatches 8
expect 2 "an even number of micro-batches" "$mt" simulate --schedule gpipe-pairs --stages 4 --microbatches 7

make_tiny
make_ini pairs.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=32 train.global_batch=16 train.steps=4
"$mt" --config pairs.ini run.dir=one >/dev/null 2>&1
OMP_NUM_THREADS=1 "$root/scripts/launch.sh" -n 2 -- "$mt" --config pairs.ini run.dir=two parallel.pp=2 \
    parallel.schedule=gpipe-pairs >/dev/null 2>two.err
check "two ranks train as one: $(grep -m1 error two.err)" same_run two one 4
finish
