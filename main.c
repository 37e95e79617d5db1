/*
 * megatrain: pretraining of GPT models.
 * The way of one batch of tokens from file to changed weight: README, "How it works".
 */
#include "cli/cli.h"

int main(int argc, char **argv) { return cli_main(argc, argv); }
