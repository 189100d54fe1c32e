// A loop as data: what the encoder in Python (encoder.py) encodes, decoded to plain structs.
//
// These structs are read by code that is compiled for several instruction sets, so they hold no types of the C++ library.
#pragma once
#include <stdint.h>

namespace jrnn {

enum Dtype : int32_t { kFloat = 0, kBool = 1, kBfloat16 = 2 };  // kFloat: the type that the loop computes with

// An array in memory at some step: rows at `offset + row * row_stride + t * time_stride`, counted in elements.
struct Ref {
  int32_t base;   // arguments, then results, then the scratch memory
  int32_t dtype;
  int64_t offset, row_stride, time_stride;
};

// Operands: an index of `refs`, or -1 - r for the register r. Registers after the first `registers` hold literals.
struct Instruction {
  int32_t op, out, a, b, c;
};

enum Kind : int32_t { kElements = 0, kProduct = 1, kReduction = 2, kMove = 3 };

struct Stage {
  int32_t kind;
  int32_t first, count;  // instructions
  int32_t flat;          // all rows lie one after the other, so they are one long row
  int64_t width;         // columns of elements or of a product
  int32_t a, out, init;  // refs
  int32_t pack;          // of a product
  int64_t depth;         // rows of the matrix of a product
  int32_t op;            // of a reduction
  int64_t dims[4], from[4], to[4];  // of a reduction or a move: sizes and strides
};

// A constant matrix, [depth, width] with these strides, which is copied to panels of columns.
struct Pack {
  int32_t base, dtype;
  int64_t offset, depth, width, depth_stride, width_stride;
};

struct Program {
  int64_t rows, steps, reverse, scratch;  // scratch: elements
  int32_t registers, literals, n_refs, n_stages, n_packs;
  int32_t before;  // the first stages, which run once, before the first step
  const Ref* refs;
  const Instruction* instructions;
  const Stage* stages;
  const Pack* packs;
  const double* literal_values;
};

// Returns true if a product reads the matrix as it is.
static inline bool reads_matrix(const Program& p, const Pack& pack) {
  return p.rows == 1 && pack.dtype == kFloat && pack.width_stride == 1;
}

// An array [rows, m] and `parts` arrays [rows, w] next to each other, and their sum of outer products, [m, parts * w].
struct Sums {
  const void* a;
  const void* const* b;
  void* out;
  int64_t rows, m, w, parts;
};

// The carries that an affine loop has as its values: none, those before each step, or those after it.
enum Stored : int64_t { kNone = 0, kBefore = 1, kAfter = 2 };

// A loop whose carry and values are affine, as instructions on single numbers of each step (affine.h).
struct AffineLoop {
  int64_t steps, reverse, stored;
  int64_t carries, inputs, values, constants, stacks, sums, outs;
  int64_t coefficient, offset;      // registers of a tile: the only carry after a step is coefficient * carry + offset; or -1
  int64_t recurrence;               // the last instructions of `before`, which lead to these
  int64_t before, affine, after;    // instructions
  const Instruction* instructions;  // with registers in all places: of a tile before and after, of single numbers between
  const int32_t* input_at;          // registers of the inputs, of a tile
  const int32_t* results;           // registers of new carries, then of values, of single numbers
  const int32_t* sum_at;            // pairs: a register of a tile that is summed over all steps, and its factor or -1
  const int32_t* out_at;            // those that are stored
  int64_t literals;
  const double* literal_values;
  const void* const* arrays;  // constants, carries before the loop, stacks
  void* const* out;           // carries after it, sums, stacks
};

// A carry of a loop over lanes, and what makes its next value of it, in this order; -1 for what is not there. Registers but for
// `before_it` and flags.
struct Recurrence {
  int64_t before_it;                   // instructions of a tile before it
  int64_t is_shift;                    // whether the new carry is another value, `after`
  int64_t added;                       // carry + added
  int64_t reset, reset_where, fresh;   // `fresh` where `reset` is true, or is false
  int64_t coefficient, offset;         // coefficient * that + offset; the old carry for -2
  int64_t choice, choice_where, chosen;  // `chosen` where `choice` is true, or is false; the old carry for -1
  int64_t before, after;               // the carry before and after each step
  int64_t stores_before, stores_after;
};

// A loop over lanes, as instructions on tiles. Registers: constants, literals, what is computed of these once, stacks, then
// results of each tile.
struct LaneLoop {
  int64_t steps, reverse, lanes;
  int64_t constants, stacks, carries, outs, registers, count, once;  // count, once: instructions
  const Instruction* instructions;  // those that run once, those of each recurrence, then those after all of them
  const Recurrence* recurrences;    // in the order of the carries
  const int32_t* out_at;            // registers that are stored
  const bool* is_number;            // for each constant, whether all lanes have the same number
  int64_t literals;
  const double* literal_values;
  const void* const* arrays;  // constants, carries before the loop, stacks
  void* const* out;           // carries after it, stacks
};

// What is compiled once for each instruction set and type.
struct Kernel {
  const char* name;
  int64_t element_bytes;
  int64_t panel;            // columns of a panel of a packed matrix
  int64_t register_length;  // elements of a register
  // Packs the panels [first, last) of a matrix.
  void (*pack)(const Pack&, const void* matrix, void* packed, int64_t first, int64_t last);
  // Runs all steps for the rows [first, last). `registers` has room for all registers and literals, and `pointers` for refs.
  void (*run)(const Program&, void* const* bases, void* const* packed, int64_t first, int64_t last, void* registers,
              void** pointers);
  // Sums outer products for the panels [first, last) of columns; `memory` has `sum_bytes(m)`.
  void (*sums)(const Sums&, int64_t first, int64_t last, void* memory);
  int64_t (*sum_bytes)(int64_t m);
  // Runs an affine loop; `memory` has `affine_bytes`.
  void (*affine)(const AffineLoop&, void* memory);
  int64_t (*affine_bytes)(const AffineLoop&);
  bool (*is_of_steps)(int32_t op);  // whether the affine part may have it
  // Runs a loop over lanes; `memory` has `lanes_bytes`.
  void (*lanes)(const LaneLoop&, void* memory);
  int64_t (*lanes_bytes)(const LaneLoop&);
};

}  // namespace jrnn
