// Sums of outer products over rows, A^T B: the gradients of weights over all steps.
#pragma once
#include "product.h"

namespace {

constexpr int64_t kSumRows = 256;  // rows of a block, of which a panel of B stays in the second-level cache
template <class F>
constexpr int64_t kGroup = kSumRows * kRows + kLanes<F>;  // a group of columns of A; groups begin in different cache sets

// out[m, w] = sum over rows of a[row, m] b[row, w], for the panels [first, last) of columns of all parts of B.
//
// `memory` holds a block of A in groups of kRows columns, and a block of a panel of B.
template <class F>
void sum_products(const Sums& s, int64_t first, int64_t last, void* memory) {
  const F* a = static_cast<const F*>(s.a);
  F *out = static_cast<F*>(s.out), *groups = static_cast<F*>(memory);
  const int64_t count = (s.m + kRows - 1) / kRows;
  F* panel = groups + count * kGroup<F>;
  const int64_t panels = (s.w + kPanel<F> - 1) / kPanel<F>, out_stride = s.w * s.parts;
  for (int64_t row = 0; row < s.rows; row += kSumRows) {
    const int64_t depth = s.rows - row < kSumRows ? s.rows - row : kSumRows;
    for (int64_t k = 0; k < depth; k++) {
      const F* from = a + (row + k) * s.m;
      int64_t g = 0;
      for (; (g + 1) * kRows <= s.m; g++)
        for (int64_t i = 0; i < kRows; i++) groups[g * kGroup<F> + k * kRows + i] = from[g * kRows + i];
      for (int64_t i = 0; g * kRows + i < s.m; i++) groups[g * kGroup<F> + k * kRows + i] = from[g * kRows + i];
    }
    for (int64_t p = first; p < last; p++) {
      const int64_t part = p / panels, start = p % panels * kPanel<F>;
      const int64_t columns = s.w - start < kPanel<F> ? s.w - start : kPanel<F>;
      pack_panels<F>({0, kFloat, row * s.w + start, depth, columns, s.w, 1}, s.b[part], panel, 0, 1);
      for (int64_t g = 0; g < count; g++) {
        F* to = out + g * kRows * out_stride + part * s.w + start;
        const F* before = row == 0 ? nullptr : to;
        const int64_t some = s.m - g * kRows < kRows ? s.m - g * kRows : kRows;
        by_panel<F, 1>(some, groups + g * kGroup<F>, kRows, panel, depth, before, out_stride, to, out_stride, columns);
      }
    }
  }
}

// The bytes of `memory`.
template <class F>
int64_t sum_bytes(int64_t m) {
  return ((m + kRows - 1) / kRows * kGroup<F> + kPanel<F> * kSumRows) * sizeof(F);
}

}  // namespace
