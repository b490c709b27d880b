// The threads of OpenVINO's own wheel.
#pragma once

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
