/*
 * Errors, log, arenas, files and their faults, near words. What must die or be killed does so in a child: this
 * program again, with --child. The rest of src/base: test_json.c, test_mathx.c, test_config.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/batch_ramp.h"
#include "base/coroutine.h"
#include "base/file.h"
#include "base/json.h"
#include "base/layer_set.h"
#include "base/map.h"
#include "base/log.h"
#include "base/units.h"
#include "base/words.h"
#include "test.h"

/* ---- a folder for this run, and children ---- */

static const char *temp_dir(void)
{
    static char dir[64];
    if (!dir[0]) {
        strcpy(dir, "/tmp/test_base.XXXXXX");
        if (!mkdtemp(dir)) abort();
    }
    return dir;
}

/* "FOLDER/name", valid to the end. */
static const char *in_temp(const char *name)
{
    static char path[64][128];
    static int count;
    char wanted[128];
    snprintf(wanted, sizeof wanted, "%s/%s", temp_dir(), name);
    int i = 0;
    while (i < count && strcmp(path[i], wanted) != 0) i++;
    if (i == 64) abort();
    if (i == count) strcpy(path[count++], wanted);
    return path[i];
}

/* Starts this program as `--child what arg` with MEGATRAIN_FILE_FAULT=fault; stderr goes to FOLDER/stderr. */
static pid_t start_child(const char *what, const char *arg, const char *fault)
{
    const char *log = in_temp("stderr");
    fflush(stdout);
    pid_t pid = fork();
    if (pid != 0) return pid;
    if (fault) setenv("MEGATRAIN_FILE_FAULT", fault, 1);
    int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(fd, STDERR_FILENO);
    execl("/proc/self/exe", "test_base", "--child", what, arg, (char *)NULL);
    _exit(99);
}

static int run_child(const char *what, const char *arg, const char *fault)
{
    int status = -1;
    pid_t pid = start_child(what, arg, fault);
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
    return status;
}

static const char *read_text(const char *path)
{
    static char text[8192];
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f) fclose(f);
    text[n] = 0;
    return f ? text : "(missing)";
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "wb");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) abort();
}

/* ---- errors ---- */

static Err fails_below(void)
{
    return err_set(ERR_IO, "cannot open '%s'", "x");
}

static Err fails_above(void)
{
    TRY_AS(ERR_DATA, fails_below());
    return ERR_OK;
}

TEST(err_record)
{
    FAILS(fails_above(), ERR_DATA, "cannot open 'x'");
    CHECK(strcmp(err_message(), "cannot open 'x'") == 0 && err_hint_text()[0] == 0);
    CHECK(err_hint("give %d", 3) == ERR_DATA && strcmp(err_hint_text(), "give 3") == 0);
    CHECK(err_prefix(ERR_DATA, "run '%s'", "a") == ERR_DATA);
    CHECK(strcmp(err_message(), "run 'a': cannot open 'x'") == 0);
    CHECK(err_prefix(ERR_OK, "never") == ERR_OK && err_as(ERR_OK, ERR_CKPT) == ERR_OK);
    CHECK(err_set(ERR_CKPT, "shard 3: %s", err_message()) == ERR_CKPT); /* its own record as argument */
    CHECK(strcmp(err_message(), "shard 3: run 'a': cannot open 'x'") == 0 && err_hint_text()[0] == 0);

    char big[40000];
    memset(big, 'y', sizeof big - 1);
    big[sizeof big - 1] = 0;
    err_set(ERR_IO, "%s", big);
    CHECK(strlen(err_message()) > 4000 && strlen(err_message()) < sizeof big);
    err_prefix(ERR_IO, "%s", big);
    CHECK(strlen(err_message()) < sizeof big);
}

TEST(a_message_is_cut_between_characters)
{
    char text[8], long_name[2101] = "";
    ErrKept kept;
    static const char *const cases[][2] = { { "1234567", "1234567" },       { "12345678", "1234567" },
                                            { "12345\u00fc", "12345\u00fc" }, { "123456\u00fc", "123456" },
                                            { "12345\u20ac", "12345" },       { "1234\u20ac9", "1234\u20ac" },
                                            { "\u00fc\u00fc\u00fc\u00fc", "\u00fc\u00fc\u00fc" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text_cut(text, sizeof text, cases[i][0]);
        CHECK(!strcmp(text, cases[i][1]));
    }
    for (int i = 0; i < 1050; i++) strcat(long_name, "\u00fc");
    for (int shift = 0; shift < 2; shift++) {
        err_set(ERR_IO, "%s%s", shift ? "x" : "", long_name);
        err_hint("%s", err_message());
        err_keep(&kept);
        CHECK(strlen(kept.message) == 1022 + (size_t)shift && strlen(kept.hint) == 510 + (size_t)shift);
        CHECK(json_can_hold(kept.message) && json_can_hold(kept.hint));
    }
}

TEST(err_exit_codes)
{
    static const struct {
        Err err;
        int status;
    } cases[] = {
        { ERR_OK, 0 },     { ERR_CONFIG, 2 },   { ERR_DATA, 3 }, { ERR_CKPT, 4 },   { ERR_STORAGE, 5 },  { ERR_IO, 5 },
        { ERR_NUMERICS, 6 }, { ERR_PEER, 7 },   { ERR_HANG, 8 }, { ERR_MEMORY, 9 }, { ERR_RENDEZVOUS, 10 },
        { ERR_STOPPED, 75 }, { ERR_INTERRUPTED, 130 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_MSG(err_exit_code(cases[i].err) == cases[i].status, "%s", err_name(cases[i].err));
    for (int e = 0; e < ERR_COUNT; e++) CHECK(err_name((Err)e)[0] != 0);
}

static void *other_thread(void *out)
{
    err_set(ERR_PEER, "other thread");
    *(bool *)out = strcmp(err_message(), "other thread") == 0;
    return NULL;
}

TEST(err_is_per_thread)
{
    bool seen = false;
    pthread_t t;
    err_set(ERR_IO, "mine");
    CHECK(pthread_create(&t, NULL, other_thread, &seen) == 0);
    pthread_join(t, NULL);
    CHECK(seen && strcmp(err_message(), "mine") == 0);
}

TEST(err_print_and_log_lines)
{
    CHECK(WEXITSTATUS(run_child("print", "", NULL)) == 3);
    const char *text = read_text(in_temp("stderr"));
    CHECK_MSG(strstr(text, "megatrain: error (data): cannot open 'x'\nhint: look again\n    at ") == text, "%s", text);
    CHECK(strstr(text, "test_base.c") && strstr(text, "fails_below()"));
    CHECK_MSG(strstr(text, "[rank 3] warning: once 1\n") && !strstr(text, "once 2"), "%s", text);
    CHECK(strstr(text, "[rank 3] plain\n") && !strstr(text, "hidden") && strstr(text, "debug: shown\n"));
    CHECK(strstr(text, "zzzz\nafter\n")); /* a line too long is cut and still ends */
}

TEST(assert_aborts_and_says_where)
{
    int status = run_child("assert", "", NULL);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    const char *text = read_text(in_temp("stderr"));
    CHECK_MSG(strstr(text, "rank 2") && strstr(text, "test_base.c") && strstr(text, "1 + 1 == 3"), "%s", text);
    CHECK(strchr(strchr(text, '\n') + 1, '\n') != NULL); /* a backtrace follows */
}

/* ---- arenas ---- */

TEST(arena_marks_and_peak)
{
    static _Alignas(256) char memory[4096];
    Arena a;
    void *p, *q;
    arena_init(&a, "scratch", memory, sizeof memory);
    OK(arena_alloc(&a, 1, &p));
    OK(arena_alloc(&a, 257, &q));
    CHECK(p == (void *)memory && (char *)q == memory + 256 && a.used_bytes == 768 && a.peak_bytes == 768);
    ArenaMark m = arena_mark(&a);
    OK(arena_alloc(&a, 4096 - 768, &p));
    CHECK(a.peak_bytes == 4096);
    FAILS(arena_alloc(&a, 1, &q), ERR_MEMORY, "arena 'scratch' is full: 1 bytes wanted, 0 of 4096 free");
    CHECK(arena_was_full());
    err_set(ERR_MEMORY, "no memory for the arenas");
    CHECK(!arena_was_full());
    arena_release(&a, m);
    CHECK(a.used_bytes == 768 && a.peak_bytes == 4096);
    FAILS(arena_alloc(&a, INT64_MAX, &q), ERR_MEMORY, "scratch");
    FAILS(arena_alloc(&a, 4096 - 767, &q), ERR_MEMORY, "scratch");
    arena_init(&a, "odd", memory, 4000); /* the last padding must fit too */
    FAILS(arena_alloc(&a, 3999, &q), ERR_MEMORY, "odd");
    OK(arena_alloc(&a, 3840, &q));
}

TEST(arena_poison)
{
    static _Alignas(256) float memory[256];
    Arena a;
    void *p;
    arena_init(&a, "save", memory, sizeof memory);
    a.poison = true;
    OK(arena_alloc(&a, 256, &p));
    ArenaMark m = arena_mark(&a);
    OK(arena_alloc(&a, 256, &p));
    memset(memory, 0, sizeof memory);
    arena_release(&a, m);
    for (int i = 0; i < 256; i++) CHECK(isnan(memory[i]) == (i >= 64 && i < 128));
}

TEST(arena_counts_without_memory)
{
    Arena a;
    void *p;
    arena_init(&a, "state", NULL, INT64_MAX);
    for (int i = 0; i < 3; i++) OK(arena_alloc(&a, (int64_t)1 << 50, &p));
    CHECK(a.peak_bytes == 3ll << 50);
    FAILS(arena_alloc(&a, INT64_MAX - 1, &p), ERR_MEMORY, "state");
}

TEST(setup_arena)
{
    SetupArena s;
    setup_init(&s);
    uint64_t seed = 1;
    for (int i = 0; i < 400; i++) {
        int64_t n = (int64_t)(test_rand(&seed) % (i % 50 == 0 ? 300000 : 700));
        unsigned char *p;
        OK(setup_array(&s, n, &p));
        int64_t used = 0;
        for (int64_t k = 0; k < n; k++) used += p[k] != 0;
        CHECK(used == 0 && (uintptr_t)p % 64 == 0);
        memset(p, 0xAA, (size_t)n);
    }
    char *copy;
    OK(setup_strdup(&s, "text", &copy));
    CHECK(strcmp(copy, "text") == 0);
    int64_t *many;
    FAILS(setup_array(&s, INT64_MAX / 4, &many), ERR_MEMORY, "items");
    FAILS(setup_array(&s, INT64_MAX / 9, &many), ERR_MEMORY, "bytes");
    int64_t before = s.total_bytes;
    setup_freeze(&s);
    CHECK(before > 0 && s.total_bytes == before);
    setup_release(&s);
    CHECK(s.total_bytes == 0 && !s.chunks);
    int status = run_child("frozen", "", NULL);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

/* ---- files ---- */

TEST(file_write_read_map)
{
    const char *path = in_temp("a.bin");
    FileWriter w;
    OK(file_create(path, &w));
    OK(file_write(&w, "hello ", 6));
    OK(file_write(&w, "world", 5));
    OK(file_write_at(&w, 0, "J", 1));
    CHECK(w.written_bytes == 11);
    OK(file_sync_close(&w));
    FileMap m;
    OK(file_map(path, &m));
    CHECK(m.size_bytes == 11 && memcmp(m.data, "Jello world", 11) == 0 && strcmp(m.path, path) == 0);
    file_unmap(&m);
    char buf[16];
    OK(file_read_at(path, 6, buf, 5));
    CHECK(memcmp(buf, "world", 5) == 0);
    FAILS(file_read_at(path, 7, buf, 5), ERR_IO, "too short");
    char *text;
    int64_t n;
    OK(file_read_all(path, 11, &text, &n));
    CHECK(n == 11 && strcmp(text, "Jello world") == 0);
    free(text);
    FAILS(file_read_all(path, 10, &text, &n), ERR_IO, "more than the 10 allowed");
    OK(file_size(path, &n));
    CHECK(n == 11);
    write_text(path, "");
    OK(file_map(path, &m));
    CHECK(m.data == NULL && m.size_bytes == 0);
    file_unmap(&m);
    FAILS(file_map(in_temp("none"), &m), ERR_IO, "No such file");
    FAILS(file_map(temp_dir(), &m), ERR_IO, "not a regular file");
    FAILS(file_create(in_temp("none/x"), &w), ERR_IO, "cannot create");
    FAILS(file_write(&w, "x", 1), ERR_IO, "");
    FAILS(file_sync_close(&w), ERR_IO, "");
    OK(file_create(path, &w));
    file_abandon(&w);
    CHECK(!file_exists(path));
}

/* A mapped file of four pages of ones. */
static void map_ones(const char *name, FileMap *m)
{
    static char ones[4 << 16];
    const int64_t size = 4 * sysconf(_SC_PAGESIZE);
    FileWriter w;
    memset(ones, 1, sizeof ones);
    OK(file_create(in_temp(name), &w));
    OK(file_write(&w, ones, size));
    OK(file_sync_close(&w));
    OK(file_map(in_temp(name), m));
}

static int64_t sum_of(const FileMap *m)
{
    int64_t n = 0;
    for (int64_t i = 0; i < m->size_bytes; i++) n += ((const volatile char *)m->data)[i];
    return n;
}

TEST(what_is_cut_off_a_mapped_file_reads_as_zeros_and_is_noticed)
{
    const long page = sysconf(_SC_PAGESIZE);
    FileMap cut, whole;
    map_ones("cut", &cut);
    map_ones("whole", &whole);
    CHECK(sum_of(&cut) == 4 * page);
    CHECK(truncate(cut.path, page + 7) == 0);
    OK(map_intact(&cut)); /* nobody has read what is gone */
    CHECK(sum_of(&cut) == page + 7);
    FAILS(map_intact(&cut), ERR_DATA, "cut short");
    CHECK(strstr(err_message(), cut.path));
    CHECK(sum_of(&whole) == 4 * page);
    OK(map_intact(&whole));
    file_unmap(&cut);
    OK(file_map(whole.path, &cut)); /* in the place that is free again */
    OK(map_intact(&cut));
    file_unmap(&cut);
    file_unmap(&whole);
}

TEST(a_bus_error_elsewhere_ends_the_process)
{
    FileMap ours;
    map_ones("ours", &ours);
    pid_t child = fork();
    if (child == 0) {
        FileMap theirs;
        setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
        map_ones("theirs", &theirs);
        int fd = open(theirs.path, O_RDONLY);
        const volatile char *p = mmap(NULL, 1, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED || truncate(theirs.path, 0) != 0) _exit(100);
        _exit(p[0]);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    /* (a sanitizer's handler, which was there before, reports and exits) */
    bool reported = WIFEXITED(status) && WEXITSTATUS(status) != 0 && SANITIZED;
    CHECK(reported || (WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS));
    OK(map_intact(&ours));
    file_unmap(&ours);
}

TEST(file_append_goes_on)
{
    FileWriter w;
    char *text;
    int64_t n;
    const char *path = in_temp("lines");
    for (int i = 0; i < 3; i++) {
        OK(file_append(path, &w));
        CHECK(w.written_bytes == 2 * i);
        OK(file_write(&w, &"a\nb\nc\n"[2 * i], 2));
        OK(file_sync_close(&w));
    }
    OK(file_read_all(path, 100, &text, &n));
    CHECK(strcmp(text, "a\nb\nc\n") == 0);
    free(text);
}

TEST(file_append_goes_on_where_it_was_cut)
{
    FileWriter w;
    char *text;
    int64_t n;
    const char *path = in_temp("cut");
    OK(file_append(path, &w));
    OK(file_write(&w, "an old line\n", 12));
    CHECK(truncate(path, 0) == 0);
    OK(file_write_or_undo(&w, "a new one\n", 10));
    OK(file_sync_close(&w));
    OK(file_read_all(path, 100, &text, &n));
    CHECK_MSG(n == 10 && strcmp(text, "a new one\n") == 0, "%lld bytes", (long long)n);
    free(text);
}

static const struct statvfs *claimed; /* by every file system */

/* In place of the library's. */
int statvfs(const char *path, struct statvfs *out)
{
    if (claimed) *out = *claimed;
    int fd = claimed ? -1 : open(path, O_PATH | O_CLOEXEC), status = claimed ? 0 : fd;
    if (fd >= 0) status = fstatvfs(fd, out);
    if (fd >= 0) close(fd);
    return status;
}

TEST(file_folders)
{
    OK(file_make_dirs(in_temp("d/e/f")));
    OK(file_make_dirs(in_temp("d/e/f/")));
    CHECK(file_is_dir(in_temp("d/e/f")) && !file_is_dir(in_temp("d/e/g")));
    write_text(in_temp("keep"), "kept");
    FAILS(file_make_dirs(in_temp("keep/x")), ERR_IO, "keep");
    CHECK(symlink(in_temp("keep"), in_temp("d/e/link")) == 0);
    OK(file_make_dirs(in_temp("kept_dir")));
    write_text(in_temp("kept_dir/x"), "kept");
    CHECK(symlink(in_temp("kept_dir"), in_temp("d/dirlink")) == 0);
    write_text(in_temp("d/file"), "gone");
    OK(file_remove_tree(in_temp("d")));
    CHECK(!file_exists(in_temp("d")) && file_exists(in_temp("keep")) && file_exists(in_temp("kept_dir/x")));
    OK(file_remove_tree(in_temp("d")));
    int64_t n = 0;
    OK(file_free_bytes(in_temp("not/there/yet"), &n));
    CHECK(n > 0);
    static const struct statvfs huge[] = { { .f_bavail = INT64_MAX, .f_frsize = 4096 },
                                           { .f_bavail = (fsblkcnt_t)1 << 51, .f_frsize = 4096 },
                                           { .f_bavail = ((fsblkcnt_t)1 << 51) - 1, .f_frsize = 4096 } };
    for (int i = 0; i < 3; i++) {
        claimed = &huge[i];
        OK(file_free_bytes(in_temp("keep"), &n));
        CHECK(n == (i < 2 ? INT64_MAX : INT64_MAX - 4095));
    }
    claimed = NULL;
    OK(file_rename(in_temp("keep"), in_temp("kept2")));
    FAILS(file_rename(in_temp("keep"), in_temp("x")), ERR_IO, "cannot rename");
    OK(file_sync_dir(temp_dir()));
}

TEST(file_lock_names_the_holder)
{
    int fd, again;
    const char *path = in_temp("lock");
    OK(file_lock(path, &fd));
    char pid[32];
    snprintf(pid, sizeof pid, " %d'", (int)getpid());
    FAILS(file_lock(path, &again), ERR_STORAGE, pid);
    CHECK(WEXITSTATUS(run_child("lock", path, NULL)) == 5);
    file_unlock(fd);
    CHECK(WEXITSTATUS(run_child("lock", path, NULL)) == 0);

    write_text(in_temp("stderr"), "");
    pid_t child = start_child("hold", path, NULL);
    for (int i = 0; i < 1000 && strcmp(read_text(in_temp("stderr")), "held\n") != 0; i++) usleep(10000);
    FAILS(file_lock(path, &again), ERR_STORAGE, "held by another run");
    kill(child, SIGKILL); /* the system drops a dead holder's lock */
    waitpid(child, NULL, 0);
    OK(file_lock(path, &fd));
    file_unlock(fd);
}

static int count_entries(const char *dir)
{
    char command[512], line[32] = "";
    snprintf(command, sizeof command, "ls -A '%s' | wc -l", dir);
    FILE *f = popen(command, "r");
    if (!f || !fgets(line, sizeof line, f)) abort();
    pclose(f);
    return atoi(line);
}

/* A device, a pipe or a folder is not put away for a file; what a link points to is replaced, not the link. */
TEST(file_replace_of_what_is_no_file)
{
    struct stat st;
    char *text;
    int64_t n;
    OK(file_make_dirs(in_temp("odd/folder")));
    const char *pipe_path = in_temp("odd/pipe"), *link_path = in_temp("odd/link"), *target = in_temp("odd/target");
    const char *to_pipe = in_temp("odd/to_pipe"), *nowhere = in_temp("odd/nowhere");
    CHECK(mkfifo(pipe_path, 0600) == 0 && symlink("target", link_path) == 0);
    CHECK(symlink("pipe", to_pipe) == 0 && symlink("missing", nowhere) == 0);
    FAILS(file_replace(pipe_path, "a", 1), ERR_IO, "is not a regular file");
    FAILS(file_replace(to_pipe, "a", 1), ERR_IO, "is not a regular file");
    FAILS(file_replace(in_temp("odd/folder"), "a", 1), ERR_IO, "is not a regular file");
    FAILS(file_replace(nowhere, "a", 1), ERR_IO, "cannot follow link");
    CHECK(lstat(pipe_path, &st) == 0 && S_ISFIFO(st.st_mode));
    OK(file_replace(target, "old", 3));
    OK(file_replace(link_path, "new text", 8));
    CHECK(lstat(link_path, &st) == 0 && S_ISLNK(st.st_mode));
    OK(file_read_all(target, 100, &text, &n));
    CHECK(n == 8 && strcmp(text, "new text") == 0);
    free(text);
    OK(file_remove_tree(in_temp("odd")));
}

/* What lies in the way of a temporary file, of a killed process of our number or of a stranger, is neither written
 * through nor removed; what has the name of a new file is put away, be it a link. */
TEST(new_files_are_new)
{
    char beside[320];
    FileWriter w;
    OK(file_make_dirs(in_temp("new")));
    const char *path = in_temp("new/file"), *victim = in_temp("new/victim");
    write_text(victim, "old");
    snprintf(beside, sizeof beside, "%s.tmp-%d", path, (int)getpid());
    CHECK(symlink("victim", beside) == 0);
    OK(file_replace(path, "new", 3));
    CHECK(!strcmp(read_text(victim), "old") && !strcmp(read_text(path), "new") && count_entries(in_temp("new")) == 3);
    CHECK(remove(path) == 0 && symlink("victim", path) == 0);
    OK(file_create(path, &w));
    OK(file_write(&w, "x", 1));
    OK(file_sync_close(&w));
    CHECK(!strcmp(read_text(victim), "old") && !strcmp(read_text(path), "x"));
    FAILS(file_create(in_temp("new"), &w), ERR_IO, "is not a regular file");
    OK(file_remove_tree(in_temp("new")));
}

TEST(links_of_others_are_not_followed)
{
    enum { NOBODY = 65534 };
    FileWriter w;
    int fd;
    OK(file_make_dirs(in_temp("links")));
    const char *path = in_temp("links/link"), *target = in_temp("links/target");
    write_text(target, "old");
    CHECK(symlink("target", path) == 0);
    OK(file_check_link(path));
    OK(file_check_link(target));
    OK(file_check_link(in_temp("links/none")));
    if (geteuid()) printf("    skipped: links of another user, which root alone can make\n");
    for (int i = 0; !geteuid() && i < 2; i++) { /* the link, what it leads to */
        CHECK(lchown(path, i ? 0 : NOBODY, 0) == 0 && lchown(target, i ? NOBODY : 0, 0) == 0);
        FAILS(file_check_link(path), ERR_IO, i ? "what it leads to belongs to another user (65534)" : "it belongs");
        FAILS(file_check_link(in_temp("links/link/")), ERR_IO, "another user");
        FAILS(file_replace(path, "new", 3), ERR_IO, "another user");
        FAILS(file_append(path, &w), ERR_IO, "another user");
        FAILS(file_reopen(path, 1, &w), ERR_IO, "another user");
        FAILS(file_lock(path, &fd), ERR_IO, "another user");
        CHECK(!strcmp(read_text(target), "old"));
    }
    OK(file_remove_tree(in_temp("links")));
}

/* file_replace = create, write, sync, close, rename, sync folder; at each of them something happens. */
TEST(file_replace_under_faults)
{
    static const char *const actions[] = { "kill", "enospc", "eio", "short" };
    enum { OPERATIONS = 6, RENAME = 5 };
    OK(file_make_dirs(in_temp("r")));
    const char *path = in_temp("r/file");
    char fault[32], expected[32];
    for (int k = 0; k < 4; k++) {
        for (int n = 1; n <= OPERATIONS + 1; n++) {
            write_text(path, "old");
            snprintf(fault, sizeof fault, "%s@%d", actions[k], n);
            int status = run_child("replace", path, fault);
            const char *text = read_text(path), *want = n <= RENAME ? "old" : "new text";
            CHECK_MSG(strcmp(text, want) == 0, "%s: '%s'", fault, text);
            bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            if (n > OPERATIONS) CHECK_MSG(!killed && WEXITSTATUS(status) == 0, "%s", fault);
            else if (k == 0) CHECK_MSG(killed, "%s", fault);
            else {
                CHECK_MSG(!killed && WEXITSTATUS(status) == 5, "%s", fault);
                CHECK_MSG(count_entries(in_temp("r")) == 1, "%s leaves a temporary file", fault);
                const char *why = read_text(in_temp("stderr"));
                CHECK_MSG(strstr(why, k == 2 ? "Input/output error" : "No space left"), "%s: %s", fault, why);
            }
            if (k == 0 && n == 2) { /* killed in the middle of the write */
                int64_t half = 0;
                char name[300];
                snprintf(name, sizeof name, "for f in %s.tmp-*; do cat $f; rm $f; done", path);
                FILE *f = popen(name, "r");
                while (f && fgetc(f) != EOF) half++;
                if (f) pclose(f);
                CHECK(half == 4);
            }
            OK(file_remove_tree(in_temp("r")));
            OK(file_make_dirs(in_temp("r")));
        }
    }
    write_text(path, "old");
    CHECK(WEXITSTATUS(run_child("replace", path, "count")) == 0);
    snprintf(expected, sizeof expected, "file operations: %d\n", OPERATIONS);
    CHECK(strstr(read_text(in_temp("stderr")), expected));
    CHECK(WEXITSTATUS(run_child("replace", path, "explode@1")) == 2);
    CHECK(WEXITSTATUS(run_child("replace", path, "kill@0")) == 2);
}

/* With a text only operations on such paths count: "file" is written as file.tmp-PID and renamed to file. */
TEST(faults_of_some_files)
{
    static const struct {
        const char *fault;
        int status;
    } rows[] = {
        { "eio@1:r/file", 5 }, { "eio@4:file.tmp", 5 }, { "eio@5:file.tmp", 0 }, { "eio@1:elsewhere", 0 },
        { "eio@1", 5 },        { "eio@1file", 2 },      { "eio@:file", 2 },      { "eio:file", 2 },
    };
    OK(file_make_dirs(in_temp("r")));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int status = run_child("replace", in_temp("r/file"), rows[i].fault);
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == rows[i].status, "%s: %d", rows[i].fault, status);
    }
}

TEST(crc32c_published)
{
    unsigned char b[64];
    CHECK(crc32c(0, "123456789", 9) == 0xE3069283u); /* RFC 3720 B.4 and the catalogue's check value */
    memset(b, 0, 32);
    CHECK(crc32c(0, b, 32) == 0x8A9136AAu && crc32c_table(0, b, 32) == 0x8A9136AAu);
    memset(b, 0xFF, 32);
    CHECK(crc32c(0, b, 32) == 0x62A8AB43u && crc32c_table(0, b, 32) == 0x62A8AB43u);
    for (int i = 0; i < 32; i++) b[i] = (unsigned char)i;
    CHECK(crc32c(0, b, 32) == 0x46DD794Eu && crc32c_table(0, b, 32) == 0x46DD794Eu);
    CHECK(crc32c(0, b, 0) == 0 && crc32c(7, b, 0) == 7);
}

TEST(a_sample_of_a_file)
{
    enum { BYTES = 1 << 20, BUDGET = 256 << 10 };
    static uint8_t b[BYTES];
    uint64_t seed = 7;
    uint32_t whole = 0, sample = 0, other;
    const char *path = in_temp("long");
    for (int i = 0; i < BYTES; i++) b[i] = (uint8_t)test_rand(&seed);
    OK(file_replace(path, b, BYTES));
    OK(file_sample_crc(path, BYTES, &whole));
    CHECK(whole == crc32c(0, b, BYTES)); /* all of it, where it is not longer than the budget */
    OK(file_sample_crc(path, BUDGET, &sample));
    CHECK(sample != whole);
    static const int seen[] = { 0, BYTES - 1 }; /* both ends belong to every sample */
    for (int i = 0; i < 2; i++) {
        b[seen[i]] ^= 1;
        OK(file_replace(path, b, BYTES));
        OK(file_sample_crc(path, BUDGET, (other = 0, &other)));
        CHECK_MSG(other != sample, "byte %d", seen[i]);
        b[seen[i]] ^= 1;
    }
    for (int i = BYTES / 4; i < BYTES / 2; i++) b[i] ^= 1; /* so much is never missed */
    OK(file_replace(path, b, BYTES));
    OK(file_sample_crc(path, BUDGET, (other = 0, &other)));
    CHECK(other != sample);
    OK(file_replace(path, b, 0));
    OK(file_sample_crc(path, BUDGET, (other = 3, &other)));
    CHECK(other == 3);
    CHECK(file_sample_crc(in_temp("none"), BUDGET, &other) == ERR_IO);
}

TEST(crc32c_two_ways)
{
    static unsigned char b[40000]; /* (three lanes of some KiB, more than once) */
    uint64_t seed = 2;
    for (size_t i = 0; i < sizeof b; i++) b[i] = (unsigned char)test_rand(&seed);
    for (int i = 0; i < 500; i++) {
        size_t first = test_rand(&seed) % 64, n = test_rand(&seed) % (i % 2 ? 1900 : 39900),
               cut = n ? test_rand(&seed) % n : 0;
        uint32_t start = (uint32_t)test_rand(&seed), whole = crc32c(start, b + first, n);
        CHECK(whole == crc32c_table(start, b + first, n));
        CHECK(whole == crc32c(crc32c(start, b + first, cut), b + first + cut, n - cut));
    }
}

/* ---- words ---- */

/* ---- coroutines ---- */

typedef struct {
    Coroutine *coroutine;
    int64_t sum; /* of 1 ... 5, as far as it is */
    int turns;
} Adder;

/* Locals live across turns, on a stack that is not the caller's, some calls deep. */
static void add_up(Adder *a, int64_t i)
{
    int64_t here = i;
    coroutine_yield(a->coroutine);
    a->turns++;
    if (i < 5) add_up(a, i + 1);
    a->sum += here;
}

/* NAME.tmp-NUMBER of a process that was killed goes; not one that is written, that is new, or that is no such name. */
TEST(files_that_killed_processes_have_left)
{
    static const char *const names[] = { "left.tmp-99", "left.tmp-98", "left.tmp-97",
                                         "left.tmp-9x", "left.tmp-",   "sleft.tmp-99" };
    const struct timespec old[2] = { { 1000, 0 }, { 1000, 0 } };
    char path[256];
    int held = -1;
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, "%s/%s", temp_dir(), names[i]);
        const int fd = open(path, O_WRONLY | O_CREAT, 0600);
        CHECK(fd >= 0);
        if (i != 2) CHECK(!futimens(fd, old));
        if (i == 1) held = fd;
        else close(fd);
    }
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    CHECK(!fcntl(held, F_OFD_SETLK, &lock));
    snprintf(path, sizeof path, "%s/left", temp_dir());
    file_sweep_beside(path);
    OK(file_replace(path, "whole", 5));
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, "%s/%s", temp_dir(), names[i]);
        CHECK_MSG(file_exists(path) == (i > 0), "%s", names[i]);
    }
    close(held);
}

static void add_five(void *adder) { add_up(adder, 1); }

TEST(coroutines_take_turns)
{
    Adder a = { 0 }, b = { 0 };
    OK(coroutine_open(1 << 16, &a.coroutine));
    OK(coroutine_open(1 << 16, &b.coroutine));
    CHECK(coroutine_ended(a.coroutine) && !coroutine_resume(a.coroutine));
    for (int again = 0; again < 3; again++) {
        a.sum = b.sum = a.turns = b.turns = 0;
        coroutine_start(a.coroutine, add_five, &a);
        coroutine_start(b.coroutine, add_five, &b);
        for (int turn = 0; turn < 5; turn++) {
            CHECK(coroutine_resume(a.coroutine) && coroutine_resume(b.coroutine));
            CHECK(a.turns == turn && b.turns == turn && !coroutine_ended(a.coroutine));
        }
        CHECK(!coroutine_resume(a.coroutine) && coroutine_ended(a.coroutine) && a.turns == 5 && a.sum == 15);
        if (again != 1) CHECK(!coroutine_resume(b.coroutine) && b.sum == 15); /* else given up in the middle */
    }
    coroutine_start(a.coroutine, add_five, &a);
    CHECK(coroutine_resume(a.coroutine));
    coroutine_close(a.coroutine);
    coroutine_close(b.coroutine);
    coroutine_close(NULL);
    FAILS(coroutine_open((int64_t)1 << 60, &a.coroutine), ERR_MEMORY,
          "no memory for a stack of 1152921504606846976 bytes");
}

TEST(batch_ramps)
{
    static const struct {
        const char *text;
        int64_t batch[8]; /* of steps 1, 2, ... */
        int64_t most;
    } right[] = { { "8", { 8, 8, 8, 8, 8, 8, 8, 8 }, 8 },
                  { "2*3,5", { 2, 2, 2, 5, 5, 5, 5, 5 }, 5 },
                  { "4*1,8*2,2", { 4, 8, 8, 2, 2, 2, 2, 2 }, 8 },
                  { "1*8,1073741824", { 1, 1, 1, 1, 1, 1, 1, 1 }, 1073741824 } };
    static const char *const wrong[] = { "", "0", "-1", "x", "8,", "8,16", "8*2", "8*2,", "*2,4", "8*,4", "8*0,4",
                                         "8*2 ,4", "8*2,4*3", "1073741825", "99999999999999999999", "8*2,4;",
                                         "8*1000000000001,4", "1.5" };
    BatchRamp r;
    for (size_t c = 0; c < sizeof right / sizeof *right; c++) {
        int64_t sum = 0;
        CHECK(!batch_ramp_read(right[c].text, &r) && batch_ramp_most(&r) == right[c].most);
        CHECK(batch_ramp_samples(&r, 0) == 0 && batch_ramp_steps(&r, 0) == 0);
        for (int64_t step = 1; step <= 8; step++) {
            const int64_t batch = right[c].batch[step - 1];
            CHECK(batch_ramp_at(&r, step) == batch);
            for (int64_t k = 1; k <= batch; k++) CHECK(batch_ramp_steps(&r, sum + k) == step);
            sum += batch;
            CHECK(batch_ramp_samples(&r, step) == sum);
        }
    }
    for (size_t c = 0; c < sizeof wrong / sizeof *wrong; c++) {
        CHECK_MSG(batch_ramp_read(wrong[c], &r), "'%s' is no ramp", wrong[c]);
        CHECK(r.count == 1 && batch_ramp_at(&r, 5) == 1); /* something to go on with */
    }
    CHECK(!batch_ramp_read("1073741824*999999999999,1", &r));
    CHECK(batch_ramp_samples(&r, 999999999999) == INT64_MAX && batch_ramp_at(&r, 1000000000000) == 1);
    char many[RAMP_PARTS * 4 + 8] = "";
    for (int i = 1; i < RAMP_PARTS; i++) strcat(many, "2*1,");
    CHECK(!batch_ramp_read(strcat(many, "2"), &r) && r.count == RAMP_PARTS);
    strcpy(many + strlen(many) - 1, "2*1,2");
    CHECK(batch_ramp_read(many, &r));
}

TEST(layer_patterns)
{
    static const struct {
        const char *text;
        int64_t length, of[8]; /* of blocks 0, 1, ... */
    } right[] = { { "0", 1, { 0 } },
                  { "7", 1, { 7, 7, 7, 7, 7, 7, 7, 7 } },
                  { "1024*3,0", 4, { 1024, 1024, 1024, 0, 1024, 1024, 1024, 0 } },
                  { "5,4*2", 3, { 5, 4, 4, 5, 4, 4, 5, 4 } },
                  { "1*999999999,16777216", 1000000000, { 1, 1, 1, 1, 1, 1, 1, 1 } } };
    static const char *const wrong[] = { "", "-1", "x", "7,", ",7", "7*", "7*0", "*3", "7 ,0", "7,0;", "7*3*2", "1.5",
                                         "16777217", "99999999999", "1*1000000000" };
    LayerPattern p = { 0 };
    CHECK(layer_pattern_at(&p, 3) == 0 && layer_pattern_most(&p) == 0);
    p = layer_pattern_all(9);
    CHECK(layer_pattern_at(&p, 0) == 9 && layer_pattern_at(&p, 1023) == 9 && layer_pattern_most(&p) == 9);
    for (size_t c = 0; c < sizeof right / sizeof *right; c++) {
        CHECK(layer_pattern_read(right[c].text, WINDOW_MOST, &p) == right[c].length);
        for (int i = 0; i < 8; i++)
            CHECK_MSG(layer_pattern_at(&p, i) == right[c].of[i], "'%s', block %d", right[c].text, i);
    }
    CHECK(layer_pattern_most(&p) == WINDOW_MOST);
    for (size_t c = 0; c < sizeof wrong / sizeof *wrong; c++)
        CHECK_MSG(layer_pattern_read(wrong[c], WINDOW_MOST, &p) == -1, "'%s' is no pattern", wrong[c]);
    CHECK(layer_pattern_read("3*2,7,5", 9, &p) == 4 && layer_pattern_on(&p, 1) == 3 && layer_pattern_on(&p, 2) == 7);
    CHECK(layer_pattern_on(&p, 3) == 5 && layer_pattern_on(&p, 4) == 5 && layer_pattern_on(&p, 1023) == 5);
    CHECK(layer_pattern_on(&(LayerPattern){ 0 }, 3) == 0);
    CHECK(layer_pattern_read("1,0", 1, &p) == 2 && layer_pattern_read("1,2", 1, &p) == -1);
    char many[2 * PATTERN_RUNS + 8] = "";
    for (int i = 1; i < PATTERN_RUNS; i++) strcat(many, "2,");
    CHECK(layer_pattern_read(strcat(many, "2"), 2, &p) == PATTERN_RUNS);
    CHECK(layer_pattern_read(strcat(many, ",2"), 2, &p) == PATTERN_LONG);
    static const char *const words[] = { "ring", "rings" };
    CHECK(layer_pattern_read_words("rings*2,ring", words, 2, &p) == 3 && layer_pattern_at(&p, 4) == 1);
    CHECK(layer_pattern_at(&p, 5) == 0 && layer_pattern_has(&p, 0) && !layer_pattern_has(&p, 2));
    CHECK(layer_pattern_read_words("rings", words, 2, &p) == 1 && !layer_pattern_has(&p, 0));
    static const char *const no_words[] = { "", "rin", "ring,", ",ring", "ring*", "ring*0", "ring 2", "1" };
    for (int i = 0; i < 8; i++)
        CHECK_MSG(layer_pattern_read_words(no_words[i], words, 2, &p) == -1, "'%s'", no_words[i]);
}

TEST(numbers_for_people)
{
    char a[UNITS_BYTES], b[32];
    static const struct {
        double seconds;
        const char *text;
    } steps[] = { { 0.000123, "0.12 ms" }, { 0.0718, "71.80 ms" }, { 0.9712, "971.2 ms" }, { 9.8123, "9.81 s" },
                  { 118.4, "118.4 s" }, { 1265, "21m05s" }, { NAN, "?" } };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        CHECK_MSG(!strcmp(units_step(a, steps[i].seconds), steps[i].text), "%s", a);
    CHECK(!strcmp(units_commas(b, 1234567), "1,234,567") && !strcmp(units_commas(b, 999), "999"));
}

TEST(words)
{
    static const char *const list[] = { "train", "eval", "plan", "tp" };
    CHECK(word_distance("kitten", "sitting") == 3 && word_distance("", "abc") == 3 && word_distance("abc", "") == 3);
    CHECK(word_distance("same", "same") == 0 && word_distance("ab", "ba") == 2);
    CHECK(strcmp(word_nearest("tarin", list, 4), "train") == 0 && strcmp(word_nearest("plann", list, 4), "plan") == 0);
    CHECK(!word_nearest("generate", list, 4) && !word_nearest("xy", list, 4) && !word_nearest("", list, 0));
    CHECK(strcmp(word_nearest("tq", list, 4), "tp") == 0);
    CHECK(!word_nearest("t", list, 4)); /* any two letters are one edit apart */
    char longer[80];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    CHECK(!word_nearest(longer, list, 4));
}

/* ---- children ---- */

static Err write_long_lines(void)
{
    char big[9000];
    memset(big, 'z', sizeof big - 1);
    big[sizeof big - 1] = 0;
    log_set_rank(0, 1);
    log_info("%s", big);
    log_info("after");
    return ERR_OK;
}

/* ---- a file system without locks ---- */

static bool no_locks;

/* The system's, but for locks. */
int fcntl(int fd, int cmd, ...)
{
    va_list list;
    va_start(list, cmd);
    void *arg = va_arg(list, void *);
    va_end(list);
    if (no_locks && cmd == F_OFD_SETLK) return errno = ENOLCK, -1;
    return (int)syscall(SYS_fcntl, fd, cmd, arg);
}

/* A number in place of the first one in the file, or of the second. */
static void put_number(const char *path, int which, const char *number)
{
    char text[600], other[700];
    snprintf(text, sizeof text, "%s", read_text(path));
    char *at = which ? strchr(text, ' ') + 1 : text, *end = strchr(at, ' ');
    snprintf(other, sizeof other, "%.*s%s%s", (int)(at - text), text, number, end);
    write_text(path, other);
}

TEST(a_file_stands_for_a_lock_where_there_is_none)
{
    int fd, again;
    char path[PATH_MAX], held[PATH_MAX + 8], pid[32];
    snprintf(path, sizeof path, "%s", in_temp("nolock"));
    snprintf(held, sizeof held, "%s.held", path);
    no_locks = true;
    OK(file_lock(path, &fd));
    snprintf(pid, sizeof pid, " %d'", (int)getpid());
    CHECK(file_exists(held));
    FAILS(file_lock(path, &again), ERR_STORAGE, pid);
    CHECK(strstr(err_message(), "another run holds the folder"));
    file_unlock(fd);
    CHECK(!file_exists(held));

    /* a process of this host that was killed, whose number another one may have by now */
    write_text(in_temp("stderr"), "");
    pid_t child = start_child("hold without locks", path, NULL);
    for (int i = 0; i < 1000 && strcmp(read_text(in_temp("stderr")), "held\n") != 0; i++) usleep(10000);
    FAILS(file_lock(path, &again), ERR_STORAGE, "another run holds the folder");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK(file_exists(held));
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    put_number(held, 0, pid);
    OK(file_lock(path, &fd));
    char own[600];
    snprintf(own, sizeof own, "%s", read_text(held));
    file_unlock(fd);

    /* of another host nobody knows; nor is what another has taken since removed */
    snprintf(strrchr(own, '\0'), 2, "x");
    write_text(held, own);
    put_number(held, 1, "1");
    FAILS(file_lock(path, &again), ERR_STORAGE, "another run holds the folder");
    CHECK(file_exists(held));
    remove(held);
    OK(file_lock(path, &fd));
    write_text(held, own);
    file_unlock(fd);
    CHECK(!strcmp(read_text(held), own));
    remove(held);
    no_locks = false;
    OK(file_lock(path, &fd));
    CHECK(!file_exists(held));
    file_unlock(fd);
    write_text(held, own); /* another host sees this folder without locks */
    FAILS(file_lock(path, &fd), ERR_STORAGE, "another run holds the folder");
    remove(held);
    OK(file_lock(path, &fd));
    file_unlock(fd);
}

static int child_print(void)
{
    Err err = fails_above();
    err_hint("look again");
    err_print(err, true);
    log_set_rank(3, 4);
    for (int i = 1; i < 3; i++) log_warn_once("key", "once %d", i);
    log_info("plain");
    log_debug("hidden");
    log_set_level(LOG_DEBUG);
    log_debug("shown");
    write_long_lines();
    return err_exit_code(err);
}

static int child_main(const char *what, const char *arg)
{
    int fd;
    SetupArena s;
    void *p;
    Err err = ERR_INTERNAL;
    if (strcmp(what, "print") == 0) return child_print();
    if (strcmp(what, "assert") == 0) {
        log_set_rank(2, 4);
        ASSERT(1 + 1 == 3);
    }
    if (strcmp(what, "frozen") == 0) {
        setup_init(&s);
        setup_freeze(&s);
        err = setup_alloc(&s, 1, &p);
    }
    if (strcmp(what, "replace") == 0) err = file_replace(arg, "new text", 8);
    no_locks = strcmp(what, "hold without locks") == 0;
    if (strcmp(what, "lock") == 0 || strncmp(what, "hold", 4) == 0) err = file_lock(arg, &fd);
    if (strncmp(what, "hold", 4) == 0 && fputs("held\n", stderr) >= 0) sleep(60);
    if (err) err_print(err, true);
    return err_exit_code(err);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "--child") == 0) return child_main(argv[2], argv[3]);
    int status = test_main(argc, argv);
    file_remove_tree(temp_dir());
    return status;
}
