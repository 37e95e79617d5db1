/* Manifests with many pieces: the memory that reading them takes, and how many. (What is wrong in one:
 * test_ckpt_damage.c.) */
#include <malloc.h>

#include "ckpt/pieces.h"
#include "scratch.h"

/* Jansson's; its header and ours do not go together. */
void json_set_alloc_funcs(void *(*take)(size_t), void (*give_back)(void *));
static int64_t tree_bytes, most_tree_bytes;

static void *tree_malloc(size_t bytes)
{
    void *p = malloc(bytes);
    tree_bytes += (int64_t)malloc_usable_size(p);
    if (tree_bytes > most_tree_bytes) most_tree_bytes = tree_bytes;
    return p;
}

static void tree_free(void *p)
{
    tree_bytes -= (int64_t)malloc_usable_size(p);
    free(p);
}

/* Writes text and its checksum where manifest_read looks. */
static void write_manifest(const char *text, int64_t n)
{
    char crc[64];
    write_bytes("manifest.json", text, n);
    manifest_crc_text(crc, crc32c(0, text, (size_t)n), n);
    write_text("manifest.crc", crc);
}

/* A manifest of any length is never a tree as a whole: of 6144 pieces on 1024 ranks as little as of one. */
TEST(a_manifest_is_read_piece_by_piece)
{
    enum { PARAMS = 256, CUTS = 8, FILES = 1024 };
    char *text = malloc(4 << 20);
    Manifest m;
    SetupArena a;
    int64_t n =
        sprintf(text,
                "{\"format\":1,\"program\":\"p\",\"step\":1,\"samples\":1,\"tokens\":1,\"seed\":1,\"reproducible\":"
                "\"layout\",\"blocks\":{\"tp\":1,\"seq\":1,\"attn\":1},\"counters\":{},\"data\":\"\",\"config\":\"\","
                "\"parameters\":[");
    for (int i = 0; i < PARAMS; i++)
        n += sprintf(text + n, "%s{\"name\":\"p%03d\",\"shape\":[16,8],\"shift\":0}", i ? "," : "", i);
    n += sprintf(text + n, "],\"pieces\":[");
    for (int i = 0; i < 3 * PARAMS * CUTS; i++)
        n += sprintf(text + n,
                     "%s{\"name\":\"p%03d\",\"state\":\"%s\",\"dtype\":\"F32\",\"global\":[16,8],\"offset\":[%d,0],"
                     "\"shape\":[2,8],\"file\":\"shard-%05d.safetensors\",\"crc32c\":%d}",
                     i ? "," : "", i / 3 / CUTS, ckpt_state_names[i / CUTS % 3], 2 * (i % CUTS), i % FILES, i);
    n += sprintf(text + n, "],\"files\":[");
    for (int i = 0; i < FILES; i++)
        n += sprintf(text + n, "%s{\"name\":\"shard-%05d.safetensors\",\"size\":4096,\"crc32c\":[1]}", i ? "," : "", i);
    n += sprintf(text + n, "]}");
    write_manifest(text, n);
    setup_init(&a);
    json_set_alloc_funcs(tree_malloc, tree_free);
    OK(manifest_read(in_dir("."), &a, &m));
    json_set_alloc_funcs(malloc, free);
    CHECK(m.param_count == PARAMS && m.piece_count == 3 * PARAMS * CUTS && m.file_count == FILES);
    CHECK(m.pieces[5].file == 0 && m.pieces[6].file == 1 && m.files[1023].size_bytes == 4096);
    CHECK(tree_bytes == 0 && most_tree_bytes > 1000 && most_tree_bytes < 16 << 10);
    setup_release(&a);
    free(text);
}

/* A table of 70B's size on 4096 ranks, tp 8 and ZeRO-1 over 512: a slice begins and ends inside rows. */
TEST(a_manifest_of_4096_ranks_is_read)
{
    enum { TP = 8, DP = 512, PIECES = 3 * TP * DP };
    const ParamSpec table = {
        .name = "embed", .ndim = 2, .shape = { 128256, 8192 }, .padded_rows = 128256, .cut = { CUT_TP }
    };
    const Grid grid = { .tp = TP, .dp = DP };
    char *text = malloc(8 << 20);
    ParamRegistry reg;
    ParamStore store = { .reg = &reg };
    GradStats stats = { 0 };
    const ParamSet params = param_set_single(&store, &stats);
    World world;
    SetupArena a;
    Manifest m;
    PieceIter it;
    int id;
    setup_init(&a);
    param_registry_init(&reg, &a, param_place((Grid){ .tp = TP, .dp = DP }, 0, ZERO_STATES));
    OK(param_add(&reg, table, &id));
    OK(param_layout(&reg, 1));
    OK(world_open_null(&world, grid, 0));
    Ckpt c = { .o = { .params = &params, .world = &world }, .states = 1 };
    OK(pieces_open(&c, &a));
    int64_t n = sprintf(
                text,
                "{\"format\":1,\"program\":\"p\",\"step\":1,\"samples\":1,\"tokens\":1,\"seed\":1,\"reproducible\":"
                "\"run\",\"blocks\":{\"tp\":8,\"seq\":1,\"attn\":1},\"counters\":{},\"data\":\"\",\"config\":\"\","
                "\"parameters\":[{\"name\":\"embed\",\"shape\":[128256,8192],\"shift\":0}],\"pieces\":["),
            pieces = 0;
    for (int rank = 0; rank < TP * DP; rank++)
        for (piece_first(&it, &c, rank); piece_next(&it);)
            n += sprintf(
                text + n,
                "%s{\"name\":\"embed\",\"state\":\"value\",\"dtype\":\"F32\",\"global\":[128256,8192],\"offset\":"
                "[%lld,%lld],\"shape\":[%lld,%lld],\"file\":\"shard-%05d.safetensors\",\"crc32c\":1}",
                pieces++ ? "," : "", (long long)it.piece.offset[0], (long long)it.piece.offset[1],
                (long long)it.piece.shape[0], (long long)it.piece.shape[1], rank);
    CHECK_MSG(pieces > PIECES / 2 && pieces <= PIECES, "%lld pieces", (long long)pieces);
    n += sprintf(text + n, "],\"files\":[");
    for (int rank = 0; rank < TP * DP; rank++)
        n += sprintf(text + n, "%s{\"name\":\"shard-%05d.safetensors\",\"size\":2097152,\"crc32c\":[1,2]}",
                     rank ? "," : "", rank);
    n += sprintf(text + n, "]}");
    write_manifest(text, n);
    OK(manifest_read(in_dir("."), &a, &m));
    CHECK(m.piece_count == pieces);
    world_close(&world);
    setup_release(&a);
    free(text);
}

/* 70B with ZeRO-1 on 512 ranks has 73 MiB, 405B 184 MiB. */
TEST(a_manifest_may_be_larger_than_64_MiB)
{
    enum { BLANKS = 65 << 20 };
    static const char head[] =
        "{\"format\":1,\"program\":\"p\",\"step\":1,\"samples\":1,\"tokens\":1,\"seed\":1,\"reproducible\":\"run\","
        "\"blocks\":{\"tp\":1,\"seq\":1,\"attn\":1},"
        "\"counters\":{},\"data\":\"\",\"config\":\"\",\"parameters\":[{\"name\":\"p\","
        "\"shape\":[16],\"shift\":0}],\"files\":[{\"name\":\"f\",\"size\":4096,\"crc32c\":[1]}],\"pieces\":[";
    static const char tail[] =
        "{\"name\":\"p\",\"state\":\"value\",\"dtype\":\"F32\",\"global\":[16],\"offset\":[0],\"shape\":"
        "[16],\"file\":\"f\",\"crc32c\":1}]}";
    char *text = malloc(sizeof head + BLANKS + sizeof tail);
    int64_t n = sprintf(text, "%s", head);
    memset(text + n, ' ', BLANKS);
    n += BLANKS;
    n += sprintf(text + n, "%s", tail);
    write_manifest(text, n);
    SetupArena a;
    Manifest m;
    setup_init(&a);
    OK(manifest_read(in_dir("."), &a, &m));
    CHECK(m.piece_count == 1 && m.pieces[0].box.shape[0] == 16);
    const int64_t most = manifest_max_bytes;
    CHECK(most == (int64_t)4 << 30);
    manifest_max_bytes = n - 1;
    FAILS(manifest_read(in_dir("."), &a, &m), ERR_CKPT, "allowed");
    manifest_max_bytes = most;
    setup_release(&a);
    free(text);
}

TEST_MAIN
