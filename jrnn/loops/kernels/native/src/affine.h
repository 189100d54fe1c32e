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
#include "affine_blocks.h"

namespace {

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
      // What is multiplied on the way to these, or by the carry: a product of two such numbers does not overflow.
      safe = are_factors<F>(its.registers, first, 1) && are_factors<F>(inputs, a.inputs, steps) &&
             are_factors<F>(its.registers + first_value(a) - a.recurrence, a.recurrence, steps) &&
             (a.reverse ? run_first_order<F, true> : run_first_order<F, false>)(a, tile, coefficients, offsets, carry);
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
