// Loops over lanes: arrays whose elements do not read each other, and carries that are each affine in themselves.
//
// They run in tiles of steps. An operation computes all steps and lanes of a tile, which lie one after the other. Between
// them, the recurrence of a carry runs step by step, with the carry of some lanes in registers: that is all that waits. It
// leaves the carries before or after all steps of the tile, from which operations compute the rest. A recurrence has the
// operations of the step in their order, so that NaN and infinities are those of the step.
//
// Shapes: m lanes.
#pragma once
#include "affine.h"

namespace {

constexpr int64_t kLaneTileBytes = 2048;  // of a register: what a tile needs stays in the first-level cache

// Returns the steps of a tile: whole vectors, if these are not much more.
template <class F>
int64_t tile_steps(const LaneLoop& a) {
  constexpr int64_t L = kLanes<F>, elements = kLaneTileBytes / sizeof(F);
  int64_t even = 1;  // steps whose elements are whole vectors
  while (even * a.lanes % L) even *= 2;
  int64_t steps = a.lanes < elements ? elements / a.lanes : 1;
  if (even <= steps) steps = steps / even * even;
  else if (even * a.lanes <= 2 * elements) steps = even;
  return steps < a.steps ? steps : a.steps;
}

// Elements between registers: where they are a page apart, a processor takes loads from one for loads from another.
template <class F>
int64_t register_stride(const LaneLoop& a) {
  constexpr int64_t line = 64 / sizeof(F);
  return (tile_steps<F>(a) * a.lanes + line - 1) / line * line + 3 * line;
}

// Steps of a tile for a recurrence. Row 0 has the lowest time.
template <class F>
struct LaneTile {
  int64_t lanes, steps, reverse;
  const F *added, *reset, *fresh, *coefficient, *offset, *choice, *chosen;  // of `Recurrence`, or null
  bool reset_where, choice_where, adds_old, is_held;
  F *before, *after;  // or null
  const F* carry;     // before the tile
  F* next;            // after it
};

template <class V, class F>
JRNN_INLINE V lanes_at(const F* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Runs K vectors of W lanes from `lane` on. is_plain: the step is no more than a product and a sum.
template <class F, int W, int K, bool is_plain>
void run_lanes(const LaneTile<F>& t, int64_t lane) {
  typedef F V __attribute__((vector_size(W * sizeof(F))));
  V carry[K];
  memcpy(carry, t.carry + lane, sizeof carry);
  const int64_t by = t.reverse ? -t.lanes : t.lanes;
  int64_t first = lane + (t.reverse ? (t.steps - 1) * t.lanes : 0);
  for (int64_t step = 0; step < t.steps; step++, first += by) {
    if (t.before) memcpy(t.before + first, carry, sizeof carry);
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) {
      const int64_t at = first + k * W;
      if (is_plain) {
        carry[k] = lanes_at<V>(t.coefficient + at) * carry[k] + lanes_at<V>(t.offset + at);
        continue;
      }
      V now = carry[k];
      if (t.added) now += lanes_at<V>(t.added + at);
      if (t.reset) {
        const V fresh = lanes_at<V>(t.fresh + at), where = lanes_at<V>(t.reset + at);
        now = t.reset_where ? (where != F(0) ? fresh : now) : (where != F(0) ? now : fresh);
      }
      if (t.coefficient && t.offset) {
        now = lanes_at<V>(t.coefficient + at) * now + lanes_at<V>(t.offset + at);
      } else if (t.coefficient && t.adds_old) {
        now = lanes_at<V>(t.coefficient + at) * now + carry[k];
      } else if (t.coefficient) {
        now = lanes_at<V>(t.coefficient + at) * now;
      } else if (t.offset) {
        now += lanes_at<V>(t.offset + at);
      } else if (t.adds_old) {
        now += carry[k];
      }
      if (t.choice) {
        const V chosen = t.is_held ? carry[k] : lanes_at<V>(t.chosen + at), where = lanes_at<V>(t.choice + at);
        now = t.choice_where ? (where != F(0) ? chosen : now) : (where != F(0) ? now : chosen);
      }
      carry[k] = now;
    }
    if (t.after) memcpy(t.after + first, carry, sizeof carry);
  }
  memcpy(t.next + lane, carry, sizeof carry);
}

// Runs all lanes. The last vector may repeat lanes of the one before it.
template <class F, int W, bool is_plain>
void run_all_lanes(const LaneTile<F>& t) {
  const int64_t m = t.lanes;
  if (m < W) {
    if constexpr (W > 1) return run_all_lanes<F, W / 2, is_plain>(t);
  }
  int64_t lane = 0;
  for (; lane + 4 * W <= m; lane += 4 * W) run_lanes<F, W, 4, is_plain>(t, lane);
  for (; lane + 2 * W <= m; lane += 2 * W) run_lanes<F, W, 2, is_plain>(t, lane);
  for (; lane + W <= m; lane += W) run_lanes<F, W, 1, is_plain>(t, lane);
  if (lane < m) run_lanes<F, W, 1, is_plain>(t, m - W);
}

template <class F>
struct LaneMemory {
  F *tiles, *carries, *next;
  F** registers;
  int64_t bytes;

  LaneMemory(const LaneLoop& a, void* memory) {
    Slices slices{static_cast<char*>(memory)};
    tiles = slices.take<F>(a.registers * register_stride<F>(a));
    carries = slices.take<F>(a.carries * a.lanes);
    next = slices.take<F>(a.lanes);
    registers = slices.take<F*>(a.registers);
    bytes = slices.used;
  }
};

template <class F>
int64_t lanes_bytes(const LaneLoop& a) {
  return LaneMemory<F>(a, nullptr).bytes;
}

// Runs an instruction for some elements of its registers.
template <class F>
void run_lanes_of(const Instruction& e, F* const* registers, int64_t at, int64_t count) {
  const Operand v[] = {{registers[e.out] + at, 0, kFloat}, {registers[e.a] + at, 0, kFloat}, {registers[e.b] + at, 0, kFloat},
                       {registers[e.c] + at, 0, kFloat}};
  instruction<F>(e.op, v, 1, count);
}

// The carry is what another value was a step before.
template <class F>
void shift(const Recurrence& r, const LaneMemory<F>& its, const LaneTile<F>& t, F* carry) {
  const int64_t m = t.lanes, rest = (t.steps - 1) * m;
  const F* value = its.registers[r.after];
  if (r.stores_before) {
    F* before = its.registers[r.before];
    memcpy(before + (t.reverse ? rest : 0), carry, m * sizeof(F));
    memcpy(before + (t.reverse ? 0 : m), value + (t.reverse ? m : 0), rest * sizeof(F));
  }
  memcpy(carry, value + (t.reverse ? 0 : rest), m * sizeof(F));
}

template <class F>
void run_recurrence(const Recurrence& r, const LaneMemory<F>& its, LaneTile<F> t, F* carry) {
  if (r.is_shift) return shift<F>(r, its, t, carry);
  const auto at = [&](int64_t i) { return i < 0 ? nullptr : its.registers[i]; };
  t.added = at(r.added), t.reset = at(r.reset), t.fresh = at(r.fresh), t.coefficient = at(r.coefficient);
  t.offset = at(r.offset), t.choice = at(r.choice), t.chosen = at(r.chosen);
  t.reset_where = r.reset_where, t.choice_where = r.choice_where, t.adds_old = r.offset == -2;
  t.is_held = r.chosen < 0;
  t.before = r.stores_before ? its.registers[r.before] : nullptr;
  t.after = r.stores_after ? its.registers[r.after] : nullptr;
  t.carry = carry, t.next = its.next;
  if (t.coefficient && t.offset && !t.added && !t.reset && !t.choice) {
    run_all_lanes<F, kLanes<F>, true>(t);
  } else {
    run_all_lanes<F, kLanes<F>, false>(t);
  }
  memcpy(carry, its.next, t.lanes * sizeof(F));
}

// `memory` has `lanes_bytes`, and starts at a cache line.
template <class F>
void lanes(const LaneLoop& a, void* memory) {
  const LaneMemory<F> its(a, memory);
  const int64_t m = a.lanes, size = tile_steps<F>(a);
  const int64_t numbers = a.constants + a.literals, first = numbers + a.once;
  for (int64_t i = 0; i < a.registers; i++) its.registers[i] = its.tiles + i * register_stride<F>(a);
  for (int64_t i = 0; i < numbers; i++) {
    const F* from = i < a.constants ? static_cast<const F*>(a.arrays[i]) : nullptr;
    const bool is_number = !from || a.is_number[i];
    const F number = from ? *from : F(a.literal_values[i - a.constants]);
    for (int64_t k = 0; k < size * m; k++) its.registers[i][k] = is_number ? number : from[k % m];
  }
  for (int64_t i = 0; i < a.carries; i++) memcpy(its.carries + i * m, a.arrays[a.constants + i], m * sizeof(F));
  for (int64_t i = 0; i < a.once; i++) run_lanes_of<F>(a.instructions[i], its.registers, 0, size * m);
  for (int64_t done = 0; done < a.steps;) {
    const int64_t steps = a.steps - done < size ? a.steps - done : size, at = a.reverse ? a.steps - done - steps : done;
    for (int64_t i = 0; i < a.stacks; i++)
      its.registers[first + i] = const_cast<F*>(static_cast<const F*>(a.arrays[a.constants + a.carries + i])) + at * m;
    for (int64_t i = 0; i < a.outs; i++) its.registers[a.out_at[i]] = static_cast<F*>(a.out[a.carries + i]) + at * m;
    LaneTile<F> tile{};
    tile.lanes = m, tile.steps = steps, tile.reverse = a.reverse;
    const Instruction* next = a.instructions + a.once;
    for (int64_t i = 0; i < a.carries; i++) {
      const Recurrence& r = a.recurrences[i];
      for (const Instruction* end = next + r.before_it; next < end; next++) run_lanes_of<F>(*next, its.registers, 0, steps * m);
      run_recurrence<F>(r, its, tile, its.carries + i * m);
    }
    for (; next < a.instructions + a.count; next++) run_lanes_of<F>(*next, its.registers, 0, steps * m);
    done += steps;
  }
  for (int64_t i = 0; i < a.carries; i++) memcpy(a.out[i], its.carries + i * m, m * sizeof(F));
}

}  // namespace
