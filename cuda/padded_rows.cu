/*
 * Rows between tensors and slots of fixed size, before and behind an all-to-all (padded_rows.h).
 *
 *   pack     tensor that is sent -> a slot for each other member; this rank's own pieces -> the tensor that receives
 *   unpack   a slot of each other member -> the tensor that receives
 *
 * Mapping   a piece, the rows of one chunk for or from one member, is one run of bytes in tensor and slot. blockIdx.y
 *           is the piece; the blocks along x step over it, 16 bytes a thread, four loads under way. Where it begins the
 *           offsets say; in its slot behind the chunks before it, whose rows every thread counts. Grids cover pieces,
 *           not what they hold at most: that would be E / topk times as many blocks as have work.
 * Traffic   every row twice: 65,536 rows of 4 KiB, 537 MB, 125 us at 4.3 TB/s. No arithmetic: bound by memory.
 * Needs     rows of an even number of bytes; of 16 and aligned for full speed. Offsets that cannot be (those of a rank
 *           that was lost) are cut off at the ends of tensors and slots.
 */
#include "kernel.cuh"
extern "C" {
#include "padded_rows.h"
}

constexpr int ROWS_THREADS = 256, ROWS_UNROLL = 4;
constexpr int64_t ROWS_BLOCKS = 8; /* of all pieces together, for each multiprocessor */

/* A tensor in pieces, by (member, chunk) or by (chunk, member). */
struct Pieces {
    uint16_t *data;
    const int64_t *offset;
    int64_t rows; /* that it has room for; of an array, if there are several */
    int copies;   /* members with the same chunks: pieces are by (member / copies, chunk). 0: by (chunk, member) */
    bool arrays;  /* one for each copy */
};

struct RowsMove {
    Pieces tensor, other; /* other: of this rank's own pieces the other end; data NULL: they are left alone */
    uint16_t *slots;
    int64_t chunks, stride, most, width; /* width: of a row, in elements of 2 bytes */
    int members, rank;
    bool to_slots;
};

struct Run {
    int64_t first, rows;
};

__device__ __forceinline__ int64_t limited(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

__device__ __forceinline__ Run run_of(const RowsMove &m, const Pieces &p, int member, int64_t chunk)
{
    const int64_t i = p.copies ? member / p.copies * m.chunks + chunk : chunk * m.members + member;
    const int64_t *at = p.offset + i * m.stride;
    Run r;
    r.first = limited(at[0], p.rows);
    r.rows = limited(at[m.stride] - r.first, p.rows - r.first);
    if (p.arrays) r.first += member % p.copies * p.rows;
    return r;
}

template <bool WIDE> __device__ __forceinline__ void copy_run(uint16_t *to, const uint16_t *from, int64_t n)
{
    typedef Pack<uint16_t> P;
    const int64_t step = gridDim.x * static_cast<int64_t>(ROWS_THREADS) * P::COUNT;
    const int64_t first = (blockIdx.x * static_cast<int64_t>(ROWS_THREADS) + threadIdx.x) * P::COUNT;
    for (int64_t base = first; base < n; base += ROWS_UNROLL * step) {
        P x[ROWS_UNROLL];
        for (int u = 0; u < ROWS_UNROLL; u++)
            if (base + u * step < n) x[u] = load_pack<uint16_t, WIDE>(from + base + u * step, n - base - u * step);
        for (int u = 0; u < ROWS_UNROLL; u++)
            if (base + u * step < n) store_pack<uint16_t, WIDE>(to + base + u * step, x[u], n - base - u * step);
    }
}

template <bool WIDE> __global__ void __launch_bounds__(ROWS_THREADS) padded_rows_kernel(RowsMove m)
{
    const int member = static_cast<int>(blockIdx.y / m.chunks);
    const int64_t chunk = blockIdx.y % m.chunks;
    const Run r = run_of(m, m.tensor, member, chunk);
    uint16_t *here = m.tensor.data + r.first * m.width, *there;
    int64_t rows = r.rows;
    if (member == m.rank) {
        if (!m.other.data) return;
        const Run o = run_of(m, m.other, member, chunk);
        there = m.other.data + o.first * m.width;
        rows = limited(rows, o.rows);
    } else {
        int64_t before = 0;
        for (int64_t c = 0; c < chunk; c++) before += run_of(m, m.tensor, member, c).rows;
        before = limited(before, m.most);
        there = m.slots + ((member - (member > m.rank)) * m.most + before) * m.width;
        rows = limited(rows, m.most - before);
    }
    copy_run<WIDE>(m.to_slots ? there : here, m.to_slots ? here : there, rows * m.width);
}

static bool aligned_16(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

static Err move_rows(Stream *s, const PaddedRows *p, bool pack)
{
    const Pieces local = { reinterpret_cast<uint16_t *>(p->local), p->local_offset, p->local_rows, p->copies, p->back };
    const Pieces remote = { reinterpret_cast<uint16_t *>(p->remote), p->remote_offset, p->remote_rows, 0, false };
    const bool from_local = pack != p->back; /* packed: what is sent; unpacked: what receives */
    const int64_t pieces = p->chunks * p->members;
    RowsMove m = { from_local ? local : remote, from_local ? remote : local,
                   reinterpret_cast<uint16_t *>(pack ? p->out : p->in), p->chunks, p->stride, p->most,
                   p->row_bytes / 2, p->members, p->rank, pack };
    if (!pack) m.other.data = nullptr;
    ASSERT(p->row_bytes % 2 == 0 && pieces < 65536);
    const int64_t packs = ceil_div(p->most * p->row_bytes, 16 * ROWS_UNROLL * ROWS_THREADS);
    const int64_t share = ceil_div(ROWS_BLOCKS * s->dev->threads, pieces);
    const dim3 grid(grid_blocks(packs < share ? packs : share), grid_blocks(pieces));
    if (p->row_bytes % 16 == 0 && aligned_16(p->local) && aligned_16(p->remote) && aligned_16(m.slots))
        LAUNCH((padded_rows_kernel<true>), grid, ROWS_THREADS, 0, cuda_stream(s), m);
    else LAUNCH((padded_rows_kernel<false>), grid, ROWS_THREADS, 0, cuda_stream(s), m);
    return ERR_OK;
}

extern "C" Err cuda_pack_rows(Stream *s, const PaddedRows *p) { return move_rows(s, p, true); }

extern "C" Err cuda_unpack_rows(Stream *s, const PaddedRows *p) { return move_rows(s, p, false); }
