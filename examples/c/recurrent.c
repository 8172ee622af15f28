/* Executes recurrent layers for all ranks in one process, in float64: section 18 of apportion/schemas/FORMAT.md. The home rows
 * of all ranks form one axis, rank after rank; so do their runs and their slots. */
#include "execute.h"

#include <string.h>

typedef struct { int64_t row, rows; } Run;
typedef struct { int64_t run, head, heads, parent; } Slot; /* parent: a slot, or -1 */
typedef struct {
    const Plan *plan;
    Recurrent kind;
    int64_t channels, decays, rows, runs, slots, *first_row, *first_run, *before; /* before: the rows before each run, -1: none */
    Run *run;
    Slot *slot;
    double *x, *y, *decay, *beta, *weight, *o, *grad; /* y: output of the convolution; grad: gradient of o */
    double *dx, *dy, *ddecay, *dbeta, *dweight;
    double *came, *left, *sum, *move, *dcame, *dleft; /* per run and head: the states before and after it, U, M, gradients */
} Layer;

/* Zeroed numbers [count][a][b][c]. */
static double *numbers(int64_t count, int64_t a, int64_t b, int64_t c) {
    if (count > (int64_t)MAX_MEMORY / 8 / (a + 1) / (b + 1) / (c + 1)) refuse("this takes too much memory");
    return allot(count * a * b * c, sizeof(double));
}

/* ------------------------------------------------------------------------------------------ runs, halo, slots */

/* The next row of a table, from `at` on, for a peer and with a value (a kind or a direction) in a column. */
static int64_t next_for(const Table *table, int64_t at, int column, int64_t value, int peer_column, int64_t peer) {
    while (at < table->rows && (table->column[column][at] != value || table->column[peer_column][at] != peer)) at++;
    return at;
}

static void read_runs(Layer *layer) {
    const Plan *plan = layer->plan;
    layer->first_row = allot(plan->ranks + 1, sizeof(int64_t)), layer->first_run = allot(plan->ranks + 1, sizeof(int64_t));
    for (int64_t r = 0; r < plan->ranks; r++) {
        layer->first_row[r + 1] = layer->first_row[r] + rows_at(plan, plan->home, r);
        layer->first_run[r + 1] = layer->first_run[r] + plan->parts[r].recurrent->rows;
    }
    layer->rows = layer->first_row[plan->ranks], layer->runs = layer->first_run[plan->ranks];
    layer->run = allot(layer->runs, sizeof(Run));
    for (int64_t r = 0; r < plan->ranks; r++) {
        const Table *runs = plan->parts[r].recurrent;
        int64_t end = layer->first_row[r];
        for (int64_t i = 0; i < runs->rows; i++, end += runs->column[R_ROWS][i - 1])
            layer->run[layer->first_run[r] + i] = (Run){end, runs->column[R_ROWS][i]};
        if (end != layer->first_row[r + 1]) refuse("recurrences: runs are not all home rows");
    }
}

static void read_halo(Layer *layer) {
    const Plan *plan = layer->plan;
    int64_t width = plan->width - 1;
    if (layer->runs > (int64_t)MAX_MEMORY / 8 / (width + 1)) refuse("this takes too much memory");
    layer->before = allot(layer->runs * width, sizeof(int64_t));
    for (int64_t i = 0; i < layer->runs * width; i++) layer->before[i] = -1;
    for (int64_t to = 0; to < plan->ranks; to++) {
        const Table *mine = plan->parts[to].recurrent + HALO - RUNS;
        int64_t *seen = allot(plan->ranks, sizeof *seen);
        for (int64_t i = 0; i < mine->rows; i++) {
            int64_t peer = mine->column[M_PEER][i], rows = mine->column[M_ROWS][i];
            const Table *theirs = plan->parts[peer].recurrent + HALO - RUNS;
            if (mine->column[M_SEND][i]) continue;
            int64_t at = next_for(theirs, seen[peer], M_SEND, 1, M_PEER, to);
            seen[peer] = at + 1;
            if (at >= theirs->rows || theirs->column[M_ROWS][at] != rows ||
                theirs->column[M_ROW][at] + rows > layer->first_row[peer + 1] - layer->first_row[peer])
                refuse("recurrences: rows of the halo do not meet others");
            for (int64_t n = 0; n < rows; n++)
                layer->before[layer->first_run[to] * width + mine->column[M_ROW][i] + n] =
                    layer->first_row[peer] + theirs->column[M_ROW][at] + n;
        }
    }
}

/* Reads the slots of a kind, each with its run: a rank's k-th slot for a peer matches the peer's k-th state for the rank. */
static void read_slots(Layer *layer, int64_t kind) {
    const Plan *plan = layer->plan;
    int64_t most = 0;
    for (int64_t r = 0; r < plan->ranks; r++) most += plan->parts[r].recurrent[FOLDS - RUNS].rows;
    layer->slot = allot(most, sizeof(Slot));
    for (int64_t to = 0; to < plan->ranks; to++) {
        const Table *folds = plan->parts[to].recurrent + FOLDS - RUNS;
        int64_t *seen = allot(plan->ranks, sizeof *seen), *number = allot(folds->rows, sizeof *number);
        for (int64_t i = 0; i < folds->rows; i++) {
            int64_t peer = folds->column[F_PEER][i], parent = folds->column[F_PARENT][i];
            const Table *states = plan->parts[peer].recurrent + STATES - RUNS;
            number[i] = -1;
            if (folds->column[F_KIND][i] != kind) continue;
            int64_t at = next_for(states, seen[peer], F_KIND, kind, F_PEER, to);
            seen[peer] = at + 1;
            if (at >= states->rows) refuse("recurrences: a slot without states");
            for (int c = F_HEAD; c <= F_RUN; c++)
                if (c != F_PEER && states->column[c][at] != folds->column[c][i]) refuse("recurrences: states of another slot");
            if (parent >= 0 && number[parent] < 0) refuse("recurrences: a parent of another kind");
            layer->slot[number[i] = layer->slots++] = (Slot){
                layer->first_run[peer] + folds->column[F_RUN][i], folds->column[F_HEAD][i], folds->column[F_HEADS][i],
                parent < 0 ? -1 : number[parent]};
        }
    }
}

/* ------------------------------------------------------------------------------------------ the convolution */

/* The row that precedes a row of a run by `age` tokens, or -1. */
static int64_t row_before(const Layer *layer, int64_t run, int64_t row, int64_t age) {
    int64_t own = layer->run[run].row, width = layer->plan->width - 1;
    return row - age >= own ? row - age : layer->before[(run + 1) * width + row - age - own];
}

/* The convolution: forward, or backward from dy to dx and dweight. */
static void convolve(Layer *layer, int backward) {
    int64_t width = layer->kind.conv > 1 ? layer->kind.conv : 1, channels = layer->channels;
    for (int64_t run = 0; run < layer->runs; run++)
        for (int64_t row = layer->run[run].row; row < layer->run[run].row + layer->run[run].rows; row++)
            for (int64_t age = 0; age < width; age++) {
                int64_t from = row_before(layer, run, row, age);
                if (from < 0) continue;
                for (int64_t c = 0; c < channels; c++) {
                    double weight = layer->weight ? layer->weight[c * width + width - 1 - age] : 1;
                    if (!backward) layer->y[row * channels + c] += weight * layer->x[from * channels + c];
                    else layer->dx[from * channels + c] += weight * layer->dy[row * channels + c];
                    if (backward && layer->weight)
                        layer->dweight[c * width + width - 1 - age] += layer->dy[row * channels + c] * layer->x[from * channels + c];
                }
            }
}

/* ------------------------------------------------------------------------------------------ a run of a head */

typedef struct { double *q, *k, *v, *decay, *beta, *o; } Token;

/* Addresses of the numbers of a row and a head, or of their gradients. */
static Token token_of(const Layer *layer, int64_t row, int64_t head, int gradient) {
    const Recurrent *kind = &layer->kind;
    int64_t key = head / (kind->heads / kind->key_heads) * kind->key_dim, at = row * kind->heads + head;
    double *y = (gradient ? layer->dy : layer->y) + row * layer->channels, *v = y + 2 * kind->key_heads * kind->key_dim;
    double *beta = gradient ? layer->dbeta : layer->beta, *o = gradient ? layer->grad : layer->o;
    return (Token){y + key, y + kind->key_heads * kind->key_dim + key, v + head * kind->value_dim,
                   (gradient ? layer->ddecay : layer->decay) + at * layer->decays, kind->delta ? beta + at : 0, o + at * kind->value_dim};
}

/* Decays the state [K, V]. Sets `missed`, if not null, to v minus the state's prediction, and `taken` to the value to be
 * added: v, or beta times `missed` under the delta rule. */
static void decay_state(const Layer *layer, Token t, double *state, double *missed, double *taken) {
    int64_t K = layer->kind.key_dim, V = layer->kind.value_dim;
    for (int64_t i = 0; i < K; i++)
        for (int64_t n = 0; n < V; n++) state[i * V + n] *= t.decay[layer->decays > 1 ? i : 0];
    for (int64_t n = 0; n < V; n++) {
        double held = 0;
        for (int64_t i = 0; i < K && t.beta; i++) held += t.k[i] * state[i * V + n];
        if (missed) missed[n] = t.v[n] - held;
        taken[n] = t.beta ? *t.beta * (t.v[n] - held) : t.v[n];
    }
}

/* Advances the state, in place, from before a run to after it. o: whether to write outputs; found: if not null, set to the
 * state before each token. */
static void scan(const Layer *layer, int64_t run, int64_t head, double *state, int o, double *found) {
    int64_t K = layer->kind.key_dim, V = layer->kind.value_dim;
    double *taken = numbers(V, 1, 1, 1);
    for (int64_t row = 0; row < layer->run[run].rows; row++) {
        Token t = token_of(layer, layer->run[run].row + row, head, 0);
        if (found) memcpy(found + row * K * V, state, (size_t)(K * V) * sizeof *state);
        decay_state(layer, t, state, 0, taken);
        for (int64_t i = 0; i < K; i++)
            for (int64_t n = 0; n < V; n++) {
                state[i * V + n] += t.k[i] * taken[n];
                if (o) t.o[n] += t.q[i] * state[i * V + n];
            }
    }
}

/* M [K, K] of a run: the columns of the identity, advanced like states with v = 0. */
static void transition(const Layer *layer, int64_t run, int64_t head, double *move) {
    int64_t K = layer->kind.key_dim;
    for (int64_t i = 0; i < K; i++) move[i * K + i] = 1;
    for (int64_t row = layer->run[run].row; row < layer->run[run].row + layer->run[run].rows; row++) {
        Token t = token_of(layer, row, head, 0);
        for (int64_t n = 0; n < K; n++) {
            double held = 0;
            for (int64_t i = 0; i < K; i++) held += t.k[i] * (move[i * K + n] *= t.decay[layer->decays > 1 ? i : 0]);
            for (int64_t i = 0; i < K && t.beta; i++) move[i * K + n] -= *t.beta * t.k[i] * held;
        }
    }
}

/* Moves a state's gradient, in place, from after a run to before it. all: also computes the gradients of its tokens. */
static void scan_grad(const Layer *layer, int64_t run, int64_t head, const double *came, double *grad, int all) {
    int64_t K = layer->kind.key_dim, V = layer->kind.value_dim, rows = layer->run[run].rows;
    double *found = numbers(rows, K, V, 1), *state = numbers(K, V, 1, 1), *missed = numbers(V, 3, 1, 1), *taken = missed + V;
    double *dtaken = taken + V;
    memcpy(state, came, (size_t)(K * V) * sizeof *state);
    scan(layer, run, head, state, 0, found);
    for (int64_t row = rows; row-- > 0;) {
        Token t = token_of(layer, layer->run[run].row + row, head, 0), d = token_of(layer, layer->run[run].row + row, head, 1);
        memcpy(state, found + row * K * V, (size_t)(K * V) * sizeof *state);
        decay_state(layer, t, state, missed, taken);
        memset(dtaken, 0, (size_t)V * sizeof *dtaken);
        for (int64_t i = 0; i < K; i++)
            for (int64_t n = 0; n < V; n++) {
                double *g = grad + i * V + n;
                *g += t.q[i] * d.o[n];
                dtaken[n] += t.k[i] * *g;
                if (all) d.q[i] += (state[i * V + n] + t.k[i] * taken[n]) * d.o[n], d.k[i] += *g * taken[n];
            }
        for (int64_t n = 0; n < V; n++) {
            if (all && t.beta) *d.beta += dtaken[n] * missed[n];
            if (t.beta) dtaken[n] *= *t.beta;
            if (all) d.v[n] += dtaken[n];
        }
        for (int64_t i = 0; i < K; i++)
            for (int64_t n = 0; n < V; n++) {
                double *g = grad + i * V + n;
                if (t.beta) *g -= t.k[i] * dtaken[n];
                if (all && t.beta) d.k[i] -= state[i * V + n] * dtaken[n];
                if (all) d.decay[layer->decays > 1 ? i : 0] += *g * found[row * K * V + i * V + n];
                *g *= t.decay[layer->decays > 1 ? i : 0];
            }
    }
}

/* ------------------------------------------------------------------------------------------ folds, and the layer */

static void forward(Layer *layer) {
    int64_t H = layer->kind.heads, K = layer->kind.key_dim, V = layer->kind.value_dim;
    convolve(layer, 0);
    for (int64_t i = 0; i < layer->runs * H; i++) {
        scan(layer, i / H, i % H, layer->sum + i * K * V, 0, 0);
        transition(layer, i / H, i % H, layer->move + i * K * K);
    }
    for (int64_t s = 0; s < layer->slots; s++) {
        const Slot *slot = layer->slot + s;
        for (int64_t at = slot->run * H + slot->head; at < slot->run * H + slot->head + slot->heads; at++) {
            int64_t past = slot->parent < 0 ? 0 : layer->slot[slot->parent].run * H + at % H;
            if (slot->parent >= 0) memcpy(layer->came + at * K * V, layer->left + past * K * V, (size_t)(K * V) * sizeof(double));
            for (int64_t i = 0; i < K; i++)
                for (int64_t n = 0; n < V; n++) {
                    double *left = layer->left + at * K * V + i * V + n;
                    *left = layer->sum[at * K * V + i * V + n];
                    for (int64_t j = 0; j < K; j++) *left += layer->move[(at * K + i) * K + j] * layer->came[(at * K + j) * V + n];
                }
        }
    }
    double *state = numbers(K, V, 1, 1);
    for (int64_t i = 0; i < layer->runs * H; i++) {
        memcpy(state, layer->came + i * K * V, (size_t)(K * V) * sizeof *state);
        scan(layer, i / H, i % H, state, 1, 0);
    }
}

static void backward(Layer *layer) {
    int64_t H = layer->kind.heads, K = layer->kind.key_dim, V = layer->kind.value_dim;
    for (int64_t i = 0; i < layer->runs * H; i++)
        scan_grad(layer, i / H, i % H, layer->came + i * K * V, layer->dcame + i * K * V, 0);
    for (int64_t s = layer->slots; s-- > 0;) {
        const Slot *slot = layer->slot + s;
        if (slot->parent < 0) continue;
        for (int64_t at = slot->run * H + slot->head; at < slot->run * H + slot->head + slot->heads; at++) {
            double *to = layer->dleft + (layer->slot[slot->parent].run * H + at % H) * K * V;
            for (int64_t i = 0; i < K; i++)
                for (int64_t n = 0; n < V; n++) {
                    to[i * V + n] += layer->dcame[at * K * V + i * V + n];
                    for (int64_t j = 0; j < K; j++)
                        to[i * V + n] += layer->move[(at * K + j) * K + i] * layer->dleft[(at * K + j) * V + n];
                }
        }
    }
    for (int64_t i = 0; i < layer->runs * H; i++)
        scan_grad(layer, i / H, i % H, layer->came + i * K * V, layer->dleft + i * K * V, 1);
    convolve(layer, 1);
}

static void take_rows(Bytes *in, double *to, int64_t first, int64_t end, int64_t width) {
    memcpy(to + first * width, take(in, (end - first) * width), (size_t)((end - first) * width) * sizeof *to);
}

static void give_rows(FILE *out, const double *from, int64_t first, int64_t end, int64_t width) {
    for (int64_t i = first * width; i < end * width; i++) give(out, from[i]);
}

void run_recurrent(const Plan *plan, Bytes *in, FILE *out, int64_t number) {
    Recurrent kind = plan->recurrent[number];
    int64_t H = kind.heads, K = kind.key_dim, V = kind.value_dim, decays = kind.diagonal ? K : 1;
    Layer layer = {.plan = plan, .kind = kind, .decays = decays, .channels = 2 * kind.key_heads * K + H * V};
    int64_t rows, channels = layer.channels;
    read_runs(&layer), read_halo(&layer), read_slots(&layer, number);
    rows = layer.rows;
    double **rooms[] = {&layer.x, &layer.y, &layer.dx, &layer.dy, &layer.beta, &layer.dbeta, &layer.decay, &layer.ddecay,
                        &layer.o, &layer.grad};
    int64_t widths[] = {channels, channels, channels, channels, H, H, H * decays, H * decays, H * V, H * V};
    for (int i = 0; i < 10; i++) *rooms[i] = numbers(rows, widths[i], 1, 1);
    double **states[] = {&layer.came, &layer.left, &layer.sum, &layer.dcame, &layer.dleft, &layer.move};
    for (int i = 0; i < 6; i++) *states[i] = numbers(layer.runs, H, K, i < 5 ? V : K);
    if (kind.conv > 1) layer.weight = take(in, channels * kind.conv), layer.dweight = numbers(channels, kind.conv, 1, 1);
    for (int64_t r = 0; r < plan->ranks; r++) {
        int64_t first = layer.first_row[r], end = layer.first_row[r + 1];
        take_rows(in, layer.x, first, end, channels), take_rows(in, layer.decay, first, end, H * decays);
        if (kind.delta) take_rows(in, layer.beta, first, end, H);
        take_rows(in, layer.grad, first, end, H * V);
    }
    forward(&layer), backward(&layer);
    if (kind.conv > 1) give_rows(out, layer.dweight, 0, channels, kind.conv);
    for (int64_t r = 0; r < plan->ranks; r++) {
        int64_t first = layer.first_row[r], end = layer.first_row[r + 1];
        give_rows(out, layer.o, first, end, H * V), give_rows(out, layer.dx, first, end, channels);
        give_rows(out, layer.ddecay, first, end, H * decays);
        if (kind.delta) give_rows(out, layer.dbeta, first, end, H);
    }
}
