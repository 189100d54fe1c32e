// The kernel for one instruction set: all steps of a loop, for some rows. Built with JRNN_KERNEL, the name of the set, and
// JRNN_VECTOR_BYTES.
//
// It includes nothing of the C++ library, whose inline functions the linker would share with code for other sets.
#include "affine.h"
#include "affine_lanes.h"
#include "product.h"
#include "reductions.h"
#include "sums.h"

namespace {

template <class F>
void run(const Program& p, void* const* bases, void* const* packed, int64_t first, int64_t last, void* memory,
         void** pointers) {
  F* registers = static_cast<F*>(memory);
  for (int32_t i = 0; i < p.literals; i++)
    for (int64_t k = 0; k < kTile; k++) registers[(p.registers + i) * kTile + k] = F(p.literal_values[i]);
  const int64_t rows = last - first;
  for (int64_t step = 0; step < p.steps; step++) {
    const int64_t t = p.reverse ? p.steps - 1 - step : step;
    for (int32_t i = 0; i < p.n_refs; i++) {
      const Ref& ref = p.refs[i];
      pointers[i] = static_cast<char*>(bases[ref.base]) + (ref.offset + t * ref.time_stride) * bytes_of(ref.dtype, sizeof(F));
    }
    for (int32_t i = step == 0 ? 0 : p.before; i < p.n_stages; i++) {
      const Stage& s = p.stages[i];
      if (s.kind == kElements) {
        elements<F>(p, s, pointers, first, rows, registers);
        continue;
      }
      const Ref &from = p.refs[s.a], &to = p.refs[s.out];
      const F* a = static_cast<const F*>(pointers[s.a]) + first * from.row_stride;
      F* out = static_cast<F*>(pointers[s.out]) + first * to.row_stride;
      if (s.kind == kProduct) {
        const F* init = s.init < 0 ? nullptr : static_cast<const F*>(pointers[s.init]) + first * p.refs[s.init].row_stride;
        const int64_t init_stride = s.init < 0 ? 0 : p.refs[s.init].row_stride;
        if (reads_matrix(p, p.packs[s.pack])) {
          row_by_matrix<F>(a, p.packs[s.pack], static_cast<const F*>(packed[s.pack]), init, out);
          continue;
        }
        product<F>(a, from.row_stride, static_cast<const F*>(packed[s.pack]), s.depth, s.width, init, init_stride, out,
                   to.row_stride, rows);
      } else if (s.kind == kReduction) {
        reduction<F>(s, a, from.row_stride, out, to.row_stride, rows);
      } else {
        move<F>(s, a, from.row_stride, out, to.row_stride, rows);
      }
    }
  }
}

#define JRNN_STRING_OF(name) #name
#define JRNN_STRING(name) JRNN_STRING_OF(name)
#define JRNN_JOINED_OF(a, b) a##b
#define JRNN_JOINED(a, b) JRNN_JOINED_OF(a, b)

}  // namespace

namespace jrnn {

extern const Kernel JRNN_JOINED(kernel_f32_, JRNN_KERNEL);
extern const Kernel JRNN_JOINED(kernel_f64_, JRNN_KERNEL);
const Kernel JRNN_JOINED(kernel_f32_, JRNN_KERNEL) = {
    JRNN_STRING(JRNN_KERNEL), 4, kPanel<float>, kTile, pack_panels<float>, run<float>,
    sum_products<float>, sum_bytes<float>, affine<float>, affine_bytes<float>, is_of_steps, lanes<float>, lanes_bytes<float>};
const Kernel JRNN_JOINED(kernel_f64_, JRNN_KERNEL) = {
    JRNN_STRING(JRNN_KERNEL), 8, kPanel<double>, kTile, pack_panels<double>, run<double>,
    sum_products<double>, sum_bytes<double>, affine<double>, affine_bytes<double>, is_of_steps, lanes<double>, lanes_bytes<double>};

}  // namespace jrnn
