/*
 * What was measured of a device: lines of its file there and back, what is wrong in one, and what is looked up between
 * points, against rates worked by hand.
 */
#include <math.h>

#include "config/config_device.h"
#include "cost/measured.h"
#include "measure/cases.h"
#include "scratch.h"
#include "test.h"

static void add(DevicePoints *all, const char *section, const char *value)
{
    OK(device_points_read(all, section, "us", value));
}

TEST(a_line_there_and_back)
{
    static const struct {
        const char *section, *value;
    } lines[] = { { "op.linear_fwd", "f32 2x1 256x512x128 690.5" },
                  { "op.norm_bwd", "bf16 1x16 8192 3.25" },
                  { "comm.all-gather", "4 65536 41.2" } };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        DevicePoints all = { 0 };
        char line[POINT_LINE_BYTES], want[POINT_LINE_BYTES];
        add(&all, lines[i].section, lines[i].value);
        device_point_line(&all.items[0], line);
        snprintf(want, sizeof want, "us = %s", lines[i].value);
        CHECK_MSG(all.count == 1 && !strcmp(line, want), "%s", line);
        device_points_free(&all);
    }
}

TEST(what_is_no_point)
{
    static const struct {
        const char *section, *key, *value;
    } bad[] = {
        { "op.rope", "us", "" },
        { "op.rope", "us", "f32 2x1 256" },
        { "op.rope", "us", "f32 2x1 256 0" },
        { "op.rope", "us", "f32 2x1 256 -1" },
        { "op.rope", "us", "f32 2x1 256 nan" },
        { "op.rope", "us", "f32 2x1 256 inf" },
        { "op.rope", "us", "f32 2x1 0 5" },
        { "op.rope", "us", "f32 0x1 256 5" },
        { "op.rope", "us", "f32 2x0 256 5" },
        { "op.rope", "us", "f32 2 256 5" },
        { "op.rope", "us", "f32 2x1 256x2x3x4 5" },
        { "op.rope", "us", "f32 2x1 256x 5" },
        { "op.rope", "us", "f32 2x1 256 5 6" },
        { "op.rope", "ms", "f32 2x1 256 5" },
        { "op.a_name_that_is_far_longer_than_any", "us", "f32 2x1 256 5" },
        { "comm.barrier", "us", "2 1x1 5" },
        { "comm.barrier", "us", "0 1 5" },
        { "comm.barrier", "us", "2 1" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        DevicePoints all = { 0 };
        FAILS(device_points_read(&all, bad[i].section, bad[i].key, bad[i].value), ERR_CONFIG, bad[i].section);
        CHECK_MSG(all.count == 0, "%s", bad[i].value);
        device_points_free(&all);
    }
}

TEST(a_file_with_points)
{
    DeviceFile f;
    const char *text = "[device]\nmemory_mib = 5\nprocessors = 8\n[op.rope]\nus = f32 1x8 64 2\n[comm.barrier]\n"
                       "us = 2 1 30\n[op.rope]\nus = f32 1x8 32 1\n";
    OK(device_file_read(write_text("points.ini", text), &f));
    int count = 0;
    const DevicePoint *rope = device_points_of(&f.points, "rope", &count);
    CHECK(f.processors == 8 && f.points.count == 3 && f.points.names == 2);
    CHECK(rope && count == 2 && rope[0].shape[0] == 32 && rope[1].shape[0] == 64 && rope[1].threads == 8);
    CHECK(!device_points_of(&f.points, "norm_fwd", &count));
    device_file_release(&f);
    text = "[device]\nmemory_mib = 5\n[op.rope]\nus = f32 1x8 64 0\n";
    FAILS(device_file_read(write_text("wrong.ini", text), &f), ERR_CONFIG, ":4: not a line of a device");
}

/* ---- looked up ---- */

static double measured(const DevicePoints *all, OpId id, const void *args, int ranks, int threads)
{
    double seconds = NAN;
    CHECK(measured_op(all, id, args, ranks, threads, &seconds));
    return 1e6 * seconds;
}

/* A call that moves 8 bytes for each of n elements. */
static gelu_fwd_args gelu(int64_t n)
{
    static float x;
    return (gelu_fwd_args){ .y = tensor_of(&x, F32, 1, n), .x = tensor_of(&x, F32, 1, n) };
}

TEST(memory_work_by_its_bytes)
{
    DevicePoints all = { 0 };
    add(&all, "op.gelu_fwd", "f32 1x2 4096 2");
    add(&all, "op.gelu_fwd", "f32 1x2 65536 32");
    add(&all, "op.gelu_fwd", "f32 2x1 4096 10");
    OK(device_points_order(&all));
    gelu_fwd_args a = gelu(512);
    CHECK_CLOSE(measured(&all, OP_gelu_fwd, &a, 1, 2), 2, 1e-9, "at a point");
    CHECK_CLOSE(measured(&all, OP_gelu_fwd, &a, 2, 1), 10, 1e-9, "with other threads");
    CHECK_CLOSE(measured(&all, OP_gelu_fwd, &a, 8, 1), 10, 1e-9, "with the nearest number of ranks");
    a = gelu(2048);
    CHECK_CLOSE(measured(&all, OP_gelu_fwd, &a, 1, 2), 8, 1e-9, "between two, each 16 times the other");
    a = gelu(1 << 20);
    CHECK_CLOSE(measured(&all, OP_gelu_fwd, &a, 1, 2), 4096, 1e-9, "beyond the last at its rate");
    a = gelu(1);
    CHECK_CLOSE(measured(&all, OP_gelu_fwd, &a, 1, 2), 2, 1e-9, "before the first as long as that");
    double seconds;
    CHECK(!measured_op(&all, OP_gelu_bwd, &(gelu_bwd_args){ 0 }, 1, 2, &seconds));
    device_points_free(&all);
}

static linear_fwd_args product(int64_t N, int64_t O, int64_t I, bool with_gelu)
{
    static float x;
    linear_fwd_args a = { .y = tensor_of(&x, F32, N, O), .x = tensor_of(&x, F32, N, I), .w = tensor_of(&x, F32, O, I) };
    if (with_gelu) a.gelu = a.y;
    return a;
}

TEST(products_by_their_shape)
{
    DevicePoints all = { 0 };
    add(&all, "op.linear_fwd", "f32 1x1 64x64x64 10");
    add(&all, "op.linear_fwd", "f32 1x1 256x64x64 20");
    add(&all, "op.gelu_fwd", "f32 1x1 65536 7");
    OK(device_points_order(&all));
    linear_fwd_args a = product(64, 64, 64, false);
    CHECK_CLOSE(measured(&all, OP_linear_fwd, &a, 1, 1), 10, 1e-6, "at a point");
    a = product(128, 64, 64, false);
    CHECK_CLOSE(measured(&all, OP_linear_fwd, &a, 1, 1), 20 / sqrt(2), 1e-6, "as far from both: the mean of the rates");
    a = product(256, 32, 64, true);
    CHECK_CLOSE(measured(&all, OP_linear_fwd, &a, 1, 1), 10 + 7, 1e-6, "half as many outputs at their rate, and GELU");
    add(&all, "op.linear_fwd", "f32 1x1 1024x64x16 5");
    OK(device_points_order(&all));
    a = product(512, 64, 64, false); /* of the corners around one is known */
    CHECK_CLOSE(measured(&all, OP_linear_fwd, &a, 1, 1), 40, 1e-6, "the corner's rate");
    a = product(300, 64, 20, false); /* most of the corners' weight is of such as are not known */
    const double at[3][3] = { { 64, 64, 10 }, { 256, 64, 20 }, { 1024, 16, 5 } }; /* rows, inputs, us */
    double weights = 0, sum = 0;
    for (int i = 0; i < 3; i++) {
        const double rows = log2(at[i][0] / 300), inputs = log2(at[i][1] / 20);
        const double weight = 1 / pow(rows * rows + inputs * inputs, 3);
        weights += weight;
        sum += weight * log(at[i][2] / (at[i][0] * at[i][1]));
    }
    CHECK_CLOSE(measured(&all, OP_linear_fwd, &a, 1, 1), 300 * 20 * exp(sum / weights), 1e-4, "by distance");
    device_points_free(&all);
}

/* Half of a sequence's queries against all keys see three quarters of the pairs; a window cuts most of them. */
TEST(attention_by_the_pairs_that_it_sees)
{
    static float x;
    enum { T = 64, H = 2, B = 3, C = 16 };
    DevicePoints all = { 0 };
    add(&all, "op.attention_fwd", "f32 1x1 64x64x16 100");
    OK(device_points_order(&all));
    attention_fwd_args a = { .o = tensor_of(&x, F32, B, T, H, C),
                             .q = tensor_of(&x, F32, B, T, H, C),
                             .k = tensor_of(&x, F32, B, T, H, C),
                             .v = tensor_of(&x, F32, B, T, H, C),
                             .q_span = spans_whole(T),
                             .k_span = spans_whole(T) };
    CHECK_CLOSE(measured(&all, OP_attention_fwd, &a, 1, 1), 100 * B * H, 1e-9, "whole");
    a.window = 1;
    CHECK_CLOSE(measured(&all, OP_attention_fwd, &a, 1, 1), 100 * B * H * 2 / (T + 1.0), 1e-9, "each key alone");
    a.window = 0;
    a.q_span = spans_run(T / 2, T / 2);
    const double seen = T / 2 * (T / 2) + T / 2 * (T / 2 + 1) / 2.0;
    CHECK_CLOSE(measured(&all, OP_attention_fwd, &a, 1, 1), 100 * B * H * seen / (T * (T + 1) / 2.0), 1e-9, "the end");
    device_points_free(&all);
}

TEST(collectives_by_bytes_and_members)
{
    DevicePoints all = { 0 };
    double s;
    add(&all, "comm.all-gather", "2 1024 50");
    add(&all, "comm.all-gather", "2 1048576 1600");
    add(&all, "comm.all-gather", "4 1024 200");
    OK(device_points_order(&all));
    CHECK(measured_comm(&all, COMM_ALL_GATHER, 2, 32768, &s));
    CHECK_CLOSE(1e6 * s, sqrt(50.0 * 1600), 1e-9, "half way");
    CHECK(measured_comm(&all, COMM_ALL_GATHER, 4, 8, &s));
    CHECK_CLOSE(1e6 * s, 200, 1e-9, "four members");
    CHECK(!measured_comm(&all, COMM_BARRIER, 2, 0, &s));
    CHECK(measured_skew(&all, 2, 2, 2, 1) == 0);
    device_points_free(&all);
}

/* What a call behind work takes, beyond what it takes behind the shortest. */
TEST(calls_behind_work)
{
    enum { MANY = 64 };
    DevicePoints all = { 0 };
    add(&all, "comm.skew", "2 100 4");
    add(&all, "comm.skew", "2 10000 36");
    add(&all, "comm.skew", "4 100 8");
    add(&all, "comm.skew", "4 400 10");
    add(&all, "comm.skew-of-pairs", "4 100 1");
    add(&all, "comm.skew-of-pairs", "4 10000 3");
    OK(device_points_order(&all));
    CHECK(measured_skew(&all, 2, 2, MANY, 0) == 0 && measured_skew(&all, 2, 2, MANY, 100e-6) == 0);
    CHECK(measured_skew(&all, 1, 1, MANY, 1) == 0);
    CHECK_CLOSE(1e6 * measured_skew(&all, 2, 2, MANY, 1000e-6), 12 - 4, 1e-9, "between two");
    CHECK_CLOSE(1e6 * measured_skew(&all, 2, 2, MANY, 20000e-6), 36 - 4, 1e-9, "beyond the last");
    CHECK_CLOSE(1e6 * measured_skew(&all, 8, 8, MANY, 400e-6), 10 - 8, 1e-9, "of the nearest number");
    CHECK_CLOSE(1e6 * measured_skew(&all, 4, 4, 2, 400e-6), 10 - 8, 1e-9, "as many ranks take turns");
    CHECK_CLOSE(1e6 * measured_skew(&all, 4, 4, 2, 100e-6), 8 * sqrt(1.25) - 8, 1e-9, "turns make work twice as long");
    CHECK_CLOSE(1e6 * measured_skew(&all, 2, 4, 2, 500e-6), sqrt(3) - 1, 1e-9, "pairs that take turns");
    CHECK(measured_skew(&all, 2, 8, 4, 1) == 0); /* nobody took turns on four processors when this was measured */
    device_points_free(&all);
}

TEST_MAIN
