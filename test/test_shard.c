/*
 * Boxes against the definition of the memory order in param.c (param_plain_row), on random shapes, sections,
 * interleaving, padding, cuts and grids: boxes of all ranks tile a tensor exactly once, flat ranges hold just
 * their elements, and what is saved on one grid and loaded on another is the same memory.
 */
#include "test.h"

#include "param/shard.h"

static bool box_equal(Box a, Box b)
{
    return a.offset[0] == b.offset[0] && a.offset[1] == b.offset[1] && a.shape[0] == b.shape[0] &&
           a.shape[1] == b.shape[1];
}

enum { MAX_BOXES = 1024 };

static const int tps[] = { 1, 2, 4, 8 };

/* A random tensor that every tp of `tps` can cut. */
static ParamSpec random_spec(uint64_t *rng)
{
    static const int64_t interleaves[] = { 1, 8, 16 };
    ParamSpec s = { .name = "w", .ndim = 1 + (int)(test_rand(rng) % 2) };
    int kind = (int)(test_rand(rng) % 4);
    s.interleave = 1;
    if (kind == 0) { /* sections */
        s.interleave = interleaves[test_rand(rng) % 3];
        int n = 2 + (int)(test_rand(rng) % 2);
        for (int i = 0; i < n; i++) {
            int64_t unit = s.interleave > 1 ? s.interleave : 8;
            s.section[i] = unit * (int64_t)(1 + test_rand(rng) % 4);
            s.shape[0] += s.section[i];
        }
        s.cut[0] = s.interleave > 1 && test_rand(rng) % 4 ? CUT_TP : CUT_NONE;
    } else if (kind == 1) { /* padded rows, perhaps more padding than a rank has rows */
        s.shape[0] = 1 + (int64_t)(test_rand(rng) % 60);
        s.padded_rows = (s.shape[0] + 7) / 8 * 8 + 8 * (int64_t)(test_rand(rng) % 8);
        s.cut[0] = CUT_TP;
    } else if (kind == 2) {
        s.shape[0] = 8 * (int64_t)(1 + test_rand(rng) % 6);
        s.cut[0] = test_rand(rng) % 2 ? CUT_TP : CUT_NONE;
    } else { /* columns cut */
        s.ndim = 2;
        s.shape[0] = 1 + (int64_t)(test_rand(rng) % 20);
        s.cut[1] = CUT_TP;
    }
    s.shape[1] = s.cut[1] == CUT_TP ? 8 * (int64_t)(1 + test_rand(rng) % 4)
                                    : 1 + (int64_t)(test_rand(rng) % 9);
    return s;
}

static ParamPlace tp_place(int tp, int tp_rank)
{
    return param_place((Grid){ .tp = tp, .dp = 1 }, tp_rank, false);
}

static Param add_at(SetupArena *a, ParamSpec s, ParamPlace place)
{
    ParamRegistry r;
    int id;
    param_registry_init(&r, a, place);
    OK(param_add(&r, s, &id));
    return r.items[0];
}

static Param add(SetupArena *a, ParamSpec s, int tp, int tp_rank) { return add_at(a, s, tp_place(tp, tp_rank)); }

/* A stack of eight such, cut over ep, and over etp what was cut over tp. */
static ParamSpec of_experts(ParamSpec s)
{
    s.group = PARAM_EXPERT;
    s.ndim = 2;
    s.stack = 8;
    s.stack_cut = CUT_EP;
    s.shape[0] *= s.stack;
    for (int d = 0; d < 2; d++)
        if (s.cut[d] == CUT_TP) s.cut[d] = CUT_ETP;
    return s;
}

static const char *spec_text(const ParamSpec *s, int tp)
{
    static char text[256];
    snprintf(text, sizeof text, "%dD [%lld, %lld] padded %lld cut %d %d sections %lld %lld %lld / %lld tp %d",
             s->ndim, (long long)s->shape[0], (long long)s->shape[1], (long long)s->padded_rows, s->cut[0],
             s->cut[1], (long long)s->section[0], (long long)s->section[1], (long long)s->section[2],
             (long long)s->interleave, tp);
    return text;
}

/* The plain global element index of a local element, by param.c; -1 for padding. */
static int64_t plain_index(const Param *p, int64_t at)
{
    int64_t row = param_plain_row(p, at / p->local[1]);
    return row < 0 ? -1 : row * p->spec.shape[1] + p->first[1] + at % p->local[1];
}

/* Adds 1 to hits[local element] for every element of the boxes that is in its place; counts the others. */
static int64_t count_hits(const Param *p, const ShardBox *b, int n, int *hits)
{
    int64_t wrong = 0;
    for (int i = 0; i < n; i++)
        for (int64_t r = 0; r < b[i].box.shape[0]; r++)
            for (int64_t c = 0; c < b[i].box.shape[1]; c++) {
                int64_t at = b[i].at + r * b[i].ld + c;
                int64_t want = (b[i].box.offset[0] + r) * p->spec.shape[1] + b[i].box.offset[1] + c;
                if (at < 0 || at >= p->count || plain_index(p, at) != want) wrong++;
                else hits[at]++;
            }
    return wrong;
}

TEST(boxes_hold_exactly_the_local_elements_that_are_not_padding)
{
    uint64_t rng = 1;
    for (int round = 0; round < 400; round++) {
        SetupArena a;
        setup_init(&a);
        ParamSpec s = random_spec(&rng);
        int tp = tps[test_rand(&rng) % 4];
        for (int t = 0; t < tp; t++) {
            ShardBox b[MAX_BOXES];
            Param p = add(&a, s, tp, t);
            int n = shard_boxes(&p, b, MAX_BOXES), *hits = calloc((size_t)p.count, sizeof *hits);
            int64_t wrong = count_hits(&p, b, n, hits);
            for (int64_t i = 0; i < p.count; i++) wrong += hits[i] != (plain_index(&p, i) >= 0);
            CHECK_MSG(wrong == 0 && n <= MAX_BOXES, "%s", spec_text(&s, tp));
            CHECK(shard_boxes(&p, NULL, 0) == n);
            for (int i = 1; i < n; i++)
                CHECK(b[i].box.offset[0] >= b[i - 1].box.offset[0] + b[i - 1].box.shape[0]);
            free(hits);
        }
        setup_release(&a);
    }
}

TEST(boxes_of_all_owners_tile_the_global_tensor_once)
{
    uint64_t rng = 2;
    for (int round = 0; round < 300; round++) {
        SetupArena a;
        setup_init(&a);
        ParamSpec s = random_spec(&rng);
        Grid g = { .tp = tps[test_rand(&rng) % 4], .dp = 1 + (int)(test_rand(&rng) % 3), .ep = 1 };
        const bool experts = !s.padded_rows && test_rand(&rng) % 2;
        int writers = 0;
        if (experts) s = of_experts(s);
        g.etp = 1;
        while (experts && g.ep < 8 && g.etp < 8 && g.tp * g.dp % (2 * g.ep * g.etp) == 0 && test_rand(&rng) % 3)
            *(test_rand(&rng) % 2 ? &g.ep : &g.etp) *= 2;
        int *hits = calloc((size_t)(s.shape[0] * s.shape[1] + 1), sizeof *hits);
        Param any = add(&a, s, 1, 0);
        for (int rank = 0; rank < g.tp * g.dp; rank++) {
            const ParamPlace place = param_place(g, rank, false);
            Param p = shard_param(&any, &place), direct = add_at(&a, s, place);
            CHECK(p.local[0] == direct.local[0] && p.local[1] == direct.local[1] &&
                  p.first[0] == direct.first[0] && p.first[1] == direct.first[1] && p.count == direct.count);
            if (!shard_owner(&p, &place)) continue;
            writers++;
            ShardBox b[MAX_BOXES];
            Box piece;
            int n = shard_boxes(&p, b, MAX_BOXES);
            for (int at = 0, k; at < n; at += k) { /* merged, as they are stored */
                k = shard_merge(b + at, n - at, &piece);
                for (int64_t r = 0; r < piece.shape[0]; r++)
                    for (int64_t c = 0; c < piece.shape[1]; c++)
                        hits[(piece.offset[0] + r) * any.spec.shape[1] + piece.offset[1] + c]++;
            }
            if (!shard_is_cut(&p, CUT_TP) && !experts)
                CHECK(n > 0 && shard_merge(b, n, &piece) == n && box_equal(piece, shard_global(&p)));
        }
        int64_t wrong = 0;
        for (int64_t i = 0; i < any.spec.shape[0] * any.spec.shape[1]; i++) wrong += hits[i] != 1;
        CHECK_MSG(wrong == 0, "%s dp %d ep %d etp %d", spec_text(&any.spec, g.tp), g.dp, g.ep, g.etp);
        const int parts = shard_is_cut(&any, CUT_ETP) ? g.etp : 1;
        CHECK(writers == (experts ? g.ep * parts : shard_is_cut(&any, CUT_TP) ? g.tp : 1));
        free(hits);
        setup_release(&a);
    }
}

TEST(a_flat_range_is_at_most_two_boxes_more_than_the_whole)
{
    uint64_t rng = 3;
    for (int round = 0; round < 600; round++) {
        SetupArena a;
        setup_init(&a);
        ParamSpec s = random_spec(&rng);
        int tp = tps[test_rand(&rng) % 4];
        const int64_t stack = s.padded_rows ? 1 : 1 + (int64_t)(test_rand(&rng) % 3);
        s.stack = stack;
        s.shape[0] *= stack;
        Param p = add(&a, s, tp, (int)(test_rand(&rng) % (uint64_t)tp));
        int64_t first = (int64_t)(test_rand(&rng) % (uint64_t)(p.count + 1));
        int64_t count = (int64_t)(test_rand(&rng) % (uint64_t)(p.count - first + 1));
        ShardBox b[MAX_BOXES];
        int n = shard_range(&p, first, count, b, MAX_BOXES), *hits = calloc((size_t)p.count, sizeof *hits);
        int64_t wrong = count_hits(&p, b, n, hits);
        for (int64_t i = 0; i < p.count; i++)
            wrong += hits[i] != (i >= first && i < first + count && plain_index(&p, i) >= 0);
        CHECK_MSG(wrong == 0, "%s range %lld + %lld", spec_text(&s, tp), (long long)first, (long long)count);
        if (!s.section[0]) CHECK_MSG(n <= 2 + stack, "%d boxes, %s", n, spec_text(&s, tp));
        else CHECK(n <= 2 + (int)stack * PARAM_MAX_SECTIONS * (int)s.interleave);
        free(hits);
        setup_release(&a);
    }
}

/* ZeRO-1: slices of a made-up dp size tile the local memory, so their boxes tile the tensor. */
TEST(slices_over_dp_and_tp_tile_the_global_tensor_once)
{
    uint64_t rng = 4;
    for (int round = 0; round < 200; round++) {
        SetupArena a;
        setup_init(&a);
        ParamSpec s = random_spec(&rng);
        int tp = tps[test_rand(&rng) % 4], dp = 1 + (int)(test_rand(&rng) % 5);
        Param any = add(&a, s, tp, 0);
        int *hits = calloc((size_t)(any.spec.shape[0] * any.spec.shape[1]), sizeof *hits);
        for (int t = 0; t < (shard_is_cut(&any, CUT_TP) ? tp : 1); t++) {
            const ParamPlace place = tp_place(tp, t);
            Param p = shard_param(&any, &place);
            int64_t slice = (p.count + dp - 1) / dp;
            for (int64_t first = 0; first < p.count; first += slice) {
                ShardBox b[MAX_BOXES];
                int n = shard_range(&p, first, first + slice > p.count ? p.count - first : slice, b,
                                    MAX_BOXES);
                for (int i = 0; i < n; i++)
                    for (int64_t e = 0; e < box_count(b[i].box); e++) {
                        int64_t r = b[i].box.offset[0] + e / b[i].box.shape[1];
                        hits[r * p.spec.shape[1] + b[i].box.offset[1] + e % b[i].box.shape[1]]++;
                    }
            }
        }
        int64_t wrong = 0;
        for (int64_t i = 0; i < any.spec.shape[0] * any.spec.shape[1]; i++) wrong += hits[i] != 1;
        CHECK_MSG(wrong == 0, "%s dp %d", spec_text(&any.spec, tp), dp);
        free(hits);
        setup_release(&a);
    }
}

static void copy_box(float *dst, ShardBox to, const float *src, ShardBox from)
{
    for (int64_t r = 0; r < to.box.shape[0]; r++)
        memcpy(dst + to.at + r * to.ld, src + from.at + r * from.ld, (size_t)to.box.shape[1] * sizeof *dst);
}

/* Moves every box of `from` that meets a box of `to`; returns the elements moved. */
static int64_t reshape(const Param *to, float *dst, const Param *from, const float *src)
{
    ShardBox have[MAX_BOXES], want[MAX_BOXES], a, b;
    int64_t moved = 0;
    int nh = shard_boxes(from, have, MAX_BOXES), nw = shard_boxes(to, want, MAX_BOXES);
    for (int i = 0; i < nh; i++)
        for (int k = 0; k < nw; k++) {
            if (!shard_clip(have[i], want[k].box, &a)) continue;
            CHECK(shard_clip(want[k], have[i].box, &b) && box_equal(a.box, b.box));
            copy_box(dst, b, src, a);
            moved += box_count(a.box);
        }
    return moved;
}

/* What every rank of another grid gets from the owners' pieces is what it would have had itself. */
TEST(saved_on_one_grid_and_loaded_on_another_is_the_same_memory)
{
    uint64_t rng = 5;
    for (int round = 0; round < 300; round++) {
        SetupArena a;
        setup_init(&a);
        ParamSpec s = random_spec(&rng);
        int tp1 = tps[test_rand(&rng) % 4], tp2 = tps[test_rand(&rng) % 4];
        for (int t2 = 0; t2 < tp2; t2++) {
            Param to = add(&a, s, tp2, t2);
            float *got = calloc((size_t)to.count, sizeof *got);
            int64_t moved = 0, wrong = 0, plain = 0;
            for (int t1 = 0; t1 < tp1; t1++) {
                Param from = add(&a, s, tp1, t1);
                const ParamPlace place = tp_place(tp1, t1);
                if (!shard_owner(&from, &place)) continue;
                float *have = malloc((size_t)from.count * sizeof *have);
                for (int64_t i = 0; i < from.count; i++) /* padding is poison: it must not travel */
                    have[i] = plain_index(&from, i) < 0 ? NAN : 1 + (float)plain_index(&from, i);
                moved += reshape(&to, got, &from, have);
                free(have);
            }
            for (int64_t i = 0; i < to.count; i++) {
                int64_t want = plain_index(&to, i);
                plain += want >= 0;
                wrong += !(got[i] == (want < 0 ? 0 : 1 + (float)want));
            }
            CHECK_MSG(wrong == 0 && moved == plain, "%s -> tp %d", spec_text(&s, tp1), tp2);
            free(got);
        }
        setup_release(&a);
    }
}

TEST(a_registry_holds_any_number_and_no_name_twice)
{
    enum { COUNT = 20000 };
    SetupArena a;
    ParamRegistry r;
    char name[PARAM_NAME_MAX];
    int id;
    setup_init(&a);
    param_registry_init(&r, &a, param_place_single());
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "layers.%d.weight", i);
        OK(param_add(&r, (ParamSpec){ .name = name, .ndim = 1, .shape = { 3 } }, &id));
        CHECK(id == i);
    }
    for (int i = 0; i < COUNT; i += 101) {
        snprintf(name, sizeof name, "layers.%d.weight", i);
        FAILS(param_add(&r, (ParamSpec){ .name = name, .ndim = 1, .shape = { 3 } }, &id), ERR_INTERNAL, name);
    }
    CHECK(r.count == COUNT && param_total(&r) == 3 * COUNT && !strcmp(r.items[7000].name, "layers.7000.weight"));
    setup_release(&a);
}

/* A rank of two would have the gate alone, and the other what it gates. */
TEST(a_part_has_rows_of_every_section)
{
    SetupArena a;
    ParamRegistry r;
    int id;
    setup_init(&a);
    param_registry_init(&r, &a, tp_place(2, 0));
    ParamSpec s = { .name = "fc1", .ndim = 1, .shape = { 16 }, .cut = { CUT_TP }, .section = { 8, 8 } };
    FAILS(param_add(&r, s, &id), ERR_CONFIG, "fc1: 1 chunks cannot be cut over tp=2");
    s.interleave = 2;
    OK(param_add(&r, s, &id));
    setup_release(&a);
}

/* Slices are equal and begin where parameters may, also where experts have another number of them than what lies
 * behind. */
TEST(buckets_of_any_slices_are_cut_evenly)
{
    for (int experts = 1; experts <= 6; experts++)
        for (int dense = 1; dense <= 6; dense++) {
            SetupArena a;
            ParamRegistry r;
            ParamPlace place = param_place_single();
            int id;
            setup_init(&a);
            place.zero_shards[PARAM_EXPERT] = experts;
            place.zero_shards[PARAM_DENSE] = place.zero_shards[PARAM_STATE] = dense;
            param_registry_init(&r, &a, place);
            OK(param_add(&r, (ParamSpec){ .name = "experts", .ndim = 1, .shape = { 100 }, .group = PARAM_EXPERT },
                         &id));
            OK(param_add(&r, (ParamSpec){ .name = "w", .ndim = 1, .shape = { 700 } }, &id));
            OK(param_add(&r,
                         (ParamSpec){
                             .name = "bias", .ndim = 1, .shape = { 9 }, .group = PARAM_STATE, .partial = PARTIAL_ROWS },
                         &id));
            OK(param_layout(&r, INT64_MAX));
            for (int b = 0; b < r.bucket_count; b++)
                CHECK_MSG(r.buckets[b].count % (r.buckets[b].zero_shards * PARAM_ALIGN) == 0,
                          "experts in %d shards, the rest in %d: bucket %d has %lld elements", experts, dense, b,
                          (long long)r.buckets[b].count);
            setup_release(&a);
        }
}

TEST(box_intersection)
{
    Box a = { { 2, 0 }, { 4, 10 } }, b = { { 5, 3 }, { 4, 4 } }, x;
    CHECK(box_intersect(a, b, &x) && box_equal(x, (Box){ { 5, 3 }, { 1, 4 } }));
    CHECK(box_intersect(b, a, &x) && box_equal(x, (Box){ { 5, 3 }, { 1, 4 } }));
    CHECK(!box_intersect(a, (Box){ { 6, 0 }, { 1, 10 } }, &x));
    CHECK(!box_intersect(a, (Box){ { 2, 10 }, { 4, 1 } }, &x));
    CHECK(!box_intersect(a, (Box){ { 3, 3 }, { 0, 4 } }, &x));
    ShardBox s = { a, 100, 10 }, c;
    CHECK(shard_clip(s, b, &c) && c.at == 133 && c.ld == 10 && box_equal(c.box, (Box){ { 5, 3 }, { 1, 4 } }));
}

TEST_MAIN
