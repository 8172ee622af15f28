/* Memory of ranks, programs that run on it (execute.c), and recurrent layers (recurrent.c). */
#ifndef EXECUTE_H
#define EXECUTE_H

#include "plan.h"

#include <stdio.h>

enum { NONE, X, Q, KV, O, DX, DQ, DKV, DO, DELTA, TENSORS };

/* Rows of a tensor at home or in a rank's arena: [rows][heads][width], its components one after another. */
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

/* The memory of a tensor; the number of its heads at home; the number of rows that a rank has in a layout. */
Memory memory_of(const Machine *m, int64_t tensor, int64_t rows, int64_t heads);
int64_t heads_at_home(const Plan *plan, int64_t tensor);
int64_t rows_at(const Plan *plan, int64_t layout, int64_t rank);
/* Runs the programs of all ranks for a kind and a phase (0: forward, 1: backward). */
void run_phase(Machine *m, int64_t kind, int phase);
/* Runs a recurrent kind on the numbers of a case, forward and backward. */
void run_recurrent(const Plan *plan, Bytes *in, FILE *out, int64_t kind);
/* Reads the next numbers of a case's inputs; writes a number to its outputs. */
double *take(Bytes *in, int64_t count);
void give(FILE *out, double x);

#endif
