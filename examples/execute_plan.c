/* Reads a plan and executes it: all ranks in one process, in float64. C99 and its library, nothing else.
 *
 *   cc -O2 -std=c99 -o execute_plan execute_plan.c -lm
 *
 *   execute_plan read PLAN            its tables as JSON
 *   execute_plan check PLAN           exit 1 where a reader must refuse it
 *   execute_plan run CASE OUTPUTS     a case of the conformance suite: CASE/case.plan on CASE/inputs.f64
 *
 * Written from apportion/schemas/FORMAT.md, whose sections the comments name. Bytes are hostile: whatever they say, the
 * program ends with a message and exit code 1, and touches no memory that is not its own.
 */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT ((int64_t)1 << 48)
#define MAX_MEMORY ((size_t)1 << 30)

static void refuse(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    exit(1);
}

/* Zeroed memory, given back when the program ends. */
typedef struct Block { struct Block *next; double aligned[]; } Block;
static Block *blocks;
static size_t allotted;

static void give_back(void) {
    while (blocks) {
        Block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
}

static void *allot(int64_t count, size_t size) {
    if (count < 0 || (uint64_t)count > (MAX_MEMORY - allotted) / size) refuse("this takes too much memory");
    Block *block = calloc(1, sizeof(Block) + (size_t)count * size);
    if (!block) refuse("out of memory");
    allotted += (size_t)count * size;
    block->next = blocks;
    blocks = block;
    return block->aligned;
}

/* ------------------------------------------------------------------------------------------ MessagePack */

typedef struct { const uint8_t *at, *end; } Bytes;
typedef enum { NIL, BOOL, INT, FLOAT, STR, BIN, ARRAY, MAP } Type;
typedef struct { Type type; int64_t number; double real; Bytes bytes; } Value; /* number: also of items, or pairs */

static uint64_t big_endian(Bytes *in, int size) {
    uint64_t number = 0;
    if (in->end - in->at < size) refuse("envelope: it ends too soon");
    while (size--) number = number << 8 | *in->at++;
    return number;
}

static Value sized(Bytes *in, Type type, uint64_t size) {
    Value value = {type, (int64_t)size, 0, {in->at, in->at}};
    if (size > (uint64_t)(in->end - in->at)) refuse("envelope: a length goes beyond the end"); /* an item has a byte */
    if (type == STR || type == BIN) value.bytes.end = in->at += size;
    return value;
}

static Value integer(uint64_t bits, int bytes, int is_signed) {
    if (!is_signed && bits > INT64_MAX) refuse("values: an integer is too large");
    if (is_signed && bytes < 8 && bits >> (8 * bytes - 1)) bits |= ~(uint64_t)0 << 8 * bytes;
    Value value = {INT, 0, 0, {0, 0}};
    memcpy(&value.number, &bits, 8);
    return value;
}

/* The next value; of arrays and maps its head: their items follow. */
static Value next(Bytes *in) {
    uint8_t head = (uint8_t)big_endian(in, 1);
    Value value = {NIL, 0, 0, {0, 0}};
    if (head < 0x80) return integer(head, 8, 0);
    if (head < 0x90) return sized(in, MAP, head & 15);
    if (head < 0xa0) return sized(in, ARRAY, head & 15);
    if (head < 0xc0) return sized(in, STR, head & 31);
    if (head >= 0xe0) return integer(head, 1, 1);
    if (head >= 0xc4 && head <= 0xc6) return sized(in, BIN, big_endian(in, 1 << (head - 0xc4)));
    if (head >= 0xcc && head <= 0xcf) return integer(big_endian(in, 1 << (head - 0xcc)), 8, 0);
    if (head >= 0xd0 && head <= 0xd3) return integer(big_endian(in, 1 << (head - 0xd0)), 1 << (head - 0xd0), 1);
    if (head >= 0xd9 && head <= 0xdb) return sized(in, STR, big_endian(in, 1 << (head - 0xd9)));
    if (head == 0xdc || head == 0xdd) return sized(in, ARRAY, big_endian(in, 2 << (head - 0xdc)));
    if (head == 0xde || head == 0xdf) return sized(in, MAP, big_endian(in, 2 << (head - 0xde)));
    if (head == 0xc2 || head == 0xc3) value.type = BOOL, value.number = head & 1;
    else if (head == 0xca || head == 0xcb) value.type = FLOAT, big_endian(in, 4 << (head - 0xca));
    else if (head != 0xc0) refuse("envelope: unknown MessagePack type %d", head);
    return value;
}

/* The value as a whole: `bytes` of arrays and maps are their items. */
static Value whole(Bytes *in, int depth) {
    Value value = next(in);
    int64_t items = value.type == ARRAY ? value.number : value.type == MAP ? 2 * value.number : 0;
    if (depth > 32) refuse("envelope: it is nested too deeply");
    for (; items; items--) whole(in, depth + 1);
    if (value.type >= ARRAY) value.bytes.end = in->at;
    return value;
}

static Value alone(Bytes in, Type type, const char *what) {
    Value value = whole(&in, 0);
    if (value.type != type || in.at != in.end) refuse("%s: another type, or bytes behind it", what);
    return value;
}

static int is(Value text, const char *other) {
    size_t size = (size_t)(text.bytes.end - text.bytes.at);
    return text.type == STR && strlen(other) == size && memcmp(text.bytes.at, other, size) == 0;
}

static int equal(Value a, Value b) {
    size_t size = (size_t)(a.bytes.end - a.bytes.at);
    return a.type == b.type && (size_t)(b.bytes.end - b.bytes.at) == size && memcmp(a.bytes.at, b.bytes.at, size) == 0;
}

/* The value of a key of a map; found: whether it is there. */
static Value find(Value map, const char *key, int *found) {
    Bytes in = map.bytes;
    Value value = {NIL, 0, 0, {0, 0}};
    *found = 0;
    for (int64_t n = 0; n < map.number && !*found; n++) {
        *found = is(whole(&in, 0), key);
        value = whole(&in, 0);
    }
    return value;
}

static Value get(Value map, const char *key, Type type, const char *what) {
    int found;
    Value value = find(map, key, &found);
    if (!found || value.type != type) refuse("%s: `%s` is missing or of another type", what, key);
    return value;
}

/* ------------------------------------------------------------------------------------------ 2: the id */

static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
static const uint64_t IV[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                               0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

static uint64_t rotated(uint64_t x, int by) { return x >> by | x << (64 - by); }

static void mix(uint64_t v[16], int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x, v[d] = rotated(v[d] ^ v[a], 32), v[c] += v[d], v[b] = rotated(v[b] ^ v[c], 24);
    v[a] += v[b] + y, v[d] = rotated(v[d] ^ v[a], 16), v[c] += v[d], v[b] = rotated(v[b] ^ v[c], 63);
}

static void compress(uint64_t h[8], const uint8_t block[128], uint64_t count, int last) {
    uint64_t m[16], v[16];
    memset(m, 0, sizeof m);
    for (int i = 0; i < 128; i++) m[i / 8] |= (uint64_t)block[i] << 8 * (i % 8);
    for (int i = 0; i < 8; i++) v[i] = h[i], v[i + 8] = IV[i];
    v[12] ^= count, v[14] ^= last ? ~(uint64_t)0 : 0;
    for (int round = 0; round < 12; round++)
        for (int i = 0; i < 8; i++) {
            const uint8_t *s = SIGMA[round % 10] + 2 * i;
            int turn = i / 4; /* columns, then diagonals */
            mix(v, i & 3, 4 + ((i + turn) & 3), 8 + ((i + 2 * turn) & 3), 12 + ((i + 3 * turn) & 3), m[s[0]], m[s[1]]);
        }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

typedef struct { uint8_t bytes[32]; } Digest;

/* BLAKE2b of `prefix` and then `data`. */
static Digest hash(const char *prefix, size_t before, Bytes data) {
    uint64_t h[8], size = before + (uint64_t)(data.end - data.at), done = 0;
    Digest digest;
    for (int i = 0; i < 8; i++) h[i] = IV[i];
    h[0] ^= 0x01010020;
    do {
        uint8_t block[128] = {0};
        uint64_t count = size - done < 128 ? size - done : 128;
        for (uint64_t i = 0; i < count; i++, done++)
            block[i] = done < before ? (uint8_t)prefix[done] : data.at[done - before];
        compress(h, block, done, done == size);
    } while (done < size);
    for (int i = 0; i < 32; i++) digest.bytes[i] = (uint8_t)(h[i / 8] >> 8 * (i % 8));
    return digest;
}

static Bytes bytes_of(const void *data, size_t size) {
    Bytes bytes = {data, (const uint8_t *)data + size};
    return bytes;
}

static Digest plan_id(const Bytes sections[5], const Bytes *parts, int64_t ranks) {
    static const char MAGIC[] = "apportion.plan"; /* with the zero behind it */
    Digest *level = allot(ranks, sizeof *level), fixed[6];
    for (int64_t rank = 0; rank < ranks; rank++) level[rank] = hash("\0", 1, parts[rank]);
    for (int64_t n = ranks; n > 1; n = (n + 1) / 2) {
        for (int64_t i = 0; 2 * i + 1 < n; i++) level[i] = hash("\1", 1, bytes_of(level + 2 * i, 64));
        if (n & 1) level[n / 2] = level[n - 1];
    }
    for (int i = 0; i < 5; i++) fixed[i] = hash("", 0, sections[i]);
    fixed[5] = level[0];
    return hash(MAGIC, sizeof MAGIC, bytes_of(fixed, sizeof fixed));
}

/* ------------------------------------------------------------------------------------------ 4: cells */

typedef enum { LAST, WITH, AFTER, PLACE, BY, RISE, FOLLOW, NEW, KEYS, QUERIES, LIKE, ROW } Rule;
enum { TENSOR_END = -1, HEAD_SETS = -2, PEERS = -3, OPERANDS = -4, BELOW = -5 }; /* what bounds a column, if no number */
typedef struct { const char *name; Rule rule; int a, b; int64_t least, most; int place; } Column; /* place: when shown */
typedef struct { int columns; Column column[9]; } Form;
typedef struct { int64_t rows, *column[9]; } Table;

enum { ARENAS, OPERAND, INSTRUCTIONS, TRANSFERS, TASKS, GRADS, ROWOPS, TABLES, SPANS = TABLES, MOVES };
enum { A_TENSOR, A_ROWS, A_HEADS };
enum { O_SOURCE, O_TENSOR, O_SPACE, O_ROWS, O_ROW, O_COL, O_HEADS };
enum { I_OP, I_ROUND, I_CHANNEL, I_MODE, I_COUNT };
enum { T_SEND, T_PEER, T_OPERAND };
enum { S_LENGTH, S_ROW, S_TOKEN, S_SEQUENCE, S_POSITION };
enum { M_SEND, M_PEER, M_ROWS, M_ROW };

static const Form FORMS[] = {
    [ARENAS] = {3, {{"tensor", LAST, 0, 0, 1, 9, 0}, {"rows", LAST, 0, 0, 1, LIMIT, 1}, {"heads", LAST, 0, 0, 0, 65536, 2}}},
    [OPERAND] = {7, {{"source", LAST, 0, 0, 0, BELOW, -1}, {"tensor", LAST, 0, 0, 0, 9, 0}, {"space", LAST, 0, 0, 0, 1, 1},
                     {"rows", LIKE, 0, 0, 0, LIMIT, 3}, {"row", ROW, 0, 0, 0, LIMIT, 2}, {"col", LIKE, 0, 0, 0, 65536, 4},
                     {"heads", LIKE, 0, 0, 0, HEAD_SETS, 5}}},
    [INSTRUCTIONS] = {5, {{"op", FOLLOW, 0, 0, 1, 13, 0}, {"round", RISE, I_OP, 0, 0, LIMIT, 1}, {"channel", BY, I_OP, 0, 0, LIMIT, 2},
                          {"mode", BY, I_OP, 0, 0, 3, 3}, {"count", BY, I_OP, 0, 0, LIMIT, 4}}},
    [TRANSFERS] = {3, {{"send", LAST, 0, 0, 0, 1, 0}, {"peer", FOLLOW, 0, 0, 0, PEERS, 1}, {"operand", NEW, 0, 0, 0, OPERANDS, 2}}},
    [TASKS] = {6, {{"q", NEW, 0, 0, 0, OPERANDS, 0}, {"kv", NEW, 0, 0, 0, OPERANDS, 1}, {"o", WITH, 0, 0, 0, OPERANDS, 2},
                   {"dmin", KEYS, 1, 0, -LIMIT, LIMIT, 3}, {"dmax", QUERIES, 0, 0, -LIMIT, LIMIT, 4}, {"first", LAST, 0, 0, 0, 1, 5}}},
    [GRADS] = {9, {{"q", NEW, 0, 0, 0, OPERANDS, 0}, {"kv", NEW, 0, 0, 0, OPERANDS, 1}, {"do", WITH, 0, 0, 0, OPERANDS, 2},
                   {"delta", WITH, 0, 0, 0, OPERANDS, 3}, {"dq", WITH, 0, 0, 0, OPERANDS, 4}, {"dkv", NEW, 0, 0, 0, OPERANDS, 5},
                   {"dmin", KEYS, 1, 0, -LIMIT, LIMIT, 6}, {"dmax", QUERIES, 0, 0, -LIMIT, LIMIT, 7}, {"first", FOLLOW, 0, 0, 0, 3, 8}}},
    [ROWOPS] = {5, {{"a", FOLLOW, 0, 0, 0, OPERANDS, 0}, {"b", LAST, 0, 0, 0, OPERANDS, 1}, {"c", NEW, 0, 0, 0, OPERANDS, 2},
                    {"d", LAST, 0, 0, 0, OPERANDS, 3}, {"first", LAST, 0, 0, 0, 1, 4}}},
    [SPANS] = {5, {{"length", LAST, 0, 0, 1, LIMIT, 2}, {"row", AFTER, S_LENGTH, 0, 0, LIMIT, 0}, {"token", AFTER, S_LENGTH, 0, 0, LIMIT, 1},
                   {"sequence", LAST, 0, 0, 0, LIMIT, 3}, {"position", PLACE, S_TOKEN, S_SEQUENCE, 0, LIMIT, 4}}},
    [MOVES] = {4, {{"send", LAST, 0, 0, 0, 1, 0}, {"peer", FOLLOW, 0, 0, 0, PEERS, 1}, {"rows", LAST, 0, 0, 1, LIMIT, 3},
                   {"row", AFTER, M_ROWS, 0, 0, LIMIT, 2}}}};

/* What a cell is read with. held: the operands of the part's programs before this one. */
typedef struct { int64_t ranks, head_sets, newest; Table held, *operands; } Context;

static int64_t number(Bytes *cell) {
    uint64_t found = 0;
    for (int shift = 0; shift < 56; shift += 7) {
        if (cell->at == cell->end) break;
        uint8_t byte = *cell->at++;
        found |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return (int64_t)found;
    }
    refuse("cells: a number does not end, or has more than 8 bytes");
    return 0;
}

static int64_t difference(Bytes *cell) {
    int64_t found = number(cell);
    return found & 1 ? -(found / 2) - 1 : found / 2;
}

/* How much the rows of the next column are above what is expected. */
static void differences(Bytes *cell, int64_t rows, int64_t *found) {
    int64_t form = cell->at < cell->end ? *cell->at++ : 9, row = -1, bits = (rows + 7) / 8;
    const uint8_t *bit = cell->at;
    memset(found, 0, (size_t)rows * sizeof *found);
    if (form > 3) refuse("cells: no such form of a column");
    if (form == 1) {
        int64_t count = number(cell);
        if (count > rows) refuse("cells: more differences than rows");
        while (count--) {
            int64_t zeros = number(cell);
            if (zeros >= rows - row - 1) refuse("cells: a difference beyond the rows");
            row += zeros + 1;
            found[row] = difference(cell);
        }
    }
    if (form == 2) {
        if (bits > cell->end - cell->at || (rows % 8 && bit[bits - 1] >> rows % 8)) refuse("cells: bits beyond the rows");
        cell->at += bits;
        for (row = 0; row < rows; row++)
            if (bit[row / 8] >> row % 8 & 1) found[row] = difference(cell);
    }
    if (form == 3)
        for (row = 0; row < rows; row++) found[row] = difference(cell);
}

static int64_t row_of_operand(const Table *table, const Table *held, int64_t at, int64_t i) {
    int64_t *const *column = table->column, source = column[O_SOURCE][i];
    int follows = i > 0 && column[O_TENSOR][i - 1] == column[O_TENSOR][i] && column[O_SPACE][i - 1] == column[O_SPACE][i];
    if (source && held->column[O_SPACE][at - source] == column[O_SPACE][i]) {
        int shifts = i > 0 && column[O_SOURCE][i - 1] == source;
        int64_t shift = shifts ? column[O_ROW][i - 1] - held->column[O_ROW][at - 1 - source] : 0;
        return held->column[O_ROW][at - source] + shift;
    }
    return follows ? column[O_ROW][i - 1] + column[O_ROWS][i - 1] : 0;
}

/* What is expected of a row of a column; seen: 1 more than what followed each number, 0: nothing yet. */
static int64_t expected(const Form *form, int c, const Table *table, Context *context, int64_t i, const int64_t *seen) {
    const Column *column = form->column + c;
    int64_t *const *v = table->column, *a = v[column->a], *b = v[column->b], zero = 0;
    int64_t last = i ? v[c][i - 1] : 0, a_last = i ? a[i - 1] : zero, at = context->held.rows + i;
    switch (column->rule) {
    case LAST: return last;
    case WITH: return last + a[i] - a_last;
    case AFTER: return last + a_last;
    case PLACE: return i && b[i] == b[i - 1] ? last + a[i] - a_last : 0;
    case BY: return seen[a[i]] ? seen[a[i]] - 1 : 0;
    case RISE: return (seen[a[i]] ? seen[a[i]] - 1 : 0) + (a[i] <= 2);
    case FOLLOW: return seen[last] ? seen[last] - 1 : last + 1;
    case NEW: return seen[last] ? seen[last] - 1 : context->newest + 1;
    case KEYS: return 1 - context->operands->column[O_ROWS][a[i]];
    case QUERIES: return context->operands->column[O_ROWS][a[i]] - 1;
    case LIKE: return v[O_SOURCE][i] ? context->held.column[c][at - v[O_SOURCE][i]] : last;
    default: return row_of_operand(table, &context->held, at, i);
    }
}

static int64_t bound(int64_t most, const Context *context, int64_t i) {
    if (most == HEAD_SETS) return context->head_sets;
    if (most == PEERS) return context->ranks - 1;
    if (most == OPERANDS) return context->operands->rows - 1;
    return most == BELOW ? context->held.rows + i : most;
}

static Table read_cell(int kind, Bytes cell, Context *context) {
    const Form *form = FORMS + kind;
    int64_t size = cell.end - cell.at, names = context->ranks + 256 + (context->operands ? context->operands->rows : 0);
    const uint8_t *begin = cell.at;
    Table table = {size ? number(&cell) : 0, {0}};
    if (table.rows > 1 << 24 || table.rows > 2 * size || (size && !table.rows)) refuse("cells: so few bytes have no such rows");
    int64_t *off = allot(table.rows, sizeof *off), *seen = allot(names, sizeof *seen);
    for (int c = 0; c < form->columns; c++) {
        /* operands are read behind those of the programs before, which their sources are among */
        int64_t skip = kind == OPERAND ? context->held.rows : 0, *values = allot(skip + table.rows, sizeof *values);
        if (skip) memcpy(values, context->held.column[c], (size_t)skip * sizeof *values);
        if (kind == OPERAND) context->held.column[c] = values;
        table.column[c] = values + skip;
    }
    for (int c = 0; c < form->columns && size; c++) {
        const Column *column = form->column + c;
        int64_t *values = table.column[c];
        int names_operands = column->rule == NEW || (kind == ROWOPS && column->rule == FOLLOW);
        memset(seen, 0, (size_t)names * sizeof *seen);
        differences(&cell, table.rows, off);
        for (int64_t i = 0; i < table.rows; i++) {
            int64_t key = column->rule == BY || column->rule == RISE ? table.column[column->a][i] : i ? values[i - 1] : 0;
            values[i] = expected(form, c, &table, context, i, seen) + off[i];
            if (values[i] < column->least || values[i] > bound(column->most, context, i))
                refuse("values: %s = %lld cannot be", column->name, (long long)values[i]);
            if (column->rule >= BY && column->rule <= NEW) seen[key] = values[i] + 1;
            if (names_operands && values[i] > context->newest) context->newest = values[i];
        }
    }
    for (; cell.at < cell.end; cell.at++)
        if (*cell.at || 2 * (cell.at - begin) >= table.rows) refuse("cells: bytes are left over");
    return table;
}

/* ------------------------------------------------------------------------------------------ 3 and 4: the plan */

typedef struct { int64_t count, *head; } Heads;
typedef struct { Table table[TABLES]; } Program;
typedef struct { Table *spans, *moves; Program (*programs)[2]; } Part;
typedef struct {
    Value map, header, layouts, moves;
    int64_t ranks, q_heads, kv_heads, head_dim, v_head_dim, head_sets, kinds, layout_count, move_count, tokens, home;
    int narrow, *phases; /* narrow: 1 bf16, 2 fp16: gradients are rounded on their way; phases: of each kind, as bits */
    Value *kind_name, *layout_name;
    Heads *heads;
    Part *parts;
} Plan;

static const char *const PHASES[2] = {"forward", "backward"};
static const int LIST_OF_OP[14] = {0, TRANSFERS, 0, TASKS, GRADS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS};

static int64_t whole_number(Value map, const char *key, int64_t least, int64_t most) {
    int64_t found = get(map, key, INT, "sections").number;
    if (found < least || found > most) refuse("sections: %s = %lld cannot be", key, (long long)found);
    return found;
}

static Value *names_of(Value header, const char *key, int64_t *count) {
    Value list = get(header, key, ARRAY, "sections"), *names = allot(*count = list.number, sizeof *names);
    if (!list.number) refuse("sections: no %s", key);
    for (int64_t i = 0; i < list.number; i++) {
        names[i] = whole(&list.bytes, 0);
        if (names[i].type != STR || !names[i].number) refuse("sections: %s must be names", key);
        for (int64_t j = 0; j < i; j++)
            if (equal(names[i], names[j])) refuse("sections: a name of %s twice", key);
    }
    return names;
}

static int64_t place_of(Value name, const Value *names, int64_t count, const char *what) {
    for (int64_t i = 0; i < count; i++)
        if (equal(name, names[i])) return i;
    refuse("%s", what);
    return 0;
}

static void read_head_sets(Plan *plan) {
    Value list = get(plan->header, "head_sets", ARRAY, "sections");
    plan->head_sets = list.number;
    plan->heads = allot(list.number, sizeof(Heads));
    for (int64_t i = 0; i < list.number; i++) {
        Value set = whole(&list.bytes, 0);
        uint8_t *used = allot(plan->q_heads, 1);
        if (set.type != ARRAY || !set.number) refuse("sections: a head set must hold heads");
        plan->heads[i].count = set.number;
        plan->heads[i].head = allot(set.number, sizeof(int64_t));
        for (int64_t n = 0; n < set.number; n++) {
            Value head = whole(&set.bytes, 0);
            if (head.type != INT || head.number < 0 || head.number >= plan->q_heads || used[head.number]++)
                refuse("sections: head sets must hold distinct heads");
            plan->heads[i].head[n] = head.number;
        }
    }
}

static void read_header(Plan *plan, Value version) {
    Value header = plan->header, dtype = get(header, "dtype", STR, "sections"), sent;
    Value inner = get(header, "version", ARRAY, "sections"), home = get(header, "home_layout", STR, "sections");
    int half = is(dtype, "bf16") ? 1 : is(dtype, "fp16") ? 2 : 0, found;
    if (!equal(version, inner)) refuse("sections: another version than outside");
    if (!half && !is(dtype, "fp32") && !is(dtype, "fp64")) refuse("sections: unknown dtype");
    plan->ranks = whole_number(header, "ranks", 1, 65535);
    plan->q_heads = whole_number(header, "q_heads", 1, 65536);
    plan->kv_heads = whole_number(header, "kv_heads", 1, 65536);
    plan->head_dim = whole_number(header, "head_dim", 1, 65536);
    plan->v_head_dim = whole_number(header, "v_head_dim", 1, 65536);
    if (plan->q_heads % plan->kv_heads) refuse("sections: q_heads is no multiple of kv_heads");
    get(header, "recipe", STR, "sections");
    get(header, "seed", INT, "sections");
    get(header, "engines", MAP, "sections");
    get(header, "diagonals", MAP, "sections");
    sent = find(header, "sent_gradients", &found);
    if (found && (!is(sent, "model") || !half)) refuse("sections: sent_gradients cannot be that");
    plan->narrow = found ? half : 0;
    plan->kind_name = names_of(header, "kinds", &plan->kinds);
    plan->layout_name = names_of(header, "layouts", &plan->layout_count);
    plan->phases = allot(plan->kinds, sizeof *plan->phases);
    plan->home = place_of(home, plan->layout_name, plan->layout_count, "sections: home_layout is no layout");
    read_head_sets(plan);
}

static void read_names(Plan *plan) {
    Value layouts = plan->layouts, moves = plan->moves;
    if (layouts.number != plan->layout_count) refuse("sections: not the layouts of the header");
    for (int64_t i = 0; i < layouts.number; i++) {
        Value name = whole(&layouts.bytes, 0), of = whole(&layouts.bytes, 0);
        place_of(name, plan->layout_name, plan->layout_count, "sections: not the layouts of the header");
        int64_t tokens = of.type == MAP ? whole_number(of, "tokens", 0, LIMIT) : -1;
        if (of.type != MAP || (i && tokens != plan->tokens)) refuse("sections: layouts of other tokens");
        plan->tokens = tokens;
    }
    plan->move_count = moves.number;
    for (int64_t i = 0; i < moves.number; i++) {
        Value pair = whole(&moves.bytes, 0);
        if (pair.type != ARRAY || pair.number != 2) refuse("sections: a move has a source and a target");
        for (int n = 0; n < 2; n++)
            place_of(whole(&pair.bytes, 0), plan->layout_name, plan->layout_count, "sections: a move of no layout");
    }
}

static void check_operands(const Plan *plan, const Table *table) {
    for (int64_t i = 0; i < table->rows; i++) {
        int64_t tensor = table->column[O_TENSOR][i], heads = table->column[O_HEADS][i], any = 0;
        for (int c = O_TENSOR; c <= O_HEADS; c++) any |= table->column[c][i];
        if (!i && any) refuse("values: operand 0 is none");
        if (i && (!tensor || !table->column[O_ROWS][i])) refuse("values: only operand 0 is none");
        if ((tensor == 3 || tensor == 7) && heads)
            for (int64_t n = 0; n < plan->heads[heads - 1].count; n++)
                if (plan->heads[heads - 1].head[n] >= plan->kv_heads) refuse("indexes: no such KV head");
    }
}

static void check_program(const Plan *plan, const Program *program) {
    const Table *arenas = program->table + ARENAS, *steps = program->table + INSTRUCTIONS;
    int64_t used[TABLES] = {0}, seen = 0;
    for (int64_t i = 0; i < arenas->rows; i++) {
        if (seen >> arenas->column[A_TENSOR][i] & 1) refuse("values: two arenas of a tensor");
        seen |= 1 << arenas->column[A_TENSOR][i];
    }
    check_operands(plan, program->table + OPERAND);
    for (int64_t i = 0; i < steps->rows; i++) {
        int64_t op = steps->column[I_OP][i], count = steps->column[I_COUNT][i];
        int64_t rest = steps->column[I_CHANNEL][i] | steps->column[I_MODE][i] | (op == 2 ? 0 : steps->column[I_ROUND][i]);
        if ((op != 1 && rest) || (op == 2 && count)) refuse("values: that is not for op %d", (int)op);
        used[LIST_OF_OP[op]] += op == 2 ? 0 : count;
        if (used[LIST_OF_OP[op]] > 1 << 24) refuse("counts: beyond the lists");
    }
    for (int list = TRANSFERS; list < TABLES; list++)
        if (used[list] != program->table[list].rows) refuse("counts: they do not add up to the list");
}

static Bytes cell_of(Bytes *list, const char *what) {
    Value cell = whole(list, 0);
    if (cell.type != BIN) refuse("parts: %s must be cells", what);
    return cell.bytes;
}

static void read_programs(Plan *plan, Part *part, Value kinds, int64_t rank) {
    Context context = {plan->ranks, plan->head_sets, 0, {0, {0}}, 0};
    if (kinds.number != plan->kinds) refuse("parts: other kinds than the header");
    part->programs = allot(plan->kinds, sizeof *part->programs);
    for (int64_t kind = 0; kind < plan->kinds; kind++) {
        Value name = whole(&kinds.bytes, 0), phases = whole(&kinds.bytes, 0);
        int has = 0;
        if (!equal(name, plan->kind_name[kind]) || phases.type != MAP) refuse("parts: other kinds than the header");
        for (int64_t n = 0; n < phases.number; n++) {
            Value phase = whole(&phases.bytes, 0), cells = whole(&phases.bytes, 0);
            int number = is(phase, PHASES[1]);
            if ((!number && !is(phase, PHASES[0])) || has >> number || cells.type != ARRAY || cells.number != TABLES)
                refuse("parts: phases are forward and backward, of 7 tables");
            has |= 1 << number;
            context.newest = 0;
            context.operands = 0;
            for (int t = 0; t < TABLES; t++) {
                Table *table = part->programs[kind][number].table + t;
                *table = read_cell(t, cell_of(&cells.bytes, "tables"), &context);
                if (t == OPERAND) context.operands = table, context.held.rows += table->rows;
            }
            check_program(plan, part->programs[kind] + number);
        }
        if (!rank) plan->phases[kind] = has;
        if (!has || plan->phases[kind] != has) refuse("parts: phases that others have not");
    }
}

static void read_part(Plan *plan, Bytes bytes, int64_t rank) {
    Value map = alone(bytes, MAP, "parts"), layouts = get(map, "layouts", ARRAY, "parts");
    Value moves = get(map, "moves", ARRAY, "parts");
    Part *part = plan->parts + rank;
    Context context = {plan->ranks, plan->head_sets, 0, {0, {0}}, 0};
    if (get(map, "rank", INT, "parts").number != rank) refuse("parts: a part of another rank");
    if (layouts.number != plan->layout_count || moves.number != plan->move_count) refuse("parts: other layouts or moves");
    part->spans = allot(layouts.number, sizeof(Table));
    part->moves = allot(moves.number, sizeof(Table));
    for (int64_t i = 0; i < layouts.number; i++) {
        Table *spans = part->spans + i;
        *spans = read_cell(SPANS, cell_of(&layouts.bytes, "layouts"), &context);
        int64_t total = 0;
        for (int64_t n = 0; n < spans->rows; n++) {
            if (spans->column[S_TOKEN][n] + spans->column[S_LENGTH][n] > plan->tokens) refuse("values: a span beyond the tokens");
            if ((total += spans->column[S_LENGTH][n]) > LIMIT) refuse("values: spans of too many rows");
        }
    }
    for (int64_t i = 0; i < moves.number; i++) part->moves[i] = read_cell(MOVES, cell_of(&moves.bytes, "moves"), &context);
    read_programs(plan, part, get(map, "programs", MAP, "parts"), rank);
}

static Bytes read_file(const char *folder, const char *name) {
    char path[4096];
    int64_t size = 0, room = 1 << 16;
    if (snprintf(path, sizeof path, "%s%s", folder, name) >= (int)sizeof path) refuse("the path is too long");
    FILE *file = fopen(path, "rb");
    if (!file) refuse("%s cannot be read", path);
    uint8_t *data = allot(room, 1);
    for (size_t got; (got = fread(data + size, 1, (size_t)(room - size), file)) > 0;) {
        size += (int64_t)got;
        if (size == room) data = memcpy(allot(room *= 2, 1), data, (size_t)size);
    }
    fclose(file);
    return bytes_of(data, (size_t)size);
}

static Plan read_plan(Bytes file) {
    static const char *const NAMES[5] = {"header", "request", "layouts", "moves", "report"};
    Plan plan = {.map = alone(file, MAP, "envelope")};
    Value version = get(plan.map, "version", ARRAY, "envelope"), parts, id;
    Bytes sections[5], *part, numbers = version.bytes;
    if (!is(get(plan.map, "format", STR, "envelope"), "apportion.plan")) refuse("envelope: it is no plan");
    Value major = version.number == 2 ? whole(&numbers, 0) : version, minor = version.number == 2 ? whole(&numbers, 0) : version;
    if (major.type != INT || minor.type != INT || major.number != 2 || minor.number < 0) refuse("version: only 2.x is read");
    for (int i = 0; i < 5; i++) sections[i] = get(plan.map, NAMES[i], BIN, "envelope").bytes;
    parts = get(plan.map, "parts", ARRAY, "envelope");
    part = allot(parts.number, sizeof *part);
    for (int64_t i = 0; i < parts.number; i++) {
        Value bytes = whole(&parts.bytes, 0);
        if (bytes.type != BIN) refuse("envelope: parts are bin");
        part[i] = bytes.bytes;
    }
    if (!parts.number) refuse("parts: there are none");
    id = get(plan.map, "id", BIN, "envelope");
    Digest real = plan_id(sections, part, parts.number);
    if (id.number != 32 || memcmp(id.bytes.at, real.bytes, 32)) refuse("id: it is not that of the bytes");
    plan.header = alone(sections[0], MAP, "sections");
    plan.layouts = alone(sections[2], MAP, "sections");
    plan.moves = alone(sections[3], ARRAY, "sections");
    read_header(&plan, version);
    if (plan.ranks != parts.number) refuse("parts: not as many as ranks");
    read_names(&plan);
    plan.parts = allot(plan.ranks, sizeof(Part));
    for (int64_t rank = 0; rank < plan.ranks; rank++) read_part(&plan, part[rank], rank);
    return plan;
}

/* ------------------------------------------------------------------------------------------ read: JSON */

static void print_text(Value text) {
    putchar('"');
    for (const uint8_t *c = text.bytes.at; c < text.bytes.end; c++)
        if (*c < 0x20) printf("\\u%04x", *c);
        else printf(*c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    putchar('"');
}

static void print_value(Bytes *in) {
    Value value = next(in);
    if (value.type == INT) printf("%lld", (long long)value.number);
    else if (value.type == STR) print_text(value);
    else if (value.type == BOOL) printf(value.number ? "true" : "false");
    else if (value.type == NIL) printf("null");
    else if (value.type == ARRAY || value.type == MAP) {
        putchar(value.type == ARRAY ? '[' : '{');
        for (int64_t i = 0; i < value.number; i++) {
            if (i) putchar(',');
            if (value.type == MAP) print_value(in), putchar(':');
            print_value(in);
        }
        putchar(value.type == ARRAY ? ']' : '}');
    } else refuse("sections: neither numbers with a point nor raw bytes belong there");
}

static void print_section(const char *name, const Plan *plan) {
    Bytes bytes = get(plan->map, name, BIN, "envelope").bytes;
    printf("\"%s\":", name);
    print_value(&bytes);
    printf(",\n");
}

static void print_table(int kind, const Table *table) {
    putchar('[');
    for (int64_t i = 0; i < table->rows; i++) {
        printf(i ? ",[" : "[");
        for (int place = 0; place < FORMS[kind].columns; place++)
            for (int c = 0; c < FORMS[kind].columns; c++)
                if (FORMS[kind].column[c].place == place) printf(place ? ",%lld" : "%lld", (long long)table->column[c][i]);
        putchar(']');
    }
    putchar(']');
}

static void print_programs(const Plan *plan, const Part *part) {
    for (int64_t kind = 0; kind < plan->kinds; kind++) {
        if (kind) putchar(',');
        print_text(plan->kind_name[kind]);
        for (int phase = 0, shown = 0; phase < 2; phase++) {
            if (!(plan->phases[kind] >> phase & 1)) continue;
            printf("%s\"%s\":[", shown++ ? "," : ":{", PHASES[phase]);
            for (int t = 0; t < TABLES; t++) {
                if (t) putchar(',');
                print_table(t, part->programs[kind][phase].table + t);
            }
            putchar(']');
        }
        putchar('}');
    }
}

static void print_plan(const Plan *plan) {
    Value id = get(plan->map, "id", BIN, "envelope");
    printf("{\"id\":\"");
    for (int i = 0; i < 32; i++) printf("%02x", id.bytes.at[i]);
    printf("\",\n");
    print_section("header", plan);
    print_section("layouts", plan);
    print_section("moves", plan);
    printf("\"parts\":[");
    for (int64_t rank = 0; rank < plan->ranks; rank++) {
        const Part *part = plan->parts + rank;
        printf("%s{\"rank\":%lld,\"layouts\":[", rank ? ",\n" : "", (long long)rank);
        for (int64_t i = 0; i < plan->layout_count; i++) {
            if (i) putchar(',');
            print_table(SPANS, part->spans + i);
        }
        printf("],\"programs\":{");
        print_programs(plan, part);
        printf("},\"moves\":[");
        for (int64_t i = 0; i < plan->move_count; i++) {
            if (i) putchar(',');
            print_table(MOVES, part->moves + i);
        }
        printf("]}");
    }
    printf("]}\n");
}

/* ------------------------------------------------------------------------------------------ 6: memory */

enum { NONE, X, Q, KV, O, DX, DQ, DKV, DO, DELTA, TENSORS };

/* Rows of a tensor at home or in the arena of a rank: [rows][heads][width], its components side by side. */
typedef struct { int64_t rows, heads, width; double *data; } Memory;
typedef struct { int64_t tensor, rows, row, count, width; const int64_t *head; Memory *memory; int64_t col; int home; } Operand;
typedef struct { int64_t rank, at, launched; Memory home[TENSORS], work[TENSORS]; const Program *program; } Rank;
typedef struct Mail { struct Mail *next; int64_t round, from, to, tensor, rows, count; const int64_t *head; double *data; } Mail;
typedef struct {
    const Plan *plan;
    int64_t hidden, kind, phase;
    double scale, softcap, *sinks, *dsinks, *w_q, *w_k, *w_v;
    Rank *ranks;
    Mail *first, **last;
    Heads all[2]; /* query heads, KV heads */
} Machine;

static int has_kv_heads(int64_t tensor) { return tensor == KV || tensor == DKV; }
static int has_no_heads(int64_t tensor) { return tensor == X || tensor == DX; }

static int64_t width_of(const Machine *m, int64_t tensor) {
    int64_t d = m->plan->head_dim, v = m->plan->v_head_dim;
    const int64_t widths[TENSORS] = {0, m->hidden + 1, d, d + v, v + 1, m->hidden, d, d + v, v, 2};
    return widths[tensor];
}

static Memory memory_of(const Machine *m, int64_t tensor, int64_t rows, int64_t heads) {
    Memory memory = {rows, has_no_heads(tensor) ? 1 : heads, width_of(m, tensor), 0};
    if (memory.heads && rows > (int64_t)MAX_MEMORY / 8 / memory.heads / (memory.width + 1)) refuse("this takes too much memory");
    memory.data = allot(rows * memory.heads * memory.width, sizeof(double));
    return memory;
}

static int64_t heads_at_home(const Plan *plan, int64_t tensor) { return has_kv_heads(tensor) ? plan->kv_heads : plan->q_heads; }

static int64_t rows_at(const Plan *plan, int64_t layout, int64_t rank) {
    const Table *spans = plan->parts[rank].spans + layout;
    int64_t rows = 0;
    for (int64_t i = 0; i < spans->rows; i++) rows += spans->column[S_LENGTH][i];
    return rows;
}

/* An operand, once its rows and heads were found to be there. */
static Operand operand(const Machine *m, Rank *rank, int64_t number) {
    const Table *table = rank->program->table + OPERAND;
    int64_t *const *v = table->column, set = v[O_HEADS][number];
    Operand x = {v[O_TENSOR][number], v[O_ROWS][number], v[O_ROW][number], 1, 0, 0, 0, v[O_COL][number], !v[O_SPACE][number]};
    x.memory = (x.home ? rank->home : rank->work) + x.tensor;
    x.width = x.memory->width;
    if (!has_no_heads(x.tensor)) {
        const Heads *heads = set ? m->plan->heads + set - 1 : m->all + has_kv_heads(x.tensor);
        x.head = heads->head, x.count = heads->count;
    } else if (set) refuse("operands: X has no heads");
    int64_t columns = x.home ? x.memory->heads : x.memory->heads - x.col;
    if (x.row + x.rows > x.memory->rows || x.count > columns || (x.home && x.col)) refuse("operands: rows or heads that are not there");
    return x;
}

static Operand want(const Machine *m, Rank *rank, int64_t number, int64_t tensor) {
    Operand x = operand(m, rank, number);
    if (x.tensor != tensor) refuse("operands: tensor %d, and not %d", (int)x.tensor, (int)tensor);
    return x;
}

/* Where the numbers of a row and a head of an operand are, heads by their place in it. */
static double *cell(Operand x, int64_t row, int64_t head) {
    int64_t column = has_no_heads(x.tensor) ? 0 : x.home ? x.head[head] : x.col + head;
    return x.memory->data + ((x.row + row) * x.memory->heads + column) * x.width;
}

static int same_heads(const int64_t *a, int64_t a_count, const int64_t *b, int64_t b_count) {
    return a_count == b_count && (!a || !b ? a == b : !memcmp(a, b, (size_t)a_count * sizeof *a));
}

static void alike(Operand a, Operand b) {
    if (a.rows != b.rows || !same_heads(a.head, a.count, b.head, b.count)) refuse("operands: other rows or heads");
}

/* Where the KV head of a query head stands in an operand of keys. */
static int64_t kv_head(const Machine *m, Operand q, int64_t head, Operand kv) {
    int64_t wanted = q.head[head] / (m->plan->q_heads / m->plan->kv_heads);
    for (int64_t i = 0; i < kv.count; i++)
        if (kv.head[i] == wanted) return i;
    refuse("heads: the KV head of a query head is not there");
    return 0;
}

/* ------------------------------------------------------------------------------------------ 7: the ops */

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Adds weight times b to a. */
static void add_to(double *a, double weight, const double *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) a[i] += weight * b[i];
}

static double larger(double a, double b) { return a > b ? a : b; }
/* exp(a - b), where b is at least a; 0 where a is minus infinity. */
static double exp_less(double a, double b) { return a == -INFINITY ? 0 : exp(a - b); }

static double logit(const Machine *m, const double *q, const double *k) {
    double scaled = dot(q, k, m->plan->head_dim) * m->scale;
    return m->softcap > 0 ? m->softcap * tanh(scaled / m->softcap) : scaled;
}

/* Two outputs, each with its LSE behind it, become that over both sets of keys. */
static void merge_row(double *into, const double *from, int64_t n) {
    double top = larger(into[n], from[n]), a = exp_less(into[n], top), b = exp_less(from[n], top), sum = a + b;
    if (top == -INFINITY) return;
    for (int64_t i = 0; i < n; i++) into[i] = (into[i] * a + from[i] * b) / sum;
    into[n] = top + log(sum);
}

static void clear_row(double *row, int64_t tensor, int64_t width) {
    memset(row, 0, (size_t)width * sizeof *row);
    if (tensor == O) row[width - 1] = -INFINITY;
}

/* The keys that a row of a task sees: [*begin, *end). */
static void keys_of(int64_t row, int64_t dmin, int64_t dmax, int64_t keys, int64_t *begin, int64_t *end) {
    *begin = row - dmax > 0 ? row - dmax : 0;
    *end = row - dmin + 1 < keys ? row - dmin + 1 : keys;
}

static void attend(const Machine *m, Rank *rank, int64_t *const *v, int64_t i) {
    Operand q = want(m, rank, v[0][i], Q), kv = want(m, rank, v[1][i], KV), o = want(m, rank, v[2][i], O);
    int64_t d = m->plan->head_dim, n = m->plan->v_head_dim, begin, end;
    double *row_o = allot(n + 1, sizeof *row_o);
    alike(q, o);
    for (int64_t row = 0; row < q.rows; row++)
        for (int64_t head = 0; head < q.count; head++) {
            int64_t own = kv_head(m, q, head, kv);
            double top = -INFINITY, sum = 0, *into = cell(o, row, head);
            clear_row(row_o, O, n + 1);
            if (v[5][i]) clear_row(into, O, n + 1);
            keys_of(row, v[3][i], v[4][i], kv.rows, &begin, &end);
            for (int64_t key = begin; key < end; key++) top = larger(top, logit(m, cell(q, row, head), cell(kv, key, own)));
            for (int64_t key = begin; key < end; key++) {
                double weight = exp_less(logit(m, cell(q, row, head), cell(kv, key, own)), top);
                add_to(row_o, weight, cell(kv, key, own) + d, n);
                sum += weight;
            }
            if (begin >= end) continue;
            for (int64_t x = 0; x < n; x++) row_o[x] /= sum;
            row_o[n] = top + log(sum);
            merge_row(into, row_o, n);
        }
}

static void attend_grad(const Machine *m, Rank *rank, int64_t *const *v, int64_t i) {
    Operand q = want(m, rank, v[0][i], Q), kv = want(m, rank, v[1][i], KV), go = want(m, rank, v[2][i], DO);
    Operand delta = want(m, rank, v[3][i], DELTA), dq = want(m, rank, v[4][i], DQ), dkv = want(m, rank, v[5][i], DKV);
    int64_t d = m->plan->head_dim, n = m->plan->v_head_dim, begin, end;
    alike(q, go), alike(q, delta), alike(q, dq), alike(kv, dkv);
    for (int64_t key = 0; key < dkv.rows && v[8][i] & 2; key++)
        for (int64_t head = 0; head < dkv.count; head++) clear_row(cell(dkv, key, head), DKV, dkv.width);
    for (int64_t row = 0; row < q.rows; row++)
        for (int64_t head = 0; head < q.count; head++) {
            int64_t own = kv_head(m, q, head, kv);
            const double *stats = cell(delta, row, head), *row_do = cell(go, row, head), *row_q = cell(q, row, head);
            double *row_dq = cell(dq, row, head);
            if (v[8][i] & 1) clear_row(row_dq, DQ, d);
            keys_of(row, v[6][i], v[7][i], kv.rows, &begin, &end);
            for (int64_t key = begin; key < end && stats[0] > -INFINITY; key++) {
                const double *k = cell(kv, key, own);
                double *dk = cell(dkv, key, own), s = logit(m, row_q, k), p = exp(s - stats[0]);
                double bend = m->softcap > 0 ? 1 - s / m->softcap * (s / m->softcap) : 1;
                double ds = p * (dot(row_do, k + d, n) - stats[1]) * bend * m->scale;
                add_to(row_dq, ds, k, d);
                add_to(dk, ds, row_q, d);
                add_to(dk + d, p, row_do, n);
            }
        }
}

static void delta(const Machine *m, Rank *rank, int64_t *const *v, int64_t i) {
    Operand go = want(m, rank, v[0][i], DO), o = want(m, rank, v[1][i], O), c = want(m, rank, v[2][i], DELTA);
    int64_t n = m->plan->v_head_dim;
    alike(go, o), alike(go, c);
    for (int64_t row = 0; row < c.rows; row++)
        for (int64_t head = 0; head < c.count; head++) {
            double *stats = cell(c, row, head), sink = m->sinks[c.head[head]];
            stats[0] = cell(o, row, head)[n];
            stats[1] = dot(cell(go, row, head), cell(o, row, head), n);
            if (stats[0] > -INFINITY) m->dsinks[c.head[head]] -= exp_less(sink, stats[0]) * stats[1];
        }
}

/* merge, add, copy and deliver: rows of `a` go to `c`. */
static void move_rows(const Machine *m, Rank *rank, int64_t op, int64_t *const *v, int64_t i) {
    Operand a = operand(m, rank, v[0][i]), c = operand(m, rank, v[2][i]);
    int sums = op == 6 || op == 7;
    if (!a.tensor || a.tensor != c.tensor || (op == 6) != (sums && a.tensor == O)) refuse("operands: another tensor");
    alike(a, c);
    for (int64_t row = 0; row < a.rows; row++)
        for (int64_t head = 0; head < a.count; head++) {
            double *into = cell(c, row, head), *from = cell(a, row, head);
            if (!sums || v[4][i]) memmove(into, from, (size_t)a.width * sizeof *into);
            else if (op == 6) merge_row(into, from, a.width - 1);
            else add_to(into, 1, from, a.width);
        }
}

static void clear(const Machine *m, Rank *rank, int64_t *const *v, int64_t i) {
    Operand c = operand(m, rank, v[2][i]);
    for (int64_t row = 0; row < c.rows; row++)
        for (int64_t head = 0; head < c.count; head++) clear_row(cell(c, row, head), c.tensor, c.width);
}

static void finish(const Machine *m, Rank *rank, int64_t *const *v, int64_t i) {
    Operand c = want(m, rank, v[2][i], O);
    double *sink = allot(c.width, sizeof *sink);
    for (int64_t row = 0; row < c.rows; row++)
        for (int64_t head = 0; head < c.count; head++) {
            sink[c.width - 1] = m->sinks[c.head[head]]; /* a key of its own, whose value is 0 */
            merge_row(cell(c, row, head), sink, c.width - 1);
        }
}

/* The projection of the suite, (1 + position / 8) x W, or its gradient, for one operand; weights: [heads][hidden][width]. */
static void project_part(const Machine *m, Operand x, Operand to, int64_t offset, int64_t width, const double *weights, Operand dx) {
    for (int64_t row = 0; row < x.rows; row++)
        for (int64_t head = 0; head < to.count; head++) {
            const double *in = cell(x, row, 0), *w = weights + to.head[head] * m->hidden * width;
            double *out = cell(to, row, head) + offset, factor = 1 + in[m->hidden] / 8;
            if (!dx.tensor) memset(out, 0, (size_t)width * sizeof *out);
            for (int64_t e = 0; e < m->hidden; e++, w += width)
                if (dx.tensor) cell(dx, row, 0)[e] += factor * dot(out, w, width);
                else add_to(out, factor * in[e], w, width);
        }
}

static void project(const Machine *m, Rank *rank, int64_t op, int64_t *const *v, int64_t i) {
    int gradient = op == 11;
    Operand x = want(m, rank, v[0][i], X), dx = {0};
    int64_t d = m->plan->head_dim, n = m->plan->v_head_dim;
    if (!m->hidden) refuse("the case has no projection");
    if (gradient) {
        dx = want(m, rank, v[3][i], DX);
        alike(x, dx);
        for (int64_t row = 0; row < dx.rows && v[4][i]; row++) clear_row(cell(dx, row, 0), DX, dx.width);
    }
    for (int column = 1; column <= 2; column++) {
        int64_t tensor = column == 1 ? (gradient ? DQ : Q) : (gradient ? DKV : KV);
        if (!v[column][i]) continue;
        Operand to = want(m, rank, v[column][i], tensor);
        if (to.rows != x.rows) refuse("operands: other rows");
        project_part(m, x, to, 0, d, column == 1 ? m->w_q : m->w_k, dx);
        if (column == 2) project_part(m, x, to, d, n, m->w_v, dx);
    }
}

/* ------------------------------------------------------------------------------------------ 8: rounds */

/* The nearest number of bf16 or fp16, ties to even. */
static double rounded(double x, int narrow) {
    int exponent, digits = narrow == 1 ? 8 : 11, least = narrow == 1 ? -125 : -13;
    float narrower = (float)x; /* as a float32 is rounded: accumulators are float32 */
    if (narrow == 1) x = narrower;
    if (x == 0 || !isfinite(x)) return x;
    frexp(x, &exponent);
    double unit = ldexp(1, (exponent < least ? least : exponent) - digits), found = nearbyint(x / unit) * unit;
    return narrow == 2 && fabs(found) > 65504 ? copysign(INFINITY, found) : found;
}

static void launch(Machine *m, Rank *rank, const Table *list, int64_t begin, int64_t end, int64_t round) {
    if (round <= rank->launched) refuse("transfers: rounds must rise");
    rank->launched = round;
    for (int64_t i = begin; i < end; i++) {
        Operand x = operand(m, rank, list->column[T_OPERAND][i]);
        Mail *mail = allot(1, sizeof *mail);
        double *data = mail->data = allot(x.rows * x.count * x.width, sizeof(double));
        if (!list->column[T_SEND][i]) continue;
        mail->round = round, mail->from = rank->rank, mail->to = list->column[T_PEER][i];
        mail->tensor = x.tensor, mail->rows = x.rows, mail->count = x.count, mail->head = x.head;
        int narrow = x.tensor >= DX && x.tensor <= DKV ? m->plan->narrow : 0;
        for (int64_t row = 0; row < x.rows; row++)
            for (int64_t head = 0; head < x.count; head++)
                for (int64_t n = 0; n < x.width; n++, data++)
                    *data = narrow ? rounded(cell(x, row, head)[n], narrow) : cell(x, row, head)[n];
        *m->last = mail;
        m->last = &mail->next;
    }
}

/* The launch of a round in a program so far, and the first of its transfers; its number of transfers. */
static int64_t launched(const Rank *rank, int64_t round, int64_t *first) {
    int64_t *const *step = rank->program->table[INSTRUCTIONS].column, found = -1, begin = 0;
    for (int64_t at = 0; at < rank->at; at++) {
        if (step[I_OP][at] != 1) continue;
        if (step[I_ROUND][at] == round) found = at, *first = begin;
        begin += step[I_COUNT][at];
    }
    if (found < 0) refuse("transfers: a wait without its launch");
    return step[I_COUNT][found];
}

/* Takes what has arrived; 0 where a peer has not sent yet. */
static int wait(Machine *m, Rank *rank, int64_t round) {
    const Table *list = rank->program->table + TRANSFERS;
    int64_t first, count = launched(rank, round, &first);
    for (int64_t i = first; i < first + count; i++)
        if (m->ranks[list->column[T_PEER][i]].launched < round) return 0;
    for (int64_t i = first; i < first + count; i++) {
        Operand x = operand(m, rank, list->column[T_OPERAND][i]);
        Mail **link = &m->first;
        if (list->column[T_SEND][i]) continue;
        while (*link && ((*link)->round != round || (*link)->to != rank->rank || (*link)->from != list->column[T_PEER][i]))
            link = &(*link)->next;
        Mail *mail = *link;
        if (!mail || mail->tensor != x.tensor || mail->rows != x.rows || !same_heads(mail->head, mail->count, x.head, x.count))
            refuse("transfers: a receive meets no send of the same rows and heads");
        double *data = mail->data;
        for (int64_t row = 0; row < x.rows; row++)
            for (int64_t head = 0; head < x.count; head++, data += x.width)
                memcpy(cell(x, row, head), data, (size_t)x.width * sizeof *data);
        if (!(*link = mail->next)) m->last = link;
    }
    return 1;
}

/* Runs a rank up to its end, or to a wait that others keep; used: rows taken of each list. */
static void advance(Machine *m, Rank *rank, int64_t used[TABLES]) {
    const Table *steps = rank->program->table + INSTRUCTIONS;
    for (; rank->at < steps->rows; rank->at++) {
        int64_t op = steps->column[I_OP][rank->at], round = steps->column[I_ROUND][rank->at];
        int list = LIST_OF_OP[op];
        const Table *table = rank->program->table + list;
        if (op == 2) {
            if (!wait(m, rank, round)) return;
            continue;
        }
        int64_t begin = used[list], end = used[list] += steps->column[I_COUNT][rank->at];
        if (op == 1) launch(m, rank, table, begin, end, round);
        for (int64_t i = begin; i < end && op > 2; i++) {
            if (op == 3) attend(m, rank, table->column, i);
            else if (op == 4) attend_grad(m, rank, table->column, i);
            else if (op == 5) delta(m, rank, table->column, i);
            else if (op == 9) clear(m, rank, table->column, i);
            else if (op == 10 || op == 11) project(m, rank, op, table->column, i);
            else if (op == 12) finish(m, rank, table->column, i);
            else move_rows(m, rank, op, table->column, i);
        }
    }
}

static void run_phase(Machine *m, int64_t kind, int phase) {
    const Plan *plan = m->plan;
    int64_t (*used)[TABLES] = allot(plan->ranks, sizeof *used), done = 0, moved = 1;
    if (!(plan->phases[kind] >> phase & 1)) refuse("the plan has no such phase");
    m->first = 0, m->last = &m->first;
    for (int64_t n = 0; n < plan->ranks; n++) {
        Rank *rank = m->ranks + n;
        rank->program = plan->parts[n].programs[kind] + phase;
        rank->at = 0, rank->launched = -1;
        memset(rank->work, 0, sizeof rank->work);
        const Table *arenas = rank->program->table + ARENAS;
        for (int64_t i = 0; i < arenas->rows; i++) {
            int64_t tensor = arenas->column[A_TENSOR][i];
            rank->work[tensor] = memory_of(m, tensor, arenas->column[A_ROWS][i], arenas->column[A_HEADS][i]);
        }
    }
    while (moved && done < plan->ranks)
        for (int64_t n = done = moved = 0; n < plan->ranks; n++) {
            int64_t before = m->ranks[n].at;
            advance(m, m->ranks + n, used[n]);
            moved += m->ranks[n].at - before;
            done += m->ranks[n].at == m->ranks[n].program->table[INSTRUCTIONS].rows;
        }
    if (done < plan->ranks) refuse("transfers: no rank can go on");
}

/* ------------------------------------------------------------------------------------------ a case of the suite */

static double *take(Bytes *in, int64_t count) {
    double *found = allot(count, sizeof *found);
    if (count * 8 > in->end - in->at) refuse("inputs.f64 ends too soon");
    for (int64_t i = 0; i < count; i++, in->at += 8) {
        uint64_t bits = 0;
        for (int byte = 0; byte < 8; byte++) bits |= (uint64_t)in->at[byte] << 8 * byte;
        memcpy(found + i, &bits, 8);
    }
    return found;
}

static void give(FILE *out, double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    for (int byte = 0; byte < 8; byte++) fputc((int)(bits >> 8 * byte & 255), out);
}

/* One component of home rows from the inputs, or to the outputs. */
static void take_home(Bytes *in, Memory memory, int64_t offset, int64_t width) {
    const double *from = take(in, memory.rows * memory.heads * width);
    for (int64_t i = 0; i < memory.rows * memory.heads; i++, from += width)
        memcpy(memory.data + i * memory.width + offset, from, (size_t)width * sizeof *from);
}

static void give_home(FILE *out, Memory memory, int64_t offset, int64_t width) {
    for (int64_t i = 0; i < memory.rows * memory.heads; i++)
        for (int64_t n = 0; n < width; n++) give(out, memory.data[i * memory.width + offset + n]);
}

static void set_positions(const Plan *plan, Rank *rank, int64_t hidden) {
    const Table *spans = plan->parts[rank->rank].spans + plan->home;
    for (int64_t i = 0; i < spans->rows; i++)
        for (int64_t n = 0; n < spans->column[S_LENGTH][i]; n++) {
            int64_t row = spans->column[S_ROW][i] + n;
            if (row >= rank->home[X].rows) refuse("layouts: a row that is not there");
            rank->home[X].data[row * (hidden + 1) + hidden] = (double)(spans->column[S_POSITION][i] + n);
        }
}

static void run_kind(Machine *m, Bytes *in, FILE *out, int64_t kind) {
    const Plan *plan = m->plan;
    int64_t d = plan->head_dim, n = plan->v_head_dim;
    m->scale = *take(in, 1), m->softcap = *take(in, 1), m->sinks = take(in, plan->q_heads);
    m->dsinks = allot(plan->q_heads, sizeof(double));
    for (int64_t r = 0; r < plan->ranks; r++) {
        Rank *rank = m->ranks + r;
        rank->rank = r;
        for (int64_t tensor = X; tensor < TENSORS; tensor++)
            rank->home[tensor] = memory_of(m, tensor, rows_at(plan, plan->home, r), heads_at_home(plan, tensor));
        if (m->hidden) take_home(in, rank->home[X], 0, m->hidden), set_positions(plan, rank, m->hidden);
        else take_home(in, rank->home[Q], 0, d), take_home(in, rank->home[KV], 0, d), take_home(in, rank->home[KV], d, n);
        take_home(in, rank->home[DO], 0, n);
    }
    run_phase(m, kind, 0);
    run_phase(m, kind, 1);
    for (int64_t head = 0; head < plan->q_heads; head++) give(out, m->dsinks[head]);
    for (int64_t r = 0; r < plan->ranks; r++) {
        Memory *home = m->ranks[r].home;
        give_home(out, home[O], 0, n), give_home(out, home[O], n, 1);
        if (m->hidden) give_home(out, home[DX], 0, m->hidden);
        else give_home(out, home[DQ], 0, d), give_home(out, home[DKV], 0, d), give_home(out, home[DKV], d, n);
    }
}

/* The layouts that a move is between. */
static void ends_of(const Plan *plan, int64_t move, int64_t ends[2]) {
    Bytes in = plan->moves.bytes;
    for (int64_t i = 0; i <= move; i++) {
        next(&in);
        for (int n = 0; n < 2; n++) ends[n] = place_of(whole(&in, 0), plan->layout_name, plan->layout_count, "no layout");
    }
}

/* The row of a layout that a token is on. */
static void tokens_of(const Plan *plan, int64_t layout, int64_t rank, double *token, int64_t rows) {
    const Table *spans = plan->parts[rank].spans + layout;
    for (int64_t i = 0; i < spans->rows; i++)
        for (int64_t n = 0; n < spans->column[S_LENGTH][i]; n++) {
            if (spans->column[S_ROW][i] + n >= rows) refuse("layouts: a row that is not there");
            token[spans->column[S_ROW][i] + n] = (double)(spans->column[S_TOKEN][i] + n);
        }
}

/* Sends the number of each token from the rows of the source layout to those of the target. */
static void run_move(const Plan *plan, FILE *out, int64_t move) {
    int64_t ends[2];
    double **token = allot(plan->ranks, sizeof *token);
    ends_of(plan, move, ends);
    for (int64_t r = 0; r < plan->ranks; r++) {
        int64_t rows = rows_at(plan, ends[0], r);
        tokens_of(plan, ends[0], r, token[r] = allot(rows, sizeof(double)), rows);
    }
    for (int64_t to = 0; to < plan->ranks; to++) {
        const Table *mine = plan->parts[to].moves + move;
        int64_t rows = rows_at(plan, ends[1], to), *next_row = allot(plan->ranks, sizeof *next_row);
        double *found = allot(rows, sizeof *found);
        for (int64_t i = 0; i < mine->rows; i++) {
            int64_t peer = mine->column[M_PEER][i], n = mine->column[M_ROWS][i], row = mine->column[M_ROW][i];
            const Table *theirs = plan->parts[peer].moves + move;
            if (mine->column[M_SEND][i]) continue;
            while (next_row[peer] < theirs->rows && (!theirs->column[M_SEND][next_row[peer]] || theirs->column[M_PEER][next_row[peer]] != to))
                next_row[peer]++;
            int64_t at = next_row[peer]++;
            if (at >= theirs->rows || theirs->column[M_ROWS][at] != n || row + n > rows ||
                theirs->column[M_ROW][at] + n > rows_at(plan, ends[0], peer)) refuse("layouts: a move does not meet another");
            memcpy(found + row, token[peer] + theirs->column[M_ROW][at], (size_t)n * sizeof *found);
        }
        for (int64_t row = 0; row < rows; row++) give(out, found[row]);
    }
}

static void run_case(const char *folder, const char *outputs) {
    Plan plan = read_plan(read_file(folder, "/case.plan"));
    Bytes in = read_file(folder, "/inputs.f64");
    Machine m = {.plan = &plan};
    double hidden = *take(&in, 1);
    if (!(hidden >= 0 && hidden <= 65536)) refuse("inputs.f64: a width of X that cannot be");
    m.hidden = (int64_t)hidden;
    if (m.hidden) {
        m.w_q = take(&in, plan.q_heads * m.hidden * plan.head_dim);
        m.w_k = take(&in, plan.kv_heads * m.hidden * plan.head_dim);
        m.w_v = take(&in, plan.kv_heads * m.hidden * plan.v_head_dim);
    }
    for (int side = 0; side < 2; side++) {
        m.all[side].head = allot(m.all[side].count = side ? plan.kv_heads : plan.q_heads, sizeof(int64_t));
        for (int64_t i = 0; i < m.all[side].count; i++) m.all[side].head[i] = i;
    }
    m.ranks = allot(plan.ranks, sizeof(Rank));
    FILE *out = fopen(outputs, "wb");
    if (!out) refuse("%s cannot be written", outputs);
    for (int64_t kind = 0; kind < plan.kinds; kind++) run_kind(&m, &in, out, kind);
    for (int64_t move = 0; move < plan.move_count; move++) run_move(&plan, out, move);
    if (fclose(out)) refuse("%s cannot be written", outputs);
}

int main(int count, char **words) {
    atexit(give_back);
    if (count == 3 && !strcmp(words[1], "check")) read_plan(read_file("", words[2]));
    else if (count == 3 && !strcmp(words[1], "read")) {
        Plan plan = read_plan(read_file("", words[2]));
        print_plan(&plan);
    } else if (count == 4 && !strcmp(words[1], "run")) run_case(words[2], words[3]);
    else {
        fprintf(stderr, "execute_plan read PLAN | check PLAN | run CASE OUTPUTS\n");
        return 2;
    }
    return 0;
}
