/*
 * All tests of test/cuda and benchmarks of bench/cuda in one program, told apart by the name that it is called by
 * (links in $(BUILD)/gpu): each by itself would carry all kernels. names.def is made by the Makefile, which also
 * compiles each with its main renamed to NAME_main.
 */
#include <stdio.h>
#include <string.h>

#define PROGRAM(name) int name##_main(int argc, char **argv);
#include "names.def"
#undef PROGRAM

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} programs[] = {
#define PROGRAM(name) { #name, name##_main },
#include "names.def"
#undef PROGRAM
};

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (!strcmp(programs[i].name, name)) return programs[i].run(argc, argv);
    fprintf(stderr, "call me by one of these names:\n");
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) fprintf(stderr, "  %s\n", programs[i].name);
    return 2;
}
