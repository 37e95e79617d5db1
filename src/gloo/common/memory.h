/*
 * Gloo's headers of its TCP transport include this one, which Debian's package leaves out (as others that install
 * what Gloo's own build lists). Where there is one it is taken. Else this stands for it, as far as those headers
 * go: pointers to buffers, in the library's layout, that code of ours never follows (comm/gloo.cc makes pairs,
 * docs/decisions.md).
 */
#if __has_include_next(<gloo/common/memory.h>)
#include_next <gloo/common/memory.h>
#else
#ifndef MEGATRAIN_GLOO_COMMON_MEMORY_H
#define MEGATRAIN_GLOO_COMMON_MEMORY_H

#include <memory>

namespace gloo
{

template <class T> class NonOwningPtr final
{
    std::shared_ptr<T> ptr_;
};

template <class T> class WeakNonOwningPtr final
{
    std::weak_ptr<T> ptr_;
};

template <class T> class ShareableNonOwningPtr final
{
    std::shared_ptr<T> ptr_;
};

} // namespace gloo

#endif
#endif
