# What the emulator compiles of a .cu file: the same lines, and in each kernel that has __launch_bounds__(N) a check,
# as the body's first statement, that the launch has no more threads. (A compiler for CUDA knows the number and the chip
# refuses; a host's has nowhere to keep it.) For kernels as clang-format leaves them: the body's brace has its own line.
BEGIN { file = ARGV[1]; printf "#line 1 \"%s\"\n", file }

# Up to the parenthesis that closes the first one of `text`.
function inside(text,    i, c, depth) {
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (c == "(") depth++
        if (c == ")" && !--depth) return substr(text, 2, i - 2)
    }
    stop("__launch_bounds__ goes over the end of the line")
}
function stop(why) {
    printf "%s:%d: %s\n", file, FNR, why >"/dev/stderr"
    stopped = 1
    exit 1
}
/^ *\/?\*/ { print; next } # of a comment
/__launch_bounds__\(/ {
    if (bounds != "") stop("a kernel without a body before this one")
    bounds = inside(substr($0, index($0, "__launch_bounds__(") + 17))
}
$0 == "{" && bounds != "" { print "{ ::emu::launch_bounds(" bounds ");"; bounds = ""; next }
{ print }
END { if (!stopped && bounds != "") stop("a kernel without a body of its own lines") }
