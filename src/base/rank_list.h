/* Lists of ranks in a configuration: "0,3-5", or "all". */
#ifndef MEGATRAIN_BASE_RANK_LIST_H
#define MEGATRAIN_BASE_RANK_LIST_H

#include <stdbool.h>

/* Is the text such a list, of ranks below `ranks`? Then, unless NULL, in[r] for those that are in it, else not. */
bool rank_list_read(const char *text, int ranks, bool *in);

#endif
