// An affine loop step by step: its registers, and its steps as they are written, on single numbers.
#pragma once
#include "elements.h"

namespace {

constexpr int64_t kBlock = 16, kSteps = 256;  // steps of a block and of a tile
constexpr int64_t kCarries = 8;               // the most

// Numbers for the matrices, and what may be in a block that is not discarded: what makes no sum overflow, and no product.
template <class F>
struct Wide;
template <>
struct Wide<float> {
  typedef double Exact;
  static constexpr float most = 1e37f, factor = 1e18f;
};
template <>
struct Wide<double> {
  typedef long double Exact;
  static constexpr double most = 1e306, factor = 1e152;
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

// What a step may compute of single numbers.
inline bool is_of_steps(int32_t op) {
  return op == kCopy || op == kAdd || op == kSub || op == kMul || op == kDiv || op == kNeg || op == kSelect;
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
      case kCopy: r[e.out] = r[e.a]; break;
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
      case kCopy: d[e.out] = d[e.a]; break;
      default: d[e.out] = r[e.a] != 0 ? d[e.c] : d[e.b];
    }
  }
}

// The steps of a tile, where step 0 is that with the lowest row.
template <class F>
struct Tile {
  const F* const* inputs;
  F* const* values;
  int64_t steps;
};

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

}  // namespace
