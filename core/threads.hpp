// Independent work on several threads.
#pragma once

#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace apportion {

// Calls one(0), one(1) .. one(count - 1) in parallel, each on a thread; rethrows the first exception. If no thread can
// be created, the calling thread does its work.
template <class One>
void at_once(std::size_t count, One&& one) {
  std::vector<std::exception_ptr> errors(count);
  const auto caught = [&](std::size_t i) {
    try {
      one(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (std::size_t i = 1; i < count; ++i) {
    try {
      threads.emplace_back(caught, i);
    } catch (const std::system_error&) {
      caught(i);
    }
  }
  if (count > 0) caught(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace apportion
