/* Commands that have their name and place but no body yet. */
#include "cli/command.h"

const Command command_convert = {
    .name = "convert",
    .summary = "Hugging Face models in and out",
    .rest = "...",
};
