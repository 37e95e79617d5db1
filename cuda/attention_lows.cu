/* The table that says which tiles of queries see none of a block's keys: attention_lows.cuh. */
#include "attention_lows.cuh"

constexpr int LOWS_THREADS = 256;

/* table[b][tile]: of the tile's queries. One warp a tile. */
__global__ void __launch_bounds__(LOWS_THREADS)
    attention_lows_kernel(AttnProblem p, Lows *table, TileWalk all, int size, int samples)
{
    const int64_t at = blockIdx.x * static_cast<int64_t>(LOWS_THREADS / WARP) + threadIdx.x / WARP;
    const int tiles = walk_count(all);
    if (at >= static_cast<int64_t>(samples) * tiles) return; /* whole warps leave together */
    const int b = static_cast<int>(at / tiles), tile = static_cast<int>(at % tiles);
    Lows x;
    tile_lows(p, b, walk_tile(all, p.q, tile, size), &x.least, &x.most);
    if (threadIdx.x % WARP == 0) table[at] = x;
}

Err attention_lows(Stream *s, const AttnProblem &p, int64_t samples, int size, const Lows **out)
{
    *out = NULL;
    if (!p.doc) return ERR_OK;
    const TileWalk all = walk_all(p.q, size);
    const int64_t count = samples * walk_count(all), bytes = LOWS_AT + count * static_cast<int64_t>(sizeof(Lows));
    if (bytes > s->dev->workspace_bytes)
        return err_set(ERR_CONFIG, "attention needs %lld bytes of workspace, there are %lld",
                       static_cast<long long>(bytes), static_cast<long long>(s->dev->workspace_bytes));
    Lows *table = reinterpret_cast<Lows *>(static_cast<char *>(s->dev->workspace) + LOWS_AT);
    *out = table;
    if (count == 0) return ERR_OK;
    const unsigned blocks = static_cast<unsigned>(ceil_div(count, LOWS_THREADS / WARP));
    LAUNCH(attention_lows_kernel, blocks, LOWS_THREADS, 0, cuda_stream(s), p, table, all, size,
           static_cast<int>(samples));
    return ERR_OK;
}
