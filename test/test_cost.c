/*
 * What ops and calls take by a device's file (cost/cost.h): against times worked by hand for a device of round
 * figures, and what must hold for any.
 */
#include <math.h>

#include "../bench/l2_model.h"
#include "cost/cost.h"
#include "cost/measured.h"
#include "cost/reached.h"
#include "device/product_speedup.h"
#include "model/model.h"
#include "scratch.h"
#include "test.h"

/* 4 multiprocessors, 1 TFLOP/s, 1 GB/s of memory; hosts of 4 devices, 100 GB/s between these, 10 to others. */
static DeviceFile round_device(void)
{
    return (DeviceFile){ .name = "round",
                         .memory_mib = 1,
                         .bf16_tflops = 1,
                         .fp32_tflops = .5,
                         .memory_gb_s = 1000,
                         .multiprocessors = 4,
                         .attention_fwd_tflops = .5,
                         .attention_bwd_tflops = .25,
                         .host_devices = 4,
                         .link_gb_s = 100,
                         .network_gb_s = 10,
                         .link_us = 5,
                         .network_us = 20,
                         .matrix_share = 1,
                         .memory_share = 1,
                         .attention_share = 1,
                         .experts_share = .5,
                         .link_share = 1,
                         .overlap_cost = .25 };
}

static char somewhere[1]; /* (no op runs: an address is all that is needed) */

static Tensor bf16(int ndim, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t dim[] = { a, b, c, d };
    return tensor_view(somewhere, BF16, ndim, dim);
}

static linear_fwd_args linear(int64_t N, int64_t O, int64_t I)
{
    return (linear_fwd_args){ .y = bf16(2, N, O, 0, 0), .x = bf16(2, N, I, 0, 0), .w = bf16(2, O, I, 0, 0) };
}

static double linear_seconds(const DeviceFile *d, int64_t N, int64_t O, int64_t I)
{
    CostModel m;
    const linear_fwd_args a = linear(N, O, I);
    OK(cost_open(&m, d, 1));
    return cost_op(&m, OP_linear_fwd, &a, 0).seconds;
}

#define SAME(got, want) CHECK_MSG(fabs((got) / (want) - 1) < 1e-9, "%s is %.9g, not %.9g", #got, got, want)

TEST(every_device_that_ships_has_its_figures)
{
    static const char *const names[] = { "a100", "a100-40", "h100", "h100-nvl", "h100-pcie", "h200", "b200", "gb200",
                                         "b300", "gb300", "l40s", "3090",    "4090", "5090",     "rtx-pro-6000" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        DeviceFile d;
        CostModel m;
        OK(device_file_read(names[i], &d));
        OK(cost_open(&m, &d, 1));
        CHECK(!m.cpu && d.attention_fwd_tflops < d.bf16_tflops && d.attention_bwd_tflops < d.attention_fwd_tflops);
        CHECK(d.link_gb_s > d.network_gb_s && d.matrix_share < 1 && d.overlap_cost < 1);
        CHECK(d.host_link_gb_s >= 32 && d.host_link_gb_s <= d.link_gb_s);
        device_file_release(&d);
    }
}

TEST(points_of_what_there_is_not_are_refused)
{
    static const struct {
        DevicePoint p;
        const char *says;
    } cases[] = {
        { { "nosuch", "f32", 1, 1, 1, { 4 }, 1 }, "[op.nosuch] is none of megatrain's ops" },
        { { "all-gather", "f32", 1, 1, 1, { 4 }, 1 }, "[op.all-gather] is none" },
        { { "gelu_fwd", "", 2, 1, 1, { 4 }, 1 }, "[comm.gelu_fwd] is none of megatrain's collectives" },
        { { "gelu_fwd", "f32", 1, 1, 3, { 4, 4, 4 }, 1 }, "a shape of [op.gelu_fwd] has 1 number, not 3" },
        { { "linear_fwd", "f32", 1, 1, 1, { 4 }, 1 }, "a shape of [op.linear_fwd] has 3 numbers, not 1" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        DevicePoint p = cases[i].p;
        DeviceFile d = { .name = "d", .points = { .items = &p, .count = 1 } };
        CostModel m;
        FAILS(cost_open(&m, &d, 1), ERR_CONFIG, cases[i].says);
    }
}

TEST(what_lacks_is_named)
{
    CostModel m;
    DeviceFile d;
    OK(device_file_read(write_text("bare.ini", "[device]\nmemory_mib = 5\nmultiprocessors = 4\n"), &d));
    FAILS(cost_open(&m, &d, 1), ERR_CONFIG, "bare: times need memory_gb_s");
    OK(device_file_read(write_text("bare.ini", "[device]\nmemory_mib = 5\nmemory_gb_s = 4\nfp32_tflops = 1\n"), &d));
    FAILS(cost_open(&m, &d, 1), ERR_CONFIG, "bare: times need processors");
    FAILS(device_file_read("mi300x", &d), ERR_CONFIG, "AMD's");
}

TEST(products_take_whole_waves_of_tiles)
{
    const DeviceFile d = round_device();
    const double tile = 2 * 128 * 256 * 4096 / (1e12 / 4);
    SAME(linear_seconds(&d, 512, 256, 4096), tile);      /* 4 tiles, one each */
    SAME(linear_seconds(&d, 640, 256, 4096), 3 * (tile / 2) / .87); /* 10 tiles of 128 x 128 in 3 waves, each slower */
    SAME(linear_seconds(&d, 128 * 4 * 16, 256, 4096), 16.5 * tile);
    DeviceFile deep = d;
    deep.tile_depth = 4096; /* as much again to begin and to end */
    SAME(linear_seconds(&deep, 512, 256, 4096), 2 * tile);
}

/* At the rate of 8 bits, both ways round; without one, at that of 16 bits. */
TEST(products_of_8_bits)
{
    DeviceFile d = round_device();
    const double tile = 2 * 128 * 256 * 4096 / (1e12 / 4);
    CostModel m;
    const Tensor factor = tensor_of(somewhere, F32, 1);
    Tensor x = tensor_of(somewhere, E4M3, 512, 4096), w = tensor_of(somewhere, E4M3, 256, 4096);
    x.scale = w.scale = &factor;
    const fp8_product_args fwd = { .y = bf16(2, 512, 256, 0, 0), .x = x, .w = w };
    const fp8_product_add_args add = { .dw = tensor_of(somewhere, F32, 512, 256), .dy = x, .x = w };
    d.fp8_tflops = 2;
    OK(cost_open(&m, &d, 1));
    SAME(cost_op(&m, OP_fp8_product, &fwd, 0).seconds, tile / 2 / .84);
    SAME(cost_op(&m, OP_fp8_product_add, &add, 0).seconds, tile / 2 / .84);
    d.tile_depth = 2048; /* of which twice as much passes */
    OK(cost_open(&m, &d, 1));
    SAME(cost_op(&m, OP_fp8_product, &fwd, 0).seconds, tile / .84);
    d.fp8_tflops = d.tile_depth = 0;
    OK(cost_open(&m, &d, 1));
    SAME(cost_op(&m, OP_fp8_product, &fwd, 0).seconds, tile);
}

/* Codes with factors of 1 x 128, whose address is all that is needed. */
static Tensor codes(Tensor *factors, int64_t rows, int64_t columns)
{
    Tensor t = tensor_of(somewhere, E4M3, rows, columns);
    *factors = tensor_of(somewhere, F32, rows, columns / 128);
    t.scale = factors;
    return t;
}

/* Tiles of 128 x 64 at experts_share of the peak of 8 bits; on Hopper of 128 x 128 and of other rates. A run leaves
 * half a block unfilled, which is multiplied, too. */
TEST(experts_of_8_bits)
{
    enum { E = 8, C = 2048 };
    DeviceFile d = round_device();
    Tensor factors[5];
    const fp8_grouped_args fwd = { .y = bf16(2, E * 128, 192, 0, 0), .x = codes(&factors[0], E * 128, 1024),
                                   .w = codes(&factors[1], E * 192, 1024) };
    fp8_grouped_add_args add = { .dw = tensor_of(somewhere, F32, E, 128, 128), .dy = codes(&factors[2], 128, C),
                                 .x = codes(&factors[3], 128, C), .begin = tensor_of(somewhere, I64, E + 1) };
    /* of which 4 multiprocessors have 24, or 16; of twice as wide 16, or 8 */
    const double tile = 2. * 128 * 64 / (1e12 / 4);
    for (int hopper = 0; hopper < 2; hopper++) {
        const double rows = hopper ? 8 * tile / 1.74 : 6 * tile, sums = 4 * tile / (hopper ? 1.54 : .83);
        CostModel m;
        d.hopper = hopper;
        d.fp8_tflops = 2;
        OK(cost_open(&m, &d, 1));
        SAME(cost_op(&m, OP_fp8_grouped, &fwd, 0).seconds, rows * 1024);
        SAME(cost_op(&m, OP_fp8_grouped_add, &add, 0).seconds, sums * C / E);
        for (int known = 0; known < 2; known++) {
            fp8_grouped_add_args some = add;
            *(known ? &some.x.expected : &some.dy.expected) = E * 128;
            SAME(cost_op(&m, OP_fp8_grouped_add, &some, 0).seconds, sums * (128 + 64));
        }
        d.fp8_tflops = 0;
        OK(cost_open(&m, &d, 1));
        SAME(cost_op(&m, OP_fp8_grouped, &fwd, 0).seconds, 2 * rows * 1024);
    }
}

/* FLOP at .06 of the peak of fp32, of as many multiprocessors as there are key heads of samples; in 16 bits forward at
 * .048 of the peak of these, of as many as there are value heads, each 64 wide; backward at .066 twice, of these and of
 * all. */
TEST(the_delta_rule_is_arithmetic_on_few_multiprocessors)
{
    enum { T = 4096, D = 128 };
    const DeviceFile d = round_device();
    CostModel m;
    OK(cost_open(&m, &d, 1));
    for (int B = 1; B <= 8; B *= 2) {
        const Tensor keys = tensor_of(somewhere, BF16, B, T, 1, D), values = tensor_of(somewhere, BF16, B, T, 2, D / 2);
        const Tensor wide = tensor_of(somewhere, F32, B, T, 2, D / 2);
        const delta_fwd_args fwd = { .o = values, .q = keys, .k = keys, .v = values };
        const delta_fwd_args plain = { .o = wide, .q = keys, .k = keys, .v = wide };
        delta_bwd_args bwd = { .dq = keys, .dk = keys, .dv = values, .go = values, .q = keys, .k = keys,
                               .v = values };
        const double flop = 8. * B * T * 2 * D * D, rate = .06 * .5e12 * (B < 4 ? B / 4. : 1);
        SAME(cost_op(&m, OP_delta_fwd, &fwd, flop).seconds, flop / (.048 * 1e12 * (B < 2 ? .5 : 1)));
        SAME(cost_op(&m, OP_delta_fwd, &plain, flop).seconds, flop / rate);
        const double back = 2 * flop / (.066 * 1e12);
        SAME(cost_op(&m, OP_delta_bwd, &bwd, 2 * flop).seconds, back * (B < 2 ? 2 : 1) + back);
        bwd.v = wide;
        SAME(cost_op(&m, OP_delta_bwd, &bwd, 2 * flop).seconds, 2 * flop / rate);
    }
}

/* The same of windows: a block has one of a group. In 16 bits it has 8 of its heads, or 64 columns of gradients of
 * keys, at .057 of the peak of these. */
TEST(a_scan_of_windows_has_more_blocks)
{
    enum { N = 192, P = 64, H = 12 };
    const DeviceFile d = round_device();
    CostModel m;
    OK(cost_open(&m, &d, 1));
    for (int windows = 1; windows <= 4; windows *= 2)
        for (int wide = 0; wide < 2; wide++) {
            const DType type = wide ? F32 : BF16;
            const int64_t T = windows * MAMBA_WINDOW;
            const Tensor keys = tensor_of(somewhere, type, 1, T, 1, N), values = tensor_of(somewhere, type, 1, T, H, P);
            const mamba_fwd_args fwd = { .o = values, .q = keys, .k = keys, .x = values };
            const mamba_bwd_args bwd = { .dx = values, .dk = keys, .dq = keys, .go = values, .q = keys, .k = keys,
                                         .x = values };
            const double flop = 6. * T * H * N * P, rate = wide ? .06 * .5e12 : .057 * 1e12;
            const double heads = fmin(1, windows * (wide ? 1 : 2) / 4.);
            const double columns = fmin(1, windows * (wide ? 1 : 3) / 4.);
            SAME(cost_op(&m, OP_mamba_fwd, &fwd, flop).seconds, flop / (rate * heads));
            SAME(cost_op(&m, OP_mamba_bwd, &bwd, 2 * flop).seconds, 2 * flop / (rate * columns));
        }
}

/* Codes count as far as they are in use: columns of transposed ones, rows of others. */
TEST(codes_in_use_are_what_passes_memory)
{
    enum { E = 2, O = 64, C = 4096, SOME = 1024 };
    DeviceFile d = round_device();
    CostModel m;
    Tensor factors[3];
    d.memory_gb_s = 1e-3;
    OK(cost_open(&m, &d, 1));
    const Tensor begin = tensor_of(somewhere, I64, E + 1);
    fp8_grouped_add_args add = { .dw = tensor_of(somewhere, F32, E, O, O), .dy = codes(&factors[0], O, C),
                                 .x = codes(&factors[1], O, C), .begin = begin };
    const double passed = 2. * O * (SOME + 128 / 2 * E) + 8 * (E + 1); /* half a block of each expert is padding */
    for (int known = 0; known < 2; known++) {
        add.dy.expected = known ? 0 : SOME, add.x.expected = known ? SOME : 0;
        SAME(cost_op(&m, OP_fp8_grouped_add, &add, 0).seconds, (2 * 4. * E * O * O + passed) / 1e6);
    }
    add.fresh = 1;
    SAME(cost_op(&m, OP_fp8_grouped_add, &add, 0).seconds, (4. * E * O * O + passed) / 1e6);
    fp8_cast_runs_args cast = { .y = codes(&factors[2], O, C), .x = bf16(2, C / 2, O, 0, 0), .begin = begin,
                                .offset = begin };
    cast.x.expected = cast.y.expected = SOME;
    const double bytes = (1. + 2) * O * SOME + 2 * 8 * (E + 1);
    SAME(cost_op(&m, OP_fp8_cast_runs, &cast, 0).seconds, bytes / 1e6);
    SAME(op_work(OP_fp8_cast_runs, &cast).shape[0], bytes);
    CHECK(cost_op(&m, OP_fp8_cast_runs, &cast, 0).launches == 2);
    fp8_grouped_args rows = { .y = bf16(2, C, O, 0, 0),
                              .x = codes(&factors[0], C, O),
                              .w = codes(&factors[1], E * O, O) };
    rows.y.expected = SOME;
    SAME(cost_op(&m, OP_fp8_grouped, &rows, 0).seconds, ((2. + 1) * SOME * O + E * O * O) / 1e6);
}

/* A tile alone is cut into as many sums as there are multiprocessors, none of them shorter than 512. */
TEST(long_sums_of_few_tiles_are_cut)
{
    DeviceFile d = round_device();
    const double tile = 2 * 128 * 256 * 4096 / (1e12 / 4);
    SAME(linear_seconds(&d, 128, 256, 4096), tile / 4);
    const double small = 2 * 64 * 64 * 1024 / .5 / (1e12 / 4);
    SAME(linear_seconds(&d, 64, 64, 1024), small / 2);
    SAME(linear_seconds(&d, 64, 64, 1000), small * 1000 / 1024);
    d.tile_depth = 1024; /* each part begins and ends: two halves of 128 x 128 twice */
    SAME(linear_seconds(&d, 128, 256, 4096), tile / 2 * (2048 + 1024) / 4096 / .87);
}

/* The second result is written when the first is there. */
TEST(an_epilogue_comes_behind_the_arithmetic)
{
    const DeviceFile d = round_device();
    CostModel m;
    linear_fwd_args a = linear(512, 256, 4096);
    OK(cost_open(&m, &d, 1));
    const double alone = cost_op(&m, OP_linear_fwd, &a, 0).seconds;
    a.gelu = bf16(2, 512, 256, 0, 0);
    SAME(cost_op(&m, OP_linear_fwd, &a, 0).seconds, alone + 2 * 512 * 256 / 1e12);
}

/* Each op has a rate in each form. */
TEST(rates_that_kernels_reach)
{
    for (int id = 0; id < OP_COUNT; id++) {
        CHECK(reached_of_copy((OpId)id) > 0 && reached_of_copy((OpId)id) < 1.1);
        for (int form = 0; form < KERNEL_FORMS; form++) {
            const double experts = reached_by_experts((OpId)id, form), wide = reached_by_attention((OpId)id, form, 128);
            const double codes = reached_by_fp8_experts((OpId)id, form);
            CHECK(experts > 0 && experts < 4 && wide > 0 && wide < 4 && codes > 0 && codes <= experts);
            CHECK(reached_by_attention((OpId)id, form, 64) < wide);
        }
    }
}

/* A product whose arithmetic takes as long as its bytes; then memory is a tenth slower, or faster. */
TEST(a_product_takes_the_longer_of_arithmetic_and_bytes)
{
    DeviceFile d = round_device();
    const double bytes = 2 * (512. * 256 + 512. * 4096 + 256. * 4096), arithmetic = 2. * 512 * 256 * 4096 / 1e12;
    d.memory_gb_s = 1e-9 * bytes / arithmetic / 1.1;
    SAME(linear_seconds(&d, 512, 256, 4096), 1.1 * arithmetic);
    d.memory_gb_s = 1e-9 * bytes / arithmetic * 1.1;
    SAME(linear_seconds(&d, 512, 256, 4096), arithmetic);
}

TEST(memory_work_takes_its_bytes_and_a_gap)
{
    DeviceFile d = round_device();
    CostModel m;
    const gelu_fwd_args a = { .y = bf16(2, 1000, 500, 0, 0), .x = bf16(2, 1000, 500, 0, 0) };
    OK(cost_open(&m, &d, 1));
    const double bytes = 2 * 2 * 500000 / (.96 / .9); /* as many as take as long at what memory_share means */
    SAME(cost_op(&m, OP_gelu_fwd, &a, 0).seconds, bytes / 1e12);
    d.gap_us = 2, d.host_us = 3;
    SAME(cost_op(&m, OP_gelu_fwd, &a, 0).seconds, bytes / 1e12 + 2e-6);
    SAME(cost_op(&m, OP_gelu_fwd, &a, 0).host, 3e-6);
}

/* A sum that is there is read; a new one is not. */
TEST(fresh_gradients_are_not_read)
{
    DeviceFile d = round_device();
    CostModel m;
    d.memory_gb_s = 1;
    linear_dw_args a = { .dw = bf16(2, 64, 64, 0, 0), .dy = bf16(2, 64, 64, 0, 0), .x = bf16(2, 64, 64, 0, 0) };
    a.dw.dtype = F32;
    OK(cost_open(&m, &d, 1));
    SAME(cost_op(&m, OP_linear_dw, &a, 0).seconds, (2 * 4 + 2 + 2) * 64. * 64 / 1e9);
    a.fresh = 1;
    SAME(cost_op(&m, OP_linear_dw, &a, 0).seconds, (4 + 2 + 2) * 64. * 64 / 1e9);
    grouped_dw_args experts = { .dw = tensor_of(somewhere, F32, 2, 64, 64), .dy = a.dy, .x = a.x };
    SAME(cost_op(&m, OP_grouped_dw, &experts, 0).seconds, (4 * 4 + 2 + 2) * 64. * 64 / 1e9);
    experts.fresh = 1;
    SAME(cost_op(&m, OP_grouped_dw, &experts, 0).seconds, (2 * 4 + 2 + 2) * 64. * 64 / 1e9);
    norm_bwd_args norm = { .dx = bf16(2, 64, 64, 0, 0), .dy = bf16(2, 64, 64, 0, 0), .x = bf16(2, 64, 64, 0, 0) };
    SAME(cost_op(&m, OP_norm_bwd, &norm, 0).seconds, 4 * 2 * 64. * 64 / (1e9 * .80 / .9));
    norm.fresh_dx = 1;
    SAME(cost_op(&m, OP_norm_bwd, &norm, 0).seconds, 3 * 2 * 64. * 64 / (1e9 * .80 / .9));
}

TEST(experts_share_their_waves)
{
    const DeviceFile d = round_device();
    CostModel m;
    OK(cost_open(&m, &d, 1));
    const grouped_fwd_args a = { .y = bf16(2, 8 * 128, 128, 0, 0), .x = bf16(2, 8 * 128, 1024, 0, 0),
                                 .w = bf16(3, 8, 128, 1024, 0) };
    SAME(cost_op(&m, OP_grouped_fwd, &a, 0).seconds, 2 * 2. * 128 * 128 * 1024 / (1e12 / 4 / 2)); /* 8 tiles, 2 waves */
}

/* Seconds of a grouped product over all experts' rows. */
static double grouped_seconds(const CostModel *m, int64_t rows, int64_t O, int64_t I, int64_t experts)
{
    const grouped_fwd_args a = { .y = bf16(2, rows, O, 0, 0), .x = bf16(2, rows, I, 0, 0),
                                 .w = bf16(3, experts, O, I, 0) };
    return cost_op(m, OP_grouped_fwd, &a, 0).seconds;
}

/* L2 does not hold all that tiles share, and some comes twice: by a model of it that walks the kernel's own order of
 * tiles that is less than the arithmetic takes, so that counting each byte once is enough. */
TEST(bytes_that_come_again_do_not_bound_experts)
{
    static const char *const names[] = { "a100", "h100", "b200" };
    static const int64_t sizes[][4] = { { 65536, 1536, 2048, 16 }, { 65536, 2048, 768, 16 }, { 16384, 28672, 4096, 1 },
                                        { 16384, 4096, 14336, 1 }, { 32768, 4096, 7168, 4 }, { 16384, 5760, 2880, 4 } };
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        DeviceFile d;
        CostModel m;
        OK(device_file_read(names[k], &d));
        OK(cost_open(&m, &d, 1));
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            const int64_t rows = sizes[i][0], O = sizes[i][1], I = sizes[i][2], experts = sizes[i][3];
            const GroupedShape shape = { rows, O, I, (int)experts, false };
            const double bytes = (double)grouped_traffic(shape, grouped_place, L2_BYTES);
            CHECK_MSG(grouped_seconds(&m, rows, O, I, experts) > bytes / (1e9 * d.memory_gb_s * d.memory_share),
                      "%s, case %zu: %g bytes", names[k], i, bytes);
        }
        device_file_release(&d);
    }
}

/* Where each expert has few rows its weights are what takes long. */
TEST(weights_of_experts_with_few_rows_bound_them)
{
    DeviceFile d;
    CostModel m;
    OK(device_file_read("h100", &d));
    OK(cost_open(&m, &d, 1));
    const double bytes = 2 * (64 * 2048. * 4096 + 64 * 16 * (2048. + 4096));
    SAME(grouped_seconds(&m, 64 * 16, 2048, 4096, 64),
         bytes / (1e9 * d.memory_gb_s * d.memory_share) + 1e-6 * d.gap_us);
    device_file_release(&d);
}

/* Kernels for Hopper have rates of their own, of 16 bits, and backward not for wide heads. */
TEST(hoppers_kernels_where_a_device_has_them)
{
    static const struct {
        OpId id;
        int64_t width;
        double faster; /* for many keys */
    } cases[] = { { OP_attention_fwd, 32, 1 },           { OP_attention_fwd, 64, 1.66 / .89 },
                  { OP_attention_fwd, 128, 2.19 },       { OP_attention_fwd, 256, 2.2 / .85 },
                  { OP_attention_bwd, 64, 1.6 / .81 },   { OP_attention_bwd, 128, 2.08 },
                  { OP_attention_bwd, 192, 1 },          { OP_grouped_fwd, 1024, 2.37 },
                  { OP_grouped_dx, 1024, 2.22 / .9 },    { OP_grouped_dw, 1024, 2.1 / .83 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const KernelForm plain = kernel_form(cases[i].id, false, cases[i].width),
                         own = kernel_form(cases[i].id, true, cases[i].width);
        const bool experts = cases[i].id != OP_attention_fwd && cases[i].id != OP_attention_bwd;
        CHECK(plain == FORM_MMA_SYNC && (own == FORM_WGMMA) == (cases[i].faster != 1));
        SAME((experts ? reached_by_experts(cases[i].id, own) : reached_by_attention(cases[i].id, own, cases[i].width)) /
                 (experts ? reached_by_experts(cases[i].id, plain)
                          : reached_by_attention(cases[i].id, plain, cases[i].width)),
             cases[i].faster);
    }
    DeviceFile d = round_device();
    CostModel m;
    const grouped_fwd_args narrow = { .y = bf16(2, 8 * 128, 128, 0, 0), .x = bf16(2, 8 * 128, 1024, 0, 0),
                                      .w = bf16(3, 8, 128, 1024, 0) };
    grouped_fwd_args wide = narrow;
    wide.y.dtype = wide.x.dtype = wide.w.dtype = F32;
    double seconds[2][2];
    for (int hopper = 0; hopper < 2; hopper++) {
        d.hopper = hopper;
        OK(cost_open(&m, &d, 1));
        seconds[hopper][0] = cost_op(&m, OP_grouped_fwd, &narrow, 0).seconds;
        seconds[hopper][1] = cost_op(&m, OP_grouped_fwd, &wide, 0).seconds;
    }
    SAME(seconds[0][0] / seconds[1][0], 2.37);
    SAME(seconds[0][1], seconds[1][1]);
}

static double attention_seconds(int64_t T, int64_t window)
{
    const DeviceFile d = round_device();
    CostModel m;
    const attention_fwd_args a = { .o = bf16(4, 1, T, 2, 128), .q = bf16(4, 1, T, 2, 128), .k = bf16(4, 1, T, 2, 128),
                                   .v = bf16(4, 1, T, 2, 128), .q_span = { .count = { T, 0 } },
                                   .k_span = { .count = { T, 0 } }, .window = window };
    OK(cost_open(&m, &d, 1));
    return cost_op(&m, OP_attention_fwd, &a, 0).seconds;
}

TEST(attention_counts_pairs_that_see_each_other)
{
    const double T = 4096, pairs = T * (T + 1) / 2, keys = pairs / T;
    SAME(attention_seconds(4096, 0), 2 * 4 * 128 * pairs / (.5e12 * keys / (keys + 283)));
    double seen = 0; /* a query at t sees min(t + 1, 256) */
    for (int t = 0; t < 4096; t++) seen += t + 1 < 256 ? t + 1 : 256;
    SAME(attention_seconds(4096, 256), 2 * 4 * 128 * seen / (.5e12 * (seen / T) / (seen / T + 283)));
}

/* Key by key, of any spans. */
static double pairs_one_by_one(Spans q, Spans k, int64_t window)
{
    double seen = 0;
    for (int64_t t = 0; t < q.count[0] + q.count[1]; t++)
        for (int64_t s = 0; s < k.count[0] + k.count[1]; s++) {
            const int64_t back = spans_position(q, t) - spans_position(k, s);
            seen += back >= 0 && (!window || back < window);
        }
    return seen;
}

TEST(pairs_of_any_spans)
{
    enum { ROWS = 48 };
    for (int64_t window = 0; window < 40; window += 7)
        for (int64_t a = 0; a < 12; a += 3)
            for (int64_t b = 0; b < 12; b += 3) {
                const Spans q = { .first = { a, a + 30 }, .count = { 9, a } },
                            k = { .first = { b, 41 - b }, .count = { 5 + b, b } };
                const attention_fwd_args of = { .q = bf16(4, 1, ROWS, 1, 64),
                                                .k = bf16(4, 1, ROWS, 1, 64),
                                                .v = bf16(4, 1, ROWS, 1, 64),
                                                .q_span = q,
                                                .k_span = k,
                                                .window = window };
                const double seen = op_work(OP_attention_fwd, &of).times * causal_pairs(ROWS, ROWS);
                CHECK_CLOSE(seen, pairs_one_by_one(q, k, window), 1e-9, "window %d, %d, %d", (int)window, (int)a,
                            (int)b);
            }
}

/* What plan, mfu and the costs of stages go by, and what an op counts, beside pairs that are counted one by one. */
TEST(flop_of_windows)
{
    enum { T = 40, HEADS = 3, WIDTH = 8 };
    static const char *const windows[] = { "0", "1", "7", "39", "40", "41", "8,0,15*2" };
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        ModelSpec m = { .layers = 5, .heads = HEADS, .kv_heads = 1, .head_dim = WIDTH, .hidden = 24, .seq = T };
        double all = 0, seen = 0;
        CHECK(layer_pattern_read(windows[i], T + 1, &m.window) > 0);
        for (int layer = 0; layer < m.layers; layer++) {
            const int64_t window = layer_pattern_at(&m.window, layer);
            const double pairs = pairs_one_by_one(spans_whole(T), spans_whole(T), window);
            all += 12. * HEADS * WIDTH * (double)(window && window < T ? window : T);
            seen += 12. * HEADS * WIDTH * pairs / T;
            CHECK((double)spans_pairs(spans_whole(T), spans_whole(T), window) == pairs);
        }
        CHECK_CLOSE((double)model_attention_flop_per_token(&m), all, 1e-12, "all keys of '%s'", windows[i]);
        CHECK_CLOSE((double)model_causal_flop_per_token(&m), seen, 1e-3, "keys seen of '%s'", windows[i]);
        const StageShare first = { .layer_count = 1 }, both = { .layer_count = 2 };
        const double step = (double)(stage_flop_per_token(&m, both) - 2 * stage_flop_per_token(&m, first) + m.hidden);
        const int64_t w = layer_pattern_at(&m.window, 1), v = layer_pattern_at(&m.window, 0);
        CHECK(step == 4. * HEADS * WIDTH * (double)((w && w < T ? w : T) - (v && v < T ? v : T)));
    }
}

/* ---- calls ---- */

static CommPlace place_of(GridShape s, GroupKind kind, int rank)
{
    const DeviceFile d = round_device();
    CostModel m;
    OK(cost_open(&m, &d, 1));
    return cost_place(&m, s, kind, rank);
}

static void check_place(CommPlace p, int size, int hosts, int here)
{
    CHECK_MSG(p.size == size && p.hosts == hosts && p.here == here, "%d members, %d hosts, %d on one", p.size, p.hosts,
              p.here);
}

TEST(groups_are_where_their_ranks_are)
{
    GridShape s = { .world = 16, .tp = 2, .cp = 1, .pp = 2, .ep = 1, .etp = 1 };
    check_place(place_of(s, GROUP_TP, 5), 2, 1, 2);
    check_place(place_of(s, GROUP_DP, 0), 4, 2, 2);  /* 0 2 | 4 6 */
    check_place(place_of(s, GROUP_PP, 3), 2, 2, 1);  /* 3 | 11 */
    s.order = ORDER_PP_DP;                           /* a replica is a run of 4 */
    check_place(place_of(s, GROUP_PP, 3), 2, 1, 2);  /* 1 3 */
    check_place(place_of(s, GROUP_DP, 0), 4, 4, 1);  /* 0 4 8 12 */
    const GridShape ragged = { .world = 12, .tp = 6, .cp = 1, .pp = 1, .ep = 1, .etp = 1 };
    check_place(place_of(ragged, GROUP_TP, 0), 6, 2, 2); /* 0 1 2 3 | 4 5 */
    check_place(place_of(ragged, GROUP_TP, 7), 6, 2, 2); /* 6 7 | 8 9 10 11 */
}

TEST(calls_take_their_bytes_over_the_slowest_link)
{
    const DeviceFile d = round_device();
    CostModel m;
    OK(cost_open(&m, &d, 1));
    const CommPlace host = { 4, 1, 4 }, hosts = { 8, 2, 4 }, rail = { 2, 2, 1 }, self = { 1, 1, 1 };
    SAME(cost_call(&m, COMM_ALL_GATHER, host, 1000000), 5e-6 + 1e-5);
    SAME(cost_call(&m, COMM_ALL_GATHER, hosts, 1000000), 24e-6 + 1e6 / 40e9); /* four ports; a hop */
    SAME(cost_call(&m, COMM_REDUCE_SCATTER_TREE_F32, rail, 1000000), 24e-6 + 1e6 / 10e9);
    SAME(cost_call(&m, COMM_ALL_TO_ALL_ROWS, host, 1000000), 8e-6 + 1e-5);
    SAME(cost_call(&m, COMM_ALL_TO_ALL_ROWS, hosts, 7000000), 27e-6 + 4e6 / 10e9); /* 4 of 7 members elsewhere */
    SAME(cost_message(&m, true, 1000000), 6e-6 + 1e-5);
    SAME(cost_message(&m, false, 1000000), 21e-6 + 1e-4);
    CHECK(cost_call(&m, COMM_ALL_GATHER, self, 1000000) == 0);
    for (CommKind k = 0; k < COMM_KIND_COUNT; k++)
        for (int64_t bytes = 1; bytes < INT64_C(1) << 40; bytes *= 4)
            CHECK(cost_call(&m, k, hosts, bytes) < cost_call(&m, k, hosts, 4 * bytes) &&
                  cost_call(&m, k, hosts, bytes) > 0);
}

/* Two threads have tasks of whole tiles; what is measured at corners of a cell follows their steps, and so does what is
 * said in between. */
TEST(between_sizes_threads_share_tasks)
{
    static const OpId ids[] = { OP_linear_fwd, OP_linear_dx, OP_linear_dw };
    static const int64_t sizes[] = { 8, 96, 128, 192, 256, 384, 512, 2048 };
    for (int k = 0; k < 3; k++) {
        int cut = 0;
        for (int i = 0; i < 512; i++) {
            const ProductShape shape = { sizes[i / 64], sizes[i / 8 % 8], sizes[i % 8], false };
            const double one = product_speedup(product_by_here(), ids[k], shape, 1),
                         two = product_speedup(product_by_here(), ids[k], shape, 2),
                         three = product_speedup(product_by_here(), ids[k], shape, 3);
            CHECK(one == 1 && two >= 1 && two <= 2 && three >= 1 && three <= 3);
            cut += two > 1 && two < 1.9;
        }
        CHECK(cut > 0);
        for (Isa isa = ISA_AUTO + 1; isa < ISA_COUNT; isa++) { /* (with AVX2 one thread has 19 of 32 tasks) */
            const ProductBy by = { isa, DOT_FMA };
            if (isa_supported(isa))
                CHECK(product_speedup(by, ids[k], (ProductShape){ 2048, 2048, 2048, false }, 2) > 1.6);
        }
        CHECK(product_speedup(product_by_here(), ids[k], (ProductShape){ 8, 16, 8, false }, 2) == 1);
    }
    CHECK(product_speedup(product_by_here(), OP_attention_fwd, (ProductShape){ 2048, 2048, 2048, false }, 2) == 1);

    const double gflop_s = 50;
    DevicePoint points[8];
    for (int i = 0; i < 8; i++) {
        const ProductShape at = { i & 4 ? 512 : 128, i & 2 ? 512 : 128, i & 1 ? 512 : 128, false };
        const double us = (double)(at.rows * at.outputs * at.inputs) / gflop_s * 2e-3 /
                          product_speedup(product_by_here(), OP_linear_fwd, at, 2);
        points[i] = (DevicePoint){
            "linear_fwd", "f32", 1, 2, 3, { (double)at.rows, (double)at.outputs, (double)at.inputs }, us
        };
    }
    const DevicePoints all = { .items = points, .count = 8, .names = 1 };
    for (int64_t n = 128; n <= 512; n += 64) {
        linear_fwd_args a = linear(256, n, n);
        a.y.dtype = a.x.dtype = a.w.dtype = F32;
        double seconds = 0;
        CHECK(measured_op(&all, OP_linear_fwd, &a, 1, 2, &seconds));
        SAME(seconds, (double)(256 * n * n) / gflop_s * 2e-9 /
                          product_speedup(product_by_here(), OP_linear_fwd, (ProductShape){ 256, n, n, false }, 2));
    }
}

/* Gradients' sums are of fixed point or a chain, which threads share otherwise: points of fp32 are of the former, those
 * of bf16 of the latter, and what is asked for is of either. */
TEST(threads_share_sums_of_gradients_as_they_are_made)
{
    const double gflop_s = 50;
    int differ = 0;
    for (int narrow = 0; narrow < 2; narrow++) {
        DevicePoint points[8];
        for (int i = 0; i < 8; i++) {
            const ProductShape at = { i & 4 ? 1024 : 64, i & 2 ? 512 : 64, i & 1 ? 512 : 64, narrow, !narrow };
            points[i] = (DevicePoint){ "linear_dw",
                                       "",
                                       1,
                                       2,
                                       3,
                                       { (double)at.rows, (double)at.outputs, (double)at.inputs },
                                       (double)(at.rows * at.outputs * at.inputs) / gflop_s * 2e-3 /
                                           product_speedup(product_by_here(), OP_linear_dw, at, 2) };
            snprintf(points[i].dtype, sizeof points[i].dtype, "%s", narrow ? "bf16" : "f32");
        }
        const DevicePoints all = { .items = points, .count = 8, .names = 1 };
        for (int i = 0; i < 64; i++) {
            double seconds[2], speedup[2];
            const int64_t n = 64 + 64 * (i / 8), m = 64 + 64 * (i % 8);
            for (int fixed = 0; fixed < 2; fixed++) {
                linear_dw_args a = { .dy = bf16(2, 512, n, 0, 0), .x = bf16(2, 512, m, 0, 0),
                                     .dw = tensor_of(somewhere, fixed ? I64 : F32, n, m) };
                a.dy.dtype = a.x.dtype = narrow ? BF16 : F32;
                speedup[fixed] =
                    product_speedup(product_by_here(), OP_linear_dw, (ProductShape){ 512, n, m, narrow, fixed }, 2);
                CHECK(measured_op(&all, OP_linear_dw, &a, 1, 2, &seconds[fixed]));
                SAME(seconds[fixed], (double)(512 * n * m) / gflop_s * 2e-9 / speedup[fixed]);
            }
            differ += fabs(speedup[0] / speedup[1] - 1) > .01;
        }
    }
    CHECK_MSG(differ > 0 || product_by_here().isa == ISA_C, "no shape is shared otherwise");
}

/* Between points threads share products as they did by the instructions that the file names, as far as this processor
 * has these. */
TEST(products_are_shared_as_where_they_were_measured)
{
    static const Isa isas[] = { ISA_AVX512, ISA_AVX2, ISA_C };
    const ProductBy here = product_by_here();
    int differ = 0;
    for (int k = 0; k < 3; k++) {
        const ProductBy by = { isa_supported(isas[k]) ? isas[k] : here.isa, DOT_FMA };
        DevicePoint points[8];
        for (int i = 0; i < 8; i++) {
            const ProductShape at = { i & 4 ? 512 : 64, i & 2 ? 512 : 64, i & 1 ? 512 : 64, false };
            points[i] = (DevicePoint){ "linear_fwd",
                                       "f32",
                                       1,
                                       2,
                                       3,
                                       { (double)at.rows, (double)at.outputs, (double)at.inputs },
                                       2 / product_speedup(by, OP_linear_fwd, at, 2) *
                                           (double)(at.rows * at.outputs * at.inputs) };
        }
        DevicePoints all = { .items = points, .count = 8, .names = 1 };
        snprintf(all.isa, sizeof all.isa, "%s", isa_name(isas[k]));
        snprintf(all.dot, sizeof all.dot, "%s", dot_name(DOT_FMA));
        for (int64_t n = 64; n <= 512; n += 16) {
            const ProductShape shape = { 200, n, n, false };
            linear_fwd_args a = linear(200, n, n);
            a.y.dtype = a.x.dtype = a.w.dtype = F32;
            double seconds = 0;
            CHECK(measured_op(&all, OP_linear_fwd, &a, 1, 2, &seconds));
            SAME(seconds, 2e-6 / product_speedup(by, OP_linear_fwd, shape, 2) * (double)(200 * n * n));
            differ +=
                fabs(product_speedup(by, OP_linear_fwd, shape, 2) / product_speedup(here, OP_linear_fwd, shape, 2) -
                     1) > .01;
        }
    }
    /* (AVX2 and plain C have panels of one shape) */
    CHECK_MSG(differ > 0 || here.isa != ISA_AVX512, "no shape is shared otherwise by other instructions");
    CHECK(product_by_names("", "").isa == here.isa && product_by_names("", "").dot == here.dot);
    for (int k = 0; k < 3; k++) {
        const bool has = isa_supported(isas[k]);
        const ProductBy by = product_by_names(isa_name(isas[k]), "vdpbf16");
        CHECK(by.isa == (has ? isas[k] : here.isa) && by.dot == (has ? DOT_VDPBF16 : here.dot));
    }
}

/* Points of 1 and of 4 threads are as far from 2: a prediction is of one kind, in whatever order a file has them. */
TEST(points_of_two_kinds_do_not_mix)
{
    DevicePoint points[16];
    linear_fwd_args a = linear(256, 192, 192);
    a.y.dtype = a.x.dtype = a.w.dtype = F32;
    for (int kind = 0; kind < 4; kind++) { /* other threads, other ranks, each in both orders */
        double alone = 0, seconds = 0;
        for (int i = 0; i < 16; i++) {
            const bool many = (i / 8 == 1) != (kind % 2 == 1);
            const int wide = many ? 4 : 1, ranks = kind < 2 ? 1 : wide, threads = kind < 2 ? wide : 1;
            points[i] = (DevicePoint){ "linear_fwd",
                                       "f32",
                                       ranks,
                                       threads,
                                       3,
                                       { i & 4 ? 512 : 128, i & 2 ? 512 : 128, i & 1 ? 512 : 128 },
                                       many ? 7 + i % 8 : 100 };
        }
        const DevicePoints few = { .items = points + 8 * (kind % 2), .count = 8, .names = 1 };
        const DevicePoints all = { .items = points, .count = 16, .names = 1 };
        const int ranks = kind < 2 ? 1 : 2, threads = kind < 2 ? 2 : 1;
        CHECK(measured_op(&few, OP_linear_fwd, &a, ranks, threads, &alone));
        CHECK(measured_op(&all, OP_linear_fwd, &a, ranks, threads, &seconds));
        SAME(seconds, alone);
    }
}

/* A GPU's by its link; a host's processors read and write, all ranks at once. */
TEST(copies_take_their_bytes)
{
    DeviceFile d = round_device();
    CostModel m;
    d.host_link_gb_s = 20, d.link_share = .5;
    OK(cost_open(&m, &d, 1));
    SAME(cost_copy(&m, 5000000), 5e-4);
    m.cpu = true, m.ranks = 4;
    SAME(cost_copy(&m, 5000000), 4e-5);
}

TEST(exchanges_take_what_goes_to_other_hosts)
{
    const DeviceFile d = round_device();
    CostModel m;
    OK(cost_open(&m, &d, 1));
    const CommPlace host = { 4, 1, 4 }, hosts = { 8, 2, 4 };
    CommMessage all[14], ring[] = { { .send = true, .peer = 1, .bytes = 1000000 }, { .peer = 7, .bytes = 1000000 },
                                    { .send = true, .peer = 1, .bytes = 2000000 } };
    for (int i = 0; i < 14; i++) all[i] = (CommMessage){ .send = i % 2, .peer = 1 + i / 2, .bytes = 1000000 };
    SAME(cost_exchange(&m, host, ring, 3), 6e-6 + 3e-5);
    SAME(cost_exchange(&m, hosts, ring, 3), 21e-6 + 3e6 / 10e9); /* some rank's neighbour is elsewhere */
    SAME(cost_exchange(&m, hosts, all, 14), 27e-6 + 4e6 / 10e9);
    SAME(cost_exchange(&m, hosts, ring + 1, 1), 21e-6 + 1e6 / 10e9); /* who gets waits as long as who sends */
    CHECK(cost_exchange(&m, hosts, ring, 0) == 0);
}

static double embedding_seconds(int64_t tokens, int64_t rows)
{
    const DeviceFile d = round_device();
    CostModel m;
    Tensor index = bf16(1, tokens, 0, 0, 0);
    index.dtype = I32;
    const embedding_fwd_args a = { .y = bf16(2, tokens, 100, 0, 0), .table = bf16(2, rows, 100, 0, 0), .index = index };
    OK(cost_open(&m, &d, 1));
    return cost_op(&m, OP_embedding_fwd, &a, 0).seconds;
}

TEST(of_an_embedding_the_rows_that_tokens_have_are_read)
{
    SAME(embedding_seconds(1000, 100000), (2 * 200 + 4) * 1000 / (1e12 * .76 / .9));
    SAME(embedding_seconds(1000, 500), (200 * 1000 + 200 * 500 + 4 * 1000) / (1e12 * .76 / .9));
}

TEST(more_work_never_takes_less)
{
    static const char *const names[] = { "a100", "h100", "b200", "4090" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        DeviceFile d;
        OK(device_file_read(names[i], &d));
        for (int64_t n = 64; n < 65536; n *= 2) {
            CHECK(linear_seconds(&d, n, 4096, 4096) <= linear_seconds(&d, 2 * n, 4096, 4096));
            CHECK(linear_seconds(&d, 4096, n, 4096) <= linear_seconds(&d, 4096, 2 * n, 4096));
            CHECK(linear_seconds(&d, 4096, 4096, n) < linear_seconds(&d, 4096, 4096, 2 * n));
            CHECK(linear_seconds(&d, n, 4096, 4096) >= 2. * (double)n * 4096 * 4096 / (1e12 * d.bf16_tflops));
        }
        device_file_release(&d);
    }
}

TEST_MAIN
