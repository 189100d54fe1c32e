// Loops whose new carry and values are affine in the carry and in inputs, with coefficients that are the same at all steps.
//
// They run in tiles of steps. What leads to the inputs is computed for all steps of a tile, and so is what follows from the
// values. Between them, in a block of steps, the values are products of matrices with its inputs and with the carry before
// it, so that only the carries between blocks wait for each other. These are in double precision, the matrices' powers in a
// wider type than the loop's.
//
// A product spreads an infinite or NaN input over its block, and its sums may overflow where those of the loop do not. The
// blocks of a tile with numbers that are not finite, or too large, are discarded, and its steps run one by one, operation by
// operation.
//
// Shapes: n carries, m inputs, p values.
#pragma once
#include "elements.h"

namespace {

constexpr int64_t kBlock = 16, kSteps = 256;  // steps of a block and of a tile
constexpr int64_t kCarries = 8;               // the most

// Numbers for the matrices, and what may be in a block that is not discarded.
template <class F>
struct Wide;
template <>
struct Wide<float> {
  typedef double Exact;
  static constexpr float most = 1e37f, large = 1e30f;
};
template <>
struct Wide<double> {
  typedef long double Exact;
  static constexpr double most = 1e306, large = 1e290;
};
template <class F>
using Exact = typename Wide<F>::Exact;

// Registers of single numbers in the affine part: constants, literals, carries, inputs, then the results of instructions.
inline int64_t first_carry(const AffineLoop& a) { return a.constants + a.literals; }
inline int64_t first_input(const AffineLoop& a) { return first_carry(a) + a.carries; }
inline int64_t numbers_of(const AffineLoop& a) { return first_input(a) + a.inputs + a.affine; }
// Registers of a tile: constants, literals, stacks, the results of `before`, values, the results of `after`.
inline int64_t first_stack(const AffineLoop& a) { return a.constants + a.literals; }
inline int64_t first_value(const AffineLoop& a) { return first_stack(a) + a.stacks + a.before; }
inline int64_t registers_of(const AffineLoop& a) { return first_value(a) + a.values + a.after; }

// The carries with some that stay 0, so that there are few variants of the loop over blocks.
inline int64_t padded_carries(const AffineLoop& a) {
  return a.carries < 3 ? a.carries : a.carries < 5 ? 4 : kCarries;
}

template <class F, class T>
void load_constants(const AffineLoop& a, T* registers) {
  for (int64_t i = 0; i < a.constants; i++) registers[i] = *static_cast<const F*>(a.arrays[i]);
  for (int64_t i = 0; i < a.literals; i++) registers[a.constants + i] = F(a.literal_values[i]);
}

template <class T>
JRNN_INLINE void run_step(const AffineLoop& a, T* r) {
  for (int64_t i = a.before; i < a.before + a.affine; i++) {
    const Instruction& e = a.instructions[i];
    switch (e.op) {
      case kAdd: r[e.out] = r[e.a] + r[e.b]; break;
      case kSub: r[e.out] = r[e.a] - r[e.b]; break;
      case kMul: r[e.out] = r[e.a] * r[e.b]; break;
      case kDiv: r[e.out] = r[e.a] / r[e.b]; break;
      case kNeg: r[e.out] = -r[e.a]; break;
      default: r[e.out] = r[e.a] != 0 ? r[e.c] : r[e.b];
    }
  }
}
// The derivatives `d` of the registers `r`: of a product, a factor is constant, and so is a divisor.
template <class T>
void run_derivatives(const AffineLoop& a, const T* r, T* d) {
  for (int64_t i = a.before; i < a.before + a.affine; i++) {
    const Instruction& e = a.instructions[i];
    switch (e.op) {
      case kAdd: d[e.out] = d[e.a] + d[e.b]; break;
      case kSub: d[e.out] = d[e.a] - d[e.b]; break;
      case kMul: d[e.out] = d[e.a] * r[e.b] + r[e.a] * d[e.b]; break;
      case kDiv: d[e.out] = d[e.a] / r[e.b]; break;
      case kNeg: d[e.out] = -d[e.a]; break;
      default: d[e.out] = r[e.a] != 0 ? d[e.c] : d[e.b];
    }
  }
}

// What the inputs of a block and the carry before it add to its values, row by row, and to the carry after it.
template <class F>
struct Response {
  F* of_inputs;  // to values, [p, m, kBlock, kBlock]: a row for each step of the input
  F* of_carry;   // to values, [p, n, kBlock]
  F* constant;   // in values, [p, kBlock]
  F* to_carry;   // from inputs, [m, kBlock, kCarries]
  double power[kCarries][kCarries], added[kCarries];  // the carry after a block without inputs: power^T carry + added
  double first[2], inputs[2][kCarries];               // of two carries: what a step adds to them, and each input times
  double powers[5][2][2];                             // the matrix of 1, 2, 4, 8 and 16 steps
  F largest;     // the largest size of numbers that cannot make a number of a block overflow
};

template <class T>
T size_of(T x) {
  return x < 0 ? -x : x;
}
template <class T>
void raise_to(T& most, T x) {  // NaN stays
  if (!(size_of(x) <= most)) most = size_of(x);
}

template <class F>
void respond(const AffineLoop& a, Exact<F>* r, Response<F>& to) {
  typedef Exact<F> T;
  const int64_t n = a.carries, m = a.inputs, p = a.values, all = numbers_of(a), width = n + m + 1;
  const int64_t padded = padded_carries(a);
  for (int64_t i = 0; i < p * padded * kBlock; i++) to.of_carry[i] = 0;
  const int64_t of_value = a.stored ? 0 : n;  // the first row of the coefficients of values
  T *d = r + all, *rows = d + all, *state = rows + (n + p) * width, *next = state + n * width;
  load_constants<F>(a, r);
  for (int64_t i = first_carry(a); i < all; i++) r[i] = 0;
  run_step<T>(a, r);
  T most = 1, growth = 1;
  for (int64_t k = 0; k < n + m; k++) {
    for (int64_t i = 0; i < all; i++) d[i] = 0;
    d[first_carry(a) + k] = 1;
    run_derivatives<T>(a, r, d);
    for (int64_t i = first_input(a) + m; i < all; i++) raise_to(most, d[i]);
    for (int64_t i = 0; i < n + p; i++) rows[i * width + k] = d[a.results[i]];
  }
  for (int64_t i = first_input(a) + m; i < all; i++) raise_to(most, r[i]);
  for (int64_t i = 0; i < n + p; i++) rows[i * width + n + m] = r[a.results[i]];
  // `state` is what the carry before, an input of the step before, and constants add to the carry after some steps.
  for (int64_t i = 0; i < n; i++) {
    for (int64_t k = 0; k < width; k++) state[i * width + k] = k < n ? T(k == i) : k < n + m ? rows[i * width + k] : T(0);
  }
  const bool reverse = a.reverse;
  const auto row_of = [reverse](int64_t step) { return reverse ? kBlock - 1 - step : step; };
  for (int64_t v = 0; v < p; v++)
    for (int64_t q = 0; q < m; q++)
      for (int64_t j = 0; j < kBlock; j++)
        for (int64_t i = 0; i < kBlock; i++)
          to.of_inputs[((v * m + q) * kBlock + j) * kBlock + i] = i == j ? F(rows[(of_value + v) * width + n + q]) : F(0);
  for (int64_t i = 0; n == 2 && i < n; i++) {
    to.first[i] = double(rows[i * width + n + m]);
    for (int64_t q = 0; q < m && q < kCarries; q++) to.inputs[i][q] = double(rows[i * width + n + q]);
  }
  for (int64_t k = 0, power = 0; k <= kBlock; k++) {
    if (n == 2 && k == int64_t(1) << power) {
      for (int64_t i = 0; i < 4; i++) to.powers[power][i / 2][i % 2] = double(state[i / 2 * width + i % 2]);
      power++;
    }
    if (k == kBlock) break;
    for (int64_t i = 0; i < n * width; i++) raise_to(growth, state[i]);
    for (int64_t v = 0; v < p; v++) {
      const T* row = rows + (of_value + v) * width;
      for (int64_t c = 0; c < width; c++) {
        T sum = c == n + m ? row[n + m] : T(0);
        for (int64_t i = 0; i < n; i++) sum += row[i] * state[i * width + c];
        raise_to(growth, sum);
        if (c < n) {
          to.of_carry[(v * padded + c) * kBlock + row_of(k)] = F(sum);
        } else if (c == n + m) {
          to.constant[v * kBlock + row_of(k)] = F(sum);
        } else {
          for (int64_t j = 0; j + k + 1 < kBlock; j++)
            to.of_inputs[((v * m + c - n) * kBlock + row_of(j)) * kBlock + row_of(j + k + 1)] = F(sum);
        }
      }
    }
    for (int64_t q = 0; q < m; q++)
      for (int64_t i = 0; i < kCarries; i++)
        to.to_carry[(q * kBlock + row_of(kBlock - 1 - k)) * kCarries + i] = i < n ? F(state[i * width + n + q]) : F(0);
    for (int64_t i = 0; i < n; i++)
      for (int64_t c = 0; c < width; c++) {
        T sum = c == n + m ? rows[i * width + n + m] : T(0);
        for (int64_t o = 0; o < n; o++) sum += rows[i * width + o] * state[o * width + c];
        next[i * width + c] = sum;
      }
    T* last = state;
    state = next, next = last;
  }
  for (int64_t i = 0; i < kCarries; i++) {
    for (int64_t o = 0; o < kCarries; o++) to.power[i][o] = i < n && o < n ? double(state[o * width + i]) : 0;
    to.added[i] = i < n ? double(state[i * width + n + m]) : 0;
  }
  to.largest = F(Wide<F>::most / (T(n + kBlock * m + 2) * most * growth));
}

// The steps of a tile, where step 0 is that with the lowest row.
template <class F>
struct Tile {
  const F* const* inputs;
  F* const* values;
  int64_t steps;
};

// What inputs and the carry before a block add to its rows of one value.
template <class F>
struct Added {
  Vec<F> by_inputs, by_carry;
};
template <class F, int N>
JRNN_INLINE Added<F> added_to(const AffineLoop& a, const Response<F>& by, int64_t v, int64_t k, const Tile<F>& t, int64_t at,
                              const F* carry) {
  typedef Vec<F> V;
  const int64_t m = a.inputs, first = a.reverse ? k : 0, end = a.reverse ? kBlock : k + kLanes<F>;  // the steps up to these
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

// Runs all whole vectors of steps of a tile whose only carry is `coefficient * carry + offset`, as `run_blocks` does.
template <class F, bool reverse>
bool run_first_order(const AffineLoop& a, const Tile<F>& t, const F* coefficients, const F* offsets, double* carry) {
  typedef Vec<F> V;
  constexpr int64_t L = kLanes<F>, last = reverse ? 0 : L - 1;
  V seen{};
  double now = *carry;
  F* out = t.values[0];
  if (a.stored == kBefore) out[reverse ? t.steps - 1 : 0] = F(now);
  for (int64_t b = 0; b < t.steps / L; b++) {
    const int64_t at = reverse ? t.steps - L * (b + 1) : L * b;
    V coefficient = load<F>(coefficients + at), offset = load<F>(offsets + at);
    compose<F, 1, reverse>(coefficient, offset);
    const V value = offset + coefficient * F(now);
    seen += absolute<F>(coefficient) + absolute<F>(value);
    now = double(offset[last]) + double(coefficient[last]) * now;
    if (a.stored == kBefore) {
      store_moved<F>(a, t, out, value, at);
    } else {
      store<F>(out + at, value);
    }
  }
  *carry = now;
  bool safe = size_of(now) <= double(Wide<F>::large);
  for (int64_t i = 0; i < L; i++) safe &= seen[i] <= Wide<F>::large;
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

// Runs steps of a tile as they are written, from `first` on in their order.
template <class F>
void run_steps(const AffineLoop& a, const Tile<F>& t, F* numbers, double* carry, int64_t first) {
  const int64_t n = a.carries;
  F *of_carry = numbers + first_carry(a), *of_inputs = numbers + first_input(a);
  for (int64_t i = 0; i < n; i++) of_carry[i] = F(carry[i]);
  for (int64_t step = first; step < t.steps; step++) {
    const int64_t at = a.reverse ? t.steps - 1 - step : step;
    for (int64_t q = 0; q < a.inputs; q++) of_inputs[q] = t.inputs[q][at];
    run_step<F>(a, numbers);
    for (int64_t v = 0; v < a.values; v++) t.values[v][at] = numbers[a.results[n + v]];
    F after[kCarries];
    for (int64_t i = 0; i < n; i++) after[i] = numbers[a.results[i]];
    for (int64_t i = 0; i < n; i++) of_carry[i] = after[i];
  }
  for (int64_t i = 0; i < n; i++) carry[i] = of_carry[i];
}

// Runs instructions for all steps of a tile.
template <class F>
void run_tile(const Instruction* instructions, int64_t count, F* const* registers, int64_t steps) {
  for (int64_t i = 0; i < count; i++) {
    const Instruction& e = instructions[i];
    const Operand v[] = {{registers[e.out], 0, kFloat}, {registers[e.a], 0, kFloat}, {registers[e.b], 0, kFloat},
                         {registers[e.c], 0, kFloat}};
    instruction<F>(e.op, v, 1, steps);
  }
}

// Adds numbers, or products of numbers, to a vector of sums.
template <class F, class Term>
JRNN_INLINE void add_terms(int64_t n, F* sums, Term term) {
  constexpr int64_t L = kLanes<F>;
  Vec<F> parts[4] = {load<F>(sums)};
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L)
#pragma GCC unroll 4
    for (int64_t k = 0; k < 4; k++) parts[k] += term(i + k * L, L);
  for (; i < n; i += L) parts[0] += term(i, n - i);
  store<F>(sums, (parts[0] + parts[1]) + (parts[2] + parts[3]));
}
template <class F>
void add_all(const F* x, const F* y, int64_t n, F* sums) {
  const auto at = [](const F* p, int64_t i, int64_t some) {
    return some < kLanes<F> ? load_some<F>(p + i, some) : load<F>(p + i);
  };
  if (y) {
    add_terms<F>(n, sums, [=](int64_t i, int64_t some) { return at(x, i, some) * at(y, i, some); });
  } else {
    add_terms<F>(n, sums, [=](int64_t i, int64_t some) { return at(x, i, some); });
  }
}

// Takes parts of one piece of memory, each at the start of a cache line; counts their bytes if there is no memory yet.
struct Slices {
  char* memory;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(memory + used);
    used += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

template <class F>
struct Memory {
  Response<F> response;
  Exact<F>* exact;  // of `respond`
  F *numbers, *tiles;
  F** registers;
  F* sums;  // vectors
  int64_t bytes;

  Memory(const AffineLoop& a, void* memory) {
    const int64_t n = a.carries, m = a.inputs, p = a.values;
    Slices slices{static_cast<char*>(memory)};
    response.of_inputs = slices.take<F>(p * m * kBlock * kBlock);
    response.of_carry = slices.take<F>(p * padded_carries(a) * kBlock);
    response.constant = slices.take<F>(p * kBlock);
    response.to_carry = slices.take<F>(m * kBlock * kCarries);
    exact = slices.take<Exact<F>>(2 * numbers_of(a) + (3 * n + p) * (n + m + 1));
    numbers = slices.take<F>(numbers_of(a));
    tiles = slices.take<F>(registers_of(a) * kSteps);
    registers = slices.take<F*>(registers_of(a) + m);
    sums = slices.take<F>(a.sums * kLanes<F>);
    bytes = slices.used;
  }
};

template <class F>
int64_t affine_bytes(const AffineLoop& a) {
  return Memory<F>(a, nullptr).bytes;
}

// `memory` has `affine_bytes`, and starts at a cache line.
template <class F>
void affine(const AffineLoop& a, void* memory) {
  const int64_t n = a.carries, first = first_stack(a), all = registers_of(a);
  Memory<F> its(a, memory);
  load_constants<F>(a, its.numbers);
  for (int64_t i = 0; i < all; i++) its.registers[i] = its.tiles + i * kSteps;
  for (int64_t i = 0; i < first; i++)
    for (int64_t k = 0; k < kSteps; k++) its.registers[i][k] = its.numbers[i];
  double carry[kCarries] = {};
  for (int64_t i = 0; i < n; i++) carry[i] = *static_cast<const F*>(a.arrays[a.constants + i]);
  for (int64_t i = 0; i < a.sums * kLanes<F>; i++) its.sums[i] = 0;
  const bool first_order = a.coefficient >= 0, second_order = n == 2 && a.stored && a.inputs <= kCarries;
  if (!first_order) respond<F>(a, its.exact, its.response);
  const auto run_some = n == 1 ? run_blocks<F, 1> : n == 2 ? run_blocks<F, 2> : n < 5 ? run_blocks<F, 4> : run_blocks<F, kCarries>;
  F** inputs = its.registers + all;
  for (int64_t done = 0; done < a.steps;) {
    const int64_t steps = a.steps - done < kSteps ? a.steps - done : kSteps, at = a.reverse ? a.steps - done - steps : done;
    for (int64_t i = 0; i < a.stacks; i++)
      its.registers[first + i] = const_cast<F*>(static_cast<const F*>(a.arrays[a.constants + n + i])) + at;
    for (int64_t i = 0; i < a.outs; i++) its.registers[a.out_at[i]] = static_cast<F*>(a.out[n + a.sums + i]) + at;
    for (int64_t q = 0; q < a.inputs; q++) inputs[q] = its.registers[a.input_at[q]];
    const Tile<F> tile{inputs, its.registers + first_value(a), steps};
    run_tile<F>(a.instructions, a.before, its.registers, steps);
    double before[kCarries];
    memcpy(before, carry, sizeof carry);
    bool safe;
    if (first_order) {
      const F *coefficients = its.registers[a.coefficient], *offsets = its.registers[a.offset];
      safe = (a.reverse ? run_first_order<F, true> : run_first_order<F, false>)(a, tile, coefficients, offsets, carry);
    } else if (second_order) {
      safe = (a.reverse ? run_second_order<F, true> : run_second_order<F, false>)(a, its.response, tile, carry);
    } else {
      safe = run_some(a, its.response, tile, carry);
    }
    if (!safe) memcpy(carry, before, sizeof carry);
    const int64_t size = first_order || second_order ? kLanes<F> : kBlock;
    run_steps<F>(a, tile, its.numbers, carry, safe ? steps / size * size : 0);
    run_tile<F>(a.instructions + a.before + a.affine, a.after, its.registers, steps);
    for (int64_t i = 0; i < a.sums; i++) {
      const int32_t factor = a.sum_at[2 * i + 1];
      add_all<F>(its.registers[a.sum_at[2 * i]], factor < 0 ? nullptr : its.registers[factor], steps, its.sums + i * kLanes<F>);
    }
    done += steps;
  }
  for (int64_t i = 0; i < n; i++) *static_cast<F*>(a.out[i]) = F(carry[i]);
  for (int64_t i = 0; i < a.sums; i++) {
    double sum = 0;
    for (int64_t k = 0; k < kLanes<F>; k++) sum += its.sums[i * kLanes<F> + k];
    *static_cast<F*>(a.out[n + i]) = F(sum);
  }
}

}  // namespace
