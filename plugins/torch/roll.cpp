// Roll as an operator of a domain of one's own, for TorchScript files that were exported with
//   --for torchscript --plugin roll=DOMAIN::Roll
// Declare (the schema), compute (the function), register (the macro), use (torch.ops.load_library, or --extension).
#include <torch/library.h>

#include <ATen/ATen.h>

#include <vector>

namespace {

// As torch.roll: what leaves at one end of a dimension comes in at the other. One copy of each half, per dimension.
at::Tensor roll(const at::Tensor& x, at::IntArrayRef shifts, at::IntArrayRef dims) {
    TORCH_CHECK(shifts.size() == dims.size(), "roll: as many shifts as dims, not ", shifts.size(), " and ", dims.size());
    at::Tensor y = x;
    for (size_t i = 0; i < dims.size(); ++i) {
        const int64_t length = y.size(dims[i]);
        if (length == 0) continue;
        const int64_t cut = ((-shifts[i]) % length + length) % length;
        y = at::cat({y.narrow(dims[i], cut, length - cut), y.narrow(dims[i], 0, cut)}, dims[i]);
    }
    return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(DOMAIN, m) {
    m.def("Roll(Tensor x, int[] shifts, int[] dims) -> Tensor", &roll);
}
