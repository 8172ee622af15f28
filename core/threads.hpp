// Independent work on several threads.
#pragma once

#include <future>
#include <vector>

namespace apportion {

// Calls one(0), one(1) … one(count - 1) in parallel, each on a thread; rethrows the first exception. If no thread can
// be created, the calling thread does the work.
template <class Body>
void run_parallel(std::size_t count, Body&& body) {
  std::vector<std::future<void>> others;
  for (std::size_t i = 1; i < count; ++i)
    others.push_back(std::async(std::launch::async | std::launch::deferred, [&body, i] { body(i); }));
  if (count > 0) body(0);
  for (std::future<void>& other : others) other.get();
}

}  // namespace apportion
