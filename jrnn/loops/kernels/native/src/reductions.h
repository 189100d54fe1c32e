// Reductions over a part of each row, and moves: copies whose order differs.
#pragma once
#include "elements.h"

namespace {

enum Reduction : int32_t { kSum = 0, kMost = 1, kLeast = 2 };

template <class F, int op>
JRNN_INLINE Vec<F> joined(Vec<F> a, Vec<F> b) {
  return op == kSum ? a + b : op == kMost ? greater<F>(a, b) : smaller<F>(a, b);
}
template <class F, int op>
F reduced(const F* from, int64_t n, int64_t stride) {
  const F start = op == kSum ? F(0) : op == kMost ? F(-INFINITY) : F(INFINITY);
  Vec<F> parts = all<F>(start);
  int64_t i = 0;
  if (stride == 1) {
    constexpr int kChains = 4;  // that do not wait for each other
    Vec<F> chains[kChains] = {parts, parts, parts, parts};
    for (; i + kChains * kLanes<F> <= n; i += kChains * kLanes<F>)
#pragma GCC unroll 4
      for (int k = 0; k < kChains; k++) chains[k] = joined<F, op>(chains[k], load<F>(from + i + k * kLanes<F>));
    parts = joined<F, op>(joined<F, op>(chains[0], chains[1]), joined<F, op>(chains[2], chains[3]));
    for (; i + kLanes<F> <= n; i += kLanes<F>) parts = joined<F, op>(parts, load<F>(from + i));
  }
  F rest = start;
  for (; i < n; i++) rest = joined<F, op>(all<F>(rest), all<F>(from[i * stride]))[0];
  for (int half = kLanes<F> / 2; half; half /= 2)
    for (int k = 0; k < half; k++) parts[k] = joined<F, op>(all<F>(parts[k]), all<F>(parts[k + half]))[0];
  return joined<F, op>(all<F>(parts[0]), all<F>(rest))[0];
}

// dims: three of results, then the one that is reduced, with its stride in from[3].
template <class F, int op>
void reduce_row(const Stage& s, const F* from, F* to) {
  for (int64_t i = 0; i < s.dims[0]; i++)
    for (int64_t j = 0; j < s.dims[1]; j++)
      for (int64_t k = 0; k < s.dims[2]; k++)
        to[i * s.to[0] + j * s.to[1] + k * s.to[2]] =
            reduced<F, op>(from + i * s.from[0] + j * s.from[1] + k * s.from[2], s.dims[3], s.from[3]);
}
template <class F>
void reduction(const Stage& s, const F* from, int64_t from_stride, F* to, int64_t to_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += to_stride) {
    if (s.op == kSum)
      reduce_row<F, kSum>(s, from, to);
    else if (s.op == kMost)
      reduce_row<F, kMost>(s, from, to);
    else
      reduce_row<F, kLeast>(s, from, to);
  }
}
template <class F>
void move(const Stage& s, const F* from, int64_t from_stride, F* to, int64_t to_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += to_stride)
    for (int64_t i = 0; i < s.dims[0]; i++)
      for (int64_t j = 0; j < s.dims[1]; j++)
        for (int64_t k = 0; k < s.dims[2]; k++) {
          const F* a = from + i * s.from[0] + j * s.from[1] + k * s.from[2];
          F* b = to + i * s.to[0] + j * s.to[1] + k * s.to[2];
          for (int64_t l = 0; l < s.dims[3]; l++) b[l * s.to[3]] = a[l * s.from[3]];
        }
}

}  // namespace
