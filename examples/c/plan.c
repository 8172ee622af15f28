/* Reads a plan from untrusted bytes: if they are wrong, the program ends with a message and exit code 1, without invalid
 * memory accesses. Written from apportion/schemas/FORMAT.md, whose sections the comments name. */
#include "plan.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void refuse(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    exit(1);
}

typedef struct Block { struct Block *next; double aligned[]; } Block;
static Block *blocks;
static size_t allotted;

void give_back(void) {
    while (blocks) {
        Block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
}

void *allot(int64_t count, size_t size) {
    if (count < 0 || (uint64_t)count > (MAX_MEMORY - allotted) / size) refuse("this takes too much memory");
    Block *block = calloc(1, sizeof(Block) + (size_t)count * size);
    if (!block) refuse("out of memory");
    allotted += (size_t)count * size;
    block->next = blocks;
    blocks = block;
    return block->aligned;
}

/* ------------------------------------------------------------------------------------------ MessagePack */

static uint64_t big_endian(Bytes *in, int size) {
    uint64_t number = 0;
    if (in->end - in->at < size) refuse("envelope: it ends too soon");
    while (size--) number = number << 8 | *in->at++;
    return number;
}

static Value sized(Bytes *in, Type type, uint64_t size) {
    Value value = {type, (int64_t)size, {in->at, in->at}};
    if (size > (uint64_t)(in->end - in->at)) refuse("envelope: a length goes beyond the end"); /* an item takes at least a byte */
    if (type == STR || type == BIN) value.bytes.end = in->at += size;
    return value;
}

static Value integer(uint64_t bits, int bytes, int is_signed) {
    if (!is_signed && bits > INT64_MAX) refuse("values: an integer is too large");
    if (is_signed && bytes < 8 && bits >> (8 * bytes - 1)) bits |= ~(uint64_t)0 << 8 * bytes;
    Value value = {INT, 0, {0, 0}};
    memcpy(&value.number, &bits, 8);
    return value;
}

/* The next value; of an array or a map only its head, as its items follow. */
Value next(Bytes *in) {
    uint8_t head = (uint8_t)big_endian(in, 1);
    Value value = {NIL, 0, {0, 0}};
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

/* The whole value: `bytes` of an array or a map are its items. */
Value whole(Bytes *in, int depth) {
    Value value = next(in);
    int64_t items = value.type == ARRAY ? value.number : value.type == MAP ? 2 * value.number : 0;
    if (depth > 32) refuse("envelope: it is nested too deeply");
    for (; items; items--) whole(in, depth + 1);
    if (value.type >= ARRAY) value.bytes.end = in->at;
    return value;
}

static Value only_value(Bytes in, Type type, const char *what) {
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

/* The value of a map's key. found: set to whether the key exists. */
static Value find(Value map, const char *key, int *found) {
    Bytes in = map.bytes;
    Value value = {NIL, 0, {0, 0}};
    *found = 0;
    for (int64_t n = 0; n < map.number && !*found; n++) {
        *found = is(whole(&in, 0), key);
        value = whole(&in, 0);
    }
    return value;
}

Value get(Value map, const char *key, Type type, const char *what) {
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

/* BLAKE2b of `prefix` followed by `data`. */
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

/* The id, from the digests of the sections and the root of the tree over parts. */
static Digest id_of(const Digest sections[5], Digest root) {
    static const char MAGIC[] = "apportion.plan"; /* including the final zero */
    Digest six[6];
    memcpy(six, sections, 5 * sizeof *six);
    six[5] = root;
    return hash(MAGIC, sizeof MAGIC, bytes_of(six, sizeof six));
}

static Digest root_of(const Bytes *parts, int64_t ranks) {
    Digest *level = allot(ranks, sizeof *level);
    for (int64_t rank = 0; rank < ranks; rank++) level[rank] = hash("\0", 1, parts[rank]);
    for (int64_t n = ranks; n > 1; n = (n + 1) / 2) {
        for (int64_t i = 0; 2 * i + 1 < n; i++) level[i] = hash("\1", 1, bytes_of(level + 2 * i, 64));
        if (n & 1) level[n / 2] = level[n - 1];
    }
    return level[0];
}

static Digest next_digest(Bytes *list) {
    Value value = whole(list, 0);
    Digest digest;
    if (value.type != BIN || value.number != 32) refuse("id: a digest has 32 bytes");
    memcpy(digest.bytes, value.bytes.at, 32);
    return digest;
}

/* Section 10: the root, from a rank's part and the sibling hashes on its path. */
static Digest climb(Bytes part, int64_t rank, int64_t ranks, Value path) {
    Digest node = hash("\0", 1, part);
    for (int64_t i = rank, n = ranks; n > 1; i /= 2, n = (n + 1) / 2) {
        Digest pair[2];
        if ((i ^ 1) >= n) continue;
        if (!path.number--) refuse("id: the path is too short");
        pair[i & 1] = node;
        pair[~i & 1] = next_digest(&path.bytes);
        node = hash("\1", 1, bytes_of(pair, sizeof pair));
    }
    if (path.number) refuse("id: the path is too long");
    return node;
}

/* ------------------------------------------------------------------------------------------ 4: tables */

const Form FORMS[] = {
    [ARENAS] = {3, {{"tensor", 1, 9}, {"rows", 1, LIMIT}, {"heads", 0, 65536}}},
    [OPERAND] = {6, {{"tensor", 0, 9}, {"space", 0, 1}, {"row", 0, LIMIT}, {"rows", 0, LIMIT}, {"col", 0, 65536}, {"heads", 0, HEAD_SETS}}},
    [INSTRUCTIONS] = {5, {{"op", 1, 13}, {"round", 0, LIMIT}, {"channel", 0, LIMIT}, {"mode", 0, 3}, {"count", 0, LIMIT}}},
    [TRANSFERS] = {3, {{"send", 0, 1}, {"peer", 0, PEERS}, {"operand", 0, OPERANDS}}},
    [TASKS] = {6, {{"q", 0, OPERANDS}, {"kv", 0, OPERANDS}, {"o", 0, OPERANDS}, {"dmin", -LIMIT, LIMIT}, {"dmax", -LIMIT, LIMIT},
                   {"first", 0, 1}}},
    [GRADS] = {9, {{"q", 0, OPERANDS}, {"kv", 0, OPERANDS}, {"do", 0, OPERANDS}, {"delta", 0, OPERANDS}, {"dq", 0, OPERANDS},
                   {"dkv", 0, OPERANDS}, {"dmin", -LIMIT, LIMIT}, {"dmax", -LIMIT, LIMIT}, {"first", 0, 3}}},
    [ROWOPS] = {5, {{"a", 0, OPERANDS}, {"b", 0, OPERANDS}, {"c", 0, OPERANDS}, {"d", 0, OPERANDS}, {"first", 0, 1}}},
    [SPANS] = {5, {{"row", 0, LIMIT}, {"token", 0, LIMIT}, {"length", 1, LIMIT}, {"sequence", 0, LIMIT}, {"position", 0, LIMIT}}},
    [MOVES] = {4, {{"send", 0, 1}, {"peer", 0, PEERS}, {"row", 0, LIMIT}, {"rows", 1, LIMIT}}},
    [RUNS] = {7, {{"row", 0, LIMIT}, {"rows", 1, LIMIT}, {"sequence", 0, LIMIT}, {"position", 0, LIMIT}, {"peer", 0, PEERS},
                  {"past", -1, LIMIT}, {"leads", 0, 1}}},
    [FOLDS] = {6, {{"kind", 0, KINDS}, {"head", 0, LIMIT}, {"heads", 1, 65536}, {"peer", 0, PEERS}, {"run", 0, LIMIT},
                   {"parent", -1, LIMIT}}},
    [STATES] = {5, {{"kind", 0, KINDS}, {"head", 0, LIMIT}, {"heads", 1, 65536}, {"peer", 0, PEERS}, {"run", 0, LIMIT}}},
    [HALO] = {4, {{"send", 0, 1}, {"peer", 0, PEERS}, {"row", 0, LIMIT}, {"rows", 1, LIMIT}}}};

static uint64_t little_endian(Bytes *in, int size) {
    uint64_t number = 0;
    if (in->end - in->at < size) refuse("tables: the part ends too soon");
    for (int i = 0; i < size; i++) number |= (uint64_t)*in->at++ << 8 * i;
    return number;
}

static int64_t bound(int64_t most, const Plan *plan, const Table *operands) {
    if (most == HEAD_SETS) return plan->head_sets;
    if (most == PEERS) return plan->ranks - 1;
    if (most == KINDS) return plan->recurrent_count - 1;
    return most == OPERANDS ? operands->rows - 1 : most;
}

static int width_of(int64_t low, int64_t high) {
    if (!low && !high) return 0;
    if (low >= INT8_MIN && high <= INT8_MAX) return 1;
    if (low >= INT16_MIN && high <= INT16_MAX) return 2;
    return low >= INT32_MIN && high <= INT32_MAX ? 4 : 8;
}

static int read_column(const Column *column, Bytes *part, const Plan *plan, const Table *operands, int64_t rows, int64_t *values) {
    int width = (int)little_endian(part, 1);
    int64_t low = 0, high = 0, most = bound(column->most, plan, operands);
    uint64_t last = 0;
    if (width != 0 && width != 1 && width != 2 && width != 4 && width != 8) refuse("tables: a width of %d", width);
    if (width * rows > part->end - part->at) refuse("tables: the part ends too soon");
    for (int64_t i = 0; i < rows; i++) {
        uint64_t bits = little_endian(part, width);
        int64_t step;
        if (width && width < 8 && bits >> (8 * width - 1)) bits |= ~(uint64_t)0 << 8 * width;
        memcpy(&step, &bits, 8);
        low = step < low ? step : low, high = step > high ? step : high;
        last += bits;
        memcpy(values + i, &last, 8);
        if (values[i] < column->least || values[i] > most) refuse("values: %s = %lld cannot be", column->name, (long long)values[i]);
    }
    if (width != width_of(low, high)) refuse("tables: a column is wider than its differences");
    return width;
}

/* operands: of the program, if the table refers to them. */
static Table read_table(int kind, Bytes *part, const Plan *plan, const Table *operands) {
    const Form *form = FORMS + kind;
    Table table = {(int64_t)little_endian(part, 4), {0}};
    int wide = 0;
    if (table.rows > 1 << 24 || (table.rows > 1 && table.rows > part->end - part->at)) refuse("tables: too many rows");
    for (int c = 0; c < form->columns && table.rows; c++) {
        table.column[c] = allot(table.rows, sizeof *table.column[c]);
        wide |= read_column(form->column + c, part, plan, operands, table.rows, table.column[c]);
    }
    if (table.rows > 1 && !wide) refuse("tables: rows that take no byte");
    return table;
}

/* ------------------------------------------------------------------------------------------ 3 and 4: the plan */

const char *const PHASES[2] = {"forward", "backward"};
const int LIST_OF_OP[14] = {0, TRANSFERS, 0, TASKS, GRADS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS, ROWOPS};

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
        if (names[i].type != STR || !names[i].number || names[i].number > 512) /* 128 characters */ refuse("sections: %s must be names", key);
        for (int64_t j = 0; j < i; j++)
            if (equal(names[i], names[j])) refuse("sections: a name of %s twice", key);
    }
    return names;
}

int64_t place_of(Value name, const Value *names, int64_t count, const char *what) {
    for (int64_t i = 0; i < count; i++)
        if (equal(name, names[i])) return i;
    refuse("%s", what);
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

static void check_diagonals(const Plan *plan) {
    Value map = get(plan->header, "diagonals", MAP, "sections");
    const int64_t most = (int64_t)1 << 62;
    if (map.number != plan->kinds) refuse("sections: diagonals must be of each kind");
    for (int64_t kind = 0; kind < plan->kinds; kind++) {
        int64_t at = place_of(whole(&map.bytes, 0), plan->kind_name, plan->kinds, "sections: diagonals of no kind");
        Value list = whole(&map.bytes, 0);
        int64_t before[2] = {INT64_MIN, INT64_MIN}, found[2];
        if (list.type != ARRAY || list.number > 8) refuse("sections: at most 8 diagonals of kind %d", (int)at);
        for (int64_t i = 0; i < list.number; i++, before[0] = found[0], before[1] = found[1]) {
            Value pair = whole(&list.bytes, 0);
            if (pair.type != ARRAY || pair.number != 2) refuse("sections: a diagonal has dmin and dmax");
            for (int n = 0; n < 2; n++) {
                Value number = whole(&pair.bytes, 0);
                if (number.type != INT) refuse("sections: diagonals are integers");
                found[n] = number.number;
            }
            int rises = found[0] > before[0] || (found[0] == before[0] && found[1] > before[1]);
            if (found[0] < -most || found[0] > found[1] || found[1] > most || !rises) refuse("sections: such diagonals cannot be");
        }
    }
}

static void read_phases(Plan *plan) {
    Value list = get(plan->header, "phases", ARRAY, "sections");
    for (int64_t i = 0; i < list.number; i++) {
        Value phase = whole(&list.bytes, 0);
        int number = is(phase, PHASES[1]);
        if ((!number && !is(phase, PHASES[0])) || plan->phases >> number) refuse("sections: phases are forward and backward");
        plan->phases |= 1 << number;
    }
    if (!plan->phases) refuse("sections: no phase");
}

static void read_recurrent(Plan *plan, Value map) {
    if (map.type != MAP || !map.number || map.number > 16) refuse("sections: recurrent has 1 to 16 kinds");
    plan->recurrent = allot(plan->recurrent_count = map.number, sizeof(Recurrent));
    for (int64_t i = 0; i < map.number; i++) {
        Recurrent *kind = plan->recurrent + i;
        Value name = whole(&map.bytes, 0), held = whole(&map.bytes, 0), gate;
        if (name.type != STR || !name.number || name.number > 512 || held.type != MAP) refuse("sections: a recurrent kind is a map");
        for (int64_t n = 0; n < plan->kinds; n++)
            if (equal(name, plan->kind_name[n])) refuse("sections: a recurrent kind has the name of another");
        kind->heads = whole_number(held, "heads", 1, 65536);
        kind->key_heads = whole_number(held, "key_heads", 1, 65536);
        kind->key_dim = whole_number(held, "key_dim", 1, 65536);
        kind->value_dim = whole_number(held, "value_dim", 1, 65536);
        kind->conv = whole_number(held, "conv", 0, 1024);
        whole_number(held, "layers", 1, 1 << 24);
        kind->delta = get(held, "delta", BOOL, "sections").number != 0;
        kind->diagonal = is(gate = get(held, "gate", STR, "sections"), "diagonal");
        if ((!kind->diagonal && !is(gate, "scalar")) || kind->heads % kind->key_heads) refuse("sections: such a recurrent kind cannot be");
        if (kind->conv > plan->width) plan->width = kind->conv;
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
    sent = find(header, "sent_gradients", &found);
    if (found && (!is(sent, "model") || !half)) refuse("sections: sent_gradients cannot be that");
    plan->narrow = found ? half : 0;
    plan->kind_name = names_of(header, "kinds", &plan->kinds);
    plan->layout_name = names_of(header, "layouts", &plan->layout_count);
    read_phases(plan);
    plan->home = place_of(home, plan->layout_name, plan->layout_count, "sections: home_layout is no layout");
    read_head_sets(plan);
    check_diagonals(plan);
    plan->width = 1;
    sent = find(header, "recurrent", &found);
    if (found) read_recurrent(plan, sent);
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

/* Section 18: checks that the tables of recurrent layers refer to existing rows. */
static void check_recurrent(const Plan *plan, const Table *table) {
    const Table *runs = table, *halo = table + HALO - RUNS;
    for (int64_t i = 0, end = 0; i < runs->rows; end = runs->column[R_ROW][i] + runs->column[R_ROWS][i], i++) {
        if (runs->column[R_ROW][i] != end) refuse("values: a run does not begin where the one before it ends");
        if (runs->column[R_PAST][i] < 0 && runs->column[R_PEER][i]) refuse("values: a peer without a past");
    }
    for (int t = FOLDS; t <= STATES; t++) {
        const Table *rows = table + t - RUNS;
        for (int64_t i = 0; i < rows->rows; i++) {
            if (rows->column[F_HEAD][i] + rows->column[F_HEADS][i] > plan->recurrent[rows->column[F_KIND][i]].heads)
                refuse("indexes: a head that is not there");
            if (t == FOLDS ? rows->column[F_PARENT][i] >= i : rows->column[F_RUN][i] >= runs->rows)
                refuse("indexes: a parent or a run that is not there");
        }
    }
    for (int64_t i = 0; i < halo->rows; i++)
        if (!halo->column[M_SEND][i] && halo->column[M_ROW][i] + halo->column[M_ROWS][i] > runs->rows * (plan->width - 1))
            refuse("indexes: rows of the halo that are not there");
}

static void read_part(Plan *plan, Bytes bytes, int64_t rank) {
    Part *part = plan->parts + rank;
    part->spans = allot(plan->layout_count, sizeof(Table));
    part->moves = allot(plan->move_count, sizeof(Table));
    part->programs = allot(plan->kinds, sizeof *part->programs);
    for (int64_t i = 0; i < plan->layout_count; i++) {
        Table *spans = part->spans + i;
        *spans = read_table(SPANS, &bytes, plan, 0);
        int64_t total = 0;
        for (int64_t n = 0; n < spans->rows; n++) {
            if (spans->column[S_TOKEN][n] + spans->column[S_LENGTH][n] > plan->tokens) refuse("values: a span beyond the tokens");
            if ((total += spans->column[S_LENGTH][n]) > LIMIT) refuse("values: spans of too many rows");
        }
    }
    for (int64_t kind = 0; kind < plan->kinds; kind++)
        for (int phase = 0; phase < 2; phase++) {
            Program *program = part->programs[kind] + phase;
            if (!(plan->phases >> phase & 1)) continue;
            for (int t = 0; t < TABLES; t++) program->table[t] = read_table(t, &bytes, plan, program->table + OPERAND);
            check_program(plan, program);
        }
    for (int64_t i = 0; i < plan->move_count; i++) part->moves[i] = read_table(MOVES, &bytes, plan, 0);
    for (int t = RUNS; t <= HALO && plan->recurrent_count; t++) part->recurrent[t - RUNS] = read_table(t, &bytes, plan, 0);
    if (plan->recurrent_count) check_recurrent(plan, part->recurrent);
    if (bytes.at != bytes.end) refuse("tables: bytes are left over");
}

Bytes read_file(const char *folder, const char *name) {
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

static void check_id(Value map, Digest real) {
    Value id = get(map, "id", BIN, "envelope");
    if (id.number != 32 || memcmp(id.bytes.at, real.bytes, 32)) refuse("id: it is not that of the bytes");
}

static const char *const NAMES[5] = {"header", "request", "layouts", "moves", "report"};

/* The parts of a plan, after a check that its id is that of its bytes. */
static Bytes *open_plan(Value map, int64_t *count) {
    Value parts = get(map, "parts", ARRAY, "envelope");
    Bytes *part = allot(*count = parts.number, sizeof *part);
    Digest sections[5];
    for (int i = 0; i < 5; i++) sections[i] = hash("", 0, get(map, NAMES[i], BIN, "envelope").bytes);
    for (int64_t i = 0; i < parts.number; i++) {
        Value bytes = whole(&parts.bytes, 0);
        if (bytes.type != BIN) refuse("envelope: parts are bin");
        part[i] = bytes.bytes;
    }
    if (!parts.number) refuse("parts: there are none");
    check_id(map, id_of(sections, root_of(part, parts.number)));
    return part;
}

/* A token cap is followed by the first bytes of the hash of the id and the cap. */
static void check_cap(Bytes id, Bytes cap) {
    if (cap.end - cap.at != 16) refuse("id: a token cap has 16 bytes");
    Digest sum = hash((const char *)id.at, 32, bytes_of(cap.at, 8));
    if (memcmp(sum.bytes, cap.at + 8, 8)) refuse("id: a token cap without its hash");
}

/* The part of a slice, after a proof that it belongs to its id. */
static Bytes *open_slice(Value map, int64_t *rank, int64_t *ranks) {
    Value digests = get(map, "digests", ARRAY, "envelope"), path = get(map, "path", ARRAY, "envelope");
    Bytes *part = allot(1, sizeof *part);
    Digest sections[5];
    *part = get(map, "part", BIN, "envelope").bytes;
    *rank = get(map, "rank", INT, "envelope").number, *ranks = get(map, "ranks", INT, "envelope").number;
    if (*rank < 0 || *rank >= *ranks || *ranks > 65535 || digests.number != 2) refuse("parts: a slice of no rank");
    for (int i = 0; i < 5; i++)
        sections[i] = i == 1 || i == 4 ? next_digest(&digests.bytes) : hash("", 0, get(map, NAMES[i], BIN, "envelope").bytes);
    check_id(map, id_of(sections, climb(*part, *rank, *ranks, path)));
    check_cap(get(map, "id", BIN, "envelope").bytes, get(map, "token_cap", BIN, "envelope").bytes);
    return part;
}

Plan read_plan(Bytes file) {
    Plan plan = {.map = only_value(file, MAP, "envelope"), .rank = -1};
    Value version = get(plan.map, "version", ARRAY, "envelope"), format = get(plan.map, "format", STR, "envelope");
    Bytes numbers = version.bytes, *part;
    int64_t count, is_plan = is(format, "apportion.plan");
    if (!is_plan && !is(format, "apportion.slice")) refuse("envelope: neither a plan nor a slice");
    Value major = version.number == 2 ? whole(&numbers, 0) : version, minor = version.number == 2 ? whole(&numbers, 0) : version;
    if (major.type != INT || minor.type != INT || major.number != 3 || minor.number < 0) refuse("version: only 3.x is read");
    part = is_plan ? open_plan(plan.map, &count) : open_slice(plan.map, &plan.rank, &count);
    plan.header = only_value(get(plan.map, "header", BIN, "envelope").bytes, MAP, "sections");
    plan.layouts = only_value(get(plan.map, "layouts", BIN, "envelope").bytes, MAP, "sections");
    plan.moves = only_value(get(plan.map, "moves", BIN, "envelope").bytes, ARRAY, "sections");
    read_header(&plan, version);
    if (plan.ranks != count) refuse("parts: not as many as ranks");
    read_names(&plan);
    plan.parts = allot(plan.ranks, sizeof(Part));
    if (!is_plan) read_part(&plan, *part, plan.rank);
    for (int64_t rank = 0; rank < plan.ranks && is_plan; rank++) read_part(&plan, part[rank], rank);
    return plan;
}
