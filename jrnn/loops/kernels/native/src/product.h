// Products of rows with constant matrices, which are packed into panels of columns.
#pragma once
#include <stddef.h>

#include <utility>

#include "elements.h"

namespace {

#if JRNN_VECTOR_BYTES == 32
constexpr int kVectors = 2, kRows = 6;  // 16 registers
#elif JRNN_VECTOR_BYTES == 16 && !defined(__aarch64__)
constexpr int kVectors = 2, kRows = 5;
#else
constexpr int kVectors = 4, kRows = 6;  // 32 registers
#endif
template <class F>
constexpr int64_t kPanel = kVectors * kLanes<F>;

// What of a panel is packed already.
struct Square {
  int64_t rows, columns;
};

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define JRNN_TURNS 1
#endif
#endif

#ifdef JRNN_TURNS
// Exchanges the lanes of `a` that have the bit D with those of `b` that have not.
template <class F, int D, size_t... Lane>
JRNN_INLINE void exchange(Vec<F>& a, Vec<F>& b, std::index_sequence<Lane...>) {
  constexpr int n = kLanes<F>;
  const Vec<F> first = __builtin_shufflevector(a, b, (Lane & D ? n + int(Lane) - D : int(Lane))...);
  b = __builtin_shufflevector(a, b, (Lane & D ? n + int(Lane) : int(Lane) + D)...);
  a = first;
}

// Transposes a square of vectors.
template <class F, int D = kLanes<F> / 2>
JRNN_INLINE void turn(Vec<F>* rows) {
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<F>; i++)
      if (!(i & D)) exchange<F, D>(rows[i], rows[i + D], std::make_index_sequence<kLanes<F>>{});
    turn<F, D / 2>(rows);
  }
}

// Packs squares of vectors of a matrix whose columns are contiguous.
template <class F>
Square pack_squares(const F* from, int64_t stride, int64_t depth, int64_t columns, F* out) {
  constexpr int n = kLanes<F>;
  const int64_t down = depth / n * n, across = columns / n * n;
  for (int64_t j = 0; j < across; j += n)
    for (int64_t k = 0; k < down; k += n) {
      Vec<F> rows[n];
#pragma GCC unroll 16
      for (int i = 0; i < n; i++) rows[i] = load<F>(from + (j + i) * stride + k);
      turn<F>(rows);
#pragma GCC unroll 16
      for (int i = 0; i < n; i++) store<F>(out + (k + i) * kPanel<F> + j, rows[i]);
    }
  return {down, across};
}
#else
template <class F>
Square pack_squares(const F*, int64_t, int64_t, int64_t, F*) {
  return {0, 0};
}
#endif

template <class F>
void pack_panels(const Pack& pack, const void* matrix, void* packed, int64_t first, int64_t last) {
  const int64_t size = bytes_of(pack.dtype, sizeof(F));
  const char* from = static_cast<const char*>(matrix) + pack.offset * size;
  for (int64_t panel = first; panel < last; panel++) {
    F* out = static_cast<F*>(packed) + panel * kPanel<F> * pack.depth;
    const int64_t start = panel * kPanel<F>;
    const int64_t columns = pack.width - start < kPanel<F> ? pack.width - start : kPanel<F>;
    const bool turns = pack.dtype == kFloat && pack.depth_stride == 1 && pack.width_stride != 1;
    const F* column = reinterpret_cast<const F*>(from) + start * pack.width_stride;
    const Square done = turns ? pack_squares<F>(column, pack.width_stride, pack.depth, columns, out) : Square{0, 0};
    constexpr int64_t block = 16;  // rows that are copied together, so that transposing reads whole lines
    for (int64_t k0 = 0; k0 < pack.depth; k0 += block) {
      const int64_t end = k0 + block < pack.depth ? k0 + block : pack.depth;
      if (pack.width_stride == 1 && pack.dtype == kFloat && columns == kPanel<F>) {
        const F* at = reinterpret_cast<const F*>(from) + start;
        for (int64_t k = k0; k < end; k++)
          for (int v = 0; v < kVectors; v++)
            store<F>(out + k * kPanel<F> + v * kLanes<F>, load<F>(at + k * pack.depth_stride + v * kLanes<F>));
      } else if (pack.width_stride == 1) {
        for (int64_t k = k0; k < end; k++) read_row<F>(out + k * kPanel<F>, from + (k * pack.depth_stride + start) * size, pack.dtype, columns);
      } else {
        for (int64_t j = end <= done.rows ? done.columns : 0; j < columns; j++)
          for (int64_t k = j < done.columns && k0 < done.rows ? done.rows : k0; k < end; k++)
            read_row<F>(out + k * kPanel<F> + j, from + (k * pack.depth_stride + (start + j) * pack.width_stride) * size, pack.dtype, 1);
      }
      for (int64_t k = k0; k < end; k++)
        for (int64_t j = columns; j < kPanel<F>; j++) out[k * kPanel<F> + j] = F(0);
    }
  }
}

// Sums of R rows and one panel stay in registers. The order of additions does not depend on R. The elements of a row of `a`
// lie next to each other, a_stride from those of the next row; or if `turned`, those of a column do.
//
// It has no code for a part of a panel: the compiler would keep some of the sums in memory.
template <class F, int R, int turned>
void rows_by_panel(const F* a, int64_t a_stride, const F* panel, int64_t depth, const F* init, int64_t init_stride, F* out,
                   int64_t out_stride) {
  Vec<F> sums[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++)
      sums[r][v] = init == nullptr ? Vec<F>{} : load<F>(init + r * init_stride + v * kLanes<F>);
  for (int64_t k = 0; k < depth; k++) {
    Vec<F> b[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) b[v] = load<F>(panel + k * kPanel<F> + v * kLanes<F>);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F value = turned ? a[k * a_stride + r] : a[r * a_stride + k];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) sums[r][v] += value * b[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) store<F>(out + r * out_stride + v * kLanes<F>, sums[r][v]);
}

// The same for at most kRows rows and the first columns of a panel.
template <class F, int turned>
void by_panel(int64_t rows, const F* a, int64_t a_stride, const F* panel, int64_t depth, const F* init, int64_t init_stride,
              F* out, int64_t out_stride, int64_t columns) {
  if (columns < kPanel<F>) {
    F whole[kRows * kPanel<F>] = {};
    for (int64_t r = 0; r < rows && init != nullptr; r++)
      memcpy(whole + r * kPanel<F>, init + r * init_stride, columns * sizeof(F));
    by_panel<F, turned>(rows, a, a_stride, panel, depth, whole, kPanel<F>, whole, kPanel<F>, kPanel<F>);
    for (int64_t r = 0; r < rows; r++) memcpy(out + r * out_stride, whole + r * kPanel<F>, columns * sizeof(F));
    return;
  }
  switch (rows) {
#define JRNN_CASE(R)                                                                                   \
  case R:                                                                                              \
    return rows_by_panel<F, R, turned>(a, a_stride, panel, depth, init, init_stride, out, out_stride);
    JRNN_CASE(1) JRNN_CASE(2) JRNN_CASE(3) JRNN_CASE(4) JRNN_CASE(5)
    default:
      rows_by_panel<F, kRows, turned>(a, a_stride, panel, depth, init, init_stride, out, out_stride);
#undef JRNN_CASE
  }
}

// out[r] = init[r] + a[r] @ matrix, for some rows.
template <class F>
void product(const F* a, int64_t a_stride, const F* packed, int64_t depth, int64_t width, const F* init, int64_t init_stride,
             F* out, int64_t out_stride, int64_t rows) {
  const int64_t groups = (rows + kRows - 1) / kRows;
  for (int64_t start = 0; start < width; start += kPanel<F>) {
    const F* panel = packed + start * depth;
    const int64_t columns = width - start < kPanel<F> ? width - start : kPanel<F>;
    for (int64_t g = 0, r = 0; g < groups; g++) {
      const int64_t some = (rows - r + groups - g - 1) / (groups - g);
      const F* first = init == nullptr ? nullptr : init + r * init_stride + start;
      by_panel<F, 0>(some, a + r * a_stride, a_stride, panel, depth, first, init_stride, out + r * out_stride + start, out_stride,
                     columns);
      r += some;
    }
  }
}

// out = first + a @ rows, for one row and R rows of a matrix, each of which is read from its start to its end.
template <class F, int R>
void add_rows(const F* a, const F* rows, int64_t down, int64_t width, const F* first, F* out) {
  constexpr int64_t kSome = 4;  // vectors of a block of columns
  int64_t start = 0;
  for (; start + kSome * kLanes<F> <= width; start += kSome * kLanes<F>) {
    Vec<F> sums[kSome];
#pragma GCC unroll 8
    for (int v = 0; v < kSome; v++) sums[v] = first == nullptr ? Vec<F>{} : load<F>(first + start + v * kLanes<F>);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < kSome; v++) sums[v] += a[r] * load<F>(rows + r * down + start + v * kLanes<F>);
#pragma GCC unroll 8
    for (int v = 0; v < kSome; v++) store<F>(out + start + v * kLanes<F>, sums[v]);
  }
  for (; start < width; start += kLanes<F>) {
    const int64_t rest = width - start < kLanes<F> ? width - start : kLanes<F>;
    Vec<F> sum = first == nullptr ? Vec<F>{} : load_some<F>(first + start, rest);
    for (int r = 0; r < R; r++) sum += a[r] * load_some<F>(rows + r * down + start, rest);
    store_some<F>(out + start, sum, rest);
  }
}

// The same for a whole matrix as it is: packing it would take as long as the product.
template <class F>
void row_by_matrix(const F* a, const Pack& matrix, const F* b, const F* init, F* out) {
  constexpr int64_t kDeep = 8;
  const int64_t down = matrix.depth_stride;
  const F* first = init;
  int64_t k = 0;
  for (; k + kDeep <= matrix.depth; k += kDeep, first = out) add_rows<F, kDeep>(a + k, b + k * down, down, matrix.width, first, out);
  for (; k < matrix.depth; k++, first = out) add_rows<F, 1>(a + k, b + k * down, down, matrix.width, first, out);
}

}  // namespace
