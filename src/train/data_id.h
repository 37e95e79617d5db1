/*
 * What a run trains on, as a text that its checkpoints keep: when the run goes on, the data must be the same.
 *
 *   train 1c291ca3, tokenizer 8a9136aa
 *   data/books: 4096 bytes, 12 documents, 2048 tokens, index 5e7f1021, content 77aa0b12
 *   ...
 *   from sample 72000 on                    the files of a later stage (data/dataset.h)
 *
 * The first line decides: checksums over the order of samples (indexes, split, weights, seq, seed) and the tokenizer.
 * The lines of the token files say what differs. `content` is there where PREFIX.crc is (data/indexed.h), and decides
 * too if both texts have it: the files may then lie elsewhere. Without it they must have the same path, and tokens that
 * differ in files of the same lengths are not noticed.
 */
#ifndef MEGATRAIN_TRAIN_DATA_ID_H
#define MEGATRAIN_TRAIN_DATA_ID_H

#include <stdio.h>

#include "base/arena.h"
#include "data/dataset.h"
#include "data/tokenizer.h"

/* A source's line. */
void data_id_put_source(FILE *f, DatasetSource s);

/* Makes the text, in `setup`. */
Err data_id_make(const Dataset *train, const Tokenizer *tokenizer, SetupArena *setup, char **out);

/* The parts that may differ. DATA_ORDER: the order of the samples of the same files. */
enum { DATA_TOKENIZER = 1, DATA_FILES = 2, DATA_ORDER = 4, DATA_ALL = 7 };

/* A set of these. */
unsigned data_id_differs(const char *now, const char *then);

/* ERR_CKPT, which names what differs besides `allowed`, how both texts describe it, and the way out. */
Err data_id_same(const char *now, const char *then, unsigned allowed);

/* For weights alone, whatever data they go on with: ERR_CKPT if they were trained with another tokenizer. */
Err data_id_same_tokenizer(const Tokenizer *now, const char *then);

#endif
