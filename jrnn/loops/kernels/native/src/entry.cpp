// The custom call, and what Python asks of the object.
#include <new>
#include <string>

#include "call.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jrnn {

namespace {

ffi::Error invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jrnn's kernel of a loop: " + what);
}

int64_t most_threads(ffi::ThreadPool pool) {
  return std::min<int64_t>(pool.num_threads(), std::max<unsigned>(1, std::thread::hardware_concurrency()));
}

// Does the work of a call with threads of the pool, and with this one.
template <class Work>
void finish(ffi::ThreadPool pool, const std::shared_ptr<Work>& call) {
  try {
    for (int64_t i = 1; i < call->blocks; i++) pool.Schedule([call] { call->work(); });
  } catch (const std::bad_alloc&) {  // this thread does what no other one does
  }
  call->work();
  call->wait();
}

ffi::Error sum(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::RemainingArgs parts, ffi::Result<ffi::AnyBuffer> out,
               int64_t level, int64_t threads) try {
  const auto of_a = a.dimensions(), of_out = out->dimensions();
  const int64_t bytes = a.element_type() == ffi::F32 ? 4 : 8, count = parts.size();
  bool fits = count > 0 && of_a.size() == 2 && of_out.size() == 2 && of_a[1] == of_out[0] && of_out[1] % count == 0 &&
              a.size_bytes() == static_cast<size_t>(of_a[0] * of_a[1] * bytes) &&
              out->size_bytes() == static_cast<size_t>(of_out[0] * of_out[1] * bytes);
  const int64_t w = fits ? of_out[1] / count : 0;
  auto call = std::make_shared<SumCall>();
  for (int64_t i = 0; fits && i < count; i++) {
    const auto part = parts.get<ffi::AnyBuffer>(i);
    fits = part.has_value() && part->dimensions().size() == 2 && part->dimensions()[0] == of_a[0] &&
           part->dimensions()[1] == w && part->size_bytes() == static_cast<size_t>(of_a[0] * w * bytes);
    if (fits) call->parts.push_back(part->untyped_data());
  }
  if (!fits) return invalid("the arrays of a sum do not fit together");
  ask_for_large_pages({{static_cast<char*>(out->untyped_data()), out->size_bytes()}});
  call->sums = {a.untyped_data(), call->parts.data(), out->untyped_data(), of_a[0], of_a[1], w, count};
  call->kernel = kernel_for(level, bytes);
  if (!call->prepare(std::min(threads, most_threads(pool))))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
  finish(pool, call);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
}

ffi::AnyBuffer unwrapped(ffi::AnyBuffer buffer) { return buffer; }
ffi::AnyBuffer unwrapped(ffi::Result<ffi::AnyBuffer> buffer) { return *buffer; }

// Adds the memory of arrays, each of a number of elements; returns false if one has another size.
template <class Arrays, class Buffer>
bool add_arrays(const Arrays& arrays, size_t first, size_t count, int64_t bytes, std::vector<Buffer>& out) {
  for (size_t i = first; i < first + count; i++) {
    const auto array = arrays.template get<ffi::AnyBuffer>(i);
    if (!array.has_value()) return false;
    ffi::AnyBuffer buffer = unwrapped(*array);
    if (buffer.size_bytes() != static_cast<size_t>(bytes)) return false;
    out.push_back(buffer.untyped_data());
  }
  return true;
}

// The integers: bytes of an element, the first fields of AffineLoop, instructions, and registers, all in their order.
ffi::Error affine(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> program,
                  ffi::Span<const double> literals, int64_t level) try {
  AffineLoop a{};
  int64_t bytes = 0;
  std::initializer_list<int64_t*> fields = {
      &bytes, &a.steps, &a.reverse, &a.stored, &a.carries, &a.inputs, &a.values, &a.constants,
      &a.stacks, &a.sums, &a.outs, &a.coefficient, &a.offset, &a.recurrence, &a.before, &a.affine, &a.after};
  const int64_t* at = program.begin();
  if (program.size() < fields.size()) return invalid("an affine loop is not of this version");
  for (int64_t* field : fields) *field = *at++;
  const size_t count = a.before + a.affine + a.after, n_registers = a.inputs + a.carries + a.values + 2 * a.sums + a.outs;
  bool fits = (bytes == 4 || bytes == 8) && a.carries > 0 && a.carries <= 8 && (a.coefficient < 0 || (a.carries == 1 && a.values == 1)) && args.size() == size_t(a.constants + a.carries + a.stacks) &&
              rets.size() == size_t(a.carries + a.sums + a.outs) && program.size() == fields.size() + 5 * count + n_registers;
  if (!fits) return invalid("an affine loop is not of this version");
  const Kernel* kernel = kernel_for(level, bytes);
  std::vector<Instruction> instructions;
  for (size_t i = 0; i < count; i++, at += 5)
    instructions.push_back({int32_t(at[0]), int32_t(at[1]), int32_t(at[2]), int32_t(at[3]), int32_t(at[4])});
  for (int64_t i = a.before; i < a.before + a.affine; i++)
    if (!kernel->is_of_steps(instructions[i].op)) return invalid("an affine loop has an operation that is not affine");
  const std::vector<int32_t> registers(at, at + n_registers);
  a.instructions = instructions.data();
  a.input_at = registers.data(), a.results = a.input_at + a.inputs;
  a.sum_at = a.results + a.carries + a.values, a.out_at = a.sum_at + 2 * a.sums;
  a.literals = literals.size(), a.literal_values = literals.begin();
  std::vector<const void*> arrays;
  std::vector<void*> out;
  const int64_t all_steps = bytes * a.steps;
  fits = add_arrays(args, 0, a.constants + a.carries, bytes, arrays) && add_arrays(args, arrays.size(), a.stacks, all_steps, arrays) &&
         add_arrays(rets, 0, a.carries + a.sums, bytes, out) && add_arrays(rets, out.size(), a.outs, all_steps, out);
  if (!fits) return invalid("an array of an affine loop has the wrong size");
  a.arrays = arrays.data(), a.out = out.data();
  const Memory memory(kernel->affine_bytes(a));
  if (!memory) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
  kernel->affine(a, memory.at(0));
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
}

// The integers: bytes of an element, the first fields of LaneLoop, recurrences, instructions, and stored registers.
ffi::Error lanes(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> program,
                 ffi::Span<const double> literals, int64_t level) try {
  LaneLoop a{};
  int64_t bytes = 0;
  std::initializer_list<int64_t*> fields = {&bytes,    &a.steps,   &a.reverse, &a.lanes,     &a.constants,
                                            &a.stacks, &a.carries, &a.outs,    &a.registers, &a.count,  &a.once};
  const int64_t *at = program.begin(), *end = at + program.size();
  bool fits = program.size() >= fields.size();
  for (int64_t* field : fields)
    if (fits) *field = *at++;
  fits = fits && (bytes == 4 || bytes == 8) && a.lanes > 0 && args.size() == size_t(a.constants + a.carries + a.stacks) &&
         rets.size() == size_t(a.carries + a.outs) && end - at == 15 * a.carries + 5 * a.count + a.outs;
  if (!fits) return invalid("a loop over lanes is not of this version");
  std::vector<Recurrence> recurrences;
  for (int64_t i = 0; i < a.carries; i++, at += 15)
    recurrences.push_back({at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], at[10], at[11], at[12], at[13],
                           at[14]});
  std::vector<Instruction> instructions;
  for (int64_t i = 0; i < a.count; i++, at += 5)
    instructions.push_back({int32_t(at[0]), int32_t(at[1]), int32_t(at[2]), int32_t(at[3]), int32_t(at[4])});
  const std::vector<int32_t> registers(at, end);
  a.instructions = instructions.data(), a.recurrences = recurrences.data(), a.out_at = registers.data();
  a.literals = literals.size(), a.literal_values = literals.begin();
  std::vector<const void*> arrays;
  std::vector<void*> out;
  const std::unique_ptr<bool[]> is_number(new bool[a.constants + 1]);
  const int64_t row = bytes * a.lanes;
  for (int64_t i = 0; fits && i < a.constants; i++) {
    const auto array = args.get<ffi::AnyBuffer>(i);
    is_number[i] = array.has_value() && array->size_bytes() == size_t(bytes);
    fits = add_arrays(args, i, 1, is_number[i] ? bytes : row, arrays);
  }
  fits = fits && add_arrays(args, a.constants, a.carries, row, arrays) &&
         add_arrays(args, arrays.size(), a.stacks, row * a.steps, arrays) && add_arrays(rets, 0, a.carries, row, out) &&
         add_arrays(rets, out.size(), a.outs, row * a.steps, out);
  if (!fits) return invalid("an array of a loop over lanes has the wrong size");
  a.is_number = is_number.get(), a.arrays = arrays.data(), a.out = out.data();
  const Kernel* kernel = kernel_for(level, bytes);
  const Memory memory(kernel->lanes_bytes(a));
  if (!memory) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
  kernel->lanes(a, memory.at(0));
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
}

ffi::Error run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> program,
               ffi::Span<const double> literals, int64_t level, int64_t threads) try {
  auto call = std::make_shared<Call>();
  call->literals.assign(literals.begin(), literals.end());
  Decoded& decoded = call->decoded;
  if (!decode(program.begin(), program.size(), call->literals.data(), call->literals.size(), decoded))
    return invalid("the program is not of this version");
  if (decoded.sizes.size() != args.size() + rets.size() || static_cast<size_t>(decoded.n_args) != args.size())
    return invalid("the number of arrays is wrong");
  std::vector<Block> written;
  for (size_t i = 0; i < decoded.sizes.size(); i++) {
    const bool is_arg = i < args.size();
    void* data = nullptr;
    size_t bytes = 0;
    if (is_arg) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      data = buffer->untyped_data(), bytes = buffer->size_bytes();
    } else {
      auto buffer = rets.get<ffi::AnyBuffer>(i - args.size());
      if (buffer.has_error()) return buffer.error();
      data = (*buffer)->untyped_data(), bytes = (*buffer)->size_bytes();
    }
    if (bytes != static_cast<size_t>(decoded.sizes[i])) return invalid("an array has the wrong size");
    call->bases.push_back(data);
    if (!is_arg) written.emplace_back(static_cast<char*>(data), bytes);
  }
  ask_for_large_pages(std::move(written));
  if (!call->prepare(level, std::min(threads, most_threads(pool))))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
  finish(pool, call);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
}

}  // namespace
}  // namespace jrnn

#define JRNN_EXPORT extern "C" __attribute__((visibility("default")))

JRNN_EXPORT XLA_FFI_Error* jrnn_loop(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<ffi::Span<const int64_t>>("program")
                             .Attr<ffi::Span<const double>>("literals")
                             .Attr<int64_t>("level")
                             .Attr<int64_t>("threads")
                             .To(jrnn::run)
                             .release();
  return handler->Call(frame);
}

JRNN_EXPORT XLA_FFI_Error* jrnn_sum(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attr<int64_t>("level")
                             .Attr<int64_t>("threads")
                             .To(jrnn::sum)
                             .release();
  return handler->Call(frame);
}

JRNN_EXPORT XLA_FFI_Error* jrnn_affine(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<ffi::Span<const int64_t>>("program")
                             .Attr<ffi::Span<const double>>("literals")
                             .Attr<int64_t>("level")
                             .To(jrnn::affine)
                             .release();
  return handler->Call(frame);
}

JRNN_EXPORT XLA_FFI_Error* jrnn_lanes(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<ffi::Span<const int64_t>>("program")
                             .Attr<ffi::Span<const double>>("literals")
                             .Attr<int64_t>("level")
                             .To(jrnn::lanes)
                             .release();
  return handler->Call(frame);
}

JRNN_EXPORT int64_t jrnn_format() { return jrnn::kFormat; }

// The version of XLA's interface of custom calls, 1000 * major + minor.
JRNN_EXPORT int64_t jrnn_api() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

// The names of the instruction sets that this machine can use, with commas, the best one first.
JRNN_EXPORT const char* jrnn_instruction_sets() {
  static const std::string names = [] {
    std::string joined;
    for (const auto& pair : jrnn::kernels()) joined += (joined.empty() ? "" : ",") + std::string(pair.narrow->name);
    return joined;
  }();
  return names.c_str();
}
