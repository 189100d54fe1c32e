// Elementwise instructions over tiles: each runs over some rows and columns before the next one, and what they pass to each
// other stays in the first-level cache.
#pragma once
#include "program.h"
#include "vectors.h"

namespace {

using namespace jrnn;

// encoder.py has the same list. fmt: X(name, number of operands, expression)
#define JRNN_OPS(X)                                                              \
  X(kCopy, 1, a)                                                                 \
  X(kAdd, 2, a + b)                                                              \
  X(kSub, 2, a - b)                                                              \
  X(kMul, 2, a * b)                                                              \
  X(kDiv, 2, a / b)                                                              \
  X(kMax, 2, greater<F>(a, b))                                                   \
  X(kMin, 2, smaller<F>(a, b))                                                   \
  X(kNeg, 1, -a)                                                                 \
  X(kAbs, 1, absolute<F>(a))                                                     \
  X(kExp, 1, exponential<F>(a))                                                  \
  X(kTanh, 1, hyperbolic_tangent<F>(a))                                          \
  X(kLogistic, 1, logistic<F>(a))                                                \
  X(kLog, 1, logarithm<F>(a))                                                    \
  X(kLog1p, 1, log1p<F>(a))                                                      \
  X(kExpm1, 1, expm1<F>(a))                                                      \
  X(kSqrt, 1, square_root<F>(a))                                                 \
  X(kRsqrt, 1, F(1) / square_root<F>(a))                                         \
  X(kSquare, 1, a * a)                                                           \
  X(kOneMinusSquare, 1, (F(1) - a) * (F(1) + a))                                 \
  X(kSelect, 3, a != F(0) ? c : b)                                               \
  X(kEqual, 2, truth<F>(a == b))                                                 \
  X(kNotEqual, 2, truth<F>(a != b))                                              \
  X(kLess, 2, truth<F>(a < b))                                                   \
  X(kLessEqual, 2, truth<F>(a <= b))                                             \
  X(kNot, 1, F(1) - a)                                                           \
  X(kSign, 1, (a > F(0) ? all<F>(F(1)) : a < F(0) ? all<F>(F(-1)) : a))          \
  X(kFloor, 1, (rounded<F>(a) > a ? rounded<F>(a) - F(1) : rounded<F>(a)))       \
  X(kCeil, 1, (rounded<F>(a) < a ? rounded<F>(a) + F(1) : rounded<F>(a)))        \
  X(kRound, 1, rounded<F>(a))                                                    \
  X(kIsFinite, 1, truth<F>(absolute<F>(a) < F(INFINITY)))                        \
  X(kToBfloat16, 1, to_bfloat16<F>(a))                                           \
  X(kSin, 1, (each<F, ::sin>(a)))                                                \
  X(kCos, 1, (each<F, ::cos>(a)))                                                \
  X(kErf, 1, (each<F, ::erf>(a)))

enum Op : int32_t {
#define JRNN_NAME(name, operands, expression) name,
  JRNN_OPS(JRNN_NAME)
#undef JRNN_NAME
  kSpread,  // fills each row with one number
};

template <class F>
JRNN_INLINE Vec<F> truth(Ints<F> found) {
  return found ? all<F>(F(1)) : all<F>(F(0));
}
template <class F, double (*function)(double)>
inline Vec<F> each(Vec<F> x) {
  Vec<F> out;
  for (int i = 0; i < kLanes<F>; i++) out[i] = F(function(double(x[i])));
  return out;
}

// An operand of one instruction in one tile.
struct Operand {
  void* at;
  int64_t stride;  // elements between rows
  int32_t dtype;
};

JRNN_INLINE float widened(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float out;
  memcpy(&out, &wide, 4);
  return out;
}
JRNN_INLINE uint16_t narrowed(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class F>
void read_row(F* out, const void* from, int32_t dtype, int64_t n) {
  if (dtype == kBool) {
    const uint8_t* p = static_cast<const uint8_t*>(from);
    for (int64_t i = 0; i < n; i++) out[i] = p[i] ? F(1) : F(0);
  } else if (dtype == kBfloat16) {
    const uint16_t* p = static_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < n; i++) out[i] = F(widened(p[i]));
  } else {
    memcpy(out, from, n * sizeof(F));
  }
}
template <class F>
void write_row(void* to, int32_t dtype, const F* from, int64_t n) {
  if (dtype == kBool) {
    uint8_t* p = static_cast<uint8_t*>(to);
    for (int64_t i = 0; i < n; i++) p[i] = from[i] != F(0);
  } else if (dtype == kBfloat16) {
    uint16_t* p = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; i++) p[i] = narrowed(float(from[i]));
  } else {
    memcpy(to, from, n * sizeof(F));
  }
}
inline int64_t bytes_of(int32_t dtype, int64_t element) { return dtype == kBool ? 1 : dtype == kBfloat16 ? 2 : element; }

template <class F, int operands, class Function>
JRNN_INLINE void apply(Function f, const Operand* v, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) {
    F* out = static_cast<F*>(v[0].at) + r * v[0].stride;
    const F* a = static_cast<const F*>(v[1].at) + r * v[1].stride;
    const F* b = operands > 1 ? static_cast<const F*>(v[2].at) + r * v[2].stride : a;
    const F* c = operands > 2 ? static_cast<const F*>(v[3].at) + r * v[3].stride : a;
    int64_t i = 0;
    for (; i + kLanes<F> <= columns; i += kLanes<F>) store<F>(out + i, f(load<F>(a + i), load<F>(b + i), load<F>(c + i)));
    if (int64_t rest = columns - i)
      store_some<F>(out + i, f(load_some<F>(a + i, rest), load_some<F>(b + i, rest), load_some<F>(c + i, rest)), rest);
  }
}

template <class F>
void instruction(int32_t op, const Operand* v, int64_t rows, int64_t columns) {
  if (v[0].dtype != kFloat || v[1].dtype != kFloat) {  // only copies read or write other types
    for (int64_t r = 0; r < rows; r++) {
      char* out = static_cast<char*>(v[0].at) + r * v[0].stride * bytes_of(v[0].dtype, sizeof(F));
      const char* a = static_cast<const char*>(v[1].at) + r * v[1].stride * bytes_of(v[1].dtype, sizeof(F));
      if (v[0].dtype == kFloat) {
        read_row<F>(reinterpret_cast<F*>(out), a, v[1].dtype, op == kSpread ? 1 : columns);
        if (op == kSpread)
          for (int64_t i = 1; i < columns; i++) reinterpret_cast<F*>(out)[i] = reinterpret_cast<F*>(out)[0];
      } else {
        write_row<F>(out, v[0].dtype, reinterpret_cast<const F*>(a), columns);
      }
    }
    return;
  }
  switch (op) {
#define JRNN_CASE(name, operands, expression)                                                             \
  case name:                                                                                              \
    apply<F, operands>([](Vec<F> a, Vec<F> b, Vec<F> c) { (void)b, (void)c; return expression; }, v, rows, columns); \
    break;
    JRNN_OPS(JRNN_CASE)
#undef JRNN_CASE
    case kSpread:
      for (int64_t r = 0; r < rows; r++) {
        F* out = static_cast<F*>(v[0].at) + r * v[0].stride;
        const F value = static_cast<const F*>(v[1].at)[r * v[1].stride];
        for (int64_t i = 0; i < columns; i++) out[i] = value;
      }
      break;
    default:
      break;
  }
}

// Asks for the place of an operand in the next tile, `by` elements further. An array of all steps is far away, and what the
// processor fetches by itself ends with a page.
template <class F>
JRNN_INLINE void ask_for(const Operand& v, int64_t by, int64_t rows, int64_t columns) {
  const int64_t size = bytes_of(v.dtype, sizeof(F));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < columns; i += kLanes<F>)
      __builtin_prefetch(static_cast<const char*>(v.at) + (by + r * v.stride + i) * size, 0, 2);
}

constexpr int64_t kTile = 512;  // elements of a register

// Runs the instructions of a stage for `rows` rows from `row` on. `pointers` are those of the refs at this step, at row 0.
template <class F>
void elements(const Program& p, const Stage& stage, void* const* pointers, int64_t row, int64_t rows, F* registers) {
  int64_t width = stage.width;
  if (stage.flat) width *= rows;
  const int64_t count = stage.flat ? 1 : rows;
  const int64_t columns_most = width < kTile ? width : kTile;
  const int64_t padded = (columns_most + kLanes<F> - 1) / kLanes<F> * kLanes<F>;
  const int64_t rows_most = kTile / padded;
  for (int64_t r = 0; r < count; r += rows_most) {
    const int64_t some = count - r < rows_most ? count - r : rows_most;
    for (int64_t column = 0; column < width; column += columns_most) {
      const int64_t columns = width - column < columns_most ? width - column : columns_most;
      for (int32_t i = stage.first; i < stage.first + stage.count; i++) {
        const Instruction& instr = p.instructions[i];
        const int32_t given[4] = {instr.out, instr.a, instr.b, instr.c};
        Operand v[4];
        int64_t runs = some;
        for (int k = 0; k < 4; k++) {
          const int32_t index = given[k];
          if (index < 0) {
            v[k] = {registers + (-1 - index) * kTile, index < -p.registers ? 0 : padded, kFloat};
            continue;
          }
          const Ref& ref = p.refs[index];
          const int64_t skipped = (row + r) * ref.row_stride + (instr.op == kSpread && k == 1 ? 0 : column);
          v[k] = {static_cast<char*>(pointers[index]) + skipped * bytes_of(ref.dtype, sizeof(F)), ref.row_stride, ref.dtype};
          if (ref.time_stride) {
            const int64_t turn = (p.reverse ? -ref.time_stride : ref.time_stride) - r * ref.row_stride;
            ask_for<F>(v[k], r + rows_most < count ? rows_most * ref.row_stride : turn, some, columns);
          }
          if (k == 0 && ref.row_stride == 0 && p.rows > 1) runs = row + r == 0 ? 1 : 0;  // a result that all rows share
        }
        if (runs) instruction<F>(instr.op, v, runs, columns);
      }
    }
  }
}

}  // namespace
