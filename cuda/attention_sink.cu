/*
 * Attention, the gradient of the sinks: what each row adds, dsink = -exp(sink - lse) delta.
 *
 * Mapping  a thread an element.
 * Traffic  reads two fp32 and writes one 16-bit number for each head of a row, beside C numbers of attention's
 *          matrices: 10 bytes; 65,536 x 64: 42 MB, 10 us at 4.3 TB/s.
 */
#include "kernel.cuh"

constexpr int SINK_THREADS = 256;

template <class T>
__global__ void __launch_bounds__(SINK_THREADS)
    attention_sink_kernel(Rows<T> dsink, const T *sink, Rows<const float> lse, Rows<const float> delta,
                          int64_t rows, int H)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(SINK_THREADS) + threadIdx.x;
    if (i >= rows * H) return;
    const int64_t n = i / H, h = i - n * H;
    const float p = expf(to_float(sink[h]) - lse.at(n)[h]);
    dsink.at(n)[h] = from_float<T>(-p * delta.at(n)[h]);
}

template <class T> static void launch_sink(Stream *s, const sink_bwd_args *a)
{
    const int64_t rows = a->lse.dim[0], H = a->lse.dim[1];
    if (rows * H == 0) return;
    const unsigned blocks = static_cast<unsigned>(ceil_div(rows * H, SINK_THREADS));
    LAUNCH((attention_sink_kernel<T>), blocks, SINK_THREADS, 0, cuda_stream(s), rows_of<T>(a->dsink),
           data_of<const T>(a->sink), rows_of<const float>(a->lse), rows_of<const float>(a->delta), rows,
           static_cast<int>(H));
}

extern "C" Err cuda_sink_bwd(Stream *s, const sink_bwd_args *a)
{
    DISPATCH(a->sink.dtype, launch_sink<T>(s, a));
    return ERR_OK;
}
