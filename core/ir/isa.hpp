// Codes of ops, tensors and spaces, equal to those in apportion/ir/isa.py and tensors.py: a test compares them.
#pragma once

#include "array.hpp"

namespace apportion {

enum class Op : uint8_t {
  LAUNCH = 1,
  WAIT,
  ATTEND,
  ATTEND_GRAD,
  DELTA,
  MERGE,
  ADD,
  COPY,
  CLEAR,
  PROJECT,
  PROJECT_GRAD,
  FINISH,
  DELIVER,
};

enum class Tensor : uint8_t { NONE, X, Q, KV, O, DX, DQ, DKV, DO, DELTA };

enum class Space : uint8_t { HOME, WORK };

// bits of the mode of a launch
inline constexpr int64_t ALL_TO_ALL = 1, RESULTS = 2;
// bits of `first` in grads: which accumulators a task overwrites; tasks and rowops have only bit 1
inline constexpr int64_t FIRST_DQ = 1, FIRST_DKV = 2;

inline constexpr int64_t TENSORS = 10;

// A set of tensors, one bit each.
class Tensors {
 public:
  using Given = uint32_t;
  template <class... Some>
  static constexpr Tensors of(Some... some) {
    return Tensors((0U | ... | (1U << static_cast<unsigned>(some))));
  }
  constexpr explicit Tensors(uint32_t bits) : bits_(bits) {}
  constexpr bool has(Tensor tensor) const { return (bits_ >> static_cast<unsigned>(tensor) & 1U) != 0; }
  constexpr uint32_t bits() const { return bits_; }

 private:
  uint32_t bits_;
};

// tensors that are sums of partial results; that have KV heads; that have no heads
inline constexpr Tensors PARTIALS = Tensors::of(Tensor::O, Tensor::DX, Tensor::DQ, Tensor::DKV);
inline constexpr Tensors KV_SIDE = Tensors::of(Tensor::KV, Tensor::DKV);
inline constexpr Tensors HEADLESS = Tensors::of(Tensor::NONE, Tensor::X, Tensor::DX);

}  // namespace apportion
