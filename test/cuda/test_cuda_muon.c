/* Muon's ops on cuda, for float gradients, against the CPU's. */
#include "cuda_case.h"

static const DType types[] = { F32, BF16, F16 };
enum { TYPES = 3 };

static Pair pair_step(CudaCase *c, bool skip)
{
    const StepValues v = { .lr = 0.01f, .grad_scale = 0.7f, .skip = skip };
    return pair_values(c, I64, &v, sizeof v / 8);
}

/* A matrix of a buffer's rows that are `ld` wide is cut into a left and a right part and a last row; where the parts
 * lie in the matrix, which may be transposed. What lies between them is nobody's. */
typedef struct {
    int rows, columns, ld, first;
    bool transposed, packed;
} Shape;

enum { BOXES = 3 };

static Pair pair_boxes(CudaCase *c, Shape z, int64_t *chunks)
{
    const int half = z.columns / 2, height = z.rows - 1;
    const int cut[BOXES][4] = { { 0, 0, height, half },
                                { 0, half, height, z.columns - half },
                                { height, 0, 1, z.columns } };
    FlatBox box[BOXES];
    int n = 0;
    int64_t at = 0;
    *chunks = 0;
    for (int i = 0; i < BOXES; i++) {
        const int row = cut[i][0], column = cut[i][1], rows = cut[i][2], columns = cut[i][3];
        if (!rows || !columns) continue;
        FlatBox b = { .rows = rows, .columns = columns, .ld = z.ld, .flags = n % 2 ? 0 : FLAT_DECAYS,
                      .scale = 0.5f + (float)n, .chunk = *chunks };
        b.shard = z.first + (int64_t)row * z.ld + column;
        b.grad = b.shard + 3, b.value = b.shard + 5;
        b.row_step = z.packed ? columns : z.transposed ? 1 : z.columns;
        b.column_step = z.transposed && !z.packed ? z.rows : 1;
        b.at = z.packed ? at : (int64_t)row * b.row_step + (int64_t)column * b.column_step;
        at += (int64_t)rows * columns;
        *chunks += flat_chunks((int64_t)rows * columns);
        box[n++] = b;
    }
    return pair_values(c, I64, box, n, sizeof *box / sizeof(int64_t));
}

static const Shape shapes[] = {
    { 2, 2, 2, 0, false, false },   { 5, 7, 7, 1, true, false },    { 9, 33, 40, 2, false, true },
    { 64, 48, 48, 0, true, false }, { 200, 300, 301, 4, false, false }, { 300, 200, 200, 0, true, false },
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static int64_t flat_of(Shape z) { return z.first + (int64_t)z.rows * z.ld + 8; }

TEST(pack)
{
    for (int i = 0; i < SHAPES; i++)
        for (int nesterov = 0; nesterov < 2; nesterov++) {
            const Shape z = shapes[i];
            CudaCase *c = case_open();
            int64_t chunks;
            Pair m = pair_random(c, F32, 1, flat_of(z)), g = pair_random(c, F32, 3, flat_of(z));
            Pair y = pair_output(c, F32, (int64_t)z.rows * z.columns), boxes = pair_boxes(c, z, &chunks);
            Pair step = pair_step(c, false), shift = pair_zero(c, I32, 1);
            BOTH(c, muon_pack, .y = AT(y), .m = AT(m), .g = AT(g), .shift = AT(shift), .boxes = AT(boxes),
                 .chunks = chunks, .step = AT(step).data, .beta = 0.95f, .nesterov = nesterov);
            pair_check(c, y, 0, "%d x %d, nesterov %d", z.rows, z.columns, nesterov);
            case_close(c);
        }
}

TEST(apply)
{
    static const int copies[] = { F32, BF16, F16, -1 };
    for (int i = 0; i < SHAPES; i++)
        for (int k = 0; k < 4; k++) {
            const Shape z = shapes[i];
            const DType X = copies[k] < 0 ? F32 : (DType)copies[k];
            CudaCase *c = case_open();
            int64_t chunks;
            Pair w = pair_random(c, F32, 2, flat_of(z)), copy = { 0 };
            Pair x = pair_random(c, X, 1, (int64_t)z.rows * z.columns), boxes = pair_boxes(c, z, &chunks);
            Pair step = pair_step(c, i == 1);
            if (copies[k] >= 0) copy = pair_random(c, X, 2, flat_of(z));
            BOTH(c, muon_apply, .w = AT(w), .copy = AT(copy), .x = AT(x), .boxes = AT(boxes), .chunks = chunks,
                 .step = AT(step).data, .decay = 0.1f);
            pair_check(c, w, 0, "w of %d x %d, copy %d", z.rows, z.columns, copies[k]);
            if (copies[k] >= 0)
                pair_check(c, copy, X == BF16 ? 0x1p-8 : X == F16 ? 0x1p-11 : 0, "copy of %d x %d", z.rows, z.columns);
            case_close(c);
        }
}

TEST(copies)
{
    for (int i = 0; i < SHAPES; i++)
        for (int t = 0; t < TYPES; t++)
            for (int back = 0; back < 2; back++) {
                const Shape z = shapes[i];
                CudaCase *c = case_open();
                int64_t chunks;
                const int64_t flat = flat_of(z), matrix = (int64_t)z.rows * z.columns;
                Pair x = pair_random(c, types[t], 1, back ? matrix : flat),
                     y = pair_random(c, types[t], 1, back ? flat : matrix);
                Pair boxes = pair_boxes(c, z, &chunks);
                BOTH(c, box_copy, .y = AT(y), .x = AT(x), .boxes = AT(boxes), .chunks = chunks, .back = back);
                pair_check(c, y, 0, "%d x %d, back %d", z.rows, z.columns, back);
                case_close(c);
            }
}

TEST(moment)
{
    enum { MOST = 70000 };
    for (int k = 0; k < 3; k++) {
        CudaCase *c = case_open();
        const int64_t first = k, gap = 5 - k, half = k == 2 ? 40000 : 100;
        FlatPart part[] = {
            { .grad = first, .shard = first, .count = half, .flags = FLAT_MUON },
            { .grad = first + half + gap, .shard = first + half + gap, .count = 64, .chunk = flat_chunks(half) },
            { .grad = half + 200,
              .shard = half + 200,
              .count = 1000,
              .chunk = flat_chunks(half) + 1,
              .flags = FLAT_MUON },
        };
        Pair m = pair_random(c, F32, 1, MOST), g = pair_random(c, F32, 3, MOST), step = pair_step(c, k == 1);
        Pair shift = pair_zero(c, I32, 1), parts = pair_values(c, I64, part, 3, sizeof *part / sizeof(int64_t));
        BOTH(c, muon_moment, .m = AT(m), .g = AT(g), .shift = AT(shift), .parts = AT(parts),
             .chunks = flat_chunks(half) + 2, .step = AT(step).data, .beta = 0.95f);
        pair_check(c, m, 0, "m from %d on", (int)first);
        case_close(c);
    }
}

/* (the CPU's squares are summed in another order: the factor differs by an ulp at most) */
TEST(normalize)
{
    static const int64_t sizes[][2] = { { 1, 1 }, { 1, 300 }, { 7, 5 }, { 33, 513 }, { 300, 40 } };
    for (int i = 0; i < 5; i++)
        for (int t = 0; t < TYPES; t++)
            for (int tiny = 0; tiny < 1 + (types[t] != F16); tiny++) { /* (f16 has no numbers so small) */
                CudaCase *c = case_open();
                const int64_t r = sizes[i][0], n = sizes[i][1];
                Pair x = pair_random(c, F32, tiny ? 1e-30 : 1, r, n), y = pair_output(c, types[t], r, n);
                Pair sums[1] = { pair_zero(c, I64, r) };
                BOTH(c, normalize, .y = AT(y), .sums = AT(sums[0]), .x = AT(x), .eps = 1e-7f);
                pair_check(c, y,
                           types[t] == BF16  ? 0x1p-8
                           : types[t] == F16 ? 0x1p-10
                                             : 2e-7,
                           "%d x %d", (int)r, (int)n);
                case_close(c);
            }
}

TEST(mix)
{
    static const int64_t sizes[][2] = { { 1, 1 }, { 3, 8 }, { 7, 33 }, { 64, 128 } };
    for (int i = 0; i < 4; i++)
        for (int t = 0; t < TYPES; t++) {
            CudaCase *c = case_open();
            Pair x = pair_random(c, types[t], 1, sizes[i][0], sizes[i][1]);
            Pair y = pair_random(c, types[t], 1, sizes[i][0], sizes[i][1]);
            BOTH(c, mix, .y = AT(y), .x = AT(x), .a = -4.775f, .b = 2.0315f);
            pair_check(c, y, types[t] == BF16 ? 0x1p-8 : types[t] == F16 ? 0x1p-11 : 0, "%d x %d", (int)sizes[i][0],
                       (int)sizes[i][1]);
            case_close(c);
        }
}

TEST_MAIN
