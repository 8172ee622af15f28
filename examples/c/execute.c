/* Executes the programs of all ranks in one process, in float64: sections 6, 7 and 8 of apportion/schemas/FORMAT.md. It also
 * runs unverified plans: every operand is checked before it is used. */
#include "execute.h"

#include <math.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------ 6: memory */

static int has_kv_heads(int64_t tensor) { return tensor == KV || tensor == DKV; }
static int has_no_heads(int64_t tensor) { return tensor == X || tensor == DX; }

static int64_t width_of(const Machine *m, int64_t tensor) {
    int64_t d = m->plan->head_dim, v = m->plan->v_head_dim;
    const int64_t widths[TENSORS] = {0, m->hidden + 1, d, d + v, v + 1, m->hidden, d, d + v, v, 2};
    return widths[tensor];
}

Memory memory_of(const Machine *m, int64_t tensor, int64_t rows, int64_t heads) {
    Memory memory = {rows, has_no_heads(tensor) ? 1 : heads, width_of(m, tensor), 0};
    if (memory.heads && rows > (int64_t)MAX_MEMORY / 8 / memory.heads / (memory.width + 1)) refuse("this takes too much memory");
    memory.data = allot(rows * memory.heads * memory.width, sizeof(double));
    return memory;
}

int64_t heads_at_home(const Plan *plan, int64_t tensor) { return has_kv_heads(tensor) ? plan->kv_heads : plan->q_heads; }

int64_t rows_at(const Plan *plan, int64_t layout, int64_t rank) {
    const Table *spans = plan->parts[rank].spans + layout;
    int64_t rows = 0;
    for (int64_t i = 0; i < spans->rows; i++) rows += spans->column[S_LENGTH][i];
    return rows;
}

/* The operand, after a check that its rows and heads exist. */
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

/* Address of the numbers of a row and a head of an operand; head: index among the operand's heads. */
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

/* The index of a query head's KV head in an operand of keys. */
static int64_t kv_head(const Machine *m, Operand q, int64_t head, Operand kv) {
    int64_t number = q.head[head] / (m->plan->q_heads / m->plan->kv_heads);
    for (int64_t i = 0; i < kv.count; i++)
        if (kv.head[i] == number) return i;
    refuse("heads: the KV head of a query head is not there");
}

/* ------------------------------------------------------------------------------------------ 7: the ops */

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* a += weight * b. */
static void add_to(double *a, double weight, const double *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) a[i] += weight * b[i];
}

static double larger(double a, double b) { return a > b ? a : b; }
/* exp(a - b) for b >= a; 0 if a is minus infinity. */
static double exp_less(double a, double b) { return a == -INFINITY ? 0 : exp(a - b); }

static double logit(const Machine *m, const double *q, const double *k) {
    double scaled = dot(q, k, m->plan->head_dim) * m->scale;
    return m->softcap > 0 ? m->softcap * tanh(scaled / m->softcap) : scaled;
}

/* Merges `from` into `into`: the output over both sets of keys. The LSE follows an output's n numbers. */
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

/* Sets the range of keys that a row of a task sees: [*begin, *end). */
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

/* merge, add, copy and deliver: move rows of `a` to `c`. */
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
            sink[c.width - 1] = m->sinks[c.head[head]]; /* an additional key with value 0 */
            merge_row(cell(c, row, head), sink, c.width - 1);
        }
}

/* The suite's projection, (1 + position / 8) x W, or its gradient, for one operand. weights: [heads][hidden][width]. */
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

/* Rounds to the nearest bf16 or fp16 number, ties to even. */
static double rounded(double x, int narrow) {
    int exponent, digits = narrow == 1 ? 8 : 11, least = narrow == 1 ? -125 : -13;
    float narrower = (float)x; /* rounds a float32, as accumulators are float32 */
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

/* Finds the launch of a round among the steps so far: sets the first of its transfers, returns their number. */
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

/* Takes what has arrived; returns 0 if a peer has not launched the round yet. */
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

/* Runs a rank to its end, or to a wait for other ranks. used: consumed rows of each list. */
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

void run_phase(Machine *m, int64_t kind, int phase) {
    const Plan *plan = m->plan;
    int64_t (*used)[TABLES] = allot(plan->ranks, sizeof *used), done = 0, moved = 1;
    if (!(plan->phases >> phase & 1)) refuse("the plan has no such phase");
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
