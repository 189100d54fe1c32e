// The matrices of an affine loop with constant coefficients: what a block of steps is of its inputs and the carry before it.
#pragma once
#include "affine_steps.h"

namespace {

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

}  // namespace
