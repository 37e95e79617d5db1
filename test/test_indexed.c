/*
 * Token files against hand-made bytes and a second writer in Python; damaged ones; a process
 * killed at any operation of writing a pair.
 */
#include "test.h"

#include <unistd.h>

#include "token_pair.h"

static int64_t read_bytes(const char *name, char **out)
{
    int64_t size = 0;
    OK(file_read_all(in_dir(name), 1 << 28, out, &size));
    return size;
}

/* Two documents, {1, 2, 300} and {65535}, and an empty one between. */
static const uint8_t hand_idx[] = {
    'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0,                      /* magic */
    1,   0,   0,   0,   0,   0,   0,   0,                         /* version */
    8,                                                            /* u16 */
    2,   0,   0,   0,   0,   0,   0,   0,                         /* sequences */
    4,   0,   0,   0,   0,   0,   0,   0,                         /* document entries */
    3,   0,   0,   0,   1,   0,   0,   0,                         /* lengths */
    0,   0,   0,   0,   0,   0,   0,   0, 6, 0, 0, 0, 0, 0, 0, 0, /* byte offsets */
    0,   0,   0,   0,   0,   0,   0,   0, 1, 0, 0, 0, 0, 0, 0, 0, /* documents end after */
    1,   0,   0,   0,   0,   0,   0,   0, 2, 0, 0, 0, 0, 0, 0, 0,
};
static const uint8_t hand_bin[] = { 1, 0, 2, 0, 44, 1, 255, 255 };

static void write_hand(const char *prefix)
{
    char name[64];
    snprintf(name, sizeof name, "%s.idx", prefix);
    write_bytes(name, hand_idx, sizeof hand_idx);
    snprintf(name, sizeof name, "%s.bin", prefix);
    write_bytes(name, hand_bin, sizeof hand_bin);
}

TEST(indexed_bytes_by_hand)
{
    static const int32_t ids[] = { 1, 2, 300, 65535 };
    IndexedWriter *w;
    Indexed x;
    char *got;
    int32_t back[4];
    OK(indexed_create(in_dir("w"), TOKEN_U16, &w));
    OK(indexed_add_tokens(w, ids, 3));
    OK(indexed_end_document(w));
    OK(indexed_end_document(w));
    OK(indexed_add_tokens(w, ids + 3, 1));
    CHECK(!file_exists(in_dir("w.idx")) && !file_exists(in_dir("w.bin")));
    OK(indexed_finish(w));
    int64_t n = read_bytes("w.idx", &got);
    CHECK(n == sizeof hand_idx && memcmp(got, hand_idx, sizeof hand_idx) == 0);
    free(got);
    n = read_bytes("w.bin", &got);
    CHECK(n == sizeof hand_bin && memcmp(got, hand_bin, sizeof hand_bin) == 0);
    free(got);
    OK(indexed_open(in_dir("w"), &x));
    CHECK(x.sequences == 2 && x.documents == 3 && x.tokens == 4 && x.type == TOKEN_U16);
    CHECK(indexed_length(&x, 0) == 3 && indexed_start(&x, 1) == 3 && indexed_start(&x, 2) == 4);
    CHECK(indexed_document_end(&x, 0) == 1 && indexed_document_end(&x, 1) == 1 &&
          indexed_document_end(&x, 2) == 2);
    OK(indexed_read(&x, 0, 4, 0, back));
    CHECK(memcmp(back, ids, sizeof ids) == 0);
    indexed_close(&x);
}

TEST(indexed_types)
{
    static const struct {
        TokenType type;
        int bytes;
        uint64_t value; /* little endian in the file */
        int64_t want;   /* -1: refused */
    } cases[] = {
        { TOKEN_U8, 1, 200, 200 },      { TOKEN_I8, 1, 100, 100 },
        { TOKEN_I8, 1, 200, -1 },       { TOKEN_I16, 2, 30000, 30000 },
        { TOKEN_I16, 2, 40000, -1 },    { TOKEN_U16, 2, 40000, 40000 },
        { TOKEN_I32, 4, 70000, 70000 }, { TOKEN_I32, 4, 0xFFFFFFFFu, -1 },
        { TOKEN_I64, 8, 70000, 70000 }, { TOKEN_I64, 8, 1ull << 40, -1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t idx[34 + 4 + 8 + 16] = { 0 };
        int32_t got;
        Indexed x;
        memcpy(idx, hand_idx, 18);
        idx[17] = (uint8_t)cases[i].type;
        idx[18] = 1, idx[26] = 2, idx[34] = 1, idx[34 + 4 + 8 + 8] = 1;
        write_bytes("t.idx", idx, sizeof idx);
        write_bytes("t.bin", &cases[i].value, cases[i].bytes);
        OK(indexed_open(in_dir("t"), &x));
        if (cases[i].want >= 0) {
            OK(indexed_read(&x, 0, 1, 0, &got));
            CHECK(got == cases[i].want);
        } else FAILS(indexed_read(&x, 0, 1, 0, &got), ERR_DATA, "document 0, position 0");
        indexed_close(&x);
    }
}

TEST(indexed_equals_python)
{
    static const char *const specs[] = {
        "{\"dtype\":8,\"documents\":[[1,2,3],[],[4,65499],[7]]}",
        "{\"dtype\":4,\"documents\":[[],[100000,2,3],[4],[],[]]}"
    };
    static const int32_t ids[2][6] = { { 1, 2, 3, 4, 65499, 7 }, { 100000, 2, 3, 4 } };
    static const int lengths[2][5] = { { 3, 0, 2, 1, -1 }, { 0, 3, 1, 0, 0 } };
    if (system("/usr/bin/python3 -c '' 2>/dev/null") != 0) SKIP("no /usr/bin/python3");
    for (int i = 0; i < 2; i++) {
        IndexedWriter *w;
        char command[512];
        const int32_t *at = ids[i];
        snprintf(command, sizeof command, "echo '%s' | /usr/bin/python3 test/tools/write_idx.py %s",
                 specs[i], in_dir("py"));
        CHECK(system(command) == 0);
        OK(indexed_create(in_dir("c"), i ? TOKEN_I32 : TOKEN_U16, &w));
        for (int d = 0; d < 5 && lengths[i][d] >= 0; at += lengths[i][d++]) {
            OK(indexed_add_tokens(w, at, lengths[i][d]));
            OK(indexed_end_document(w));
        }
        OK(indexed_finish(w));
        CHECK(same_files("c.idx", "py.idx") && same_files("c.bin", "py.bin"));
    }
}

static Err open_and_close(const char *prefix)
{
    Indexed x;
    Err err = indexed_open(in_dir(prefix), &x);
    if (!err) indexed_close(&x);
    return err;
}

static void check_patched(int64_t at, uint8_t value, const char *message)
{
    uint8_t idx[sizeof hand_idx];
    memcpy(idx, hand_idx, sizeof idx);
    idx[at] = value;
    write_bytes("p.idx", idx, sizeof idx);
    write_bytes("p.bin", hand_bin, sizeof hand_bin);
    FAILS(open_and_close("p"), ERR_DATA, message);
    if (at < 34) CHECK_MSG(strstr(err_message(), "p.idx"), "%s", err_message());
}

TEST(indexed_damage)
{
    check_patched(0, 'm', "does not start with MMIDIDX");
    check_patched(8, 1, "does not start with MMIDIDX");
    check_patched(9, 2, "version is not 1");
    check_patched(16, 1, "version is not 1");
    check_patched(17, 7, "floating point");
    check_patched(17, 9, "type is unknown");
    check_patched(17, 0, "type is unknown");
    check_patched(17, 4, "does not start where"); /* i32: pointers no longer fit */
    check_patched(18, 3, "size does not fit");
    check_patched(25, 0x80, "more sequences than");
    check_patched(22, 1, "more sequences than");
    check_patched(26, 0, "number of documents");
    check_patched(33, 0x7F, "number of documents");
    check_patched(37, 0x80, "negative length");
    check_patched(38, 2, "describes 10");
    check_patched(42, 1, "does not start where");
    check_patched(50, 7, "does not start where");
    check_patched(50, 200, "beyond the end of PREFIX.bin");
    check_patched(57, 0x80, "beyond the end of PREFIX.bin");
    check_patched(58, 1, "does not start with 0");
    check_patched(66, 3, "ends before it begins or beyond");
    check_patched(74, 0, "ends before it begins or beyond");
    check_patched(82, 1, "does not cover all");

    write_hand("h");
    OK(open_and_close("h"));
    for (int64_t n = 0; n < (int64_t)sizeof hand_idx; n++) {
        write_bytes("h.idx", hand_idx, n);
        CHECK_MSG(open_and_close("h") == ERR_DATA, "cut to %lld bytes", (long long)n);
    }
    write_hand("h");
    write_bytes("h.bin", hand_bin, sizeof hand_bin - 1);
    FAILS(open_and_close("h"), ERR_DATA, "has 7 bytes");
    write_bytes("h.bin", hand_bin, 4);
    FAILS(open_and_close("h"), ERR_DATA, "beyond the end of PREFIX.bin");
    write_bytes("h.bin", hand_bin, 0);
    FAILS(open_and_close("h"), ERR_DATA, "h.idx");
    OK(file_remove_tree(in_dir("h.bin")));
    FAILS(open_and_close("h"), ERR_DATA, "no token file");
    FAILS(open_and_close("nowhere"), ERR_DATA, "nowhere.idx");

    uint8_t modes[sizeof hand_idx + 2] = { 0 };
    memcpy(modes, hand_idx, sizeof hand_idx);
    write_bytes("m.idx", modes, sizeof modes);
    write_bytes("m.bin", hand_bin, sizeof hand_bin);
    FAILS(open_and_close("m"), ERR_DATA, "multimodal");
    uint8_t none[42] = { 0 };
    memcpy(none, hand_idx, 18);
    none[26] = 1;
    write_bytes("m.idx", none, sizeof none);
    write_bytes("m.bin", "", 0);
    FAILS(open_and_close("m"), ERR_DATA, "holds no tokens");
}

TEST(indexed_swapped_bin)
{
    write_pair("one", TOKEN_U16, (int[]){ 5, 6 }, 2, 100);
    write_pair("two", TOKEN_U16, (int[]){ 5, 7 }, 2, 100);
    OK(file_rename(in_dir("two.bin"), in_dir("one.bin")));
    FAILS(open_and_close("one"), ERR_DATA, "has 24 bytes");
    CHECK(strstr(err_hint_text(), "another pair"));
}

TEST(indexed_bit_flips)
{
    for (int bit = 0; bit < 8 * (int)sizeof hand_idx; bit++) {
        uint8_t idx[sizeof hand_idx];
        memcpy(idx, hand_idx, sizeof idx);
        idx[bit / 8] ^= (uint8_t)(1 << bit % 8);
        write_bytes("f.idx", idx, sizeof idx);
        write_bytes("f.bin", hand_bin, sizeof hand_bin);
        Err err = open_and_close("f");
        /* some flips give another valid file: u16 read as i16, a document that ends elsewhere */
        bool harmless = (bit / 8 >= 66 && bit / 8 < 82) || bit / 8 == 17;
        CHECK_MSG(err == ERR_DATA || (harmless && err == ERR_OK), "bit %d", bit);
    }
}

/* A pair with its checksums: whichever bit of the three files is another, or wherever one ends, it is seen. */
TEST(indexed_sums)
{
    static const char *const names[] = { "s.idx", "s.bin", "s.crc" };
    const bool every = getenv("MEGATRAIN_DAMAGE") != NULL;
    bool known;
    Indexed x;
    write_pair("s", TOKEN_U16, (int[]){ 5, 1, 9, 1 }, 4, 100);
    OK(indexed_open(in_dir("s"), &x));
    OK(indexed_verify(&x, &known));
    CHECK(known && x.documents == 4);
    indexed_close(&x);
    for (int f = 0; f < 3; f++) {
        char *good;
        int64_t size = read_bytes(names[f], &good), missed = 0, cut = 0;
        for (int64_t bit = 0; bit < 8 * size; bit += every ? 1 : 3) {
            good[bit / 8] ^= (char)(1 << bit % 8);
            write_bytes(names[f], good, size);
            Err err = indexed_open(in_dir("s"), &x);
            if (!err) {
                err = indexed_verify(&x, &known);
                indexed_close(&x);
            }
            missed += err != ERR_DATA || !strstr(err_message(), f == 2 ? "s." : names[f]);
            good[bit / 8] ^= (char)(1 << bit % 8);
        }
        for (int64_t n = 0; n < size; n++) {
            write_bytes(names[f], good, n);
            cut += open_and_close("s") != ERR_DATA;
        }
        CHECK_MSG(!missed && !cut, "%s: %lld flips, %lld ends", names[f], (long long)missed, (long long)cut);
        write_bytes(names[f], good, size);
        free(good);
    }
    OK(open_and_close("s"));
    OK(file_remove_tree(in_dir("s.crc"))); /* which is not needed */
    OK(indexed_open(in_dir("s"), &x));
    OK(indexed_verify(&x, &known));
    CHECK(!known);
    indexed_close(&x);
}

/* Ids know their tokenizer, where its line is in PREFIX.crc; a pair without it takes any. */
TEST(indexed_tokenizer)
{
    IndexedWriter *w;
    Indexed x;
    char *text;
    OK(indexed_create(in_dir("t"), TOKEN_U16, &w));
    indexed_made_with(w, 0x0badcafe);
    OK(indexed_add_tokens(w, (int32_t[]){ 1, 2, 3 }, 3));
    OK(indexed_finish(w));
    for (int known = 1; known >= 0; known--) {
        bool summed;
        OK(indexed_open(in_dir("t"), &x));
        OK(indexed_verify(&x, &summed));
        CHECK(summed && x.made_with == known);
        OK(indexed_check_tokenizer(&x, 0x0badcafe, "mine"));
        if (known)
            FAILS(indexed_check_tokenizer(&x, 0x0badcaff, "mine"), ERR_DATA,
                  "was made with another tokenizer than 'mine': checksums 0badcafe and 0badcaff");
        else OK(indexed_check_tokenizer(&x, 0x0badcaff, "mine"));
        indexed_close(&x);
        const int64_t size = read_bytes("t.crc", &text);
        if (known) {
            CHECK(!memcmp(text, "tokenizer crc32c 0badcafe\nbin", 29));
            for (int64_t n = 1; n < size; n++) { /* cut at either end, but for the whole line */
                write_bytes("t.crc", text, n);
                CHECK(open_and_close("t") == ERR_DATA);
                write_bytes("t.crc", text + n, size - n);
                CHECK_MSG((open_and_close("t") == ERR_OK) == (n == 26), "without its first %d bytes", (int)n);
            }
            write_bytes("t.crc", text + 26, size - 26);
        }
        free(text);
    }
}

TEST(indexed_vocabulary)
{
    Indexed x;
    int32_t out[8];
    int64_t highest;
    write_hand("v");
    OK(indexed_open(in_dir("v"), &x));
    OK(indexed_read(&x, 0, 4, 65536, out));
    FAILS(indexed_read(&x, 0, 4, 65535, out), ERR_DATA,
          "token id 65535 at byte 6 (document 2, position 0)");
    FAILS(indexed_read(&x, 1, 2, 300, out), ERR_DATA,
          "token id 300 at byte 4 (document 0, position 2)");
    FAILS(indexed_check(&x, 0, x.tokens, 300, NULL), ERR_DATA, "document 0, position 2");
    OK(indexed_check(&x, 0, 2, 300, NULL));
    OK(indexed_check(&x, 0, x.tokens, 0, &highest));
    CHECK(highest == 65535);
    indexed_close(&x);
    CHECK(indexed_type_for(65499) == TOKEN_U16 && indexed_type_for(65500) == TOKEN_I32);
}

TEST(indexed_writer_leaves_nothing)
{
    IndexedWriter *w;
    OK(indexed_create(in_dir("sub/deep/x"), TOKEN_I32, &w));
    OK(indexed_end_document(w));
    FAILS(indexed_finish(w), ERR_DATA, "no tokens");
    OK(indexed_create(in_dir("sub/deep/x"), TOKEN_I32, &w));
    OK(indexed_add_tokens(w, &(int32_t){ 5 }, 1));
    indexed_abandon(w);
    CHECK(dir_is_empty("sub/deep"));
}

/* Run by the next test in a process of its own, which a fault hits at the N-th file operation. */
TEST(fault_child)
{
    const char *prefix = getenv("DATA_FAULT_PREFIX");
    IndexedWriter *w;
    CHECK(true);
    if (!prefix) return;
    if (indexed_create(prefix, TOKEN_U16, &w) != ERR_OK) exit(3);
    if (indexed_add_tokens(w, (int32_t[]){ 7, 8, 9 }, 3) != ERR_OK) exit(3);
    exit(indexed_finish(w) == ERR_OK ? 0 : 3);
}

static int run_fault(const char *action, int operation)
{
    char exe[256], command[1024];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = 0;
    write_pair("k/x", TOKEN_U16, (int[]){ 5 }, 1, 100);
    snprintf(command, sizeof command,
             "DATA_FAULT_PREFIX=%s MEGATRAIN_FILE_FAULT=%s@%d sh -c 'exec %s fault_child' >%s 2>&1",
             in_dir("k/x"), action, operation, exe, in_dir("fault.log"));
    return system(command);
}

/* Whatever operation is the last: the old pair, the new one, or none that looks like one. */
TEST(indexed_faults)
{
    static const char *const actions[] = { "kill", "enospc", "short", "eio" };
    for (int a = 0; a < 4; a++) {
        int whole = 0, absent = 0, done = -1;
        for (int n = 1; n < 30 && done != 0; n++) {
            Indexed x;
            char command[256];
            done = run_fault(actions[a], n);
            if (file_exists(in_dir("k/x.idx"))) {
                OK(indexed_open(in_dir("k/x"), &x));
                CHECK(x.tokens == (done == 0 ? 3 : x.tokens) && (x.tokens == 5 || x.tokens == 3));
                indexed_close(&x);
                whole++;
            } else absent++;
            snprintf(command, sizeof command, "test -z \"$(ls %s | grep tmp)\"", in_dir("k"));
            CHECK_MSG(a == 0 || system(command) == 0, "%s@%d leaves a temporary file", actions[a],
                      n);
            OK(file_remove_tree(in_dir("k")));
        }
        CHECK_MSG(done == 0 && whole > 4 && absent >= 1, "%s: %d whole, %d absent", actions[a],
                  whole, absent);
    }
}

TEST_MAIN
