/* A plan in memory, and its reader (plan.c). Comments name sections of apportion/schemas/FORMAT.md. */
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

/* Prints the fault on stderr and ends the program with exit code 1. */
ENDS void refuse(const char *format, ...);
/* Zeroed memory, which give_back frees when the program ends. */
void *allot(int64_t count, size_t size);
void give_back(void);

typedef struct { const uint8_t *at, *end; } Bytes;
typedef enum { NIL, BOOL, INT, FLOAT, STR, BIN, ARRAY, MAP } Type;
typedef struct { Type type; int64_t number; Bytes bytes; } Value; /* number: an integer, or the count of items or pairs */

/* MessagePack: the next value, only the head of an array or a map; the whole value, with its items as bytes. */
Value next(Bytes *in);
Value whole(Bytes *in, int depth);
/* The value of a map's key, which must have the type. what: begins the message if it is missing. */
Value get(Value map, const char *key, Type type, const char *what);

/* Section 5: the columns of tables. */
enum { HEAD_SETS = -2, PEERS = -3, OPERANDS = -4, KINDS = -5 }; /* limits of a column that depend on the plan */
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
enum { F_KIND, F_HEAD, F_HEADS, F_PEER, F_RUN, F_PARENT }; /* also of states, except the last */

extern const Form FORMS[];
extern const char *const PHASES[2];
extern const int LIST_OF_OP[14];

/* Sections 3 and 4. programs: of each kind, forward and backward. rank: of a slice, which has only that part; else -1. */
typedef struct { int64_t count, *head; } Heads;
typedef struct { Table table[TABLES]; } Program;
typedef struct { Table *spans, *moves, recurrent[4]; Program (*programs)[2]; } Part; /* recurrent: from RUNS to HALO */
typedef struct { int64_t heads, key_heads, key_dim, value_dim, conv; int diagonal, delta; } Recurrent; /* section 18 */
typedef struct {
    Value map, header, layouts, moves;
    int64_t rank, ranks, q_heads, kv_heads, head_dim, v_head_dim, head_sets, kinds, layout_count, move_count, tokens, home;
    int narrow, phases; /* narrow: dtype of sent gradients, 1: bf16, 2: fp16, 0: not rounded; phases: bits */
    Value *kind_name, *layout_name;
    Heads *heads;
    Part *parts;
    int64_t recurrent_count, width; /* width: of the widest convolution, or 1 */
    Recurrent *recurrent;
} Plan;

/* The index of a name in a list. what: the message if it is missing. */
int64_t place_of(Value name, const Value *names, int64_t count, const char *what);
/* The bytes of a file, whose path is folder and name concatenated. */
Bytes read_file(const char *folder, const char *name);
/* The plan or slice in a file, completely checked as section 16 requires. */
Plan read_plan(Bytes file);

#endif
