/* The table of commands, in the order of the help. */
#include "cli/command.h"

static const Command *const table[] = {
    &command_train,    &command_eval,   &command_generate, &command_preprocess, &command_tokenizer_train,
    &command_tokenize, &command_plan,   &command_simulate, &command_inspect,    &command_report,
    &command_convert,  &command_doctor, &command_config,
};
enum { COMMANDS = (int)(sizeof table / sizeof *table) };
_Static_assert((int)COMMANDS <= (int)COMMANDS_MAX, "COMMANDS_MAX");

const Command *const *commands(int *count)
{
    *count = COMMANDS;
    return table;
}
