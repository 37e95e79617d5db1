/*
 * Checkpoints that went wrong: damage of any byte is found and named, and whatever file operation of a save
 * fails or is the last one before kill -9, the previous checkpoint stays and no half one is ever taken for
 * whole.
 *
 * Faults run in a child: this program again, with CKPT_CHILD in its environment.
 */
#include "ckpt_fixture.h"

#include <sys/wait.h>

/* ---- damage ---- */

static const char *const files_of_two[] = { "shard-00000.safetensors", "shard-00001.safetensors",
                                            "manifest.json", "manifest.crc" };

/* The failure must name the file; for the manifest's two files either will do. */
static bool names(const char *file)
{
    return strstr(err_message(), strncmp(file, "manifest", 8) ? file : "manifest.") != NULL;
}

/* Owner of byte `at` of a whole shard: "tensor 'KEY'" or "header", by a reading of its own. */
static const char *place_of(const char *bytes, int64_t size, int64_t at)
{
    static char text[128];
    uint64_t header = 0;
    Json *root;
    memcpy(&header, bytes, 8);
    strcpy(text, "header");
    OK(json_parse("shard", bytes + 8, (int64_t)header, &root));
    for (void *it = json_iter(root); it; it = json_next(root, it)) {
        const Json *range = json_get(json_iter_value(it), "data_offsets");
        int64_t data = 8 + (int64_t)header, from = data + json_int(json_at(range, 0), size);
        if (range && at >= from && at < data + json_int(json_at(range, 1), 0))
            snprintf(text, sizeof text, "tensor '%s'", json_iter_key(it));
    }
    json_free(root);
    return text;
}

/* MEGATRAIN_DAMAGE=all: every bit of every byte (make test-files). */
static bool every_bit(void) { return getenv("MEGATRAIN_DAMAGE") != NULL; }

TEST(every_flipped_byte_is_found_and_named)
{
    const char *dir = fresh_dir();
    OK(save((Grid){ .tp = 2, .dp = 1 }, SMALL, dir, 1, 0));
    int64_t missed = 0, tried = 0;
    for (int i = 0; i < 4; i++) {
        int64_t size;
        const char *path = step_path(dir, 1, files_of_two[i]), *folder = step_path(dir, 1, "");
        char *bytes = read_file(path, &size);
        FILE *f = fopen(path, "r+b");
        setvbuf(f, NULL, _IONBF, 0);
        for (int64_t at = 0; at < size; at += at > 1500 && !every_bit() ? 7 : 1) {
            char place[128] = "";
            if (i < 2) strcpy(place, place_of(bytes, size, at));
            for (int bit = every_bit() ? 0 : (int)(at % 8); bit < 8; bit += i == 3 || every_bit() ? 1 : 8) {
                char flipped = (char)(bytes[at] ^ 1 << bit);
                fseek(f, at, SEEK_SET), fwrite(&flipped, 1, 1, f);
                if (ckpt_verify(folder) != ERR_CKPT || !names(files_of_two[i]) || !strstr(err_message(), place))
                    missed++;
                fseek(f, at, SEEK_SET), fwrite(&bytes[at], 1, 1, f);
                tried++;
            }
        }
        fclose(f);
        free(bytes);
        OK(ckpt_verify(folder));
    }
    CHECK_MSG(missed == 0 && tried > 3000, "%lld of %lld", (long long)missed, (long long)tried);
    printf("    %lld flips\n", (long long)tried);
}

TEST(every_truncation_is_found_and_named)
{
    const char *dir = fresh_dir();
    char path[PATH_MAX];
    bool found;
    OK(save((Grid){ .tp = 2, .dp = 1 }, SMALL, dir, 1, 0));
    for (int i = 0; i < 4; i++) {
        int64_t size, missed = 0;
        const char *file = step_path(dir, 1, files_of_two[i]), *folder = step_path(dir, 1, "");
        char *bytes = read_file(file, &size);
        for (int64_t n = 0; n < size; n += n > 64 && n < size - 64 && !every_bit() ? 13 : 1) {
            write_file(file, bytes, n);
            if (ckpt_verify(folder) != ERR_CKPT || !names(files_of_two[i])) missed++;
            if (n % 5 == 0) {
                if (ckpt_find(dir, INT64_MAX, path, &found) != ERR_CKPT) missed++;
                if (load(ONE, SMALL, folder, 1) != ERR_CKPT || !names(files_of_two[i])) missed++;
            }
        }
        CHECK_MSG(missed == 0, "%s: %lld", files_of_two[i], (long long)missed);
        write_file(file, bytes, size);
        remove(file);
        FAILS(ckpt_verify(folder), ERR_CKPT, files_of_two[i]);
        write_file(file, bytes, size);
        free(bytes);
        OK(ckpt_verify(folder));
    }
}

/* Manifests with a good checksum that nevertheless say something impossible. */
TEST(a_manifest_is_not_believed_beyond_its_checksum)
{
    static const char *const cases[][3] = {
        { "\"format\":1", "\"format\":0", "format" },
        { "\"format\":1", "\"format\":2", "format version 2" },
        { "\"step\":1", "\"step\":-1", "step" },
        { "\"step\":1,", "", "step" },
        { "\"step\":1", "\"step\":\"1\"", "step" },
        { "\"tp\":8", "\"tp\":1e99", "tp" },
        { "\"skipped\":1", "\"skipped\":null", "skipped" },
        { "\"step\":1", "\"step\":2", "holds a checkpoint of step 2" },
        { "\"step\":1", "\"step\":9223372036854775807", "'step': 9223372036854775807" },
        { "\"step\":1", "\"step\":1000000000001", "'step'" },
        { "\"samples\":15", "\"samples\":9223372036854775807", "'samples'" },
        { "\"tokens\":960", "\"tokens\":9223372036854775807", "'tokens'" },
        { "\"seed\":5", "\"seed\":-1", "'seed'" },
        { "\"tp\":8", "\"tp\":4097", "'tp'" },
        { "\"seq\":4", "\"seq\":-1", "'seq'" },
        { "\"attn\":64", "\"attn\":4294967296", "'attn'" },
        { "\"skipped\":1", "\"skipped\":-1", "'skipped'" },
        { "\"skipped\":1", "\"skipped\":2", "2 steps were skipped of 1" },
        { "\"skipped\":1", "\"updates\":-9223372036854775808", "'updates'" },
        { "\"skipped\":1", "\"updates\":0", "0 updates do not belong to step 1: 0 steps were skipped" },
        { "\"skipped\":1", "\"skipped\":1,\"updates\":16", "16 updates do not belong to step 1" },
        { "\"skipped\":1", "\"loss_scale_log2\":33", "'loss_scale_log2'" },
        { "\"skipped\":1", "\"loss_scale_good_steps\":-1", "'loss_scale_good_steps'" },
        { "\"data\":", "\"date\":", "data" },
        { "\"parameters\":", "\"params\":", "parameters" },
        { "\"shape\":[37,6]", "\"shape\":[37]", "outside of 'embed.weight'" },
        { "\"shape\":[37,6]", "\"shape\":[4611686018427387904,6]", "shape of 'embed.weight'" },
        { "\"shape\":[37,6]", "\"shape\":[0,6]", "shape" },
        { "\"shape\":[37,6]", "\"shape\":[37,6,1]", "shape" },
        { "\"shift\":21", "\"shift\":99999999999", "shift" },
        { "\"shift\":21", "\"shift\":-2147483648", "'embed.weight': " },
        { "\"shift\":21", "\"shift\":127", "'shift': 127, where -102 to 126" },
        { "\"shift\":21", "\"shift\":-103", "'shift'" },
        { "\"name\":\"norm.weight\"", "\"name\":\"embed.weight\"", "twice" },
        { "\"name\":\"norm.weight\"", "\"name\":\"norm/weight\"", "norm/weight" },
        { "\"state\":\"m\"", "\"state\":\"value\"", "whole of 'embed.weight'" },
        { "\"state\":\"m\"", "\"state\":\"mm\"", "'mm'" },
        { "\"dtype\":\"F32\"", "\"dtype\":\"BF16\"", "'BF16'" },
        { "\"offset\":[0,0]", "\"offset\":[1,0]", "overlapping pieces of 'embed.weight'" },
        { "\"offset\":[0,0]", "\"offset\":[6,0]", "outside of 'embed.weight'" },
        { "\"offset\":[0,0]", "\"offset\":[9223372036854775807,0]", "outside" },
        { "\"offset\":[0,0]", "\"offset\":[-1,0]", "offset" },
        { "\"offset\":[0,0],\"shape\":[32,6]", "\"offset\":[0,0],\"shape\":[31,6]",
          "whole of 'embed.weight'" },
        { "\"file\":\"shard-00001.safetensors\"", "\"file\":\"shard-00009.safetensors\"", "shard-00009" },
        { "{\"name\":\"shard-00000.safetensors\"", "{\"name\":\"../shard-00000.safetensors\"", "../shard" },
        { "{\"name\":\"shard-00000.safetensors\"", "{\"name\":\".x\"", "'.x'" },
        { "{\"name\":\"shard-00001.safetensors\"", "{\"name\":\"shard-00000.safetensors\"", "order" },
        { "\"crc32c\":[", "\"crc32c\":[0,", "checksums" },
        { "\"crc32c\":[", "\"crc32c\":[-1", "'crc32c'" },
        { "\"crc32c\":[", "\"crc32c\":[4294967296,", "checksums" },
        { "safetensors\",\"crc32c\":", "safetensors\",\"crc32c\":-", "'crc32c'" },
    };
    const char *dir = fresh_dir(), *text;
    int64_t size;
    OK(save((Grid){ .tp = 2, .dp = 1 }, SMALL, dir, 1, 0));
    char *good = read_file(step_path(dir, 1, "manifest.json"), &size);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_MSG((text = replaced(good, cases[i][0], cases[i][1])), "'%s' is not there", cases[i][0]);
        if (!text) continue;
        write_manifest(dir, 1, text);
        FAILS(ckpt_verify(step_path(dir, 1, "")), ERR_CKPT, cases[i][2]);
    }
    static const char *const fine[] = { "\"updates\":1", "\"updates\":15", "\"skipped\":1,\"updates\":0" };
    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) {
        write_manifest(dir, 1, replaced(good, "\"skipped\":1", fine[i]));
        OK(ckpt_verify(step_path(dir, 1, "")));
    }
    write_manifest(dir, 1, good);
    OK(ckpt_verify(step_path(dir, 1, "")));
    free(good);
}

TEST(swapped_shards_are_found)
{
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 1, 0));
    OK(save(ONE, SMALL, dir, 2, 0));
    rename(step_path(dir, 1, "shard-00000.safetensors"), step_path(dir, 1, "x"));
    rename(step_path(dir, 2, "shard-00000.safetensors"), step_path(dir, 1, "shard-00000.safetensors"));
    rename(step_path(dir, 1, "x"), step_path(dir, 2, "shard-00000.safetensors"));
    Job j = { .grid = { 1, 2, 0 }, .path = step_path(dir, 2, ""), .step = 2 };
    FAILS(run_ranks(&j, rank_load), ERR_CKPT, "step-00000002/shard-00000.safetensors' is damaged");
    CHECK(j.damaged);
}

/* ---- faults ---- */

/* The child: saves CKPT_STEP in CKPT_CHILD with CKPT_TP ranks; exit status: 0 or the kind of its failure. */
static int child_main(const char *dir)
{
    Err err = save((Grid){ .tp = atoi(getenv("CKPT_TP")), .dp = 1 }, SMALL, dir, atoi(getenv("CKPT_STEP")), 2);
    return err ? 100 + (int)err : 0;
}

/* Runs the child with a fault; its wait status. `operations`: the count it prints, if it was asked for. */
static int run_child(const char *dir, int tp, int step, const char *fault, int *operations)
{
    char command[512], line[256];
    snprintf(command, sizeof command,
             "CKPT_CHILD=%s CKPT_TP=%d CKPT_STEP=%d MEGATRAIN_FILE_FAULT=%s exec /proc/%d/exe 2>&1", dir, tp,
             step, fault, (int)getpid());
    FILE *f = popen(command, "r");
    while (fgets(line, sizeof line, f))
        if (operations) sscanf(line, "file operations: %d", operations);
    return pclose(f);
}

/* Before: checkpoints of steps 1 and 2. The child saves `step`. */
static void prepare_faults(const char *dir)
{
    file_remove_tree(dir);
    Job j = { .grid = ONE, .run_dir = dir, .step = 1, .saves = 2 };
    OK(run_ranks(&j, rank_save));
}

/* After: the newest is what the outcome says, whole; step 2 is whole; and saving goes on. */
static void check_faults(const char *dir, int step, int status, const char *fault)
{
    char path[PATH_MAX];
    bool found;
    bool killed = WIFSIGNALED(status) || WEXITSTATUS(status) == 128 + 9;
    CkptMeta meta = { 0 };
    SetupArena a;
    setup_init(&a);
    OK(ckpt_find(dir, INT64_MAX, path, &found));
    CHECK_MSG(found, "%s", fault);
    OK(ckpt_meta(path, &a, &meta));
    OK(load((Grid){ .tp = 2, .dp = 1 }, SMALL, path, meta.step));
    if (killed) CHECK_MSG(meta.step == 2 || meta.step == step, "%s", fault);
    else if (WEXITSTATUS(status)) {
        CHECK_MSG(WEXITSTATUS(status) == 100 + ERR_STORAGE, "%s: status %d", fault, WEXITSTATUS(status));
        CHECK_MSG(meta.step == 2, "%s", fault);
    } else CHECK_MSG(meta.step == step, "%s", fault);
    if (step != 2) OK(load(ONE, SMALL, step_path(dir, 2, ""), 2));
    OK(save(ONE, SMALL, dir, step, 2));
    OK(load(ONE, SMALL, step_path(dir, step, ""), step));
    CHECK_MSG(count_entries(dir, "tmp\\|old") == 0, "%s", fault);
    setup_release(&a);
}

static void each_fault(const char *kind, int tp, int step)
{
    const char *dir = fresh_dir();
    char fault[32];
    int operations = 0;
    prepare_faults(dir);
    CHECK(run_child(dir, tp, step, "count", &operations) == 0 && operations > 20);
    for (int n = 1; n <= operations; n++) {
        prepare_faults(dir);
        snprintf(fault, sizeof fault, "%s@%d", kind, n);
        int status = run_child(dir, tp, step, fault, NULL);
        if (!strcmp(kind, "kill")) CHECK_MSG(status != 0, "%s", fault);
        check_faults(dir, step, status, fault);
    }
    printf("    %s at each of %d file operations, tp %d, step %d\n", kind, operations, tp, step);
}

TEST(kill_at_every_file_operation) { each_fault("kill", 1, 3); }
TEST(kill_at_every_file_operation_of_a_replacement) { each_fault("kill", 1, 2); }
TEST(kill_at_every_file_operation_of_two_ranks) { each_fault("kill", 2, 3); }
TEST(disk_full_at_every_file_operation) { each_fault("enospc", 1, 3); }
TEST(disk_full_at_every_file_operation_of_two_ranks) { each_fault("enospc", 2, 3); }
TEST(io_error_at_every_file_operation) { each_fault("eio", 1, 3); }
TEST(io_error_at_every_file_operation_of_a_replacement) { each_fault("eio", 1, 2); }
TEST(short_write_at_every_file_operation) { each_fault("short", 1, 3); }

TEST(a_first_save_that_fails_leaves_no_checkpoint)
{
    char fault[32], path[PATH_MAX];
    const char *dir = fresh_dir();
    int operations = 0;
    bool found;
    CHECK(run_child(dir, 1, 1, "count", &operations) == 0);
    for (int n = 1; n <= operations; n++) {
        file_remove_tree(dir);
        snprintf(fault, sizeof fault, "%s@%d", n % 2 ? "kill" : "eio", n);
        run_child(dir, 1, 1, fault, NULL);
        OK(ckpt_find(dir, INT64_MAX, path, &found));
        if (found) OK(ckpt_verify(path));
    }
}

/* Its removal is tried when the folder is opened, and again with the save. */
TEST(a_leftover_that_cannot_be_removed_stops_no_save)
{
    static const char *const faults[] = { "eio@1:tmp-abc", "eio@2:tmp-abc" };
    for (int i = 0; i < 2; i++) {
        const char *dir = fresh_dir();
        prepare_faults(dir);
        OK(file_make_dirs(step_path(dir, 9, "../step-00000009.tmp-abc")));
        CHECK(run_child(dir, 1, 3, faults[i], NULL) == 0);
        OK(load(ONE, SMALL, step_path(dir, 3, ""), 3));
        CHECK(count_entries(dir, "tmp-abc") == 0);
    }
}

int main(int argc, char **argv)
{
    log_set_level(LOG_ERROR); /* damage is what is tried here: hundreds of warnings say nothing */
    if (getenv("CKPT_CHILD")) return child_main(getenv("CKPT_CHILD"));
    int status = test_main(argc, argv);
    file_remove_tree(fresh_dir());
    return status;
}
