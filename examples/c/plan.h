/* A plan in memory, and how it is read from bytes; see plan.c. The comments name sections of apportion/schemas/FORMAT.md. */
#ifndef PLAN_H
#define PLAN_H

#include <stddef.h>
#include <stdint.h>

#define LIMIT ((int64_t)1 << 48)
#define MAX_MEMORY ((size_t)1 << 30)

#ifdef __GNUC__
#define ENDS __attribute__((noreturn))
#else
#define ENDS
#endif

/* Says what is wrong on stderr and ends the program with exit code 1. */
ENDS void refuse(const char *format, ...);
/* Zeroed memory, given back when the program ends. */
void *allot(int64_t count, size_t size);
void give_back(void);

typedef struct { const uint8_t *at, *end; } Bytes;
typedef enum { NIL, BOOL, INT, FLOAT, STR, BIN, ARRAY, MAP } Type;
typedef struct { Type type; int64_t number; Bytes bytes; } Value; /* number: also of items, or pairs */

/* MessagePack: the next value, of arrays and maps its head; the value as a whole, whose bytes are then its items. */
Value next(Bytes *in);
Value whole(Bytes *in, int depth);
/* The value of a key of a map, of a type; `what` is said where it is not there. */
Value get(Value map, const char *key, Type type, const char *what);

/* Section 5: the columns of tables. */
enum { HEAD_SETS = -2, PEERS = -3, OPERANDS = -4, KINDS = -5 }; /* what bounds a column, if no number */
typedef struct { const char *name; int64_t least, most; } Column;
typedef struct { int columns; Column column[9]; } Form;
typedef struct { int64_t rows, *column[9]; } Table;

enum { ARENAS, OPERAND, INSTRUCTIONS, TRANSFERS, TASKS, GRADS, ROWOPS, TABLES, SPANS = TABLES, MOVES, RUNS, FOLDS, STATES, HALO };
enum { A_TENSOR, A_ROWS, A_HEADS };
enum { O_TENSOR, O_SPACE, O_ROW, O_ROWS, O_COL, O_HEADS };
enum { I_OP, I_ROUND, I_CHANNEL, I_MODE, I_COUNT };
enum { T_SEND, T_PEER, T_OPERAND };
enum { S_ROW, S_TOKEN, S_LENGTH, S_SEQUENCE, S_POSITION };
enum { M_SEND, M_PEER, M_ROW, M_ROWS };
enum { R_ROW, R_ROWS, R_SEQUENCE, R_POSITION, R_PEER, R_PAST, R_LEADS };
enum { F_KIND, F_HEAD, F_HEADS, F_PEER, F_RUN, F_PARENT }; /* of states, too, but for the last */

extern const Form FORMS[];
extern const char *const PHASES[2];
extern const int LIST_OF_OP[14];

/* Sections 3 and 4. programs: of each kind, forward and backward. rank: of a slice, which has that part alone; else -1. */
typedef struct { int64_t count, *head; } Heads;
typedef struct { Table table[TABLES]; } Program;
typedef struct { Table *spans, *moves, recurrent[4]; Program (*programs)[2]; } Part; /* recurrent: from RUNS to HALO */
typedef struct { int64_t heads, key_heads, key_dim, value_dim, conv; int diagonal, delta; } Recurrent; /* section 18 */
typedef struct {
    Value map, header, layouts, moves;
    int64_t rank, ranks, q_heads, kv_heads, head_dim, v_head_dim, head_sets, kinds, layout_count, move_count, tokens, home;
    int narrow, phases; /* narrow: 1 bf16, 2 fp16: gradients are rounded on their way; phases: as bits */
    Value *kind_name, *layout_name;
    Heads *heads;
    Part *parts;
    int64_t recurrent_count, width; /* width: of the widest convolution, at least 1 */
    Recurrent *recurrent;
} Plan;

/* The place of a name among others; `what` is said where it is not there. */
int64_t place_of(Value name, const Value *names, int64_t count, const char *what);
/* A file, by its folder and the rest of its path. */
Bytes read_file(const char *folder, const char *name);
/* The plan or the slice in a file, all of it checked as section 16 asks. */
Plan read_plan(Bytes file);

#endif
