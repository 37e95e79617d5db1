/* Writes a token file pair into the scratch folder. */
#ifndef MEGATRAIN_TEST_TOKEN_PAIR_H
#define MEGATRAIN_TEST_TOKEN_PAIR_H

#include "data/indexed.h"
#include "scratch.h"

/* documents of the given lengths; token k of the whole file is (k * 7 + 3) % vocab */
static inline void write_pair(const char *prefix, TokenType type, const int *lengths, int documents,
                              int vocab)
{
    IndexedWriter *w;
    int k = 0;
    OK(indexed_create(in_dir(prefix), type, &w));
    for (int d = 0; d < documents; d++) {
        for (int i = 0; i < lengths[d]; i++, k++)
            OK(indexed_add_tokens(w, &(int32_t){ (k * 7 + 3) % vocab }, 1));
        OK(indexed_end_document(w));
    }
    OK(indexed_finish(w));
}

#endif
