// One call of the kernel: its memory, and its work for threads.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "decode.h"
#include "pages.h"
#include "threads.h"

namespace jrnn {

#define JRNN_DECLARE(name) extern const Kernel kernel_f32_##name, kernel_f64_##name;
#if defined(JRNN_X86_LEVELS)
JRNN_DECLARE(avx512)
JRNN_DECLARE(avx2)
#endif
JRNN_DECLARE(base)

struct Pair {
  const Kernel *narrow, *wide;
};

// The kernels that this machine can run, the best one first.
inline const std::vector<Pair>& kernels() {
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

inline size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// The best kernel for elements of some bytes, or a worse one: `level` is the place of its instruction set in `kernels()`.
inline const Kernel* kernel_for(int64_t level, int64_t bytes) {
  const auto& usable = kernels();
  const Pair& pair = usable[std::min<size_t>(level < 0 ? 0 : level, usable.size() - 1)];
  return bytes == 4 ? pair.narrow : pair.wide;
}

// One sum of outer products over rows, divided by columns.
struct SumCall {
  Sums sums;
  std::vector<const void*> parts;
  const Kernel* kernel;
  int64_t blocks, panels;
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Pieces> pieces;
  Environment environment;

  bool prepare(int64_t threads) {
    panels = (sums.w + kernel->panel - 1) / kernel->panel * sums.parts;
    blocks = std::max<int64_t>(1, std::min(threads, panels));
    memory = std::make_unique<Memory>(lines(kernel->sum_bytes(sums.m)) * blocks);
    pieces = std::make_unique<Pieces>(blocks);
    return static_cast<bool>(*memory);
  }
  void work() {
    environment.run([this] {
      pieces->work([this](int64_t i) {
        kernel->sums(sums, panels * i / blocks, panels * (i + 1) / blocks, memory->at(lines(kernel->sum_bytes(sums.m)) * i));
      });
    });
  }
  void wait() const { pieces->wait(); }
};

// One call. Threads that come late hold it until they have seen that nothing is left.
struct Call {
  Decoded decoded;
  std::vector<double> literals;
  const Kernel* kernel;
  std::vector<void*> bases, packed;
  std::vector<std::pair<int32_t, int64_t>> panels;  // a matrix and its first panel of a piece
  std::unique_ptr<Memory> memory;
  size_t registers_at = 0, registers_bytes = 0, pointers_at = 0, pointers_bytes = 0;
  int64_t blocks = 1;
  std::unique_ptr<Pieces> packing, running;
  Environment environment;

  static constexpr int64_t kPanels = 4;  // of a piece of packing

  // Divides the work; `level` is the place of the instruction set in `kernels()`. Returns false if there is no memory.
  bool prepare(int64_t level, int64_t threads) {
    kernel = kernel_for(level, decoded.bytes);
    const Program& p = decoded.program;
    blocks = std::max<int64_t>(1, std::min(threads, p.rows));

    size_t needed = lines(p.scratch * decoded.bytes);
    std::vector<size_t> packed_at;
    for (int32_t i = 0; i < p.n_packs; i++) {
      if (reads_matrix(p, p.packs[i])) {
        packed_at.push_back(0);
        continue;
      }
      const int64_t count = (p.packs[i].width + kernel->panel - 1) / kernel->panel;
      packed_at.push_back(needed);
      needed += lines(count * kernel->panel * p.packs[i].depth * decoded.bytes);
      for (int64_t k = 0; k < count; k += kPanels) panels.emplace_back(i, k);
    }
    registers_at = needed;
    registers_bytes = lines((p.registers + p.literals) * kernel->register_length * decoded.bytes);
    needed += registers_bytes * blocks;
    pointers_at = needed;
    pointers_bytes = lines(decoded.refs.size() * sizeof(void*));
    needed += pointers_bytes * blocks;
    memory = std::make_unique<Memory>(needed);
    if (!*memory) return false;
    bases.push_back(memory->at(0));
    for (int32_t i = 0; i < p.n_packs; i++) {
      const Pack& pack = p.packs[i];
      char* base = static_cast<char*>(bases[pack.base]);
      packed.push_back(reads_matrix(p, pack) ? base + pack.offset * decoded.bytes : memory->at(packed_at[i]));
    }

    packing = std::make_unique<Pieces>(panels.size());
    running = std::make_unique<Pieces>(blocks);
    return true;
  }

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
        void* pointers = memory->at(pointers_at + i * pointers_bytes);
        kernel->run(decoded.program, bases.data(), packed.data(), rows * i / blocks, rows * (i + 1) / blocks,
                    memory->at(registers_at + i * registers_bytes), static_cast<void**>(pointers));
      });
    });
  }
  void wait() const { running->wait(); }
};

}  // namespace jrnn
