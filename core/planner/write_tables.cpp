// Writes the tables of all ranks from the unordered rows that lowering produces.
//
//   parts      rows of a list: rank, step, numbers (`plain`), ranges of rows of tensors, and which of these its columns
//              of operands are (`named`)
//   sorted     of each list, (part, row) by rank and step; rows of one rank and step as they were given
//   tables     rank after rank: the columns of its lists, the operands that these name, each once, numbered as they are
//              met list after list, column after column; arenas as large as what operands in work rows reach
#include <algorithm>
#include <deque>

#include "bind.hpp"

namespace apportion {

using std::int32_t;
using std::int64_t;

namespace {

// A column of a part, or the number that stands in all of its rows.
struct Cells {
  Ints column;
  int64_t same = 0;
  bool is_column = false;

  int64_t operator[](int64_t row) const { return is_column ? column[row] : same; }
  // Calls loop(numbers) with the column in its own type, or with one number for all rows: compiled for each.
  template <class Loop>
  void visit(Loop&& loop) const {
    struct Same {
      int64_t number;
      int64_t operator[](int64_t) const { return number; }
    };
    if (is_column)
      column.visit(loop);
    else
      loop(Same{same});
  }
};

// packed: row << 32 | rows << 1 | space, or -1.
struct Ranges {
  Column<const int64_t> packed;
  Cells heads;
};

// A column of operands: ranges of its part, as those of a tensor. first: no column before it has this range.
struct Named {
  int64_t tensor, range;
  bool first = false;
};

struct Part {
  Ints rank;
  Cells step;
  std::vector<Cells> plain;
  std::vector<Named> named;
  std::vector<Ranges> ranges;
};

struct Place {
  int32_t part, row;
};

// plain, named: where these columns of its parts stand among those of its table.
struct List {
  std::vector<int64_t> plain, named;
  std::vector<Part> parts;
  int64_t most_ranges = 0;  // of a part
  std::vector<Place> rows;
  std::vector<int64_t> ptr;  // of the rows, where those of each rank begin
  Matrix<int32_t> table;

  const Part& part_of(Place place) const { return parts[static_cast<std::size_t>(place.part)]; }
};

// launch: the step that each step waits for, or -1. A rank takes part in a step if it has rows, waits for what it
// launched, or all ranks do.
struct Template {
  Matrix<const int64_t> steps;  // op, round, channel, mode
  Column<const int64_t> launch;
  int64_t all_to_all;

  bool has(Column<const int64_t> count, int64_t step) const {
    const int64_t of = launch[step] >= 0 ? launch[step] : step;
    return count[of] > 0 || (steps[of][3] & all_to_all) != 0;
  }
};

struct Operand {
  int64_t packed;
  int32_t heads, tensor;

  int64_t space() const { return packed & 1; }
  int64_t row() const { return packed >> 32; }
  int64_t rows() const { return packed >> 1 & 0x7FFFFFFF; }
};

struct Arena {
  int64_t tensor, rows, columns;
};

// What one rank's rows have named so far. Memory is used again for each: a number counts if it is of this rank.
class NamedRanges {
 public:
  NamedRanges(int64_t most, int64_t tensors) : tensors_(tensors) {
    int64_t slots = 2;
    while (slots < 2 * most) slots *= 2;
    slots_.resize(static_cast<std::size_t>(slots));
    number_.resize(static_cast<std::size_t>(most * tensors), -1);
  }
  void open(int64_t rank) {
    rank_ = rank;
    ranges_.clear();
  }
  // Which of the rank's distinct ranges it is, -1 for none.
  int32_t find(int64_t packed, int64_t heads) {
    if (packed < 0) return -1;
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = hash(packed, heads) & mask;
    for (; slots_[at].rank == rank_; at = (at + 1) & mask) {
      const Range& range = ranges_[static_cast<std::size_t>(slots_[at].range)];
      if (range.packed == packed && range.heads == heads) return slots_[at].range;
    }
    slots_[at] = {static_cast<int32_t>(rank_), static_cast<int32_t>(ranges_.size())};
    ranges_.push_back({packed, static_cast<int32_t>(heads)});
    return slots_[at].range;
  }
  // The operand of a range and a tensor, among those of all ranks: below the rank's first if it has none yet.
  int32_t& number(int64_t range, int64_t tensor) {
    return number_[static_cast<std::size_t>(range * tensors_ + tensor)];
  }
  Operand operand(int64_t range, int64_t tensor) const {
    const Range& found = ranges_[static_cast<std::size_t>(range)];
    return {found.packed, found.heads, static_cast<int32_t>(tensor)};
  }

 private:
  struct Slot {
    int32_t rank = -1, range = -1;
  };
  struct Range {
    int64_t packed;
    int32_t heads;
  };
  // The middle of a product, as rows are multiples of many things (Knuth, vol. 3, section 6.4).
  static std::size_t hash(int64_t packed, int64_t heads) {
    const auto bits = static_cast<std::uint64_t>(packed) + (static_cast<std::uint64_t>(heads) << 48);
    return static_cast<std::size_t>((bits ^ bits >> 29) * 0x9E3779B97F4A7C15u >> 32);
  }

  int64_t tensors_, rank_ = -1;
  std::vector<Slot> slots_;
  std::vector<Range> ranges_;
  std::vector<int32_t> number_;
};

// Sorts the rows of a list. Adds how many each rank has at each step to `count`.
void sort_rows(List& list, Matrix<int64_t> count) {
  const int64_t ranks = count.rows(), steps = count.columns();
  list.ptr.assign(static_cast<std::size_t>(ranks) + 1, 0);
  if (list.parts.empty()) return;
  std::vector<int32_t> storage(static_cast<std::size_t>(ranks * steps + 1)), keys;
  const Column<int32_t> place(storage.data(), ranks * steps + 1);
  for (const Part& part : list.parts) {
    part.rank.visit([&](auto rank) {
      part.step.visit([&](auto step) {
        for (int64_t row = 0; row < rank.size(); ++row)
          keys.push_back(static_cast<int32_t>(rank[row] * steps + step[row]));
      });
    });
  }
  for (const int32_t key : keys) ++place[key + 1];
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t key = rank * steps + step;
      count[rank][step] += place[key + 1];
      place[key + 1] += place[key];
    }
    list.ptr[static_cast<std::size_t>(rank) + 1] = place[(rank + 1) * steps];
  }
  list.rows.resize(static_cast<std::size_t>(list.ptr.back()));
  const int32_t* key = keys.data();
  int32_t number = 0;
  for (const Part& part : list.parts) {
    for (int32_t row = 0; row < part.rank.size(); ++row)
      list.rows[static_cast<std::size_t>(place[*key++]++)] = {number, row};
    ++number;
  }
}

class Tables {
 public:
  Tables(std::vector<List>& lists, Matrix<const int64_t> heads, Column<const bool> of_keys)
      : lists_(lists), heads_(heads), of_keys_(of_keys), found_(most_ranges(lists), of_keys.size()) {}

  std::vector<Operand> operands;
  std::vector<Arena> arenas;

  // heads: [2, ranks], columns of query and of key heads in arenas; of_keys: [tensors], which of them each has.
  void write(int64_t rank) {
    first_ = static_cast<int32_t>(operands.size());
    operands.push_back({0, 0, 0});  // none
    found_.open(rank);
    reach_.assign(static_cast<std::size_t>(of_keys_.size()), 0);
    const auto one = static_cast<std::size_t>(rank);
    for (List& list : lists_) write_list(list, list.ptr[one], list.ptr[one + 1]);
    for (int64_t tensor = 0; tensor < of_keys_.size(); ++tensor) {
      const int64_t reach = reach_[static_cast<std::size_t>(tensor)];
      if (reach > 0) arenas.push_back({tensor, reach, heads_[of_keys_[tensor]][rank]});
    }
  }

 private:
  // Ranges of the rank that has most.
  static int64_t most_ranges(const std::vector<List>& lists) {
    int64_t most = 0;
    for (std::size_t rank = 0; rank + 1 < lists.front().ptr.size(); ++rank) {
      int64_t here = 0;
      for (const List& list : lists) here += (list.ptr[rank + 1] - list.ptr[rank]) * list.most_ranges;
      most = std::max(most, here);
    }
    return most;
  }

  void write_list(List& list, int64_t first, int64_t end) {
    const int64_t count = end - first;
    const Column<const Place> rows(list.rows.data() + first, count);
    const auto each_part = [&](auto&& loop) {  // rows of one part after rows of one part
      for (int64_t at = 0, behind; at < count; at = behind) {
        for (behind = at + 1; behind < count && rows[behind].part == rows[at].part;) ++behind;
        loop(list.part_of(rows[at]), at, behind);
      }
    };
    each_part([&](const Part& part, int64_t at, int64_t behind) {
      for (std::size_t one = 0; one < list.plain.size(); ++one) {
        const Column<int32_t> out = list.table[list.plain[one]].slice(first, end);
        write_plain(part.plain[one], rows.slice(at, behind), out.slice(at, behind));
      }
    });
    places_.resize(static_cast<std::size_t>(list.most_ranges * count));
    for (std::size_t one = 0; one < list.named.size(); ++one) {
      const Column<int32_t> out = list.table[list.named[one]].slice(first, end);
      each_part([&](const Part& part, int64_t at, int64_t behind) {
        const Column<int32_t> places(places_.data() + part.named[one].range * count, count);
        write_named(part, part.named[one], rows.slice(at, behind), places.slice(at, behind), out.slice(at, behind));
      });
    }
  }

  static void write_plain(const Cells& cells, Column<const Place> rows, Column<int32_t> out) {
    cells.visit([&](auto numbers) {
      for (int64_t at = 0; at < rows.size(); ++at) out[at] = static_cast<int32_t>(numbers[rows[at].row]);
    });
  }

  // A column of operands, of rows of one part. places: which of the rank's distinct ranges each is.
  void write_named(const Part& part, Named named, Column<const Place> rows, Column<int32_t> places,
                   Column<int32_t> out) {
    if (named.tensor == 0) {
      std::fill(out.begin(), out.end(), 0);
      return;
    }
    if (named.first) {
      const Ranges& ranges = part.ranges[static_cast<std::size_t>(named.range)];
      for (int64_t at = 0; at < rows.size(); ++at)
        places[at] = found_.find(ranges.packed[rows[at].row], ranges.heads[rows[at].row]);
    }
    int64_t& reach = reach_[static_cast<std::size_t>(named.tensor)];
    for (int64_t at = 0; at < rows.size(); ++at) {
      if (places[at] < 0) {
        out[at] = 0;
        continue;
      }
      int32_t& number = found_.number(places[at], named.tensor);
      if (number <= first_) {
        number = static_cast<int32_t>(operands.size());
        operands.push_back(found_.operand(places[at], named.tensor));
        if (operands.back().space() != 0) reach = std::max(reach, operands.back().row() + operands.back().rows());
      }
      out[at] = number - first_;
    }
  }

  std::vector<List>& lists_;
  Matrix<const int64_t> heads_;
  Column<const bool> of_keys_;
  NamedRanges found_;
  int32_t first_ = 0;  // operand of the rank
  std::vector<int64_t> reach_;
  std::vector<int32_t> places_;
};

}  // namespace

// What the parts of `ListPart` (apportion/planner/lower/assemble.py) are made of; keeps their arrays open.
class Opener {
 public:
  explicit Opener(nb::handle lists) {
    for (nb::handle list : lists) lists_.push_back(open_list(list));
  }
  std::vector<List>& lists() { return lists_; }

 private:
  template <class View>
  View view(nb::handle array, const char* name) {
    View view;
    open_view(view, buffers_.emplace_back(), array, name);
    return view;
  }
  Cells cells(nb::handle given, const char* name) {
    if (nb::isinstance<nb::int_>(given)) return {{}, nb::cast<int64_t>(given), false};
    return {view<Ints>(given, name), 0, true};
  }
  List open_list(nb::handle given) {
    List list;
    list.plain = nb::cast<std::vector<int64_t>>(given[0]);
    list.named = nb::cast<std::vector<int64_t>>(given[1]);
    for (nb::handle part : given[2]) {
      list.parts.push_back(open_part(part));
      list.most_ranges = std::max(list.most_ranges, static_cast<int64_t>(list.parts.back().ranges.size()));
    }
    return list;
  }
  Part open_part(nb::handle given) {
    Part part;
    part.rank = view<Ints>(given.attr("rank"), "rank");
    part.step = cells(given.attr("position"), "position");
    for (nb::handle column : given.attr("plain")) part.plain.push_back(cells(column, "plain"));
    for (nb::handle ranges : given.attr("ranges"))
      part.ranges.push_back({view<Column<const int64_t>>(ranges[0], "packed"), cells(ranges[1], "heads")});
    std::vector<bool> met(part.ranges.size());
    for (nb::handle column : given.attr("named")) {
      Named named{nb::cast<int64_t>(column[0]), nb::cast<int64_t>(column[1])};
      if (named.tensor != 0) {
        named.first = !met[static_cast<std::size_t>(named.range)];
        met[static_cast<std::size_t>(named.range)] = true;
      }
      part.named.push_back(named);
    }
    return part;
  }

  std::deque<Buffer> buffers_;
  std::vector<List> lists_;
};

// Instructions of each rank, which `ptr` says where they begin.
static void count_instructions(const Template& steps, Matrix<const int64_t> count, Column<int64_t> ptr) {
  ptr[0] = 0;
  for (int64_t rank = 0; rank < count.rows(); ++rank) {
    ptr[rank + 1] = ptr[rank];
    for (int64_t step = 0; step < count.columns(); ++step) ptr[rank + 1] += steps.has(count[rank], step);
  }
}

// Columns: op, round, channel, mode and count.
static void write_instructions(const Template& steps, Matrix<const int64_t> count, Matrix<int32_t> out) {
  int64_t at = 0;
  for (int64_t rank = 0; rank < count.rows(); ++rank) {
    for (int64_t step = 0; step < count.columns(); ++step) {
      if (!steps.has(count[rank], step)) continue;
      for (int64_t column = 0; column < 4; ++column)
        out[column][at] = static_cast<int32_t>(steps.steps[step][column]);
      out[4][at++] = static_cast<int32_t>(count[rank][step]);
    }
  }
}

// Work rows from head column 0 on.
static void write_operands(const std::vector<Operand>& operands, Matrix<int32_t> out) {
  int64_t at = 0;
  for (const Operand& operand : operands) {
    const int64_t row[] = {operand.tensor, operand.space(), operand.row(), operand.rows(), 0, operand.heads};
    for (int64_t column = 0; column < 6; ++column) out[column][at] = static_cast<int32_t>(row[column]);
    ++at;
  }
}

static nb::list write_tables(nb::handle given, const Template& steps, Matrix<const int64_t> heads,
                              Column<const bool> of_keys) {
  enum { ARENAS, OPERANDS, INSTRUCTIONS, LISTS };  // of `isa.TABLES`
  Opener opener(given);
  std::vector<List>& lists = opener.lists();
  const int64_t ranks = heads.columns(), each = steps.launch.size();
  std::vector<int64_t> storage(static_cast<std::size_t>(ranks * each));
  const Matrix<int64_t> count(storage.data(), ranks, each, each);
  New2<int64_t> ptr(LISTS + static_cast<int64_t>(lists.size()), ranks + 1);
  unlocked([&] {
    for (List& list : lists) sort_rows(list, count);
    count_instructions(steps, {storage.data(), ranks, each, each}, ptr[INSTRUCTIONS]);
  });

  New2<int32_t> instructions(5, ptr[INSTRUCTIONS][ranks]);
  nb::list tables;
  tables.append(ptr.array());
  int64_t place = LISTS;
  for (List& list : lists) {
    New2<int32_t> table(static_cast<int64_t>(list.plain.size() + list.named.size()), list.ptr.back());
    list.table = table;
    std::copy(list.ptr.begin(), list.ptr.end(), ptr[place++].begin());
    tables.append(table.array());
  }
  Tables made(lists, heads, of_keys);
  unlocked([&] {
    write_instructions(steps, {storage.data(), ranks, each, each}, instructions);
    ptr[ARENAS][0] = ptr[OPERANDS][0] = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      made.write(rank);
      ptr[ARENAS][rank + 1] = static_cast<int64_t>(made.arenas.size());
      ptr[OPERANDS][rank + 1] = static_cast<int64_t>(made.operands.size());
    }
  });

  New2<int64_t> arenas(3, ptr[ARENAS][ranks]);
  New2<int32_t> operands(6, ptr[OPERANDS][ranks]);
  for (int64_t at = 0; at < arenas.columns(); ++at) {
    const Arena& arena = made.arenas[static_cast<std::size_t>(at)];
    arenas[0][at] = arena.tensor, arenas[1][at] = arena.rows, arenas[2][at] = arena.columns;
  }
  unlocked([&] { write_operands(made.operands, operands); });
  tables.insert(1, arenas.array());
  tables.insert(2, operands.array());
  tables.insert(3, instructions.array());
  return tables;
}

void bind_write_tables(nb::module_& m) {
  m.def("write", [](nb::list lists, In2<int64_t, "steps"> steps, In<int64_t, "launch"> launch, int64_t all_to_all,
                    In2<int64_t, "heads"> heads, In<bool, "of_keys"> of_keys) {
    return write_tables(lists, {steps, launch, all_to_all}, heads, of_keys);
  });
}

}  // namespace apportion
