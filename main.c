/*
 * megatrain: pretraining of GPT models.
 * The way of one batch of tokens from file to changed weight: docs/architecture.md, "From file to changed weight".
 */
#include "base/identity.h"
#include "base/processors.h"
#include "cli/cli.h"

int main(int argc, char **argv)
{
    processors_begin(argv);
    identity_begin(MEGATRAIN_COMMIT);
    return cli_main(argc, argv);
}
