// The custom call, and what Python asks of the object.
#include <cstdlib>
#include <memory>
#include <string>

#include "decode.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jrnn {

#define JRNN_DECLARE(name) extern const Kernel kernel_f32_##name, kernel_f64_##name;
#if defined(JRNN_X86_LEVELS)
JRNN_DECLARE(avx512)
JRNN_DECLARE(avx2)
#endif
JRNN_DECLARE(base)

namespace {

struct Pair {
  const Kernel *narrow, *wide;
};

// The kernels that this machine can run, the best one first.
const std::vector<Pair>& kernels() {
  static const std::vector<Pair> found = [] {
    std::vector<Pair> usable;
#if defined(JRNN_X86_LEVELS)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
      usable.push_back({&kernel_f32_avx512, &kernel_f64_avx512});
    if (avx2) usable.push_back({&kernel_f32_avx2, &kernel_f64_avx2});
#endif
    usable.push_back({&kernel_f32_base, &kernel_f64_base});
    return usable;
  }();
  return found;
}

constexpr size_t kLine = 64;

// Memory at the start of a cache line.
class Memory {
 public:
  explicit Memory(size_t bytes) : whole_(static_cast<char*>(std::malloc(bytes + kLine))) {
    const size_t past = reinterpret_cast<uintptr_t>(whole_.get()) % kLine;
    data_ = whole_.get() + (past ? kLine - past : 0);
  }
  explicit operator bool() const { return whole_ != nullptr; }
  char* at(size_t offset) const { return data_ + offset; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> whole_;
  char* data_;
};

size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// One call. Threads that come late hold it until they have seen that nothing is left.
struct Call {
  Decoded decoded;
  std::vector<double> literals;
  const Kernel* kernel;
  std::vector<void*> bases, packed;
  std::vector<std::pair<int32_t, int64_t>> panels;  // a matrix and its first panel of a piece
  std::unique_ptr<Memory> memory;
  size_t registers_at = 0, registers_bytes = 0;
  int64_t blocks = 1;
  std::unique_ptr<Pieces> packing, running;
  Environment environment;

  static constexpr int64_t kPanels = 4;  // of a piece of packing

  void work() {
    environment.run([this] {
      packing->work([this](int64_t i) {
        const Pack& pack = decoded.packs[panels[i].first];
        const int64_t all = (pack.width + kernel->panel - 1) / kernel->panel, first = panels[i].second;
        kernel->pack(pack, bases[pack.base], packed[panels[i].first], first, std::min(first + kPanels, all));
      });
      packing->wait();
      running->work([this](int64_t i) {
        const int64_t rows = decoded.program.rows;
        std::vector<void*> pointers(decoded.refs.size());
        kernel->run(decoded.program, bases.data(), packed.data(), rows * i / blocks, rows * (i + 1) / blocks,
                    memory->at(registers_at + i * registers_bytes), pointers.data());
      });
    });
  }
};

ffi::Error invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jrnn's kernel of a loop: " + what);
}

ffi::Error run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> program,
               ffi::Span<const double> literals, int64_t level, int64_t threads) {
  auto call = std::make_shared<Call>();
  call->literals.assign(literals.begin(), literals.end());
  Decoded& decoded = call->decoded;
  if (!decode(program.begin(), program.size(), call->literals.data(), call->literals.size(), decoded))
    return invalid("the program is not of this version");
  if (decoded.sizes.size() != args.size() + rets.size() || static_cast<size_t>(decoded.n_args) != args.size())
    return invalid("the number of arrays is wrong");
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
  }
  const auto& usable = kernels();
  const Pair& pair = usable[std::min<size_t>(level < 0 ? 0 : level, usable.size() - 1)];
  call->kernel = decoded.bytes == 4 ? pair.narrow : pair.wide;
  const Program& p = decoded.program;
  const int64_t most = std::min<int64_t>(pool.num_threads(), std::max<unsigned>(1, std::thread::hardware_concurrency()));
  call->blocks = std::max<int64_t>(1, std::min({threads, most, p.rows}));

  size_t needed = lines(p.scratch * decoded.bytes);
  std::vector<size_t> packed_at;
  for (int32_t i = 0; i < p.n_packs; i++) {
    const int64_t panels = (p.packs[i].width + call->kernel->panel - 1) / call->kernel->panel;
    packed_at.push_back(needed);
    needed += lines(panels * call->kernel->panel * p.packs[i].depth * decoded.bytes);
    for (int64_t k = 0; k < panels; k += Call::kPanels) call->panels.emplace_back(i, k);
  }
  call->registers_at = needed;
  call->registers_bytes = lines((p.registers + p.literals) * call->kernel->register_length * decoded.bytes);
  needed += call->registers_bytes * call->blocks;
  call->memory = std::make_unique<Memory>(needed);
  if (!*call->memory) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jrnn's kernel of a loop: no memory");
  call->bases.push_back(call->memory->at(0));
  for (size_t at : packed_at) call->packed.push_back(call->memory->at(at));

  call->packing = std::make_unique<Pieces>(call->panels.size());
  call->running = std::make_unique<Pieces>(call->blocks);
  for (int64_t i = 1; i < call->blocks; i++) pool.Schedule([call] { call->work(); });
  call->work();
  call->running->wait();
  return ffi::Error::Success();
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
