/*
 * The validation sets of a run. data.valid names one data set, or several under names of their own:
 *
 *   prefix                                        one, without a name
 *   0.7 prefix 0.3 prefix                         one blend, without a name
 *   wiki: prefix  code: 0.7 prefix 0.3 prefix     a word that ends in ':' begins a set of that name
 *
 * With data.split there is one, without a name: the valid part of data.train's files.
 */
#ifndef MEGATRAIN_DATA_SETS_H
#define MEGATRAIN_DATA_SETS_H

#include "base/arena.h"
#include "data/dataset.h"

enum { SETS_MAX = 32, SET_NAME_BYTES = 40 /* the closing 0 is counted */ };

typedef struct {
    const char *name; /* "": it has none, and is the only one */
    Dataset *data;
    uint32_t order_crc, content_crc; /* dataset_crc and dataset_content_crc, which read whole indexes */
    bool has_content_crc;
} NamedSet;

typedef struct {
    NamedSet set[SETS_MAX];
    int count; /* 0: there are none */
    SetupArena mem;
} Sets;

/*
 * Opens all sets that o->spec names (with o->split it is one data set). ERR_CONFIG: a name is empty, too long or given
 * twice, or has no data set; a data set beside others has no name; there are too many. Other errors as in dataset_open.
 */
Err sets_open(const DatasetOptions *o, Sets *out);
void sets_close(Sets *s); /* all zero is fine */

/* Finds the set of that name; "": the first. ERR_CONFIG, which names `key`: there is none. */
Err sets_find(const Sets *s, const char *name, const char *key, int *index);

#endif
