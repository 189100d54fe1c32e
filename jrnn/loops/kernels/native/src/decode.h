// Reads a program from the integers that the encoder in Python encodes (encoder.py).
#pragma once
#include <vector>

#include "program.h"

namespace jrnn {

constexpr int64_t kFormat = 5;  // the number in encoder.py

struct Decoded {
  Program program{};
  int64_t bytes = 4;  // of an element
  std::vector<int64_t> sizes;  // bytes of each argument, then of each result
  int64_t n_args = 0;
  std::vector<Ref> refs;
  std::vector<Instruction> instructions;
  std::vector<Stage> stages;
  std::vector<Pack> packs;
};

// Returns false if the integers are not a program of this format.
inline bool decode(const int64_t* values, size_t count, const double* literals, size_t n_literals, Decoded& out) {
  size_t at = 0;
  bool complete = true;
  auto next = [&]() -> int64_t {
    if (at < count) return values[at++];
    complete = false;
    return 0;
  };
  auto short_next = [&] { return static_cast<int32_t>(next()); };
  auto length = [&]() -> size_t {
    const int64_t n = next();
    if (n < 0 || static_cast<size_t>(n) > count) complete = false;
    return complete ? static_cast<size_t>(n) : 0;
  };
  if (next() != kFormat) return false;
  Program& p = out.program;
  out.bytes = next();
  p.rows = next(), p.steps = next(), p.reverse = next(), p.scratch = next();
  p.registers = short_next();
  p.before = short_next();
  p.literals = static_cast<int32_t>(n_literals), p.literal_values = literals;
  out.n_args = next();
  out.sizes.resize(length());
  for (int64_t& size : out.sizes) size = next();
  out.refs.resize(length());
  for (Ref& r : out.refs)
    r.base = short_next(), r.dtype = short_next(), r.offset = next(), r.row_stride = next(), r.time_stride = next();
  out.instructions.resize(length());
  for (Instruction& i : out.instructions)
    i.op = short_next(), i.out = short_next(), i.a = short_next(), i.b = short_next(), i.c = short_next();
  out.stages.resize(length());
  for (Stage& s : out.stages) {
    s.kind = short_next(), s.first = short_next(), s.count = short_next(), s.flat = short_next(), s.width = next();
    s.a = short_next(), s.out = short_next(), s.init = short_next(), s.pack = short_next(), s.depth = next();
    s.op = short_next();
    for (int64_t* of : {s.dims, s.from, s.to})
      for (int i = 0; i < 4; i++) of[i] = next();
  }
  out.packs.resize(length());
  for (Pack& k : out.packs) {
    k.base = short_next(), k.dtype = short_next(), k.offset = next(), k.depth = next(), k.width = next();
    k.depth_stride = next(), k.width_stride = next();
  }
  p.refs = out.refs.data(), p.n_refs = static_cast<int32_t>(out.refs.size());
  p.instructions = out.instructions.data();
  p.stages = out.stages.data(), p.n_stages = static_cast<int32_t>(out.stages.size());
  p.packs = out.packs.data(), p.n_packs = static_cast<int32_t>(out.packs.size());
  return complete && at == count && p.rows > 0 && p.steps > 0 && (out.bytes == 4 || out.bytes == 8);
}

}  // namespace jrnn
