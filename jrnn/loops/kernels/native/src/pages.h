// Large pages for what a call writes.
//
// XLA takes the temporary arrays of a program from the system at each run, and gives them back. The system maps a page when it
// is written first, which takes longer than to write it: 4,096 bytes take 2 microseconds. One large page takes as long as 130.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jrnn {

using Block = std::pair<char*, size_t>;  // where an array begins, and its bytes

// Asks for large pages below arrays, which is a request and changes no value. Arrays that lie close to each other are one, and
// its ends share large pages with what lies next to it, often arrays of the same program.
inline void ask_for_large_pages(std::vector<Block> arrays) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLarge = 1 << 21;
  std::sort(arrays.begin(), arrays.end());
  uintptr_t first = 0, last = 0;
  const auto ask = [&] {
    if (last - first < kLarge) return;
    const uintptr_t start = first / kLarge * kLarge, end = (last + kLarge - 1) / kLarge * kLarge;
    madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
  };
  for (const auto& [data, bytes] : arrays) {
    const auto at = reinterpret_cast<uintptr_t>(data);
    if (at > last + kLarge) {
      ask();
      first = at;
    }
    last = at + bytes;
  }
  ask();
#else
  (void)arrays;
#endif
}

}  // namespace jrnn
