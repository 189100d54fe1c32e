// Blocks of steps of an affine loop: by matrices, or of one or two carries by composing steps with those before them.
#pragma once
#include "affine_response.h"

namespace {

// What inputs and the carry before a block add to its rows of one value.
template <class F>
struct Added {
  Vec<F> by_inputs, by_carry;
};
template <class F, int N>
JRNN_INLINE Added<F> added_to(const AffineLoop& a, const Response<F>& by, int64_t v, int64_t k, const Tile<F>& t, int64_t at,
                              const F* carry) {
  typedef Vec<F> V;
  // The steps up to these, in fours: the response to later ones is 0.
  const int64_t m = a.inputs, first = a.reverse ? k / 4 * 4 : 0, end = a.reverse ? kBlock : (k + kLanes<F> + 3) / 4 * 4;
  V parts[4] = {}, by_carry = load<F>(by.constant + v * kBlock + k);
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) by_carry += load<F>(by.of_carry + (v * N + i) * kBlock + k) * carry[i];
  for (int64_t q = 0; q < m; q++) {
    const F* x = t.inputs[q] + at;
    const F* response = by.of_inputs + (v * m + q) * kBlock * kBlock + k;
    for (int64_t j = first; j < end; j += 4)
#pragma GCC unroll 4
      for (int64_t o = 0; o < 4; o++) parts[o] += load<F>(response + (j + o) * kBlock) * x[j + o];
  }
  return {(parts[0] + parts[1]) + (parts[2] + parts[3]), by_carry};
}

template <class F, int N>
struct Few {
  typedef F V __attribute__((vector_size(N * sizeof(F))));
};

// Returns what the inputs of a block add to the carry after it.
template <class F, int N>
JRNN_INLINE void of_inputs(const AffineLoop& a, const Response<F>& by, const Tile<F>& t, int64_t at, F* carry) {
  typedef typename Few<F, (N < 4 ? 4 : N)>::V V;
  V added[4] = {};
  for (int64_t q = 0; q < a.inputs; q++) {
    const F* x = t.inputs[q] + at;
    const F* to_carry = by.to_carry + q * kBlock * kCarries;
#pragma GCC unroll 16
    for (int64_t j = 0; j < kBlock; j++) {
      V row;
      memcpy(&row, to_carry + j * kCarries, sizeof row);
      added[j % 4] += row * x[j];
    }
  }
  const V sum = (added[0] + added[1]) + (added[2] + added[3]);
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) carry[i] = sum[i];
}

// Stores the carries after steps as those before the next ones, as far as these are in the tile.
template <class F>
JRNN_INLINE void store_moved(const AffineLoop& a, const Tile<F>& t, F* out, Vec<F> value, int64_t at) {
  if (a.reverse ? at > 0 : at + kLanes<F> < t.steps) return store<F>(out + (a.reverse ? at - 1 : at + 1), value);
  for (int64_t i = a.reverse; i < kLanes<F> - !a.reverse; i++) out[at + (a.reverse ? i - 1 : i + 1)] = value[i];
}

// Runs all whole blocks of a tile, and returns false if the results may not be used. N: the carries, with some that stay 0.
template <class F, int N>
bool run_blocks(const AffineLoop& a, const Response<F>& by, const Tile<F>& t, double* carry) {
  typedef Vec<F> V;
  typedef typename Few<double, N>::V W;
  constexpr int64_t L = kLanes<F>;
  const int64_t last = a.reverse ? 0 : kBlock - 1;
  Ints<F> is_safe = V{} <= by.largest;
  double now[N], largest = 0;
  for (int i = 0; i < N; i++) now[i] = carry[i];
  for (int64_t i = 0; a.stored == kBefore && i < a.carries; i++) t.values[i][a.reverse ? t.steps - 1 : 0] = F(carry[i]);
  for (int64_t b = 0; b < t.steps / kBlock; b++) {
    const int64_t at = a.reverse ? t.steps - kBlock * (b + 1) : kBlock * b;
    V seen{};
    F before[N], from_inputs[N] = {};
    for (int i = 0; i < N; i++) before[i] = F(now[i]);
    for (int64_t q = 0; q < a.inputs; q++)
      for (int64_t k = 0; k < kBlock; k += L) seen += absolute<F>(load<F>(t.inputs[q] + at + k));
    if (!a.stored) of_inputs<F, N>(a, by, t, at, from_inputs);
    for (int64_t v = 0; v < a.values; v++) {
      for (int64_t k = 0; k < kBlock; k += L) {
        const Added<F> added = added_to<F, N>(a, by, v, k, t, at, before);
        const V value = added.by_inputs + added.by_carry;
        seen += absolute<F>(value);
        if (a.stored == kBefore) {
          store_moved<F>(a, t, t.values[v], value, at + k);
        } else {
          store<F>(t.values[v] + at + k, value);
        }
        if (a.stored && k == last / L * L) from_inputs[v] = added.by_inputs[last % L];
      }
    }
    is_safe &= seen <= by.largest;
    W after[2] = {};
    memcpy(&after[0], by.added, sizeof(W));
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) after[1][i] = from_inputs[i];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      W power;
      memcpy(&power, by.power[i], sizeof(W));
      after[i % 2] += power * now[i];
    }
    after[0] += after[1];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) now[i] = after[0][i], raise_to(largest, now[i]);
  }
  bool safe = largest <= double(by.largest);
  for (int64_t i = 0; i < L; i++) safe &= is_safe[i] != 0;
  for (int i = 0; i < N; i++) carry[i] = now[i];
  return safe;
}

// Returns a vector whose elements moved by R places in the order of the steps. The first R are `fill`.
template <class F, int R, bool reverse>
JRNN_INLINE Vec<F> moved(Vec<F> v, Vec<F> fill) {
  Ints<F> places{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<F>; i++) {
    const int from = reverse ? i + R : i - R;
    places[i] = from < 0 || from >= kLanes<F> ? i : kLanes<F> + from;
  }
  return shuffled<F>(fill, v, places);
}

// Replaces the coefficients and offsets of steps by those of all steps from the first one to each.
template <class F, int R, bool reverse>
JRNN_INLINE void compose(Vec<F>& coefficient, Vec<F>& offset) {
  if constexpr (R < kLanes<F>) {
    offset += coefficient * moved<F, R, reverse>(offset, Vec<F>{});
    coefficient *= moved<F, R, reverse>(coefficient, all<F>(F(1)));
    compose<F, 2 * R, reverse>(coefficient, offset);
  }
}

// Returns true if all numbers of all registers of a list may be factors.
template <class F>
bool are_factors(const F* const* registers, int64_t count, int64_t steps) {
  constexpr int64_t L = kLanes<F>;
  Vec<F> seen[2] = {};
  for (int64_t i = 0; i < count; i++) {
    const F* x = registers[i];
    int64_t k = 0;
    for (; k + 2 * L <= steps; k += 2 * L) {
      seen[0] += absolute<F>(load<F>(x + k));
      seen[1] += absolute<F>(load<F>(x + k + L));
    }
    for (; k < steps; k += L) seen[0] += absolute<F>(k + L > steps ? load_some<F>(x + k, steps - k) : load<F>(x + k));
  }
  bool safe = true;
  for (int64_t i = 0; i < L; i++) safe &= seen[0][i] + seen[1][i] <= Wide<F>::factor;
  return safe;
}

// Returns the product of all elements of a vector in double precision. A float's rounding error, which is often the same in
// all vectors, would grow with the number of steps.
template <class F>
JRNN_INLINE double product_of(Vec<F> v) {
  constexpr int half = kLanes<F> / 2;
  typename Few<F, half>::V parts[2];
  typedef typename Few<double, half>::V W;
  memcpy(parts, &v, sizeof v);
  const W pairs = __builtin_convertvector(parts[0], W) * __builtin_convertvector(parts[1], W);
  double products[half];
  memcpy(products, &pairs, sizeof pairs);
#pragma GCC unroll 4
  for (int n = half / 2; n; n /= 2)
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) products[i] *= products[i + n];
  return products[0];
}

// Runs all whole vectors of steps of a tile whose only carry is `coefficient * carry + offset`, as `run_blocks` does.
template <class F, bool reverse>
bool run_first_order(const AffineLoop& a, const Tile<F>& t, const F* coefficients, const F* offsets, double* carry) {
  typedef Vec<F> V;
  constexpr int64_t L = kLanes<F>, last = reverse ? 0 : L - 1;
  V seen{};
  const bool is_constant = a.coefficient < first_stack(a);
  double now = *carry, whole = is_constant ? product_of<F>(load<F>(coefficients)) : 0;
  F* out = t.values[0];
  if (a.stored == kBefore) out[reverse ? t.steps - 1 : 0] = F(now);
  for (int64_t b = 0; b < t.steps / L; b++) {
    const int64_t at = reverse ? t.steps - L * (b + 1) : L * b;
    V coefficient = load<F>(coefficients + at), offset = load<F>(offsets + at);
    if (!is_constant) whole = product_of<F>(coefficient);
    compose<F, 1, reverse>(coefficient, offset);
    const V value = offset + coefficient * F(now);
    seen += absolute<F>(coefficient) + absolute<F>(value);
    now = double(offset[last]) + whole * now;
    if (a.stored == kBefore) {
      store_moved<F>(a, t, out, value, at);
    } else {
      store<F>(out + at, value);
    }
  }
  bool safe = size_of(*carry) <= double(Wide<F>::factor) && size_of(now) <= double(Wide<F>::factor);
  *carry = now;
  for (int64_t i = 0; i < L; i++) safe &= seen[i] <= Wide<F>::factor;
  return safe;
}

// As `compose`, for two carries whose matrix is the same at all steps.
template <class F, int R, int power, bool reverse>
JRNN_INLINE void compose_two(const F (&powers)[5][2][2], Vec<F> (&offsets)[2]) {
  if constexpr (R < kLanes<F>) {
    const Vec<F> before[2] = {moved<F, R, reverse>(offsets[0], Vec<F>{}), moved<F, R, reverse>(offsets[1], Vec<F>{})};
    for (int i = 0; i < 2; i++) offsets[i] += powers[power][i][0] * before[0] + powers[power][i][1] * before[1];
    compose_two<F, 2 * R, power + 1, reverse>(powers, offsets);
  }
}
constexpr int log2_of(int64_t n) { return n < 2 ? 0 : 1 + log2_of(n / 2); }

// Runs all whole vectors of steps of a tile whose two carries are the values, as `run_blocks` does.
template <class F, bool reverse>
bool run_second_order(const AffineLoop& a, const Response<F>& by, const Tile<F>& t, double* carry) {
  typedef Vec<F> V;
  constexpr int64_t L = kLanes<F>, last = reverse ? 0 : L - 1;
  const double(&whole)[2][2] = by.powers[log2_of(L)];
  const F* of_carry = by.of_carry + (reverse ? kBlock - L : 0);
  F powers[5][2][2], inputs[2][kCarries];
  for (int i = 0; i < 20; i++) powers[i / 4][i / 2 % 2][i % 2] = F(by.powers[i / 4][i / 2 % 2][i % 2]);
  for (int64_t i = 0; i < 2; i++)
    for (int64_t q = 0; q < a.inputs; q++) inputs[i][q] = F(by.inputs[i][q]);
  V seen{};
  double now[2] = {carry[0], carry[1]}, largest = 0;
  for (int64_t i = 0; a.stored == kBefore && i < 2; i++) t.values[i][reverse ? t.steps - 1 : 0] = F(now[i]);
  for (int64_t b = 0; b < t.steps / L; b++) {
    const int64_t at = reverse ? t.steps - L * (b + 1) : L * b;
    V offsets[2] = {all<F>(F(by.first[0])), all<F>(F(by.first[1]))};
    for (int64_t q = 0; q < a.inputs; q++) {
      const V x = load<F>(t.inputs[q] + at);
      seen += absolute<F>(x);
      for (int i = 0; i < 2; i++) offsets[i] += inputs[i][q] * x;
    }
    compose_two<F, 1, 0, reverse>(powers, offsets);
    const F before[2] = {F(now[0]), F(now[1])};
    for (int i = 0; i < 2; i++) {
      const V by_carry = load<F>(of_carry + 2 * i * kBlock) * before[0] + load<F>(of_carry + (2 * i + 1) * kBlock) * before[1];
      const V value = offsets[i] + by_carry;
      seen += absolute<F>(value);
      if (a.stored == kBefore) {
        store_moved<F>(a, t, t.values[i], value, at);
      } else {
        store<F>(t.values[i] + at, value);
      }
    }
    const double old[2] = {now[0], now[1]};
    for (int i = 0; i < 2; i++) {
      now[i] = double(offsets[i][last]) + (whole[i][0] * old[0] + whole[i][1] * old[1]);
      raise_to(largest, now[i]);
    }
  }
  bool safe = largest <= double(by.largest);
  for (int64_t i = 0; i < L; i++) safe &= seen[i] <= by.largest;
  carry[0] = now[0], carry[1] = now[1];
  return safe;
}

}  // namespace
