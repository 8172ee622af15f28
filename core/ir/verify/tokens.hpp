// Tokens: contents of rows, as a number that ascends by one from row to row.
//
//   [0, 2^40)             an address: a home row of a rank, which stands for its token
//   (2 s + 2) 2^40 + row  a row of the tile of send s, if it has values; (2 s + 3) 2^40 + row, if it has partials
//   NOWHERE               zeros, without tokens
//   UNSENT                contents of a send whose rank has not been walked
//
// Numbers of tables are below 2^30 (FORMAT.md, section 15), so neither rows nor addresses reach 2^40.
#pragma once

#include "array.hpp"

namespace apportion::verify {

using Token = int64_t;

inline constexpr int TILE_SHIFT = 40;
inline constexpr Token FIRST_OF_TILES = Token{2} << TILE_SHIFT;
inline constexpr Token NOWHERE = -(Token{1} << 62);
inline constexpr Token UNSENT = NOWHERE - 1;

inline bool is_address(Token token) { return token >= 0 && token < FIRST_OF_TILES; }
inline bool is_of_tile(Token token) { return token >= FIRST_OF_TILES; }
inline Token first_of_tile(int64_t send, bool partial) { return (2 * send + 2 + partial) << TILE_SHIFT; }
inline int64_t send_of(Token token) { return (token >> (TILE_SHIFT + 1)) - 1; }
inline int64_t row_of(Token token) { return token & ((Token{1} << TILE_SHIFT) - 1); }

// The token `rows` rows after another.
inline Token advance(Token token, int64_t rows) { return token == NOWHERE ? NOWHERE : token + rows; }

// Degree of uncertainty: 0 for an address, 1 for a tile of values, 2 for a partial, which may be zeros.
inline int64_t uncertainty(Token token) { return is_of_tile(token) ? 1 + (token >> TILE_SHIFT & 1) : 0; }

// State of arena rows: nothing written; zeros to add to; a partial; values; a consumed partial
enum class State : uint8_t { EMPTY, CLEARED, LIVE, VALUE, SPENT };

// Rows of an operand, from `row` on, with consecutive tokens.
struct Run {
  int32_t row, rows;
  Token token;
  State state;

  int64_t end() const { return int64_t{row} + rows; }
  Token next() const { return advance(token, rows); }
};

using Runs = std::vector<Run>;

inline Run run_of(int64_t row, int64_t rows, Token token, State state) {
  return {static_cast<int32_t>(row), static_cast<int32_t>(rows), token, state};
}

// Queries [q0, q1), keys [k0, k1), dmin <= q - k <= dmax.
struct Band {
  int32_t q0, q1, k0, k1, dmin, dmax;

  bool operator==(const Band&) const = default;
};

// Marks: in a list, the next piece and the list; in a trace, the task and the head set of its queries.
struct Piece {
  Band band;
  int32_t first_mark, second_mark;
};

}  // namespace apportion::verify
