/*
 * Inside of Tokenizer, shared by tokenizer.c and encode.c (use), tokenizer_json.c, tokenizer_parts.c and
 * tokenizer_write.c (files) and bpe_train.c (training).
 */
#ifndef MEGATRAIN_DATA_TOKENIZER_IMPL_H
#define MEGATRAIN_DATA_TOKENIZER_IMPL_H

#include <limits.h>

#include "base/json.h"
#include "data/added.h"
#include "data/bpe.h"
#include "data/pretoken.h"
#include "data/tokenizer.h"

/* Stages that a text goes through, one after the other, until its pieces come to the model. */
typedef enum {
    STAGE_ADDED,   /* added tokens are cut out */
    STAGE_NFC,     /* the text is composed */
    STAGE_REPLACE, /* every `from` becomes `to` */
    STAGE_PREFIX,  /* `to` is put in front */
    STAGE_SPLIT    /* the text falls into pieces */
} StageKind;

typedef enum {
    PREFIX_ALWAYS,
    PREFIX_UNLESS_THERE,
    PREFIX_FIRST /* unless it is there, and only where the whole text begins */
} PrefixRule;

/* How the spans of a pattern, its matches and what lies between them, become pieces. */
typedef enum {
    BEHAVIOR_ISOLATED,  /* each is a piece */
    BEHAVIOR_REMOVED,   /* matches are left out */
    BEHAVIOR_PREVIOUS,  /* a match belongs to the span before it, unless that is a match */
    BEHAVIOR_NEXT,      /* a match belongs to the span behind it, unless that is a match */
    BEHAVIOR_CONTIGUOUS /* matches that touch are one piece */
} SplitBehavior;

typedef struct {
    StageKind kind;
    const AddedSet *set; /* ADDED */
    TokenText from, to;
    PrefixRule rule;
    Splitter *splitter; /* SPLIT, with the two below */
    SplitBehavior behavior;
    bool invert; /* text between matches counts as the match */
} Stage;

enum { STAGES_MAX = 24 };

/* Place of a stage's text in the whole text. */
typedef enum {
    PLACE_FIRST,    /* where the whole text begins */
    PLACE_INSIDE,   /* where a piece begins further on */
    PLACE_CONTINUES /* behind the end of a part that was encoded before */
} Place;

typedef struct {
    char *text;
    int64_t size, capacity;
    int64_t most; /* bytes that it may hold */
} StageBuffer;

/* How the texts of tokens of characters join. (Bytes just follow one another.) */
typedef enum {
    JOIN_PLAIN,
    JOIN_STRIP, /* a blank that begins the whole text is left out */
    JOIN_MARKS  /* all blank marks of the first token are left out */
} DecodeJoin;

struct Tokenizer {
    SetupArena mem; /* holds everything below except the patterns */
    const char *path;
    bool is_byte; /* the `byte` tokenizer: only vocab and eod are set */
    Bpe bpe;
    Stage stages[STAGES_MAX];
    int stage_count, normalizers; /* those between stages[0] and the second cutting out of added tokens rewrite text */
    AddedToken *added;
    int64_t added_count;
    AddedSet sets[2]; /* the added tokens: raw ones, normalized ones */
    TokenText *text;  /* [vocab] the bytes of every id inside of a text, added tokens included */
    TokenText *first; /* [vocab] the same where a text begins; `text` itself unless that is another */
    int32_t vocab, eod;
    int32_t before, behind; /* ids that the post-processor puts round a text; -1: none. (Encoding does not.) */

    /* the decoder, of tokens of characters */
    Stage *spell; /* [spell_count] replacements in the text of each token */
    int spell_count;
    bool spell_bytes; /* <0xNN> is a byte */
    DecodeJoin join;

    /* are cuts allowed at the places of split_cut, or only at those of them that are blanks? */
    enum { CUT_NOWHERE, CUT_BLANKS, CUT_WORDS } cut;
    bool prefixes; /* some stage puts something in front of pieces */
    char blank;    /* the first byte of what a blank becomes before normalized added tokens are sought */
};

/* Rewrites by one stage that does; *text then is in the buffer, unless nothing changes. ERR_DATA: it holds too much. */
Err stage_rewrite(const Stage *s, const char **text, int64_t *size, Place place, StageBuffer *b);

/* Bytes that the stages may make of a token's text. A mark in place of a blank makes three of one. */
static inline int64_t token_most(int64_t size) { return 64 + 4 * size; }

/* Stages and decoder from the members of a tokenizer.json around the model. *characters: tokens are spelled in
 * characters, not in the alphabet of bytes. ERR_DATA names what is not supported. */
Err tokenizer_load_parts(Tokenizer *t, const Json *j, bool *characters);
/* The stages of GPT-2's two files. */
Err tokenizer_plain_parts(Tokenizer *t);
/* Finds where texts may be cut: after the vocabulary and the added tokens. */
void tokenizer_find_cuts(Tokenizer *t);
/* Replaces the spellings in `text` by texts, and fills `first`. */
Err tokenizer_spell(Tokenizer *t);

/* *out in t->mem. */
Err tokenizer_copy_text(Tokenizer *t, const char *text, int64_t size, TokenText *out);

/* The member is not there, or null. */
bool json_is_absent(const Json *j);
/* ERR_DATA if the object has a member that is none of these names, which have blanks between them. */
Err json_check_members(const Json *j, const char *where, const char *names);

enum { TOKENIZER_FILE_MOST = 256 << 20 }; /* bytes of a file */

/* Fill the model, `text`, added tokens and vocab of a zeroed tokenizer. ERR_DATA. */
Err tokenizer_load_json(Tokenizer *t, const char *path);
Err tokenizer_load_pair(Tokenizer *t, const char *vocab_path, const char *merges_path);
/* The two files of a folder that has a vocabulary and merges apart. */
bool tokenizer_find_pair(const char *dir, char vocab[PATH_MAX], char merges[PATH_MAX]);

/* A merge found by training: the ids of its two tokens. */
typedef struct {
    int32_t left, right;
} TrainedMerge;

#define END_OF_TEXT "<|endoftext|>"

/* Writes a trained vocabulary; the id after the last token becomes END_OF_TEXT. ERR_IO. */
Err tokenizer_json_write(const char *path, const TokenText *tokens, int64_t token_count, const TrainedMerge *merges,
                         int64_t merge_count);

#endif
