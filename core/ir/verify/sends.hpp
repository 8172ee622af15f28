// Every send of a program, indexed by receiver, then sender, in the sender's order.
//
//   of_rank   0        3     4
//   sends     0 0 2    1     ..         sender, round, tile, and what it carries:
//
//     token   of the first row, if tokens are consecutive, or NOWHERE for zeros; known for sends from home rows,
//             else UNSENT until the sender is walked
//     parcel  runs of a tile with gaps; zeros end a run, since any tokens may be added to them
//
// Threads that walk ranges of ranks write only the sends of their own ranks, and read the contents of others only for
// sends from home rows. Addresses are resolved, and zeros claimed, when no thread walks.
#pragma once

#include "ir/verify/program.hpp"
#include "ir/verify/tokens.hpp"

namespace apportion::verify {

// Runs of a tile: first row and first token of each, NOWHERE for zeros; and the number of rows of the tile.
class Parcel {
 public:
  struct Part {
    int64_t row;
    Token token;
  };
  Parcel(const Runs& runs, int64_t rows) : rows_(rows) {
    for (const Run& run : runs) parts_.push_back({run.row, run.token});
  }
  explicit Parcel(int64_t rows) : parts_{{0, NOWHERE}}, rows_(rows) {}

  // The content of a row, and the number of rows that continue it.
  std::pair<Token, int64_t> at(int64_t row) const {
    const std::size_t i = part_of(row);
    return {advance(parts_[i].token, row - parts_[i].row), end_of(i) - row};
  }

  // Gives rows of a run of zeros the tokens from `token` on; the rest of the run stays zeros.
  void claim(int64_t row, int64_t rows, Token token) {
    const std::size_t i = part_of(row);
    const Part zeros = parts_[i];
    const int64_t end = end_of(i);
    std::vector<Part> parts;
    if (zeros.row < row) parts.push_back(zeros);
    parts.push_back({row, token});
    if (row + rows < end) parts.push_back({row + rows, NOWHERE});
    parts_[i] = parts[0];
    parts_.insert(parts_.begin() + static_cast<std::ptrdiff_t>(i) + 1, parts.begin() + 1, parts.end());
  }

 private:
  std::size_t part_of(int64_t row) const {
    const auto behind =
        std::upper_bound(parts_.begin(), parts_.end(), row, [](int64_t r, const Part& part) { return r < part.row; });
    return static_cast<std::size_t>(behind - parts_.begin()) - 1;
  }
  int64_t end_of(std::size_t i) const { return i + 1 < parts_.size() ? parts_[i + 1].row : rows_; }

  std::vector<Part> parts_;
  int64_t rows_;
};

struct Send {
  int32_t sender, round, rows, heads;  // heads: the number of a set
  Token token = UNSENT;
  std::unique_ptr<Parcel> parcel;
  Tensor tensor;
  bool from_home;

  // Called by the walk; a later walk repeats the same content, except for claimed zeros.
  void carry(const Runs& runs) {
    if (token != UNSENT || parcel != nullptr) return;
    const auto breaks = [](const Run& run, const Run& after) { return run.next() != after.token; };
    if (std::adjacent_find(runs.begin(), runs.end(), breaks) == runs.end())
      token = runs[0].token;
    else
      parcel = std::make_unique<Parcel>(runs, rows);
  }
};

// Rows with consecutive tokens from `token` on, or all zeros, or all unsent.
struct Stretch {
  Token token;
  int64_t rows;
};

class Sends {
 public:
  // Checks that rounds and numbers of sends and receives agree between ranks; `is_matched` returns the outcome.
  explicit Sends(const Program& program) : slots_(program.send.size()), rank_ptr_(program.ranks() + 1) {
    is_matched_ = rounds_agree(program) && post(program);
  }
  // False if ranks differ on a round, if a rank sends to itself or sends home rows that it does not have, or if numbers
  // of sends and receives differ.
  bool is_matched() const { return is_matched_; }

  int64_t first(int64_t rank) const { return rank_ptr_[rank]; }
  int64_t end(int64_t rank) const { return first(rank + 1); }
  Send& operator[](int64_t send) { return sends_[send]; }
  Send& of_transfer(int64_t transfer) { return sends_[slots_[transfer]]; }

  // Resolves up to `rows` rows from a token on, as far as they are consecutive: to the address of the first, NOWHERE if
  // sent as zeros, UNSENT if not yet known.
  Stretch find(Token token, int64_t rows) {
    const Token begin = token;
    bool is_whole = true;
    while (is_of_tile(token)) {
      const Send& send = (*this)[send_of(token)];
      const int64_t row = row_of(token);
      if (send.parcel != nullptr) {
        const auto [source, left] = send.parcel->at(row);
        token = source;
        rows = std::min(rows, left);
        is_whole = false;
      } else {
        token = send.token == UNSENT ? UNSENT : advance(send.token, row);
      }
    }
    if (is_whole && is_address(token)) shorten(begin, token);
    return {token, rows};
  }

  // Rows that were sent as zeros get the tokens that were added to them, from `address` on. Partials are used only
  // once, so no other rank has these zeros.
  void claim(Token token, int64_t rows, Token address) {
    while (true) {
      Send& send = (*this)[send_of(token)];
      const int64_t row = row_of(token);
      const Token source = send.parcel != nullptr ? send.parcel->at(row).first : advance(send.token, row);
      if (source == NOWHERE) {
        if (send.parcel == nullptr) send.parcel = std::make_unique<Parcel>(send.rows);
        send.parcel->claim(row, rows, address);
        return;
      }
      token = source;
    }
  }

 private:
  // Shortens the paths of all sends on the way to an address.
  void shorten(Token token, Token address) {
    while (is_of_tile(token)) {
      Send& send = (*this)[send_of(token)];
      const int64_t row = row_of(token);
      token = send.token + row;
      send.token = address - row;
    }
  }

  static bool rounds_agree(const Program& program) {
    struct Form {
      int64_t channel = -1, mode = 0, launches = 0;
    };
    const Array<Form> forms(program.rounds);
    for (int64_t i = 0; i < program.op.size(); ++i) {
      if (static_cast<Op>(program.op[i]) != Op::LAUNCH) continue;
      Form& form = forms[program.round[i]];
      if (form.launches++ == 0) {
        form.channel = program.channel[i];
        form.mode = program.mode[i];
      }
      if (form.channel != program.channel[i] || form.mode != program.mode[i]) return false;
      if (program.count[i] == 0 && (form.mode & ALL_TO_ALL) == 0) return false;
    }
    return std::all_of(forms.begin(), forms.end(), [&](const Form& form) {
      return form.launches == 0 || (form.mode & ALL_TO_ALL) == 0 || form.launches == program.ranks();
    });
  }

  bool post(const Program& program) {
    const Column<const int64_t> ptr = program.lists[TRANSFERS].ptr;
    for (int64_t rank = 0; rank < program.ranks(); ++rank)
      for (int64_t t = ptr[rank]; t < ptr[rank + 1]; ++t) {
        if (program.peer[t] == rank) return false;
        if (program.send[t] != 0) ++rank_ptr_[program.peer[t] + 1];
      }
    for (int64_t rank = 0; rank < program.ranks(); ++rank) rank_ptr_[rank + 1] += rank_ptr_[rank];
    if (2 * rank_ptr_[program.ranks()] != program.send.size()) return false;
    sends_.resize(static_cast<std::size_t>(rank_ptr_[program.ranks()]));
    const Array<int64_t> next = Array<int64_t>::of(rank_ptr_);
    bool all_inside = true;
    program.operands.columns.visit([&](const auto& operands) {
      program.each_step([&](const Step& step) {
        if (step.op != Op::LAUNCH) return;
        const auto rank = static_cast<int32_t>(step.rank), round = static_cast<int32_t>(program.round[step.index]);
        for (int64_t t = step.first; t < step.end; ++t) {
          if (program.send[t] == 0) continue;
          const Operand tile = operand_at(operands, program.operands.ptr[rank] + program.operand[t]);
          all_inside = all_inside && (!tile.is_home() || tile.end() <= program.memory.home_rows[rank]);
          const auto heads = static_cast<int32_t>(program.heads.number_of(tile.tensor, tile.heads));
          slots_[t] = next[program.peer[t]]++;
          const Token token = tile.is_home() ? program.memory.first_address[rank] + tile.row : UNSENT;
          sends_[slots_[t]] = {rank, round, tile.rows, heads, token, nullptr, tile.tensor, tile.is_home()};
        }
      });
    });
    return all_inside;
  }

  Growing<Send> sends_;
  Array<int64_t> slots_, rank_ptr_;  // slots: of each transfer that sends
  bool is_matched_ = false;
};

}  // namespace apportion::verify
