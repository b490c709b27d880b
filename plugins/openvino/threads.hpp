// The threads of OpenVINO's own wheel.
#pragma once

#include <algorithm>
#include <cstddef>

#if defined(SWIN_QUANT_TBB)
#    include "tbb/parallel_for.h"
#    include "tbb/task_arena.h"
#endif

namespace swin_quant {

inline size_t threads() {
#if defined(SWIN_QUANT_TBB)
    return size_t(tbb::this_task_arena::max_concurrency());
#else
    return 1;
#endif
}

// Tokens of a tile, at most `most`: as many tiles as give every thread as many.
inline size_t tile_of(size_t tokens, size_t most) {
    const size_t tiles = std::max<size_t>((tokens + most - 1) / most, 1), rounds = (tiles + threads() - 1) / threads();
    return std::max<size_t>((tokens + rounds * threads() - 1) / (rounds * threads()), 6);
}

template <typename Work>
void for_each(size_t count, const Work& work) {
#if defined(SWIN_QUANT_TBB)
    tbb::parallel_for(size_t(0), count, work);
#else
    for (size_t i = 0; i < count; ++i)
        work(i);
#endif
}

}  // namespace swin_quant
