// Independent work on several threads.
#pragma once

#include <cstddef>
#include <future>
#include <vector>

namespace apportion {

// Calls one(0), one(1) … one(count - 1) in parallel, each on a thread; rethrows the first exception. If no thread can
// be created, the calling thread does the work.
template <class One>
void at_once(std::size_t count, One&& one) {
  std::vector<std::future<void>> others;
  for (std::size_t i = 1; i < count; ++i)
    others.push_back(std::async(std::launch::async | std::launch::deferred, [&one, i] { one(i); }));
  if (count > 0) one(0);
  for (std::future<void>& other : others) other.get();
}

}  // namespace apportion
