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

// Asks for large pages below arrays, which is a request and changes no value. Arrays that lie close to each other are one.
inline void ask_for_large_pages(std::vector<Block> arrays) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 1 << 12, kLarge = 1 << 21;
  std::sort(arrays.begin(), arrays.end());
  uintptr_t start = 0, end = 0;
  const auto ask = [&] {
    if (end >= start + kLarge) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
  };
  for (const auto& [data, bytes] : arrays) {
    const auto first = reinterpret_cast<uintptr_t>(data), last = first + bytes;
    if (first > end + kLarge) {
      ask();
      start = (first + kPage - 1) / kPage * kPage;
    }
    end = last / kPage * kPage;
  }
  ask();
#endif
}

}  // namespace jrnn
