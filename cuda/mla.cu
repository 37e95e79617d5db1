/*
 * Latent attention: keys and values out of what all heads share and what each has of its own, and back (ops.def).
 *
 * move      mla_split and mla_merge: a head's columns [own part of the key | shared part | value], pack by pack.
 *   Mapping a thread a pack of a head in 2 rows; heads along the grid.
 *   Traffic reads kv once and pe once a head, from L2; writes k and v. 4,096 x 128 heads of 128 + 64 + 128 in bf16:
 *           604 MB, 140 us at 4.3 TB/s.
 * sum       mla_merge: the shared part's gradient, a chain over heads in fp32.
 *   Mapping a thread a pack of columns of 2 rows, over all heads. Traffic reads each head's last columns of k once.
 *
 * Needs     widths and rows in multiples of 16 bytes for full speed.
 */
#include "kernel.cuh"

template <class E> struct MlaHeads {
    Rows<E> k, v, kv, pe; /* a row's heads are rows of k, v and kv */
    int heads, own, shared;
};

template <class E, bool WIDE> __device__ __forceinline__ void move_columns(E *to, const E *from)
{
    if constexpr (WIDE) store16_global(to, load16(from));
    else *to = *from;
}

/* MERGE: k and v to kv; else kv and pe to k and v. E: any type of the elements' size. */
template <class E, bool WIDE, bool MERGE>
__global__ void __launch_bounds__(PACK_THREADS) mla_move_kernel(MlaHeads<E> t, PackGrid g)
{
    constexpr int COUNT = WIDE ? Pack<E>::COUNT : 1;
    const int64_t rows = rows_in_use(g.rows);
    UNROLL
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        const int64_t head = p.row * t.heads + blockIdx.z, c = p.column;
        if (!p.used) continue;
        if (MERGE)
            move_columns<E, WIDE>(t.kv.at(head) + c, c < t.own ? t.k.at(head) + c : t.v.at(head) + c - t.own);
        else if (c < t.own) move_columns<E, WIDE>(t.k.at(head) + c, t.kv.at(head) + c);
        else if (c < t.own + t.shared) move_columns<E, WIDE>(t.k.at(head) + c, t.pe.at(p.row) + c - t.own);
        else move_columns<E, WIDE>(t.v.at(head) + c - t.own - t.shared, t.kv.at(head) + c - t.shared);
    }
}

template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS)
    mla_sum_kernel(Rows<T> pe, Rows<const T> k, int heads, int own, PackGrid g)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const int64_t rows = rows_in_use(g.rows);
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        if (!p.used) continue;
        float sum[COUNT] = {};
        for (int h = 0; h < heads; h++) {
            const Pack<T> x = load_pack<T, WIDE>(k.at(p.row * heads + h) + own + p.column, p.left);
            UNROLL
            for (int i = 0; i < COUNT; i++) sum[i] += to_float(x.v[i]);
        }
        Pack<T> y;
        UNROLL
        for (int i = 0; i < COUNT; i++) y.v[i] = from_float<T>(sum[i]);
        store_pack<T, WIDE>(pe.at(p.row) + p.column, y, p.left);
    }
}

/* ---- launching ---- */

struct MlaTensors {
    Tensor k, v, kv, pe;
};

static Err check_widths(const MlaTensors &a)
{
    const int64_t own = a.k.dim[2] - a.pe.dim[1];
    if (own >= 0 && own + a.v.dim[2] == a.kv.dim[2]) return ERR_OK;
    return err_set(ERR_SHAPE, "mla: %lld columns of kv for keys of %lld, %lld of them shared, and values of %lld",
                   static_cast<long long>(a.kv.dim[2]), static_cast<long long>(a.k.dim[2]),
                   static_cast<long long>(a.pe.dim[1]), static_cast<long long>(a.v.dim[2]));
}

static bool all_aligned(const MlaTensors &a)
{
    return rows_aligned(a.k) && rows_aligned(a.v) && rows_aligned(a.kv) && rows_aligned(a.pe);
}

template <class E, bool MERGE> static void launch_move(Stream *s, const MlaTensors &a)
{
    const int64_t H = a.k.dim[1], shared = a.pe.dim[1], width = a.kv.dim[2] + (MERGE ? 0 : shared);
    const RowCount rows = row_count(a.k, a.kv);
    const MlaHeads<E> t = { rows_of<E>(a.k),     rows_of<E>(a.v), rows_of<E>(a.kv),
                            rows_of<E>(a.pe),    static_cast<int>(H), static_cast<int>(a.k.dim[2] - shared),
                            static_cast<int>(shared) };
    const bool wide = all_aligned(a);
    const PackGrid g = pack_grid(rows, H, width, wide ? Pack<E>::COUNT : 1);
    if (wide) LAUNCH((mla_move_kernel<E, true, MERGE>), g.grid, g.block, 0, cuda_stream(s), t, g);
    else LAUNCH((mla_move_kernel<E, false, MERGE>), g.grid, g.block, 0, cuda_stream(s), t, g);
}

template <class T> static void launch_sum(Stream *s, const MlaTensors &a)
{
    const int64_t shared = a.pe.dim[1];
    const PackGrid g = pack_grid(row_count(a.k, a.kv), 1, shared, Pack<T>::COUNT);
    const int heads = static_cast<int>(a.k.dim[1]), own = static_cast<int>(a.k.dim[2] - shared);
    if (all_aligned(a))
        LAUNCH((mla_sum_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), rows_of<T>(a.pe), rows_of<const T>(a.k),
               heads, own, g);
    else
        LAUNCH((mla_sum_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), rows_of<T>(a.pe), rows_of<const T>(a.k),
               heads, own, g);
}

extern "C" Err cuda_mla_split(Stream *s, const mla_split_args *a)
{
    const MlaTensors t = { a->k, a->v, a->kv, a->pe };
    TRY(check_widths(t));
    if (dtype_size(a->k.dtype) == 4) launch_move<uint32_t, false>(s, t);
    else launch_move<uint16_t, false>(s, t);
    return ERR_OK;
}

extern "C" Err cuda_mla_merge(Stream *s, const mla_merge_args *a)
{
    const MlaTensors t = { a->k, a->v, a->kv, a->pe };
    TRY(check_widths(t));
    if (a->pe.dtype != a->k.dtype)
        return err_set(ERR_SHAPE, "mla_merge on cuda writes %s, not %s", dtype_name(a->k.dtype),
                       dtype_name(a->pe.dtype));
    if (dtype_size(a->k.dtype) == 4) launch_move<uint32_t, true>(s, t);
    else launch_move<uint16_t, true>(s, t);
    DISPATCH(a->k.dtype, launch_sum<T>(s, t));
    return ERR_OK;
}
