// Runs a program of the kernel for CPUs on several threads at once, for ThreadSanitizer, and compares the bits with one thread.
//
// The file that is named holds 64-bit integers: how many follow, and the program (encoder.py). Literals are 1, and arrays hold
// small numbers.
#include <cstdio>
#include <cstring>

#include "call.h"

int main(int, char** arguments) {
  std::FILE* file = std::fopen(arguments[1], "rb");
  int64_t count = 0;
  if (!file || std::fread(&count, sizeof count, 1, file) != 1) return 2;
  std::vector<int64_t> program(count);
  if (std::fread(program.data(), sizeof(int64_t), count, file) != static_cast<size_t>(count)) return 2;
  std::fclose(file);
  std::vector<std::vector<std::vector<char>>> results;
  for (int64_t threads : {1, 2, 4, 7}) {
    auto call = std::make_shared<jrnn::Call>();
    call->literals.assign(64, 1.0);
    if (!jrnn::decode(program.data(), program.size(), call->literals.data(), call->literals.size(), call->decoded)) return 3;
    std::vector<std::vector<char>> arrays;
    for (int64_t bytes : call->decoded.sizes) {
      std::vector<float> values(bytes / sizeof(float) + 1);
      for (size_t i = 0; i < values.size(); i++) values[i] = static_cast<float>(i * 7919 % 101) / 101 - 0.5f;
      arrays.emplace_back(bytes);
      std::memcpy(arrays.back().data(), values.data(), bytes);
    }
    for (auto& array : arrays) call->bases.push_back(array.data());
    if (!call->prepare(0, threads)) return 4;
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads + 2; i++) others.emplace_back([call] { call->work(); });
    call->work();
    call->running->wait();
    results.push_back(arrays);
    if (results.back() != results.front()) return std::puts("other bits on several threads"), 1;
    for (auto& other : others) other.join();
  }
  std::puts("the same bits on 1, 2, 4 and 7 threads");
}
