// Rows that attention tasks leave as results, and row statistics that they compute: apportion/ir/plan/fusion.py.
#pragma once

#include "ir/programs.hpp"

namespace apportion {

// Ranges [row0, row1) of rows of numbered items.
struct RowRanges {
  Growing<int64_t> item, row0, row1;

  auto fields() { return moved(item, row0, row1); }
  std::size_t size() const { return item.size(); }
  void add(int64_t owner, int64_t begin, int64_t end) {
    item.push_back(owner);
    row0.push_back(begin);
    row1.push_back(end);
  }
};

// A sum that attention tasks add to: its column in their list, its bit of `first`, columns of operands with the same
// tokens, and the tensors of all of them.
struct Sum {
  List list;
  Tensor tensor;
  int64_t column, flag;
  std::vector<int64_t> partners;
  Tensors tensors;
};

inline const std::array<Sum, 3> SUMS{{
    {TASKS, Tensor::O, 2, 1, {0}, Tensors::of(Tensor::O, Tensor::Q)},
    {GRADS, Tensor::DQ, 4, FIRST_DQ, {0, 2, 3}, Tensors::of(Tensor::DQ, Tensor::Q, Tensor::DO, Tensor::DELTA)},
    {GRADS, Tensor::DKV, 5, FIRST_DKV, {1}, Tensors::of(Tensor::DKV, Tensor::KV)},
}};

// Complete rows of one sum: `CompleteRows` of fusion.py. home, arrived: by rank; the others by the row of their list.
struct CompleteRows {
  RowRanges tasks, home, arrived, sent, delivered;

  auto fields() { return moved(tasks, home, arrived, sent, delivered); }
};

// sums: in the order of SUMS. tasks, rowops: like `StatisticsRows` of fusion.py.
struct Fusion {
  std::array<CompleteRows, 3> sums;
  RowRanges tasks, rowops;

  auto fields() { return moved(sums, tasks, rowops); }
};

Fusion fuse(const Programs& programs);

}  // namespace apportion
