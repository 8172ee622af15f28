/* Reads plans and executes them: all ranks in one process, in float64. It needs only C99 and its standard library.
 *
 *   cc -O2 -std=c99 -o execute_plan main.c plan.c execute.c recurrent.c -lm
 *
 *   execute_plan read PLAN            tables of a plan or a slice as JSON
 *   execute_plan check PLAN           exits with 1 if a reader must refuse the plan
 *   execute_plan run CASE OUTPUTS     a case of the conformance suite: CASE/case.plan on CASE/inputs.f64
 *
 * It passes the level `run` of the conformance suite, whose README specifies these commands. */
#include "execute.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
        for (int c = 0; c < FORMS[kind].columns; c++) printf(c ? ",%lld" : "%lld", (long long)table->column[c][i]);
        putchar(']');
    }
    putchar(']');
}

static void print_programs(const Plan *plan, const Part *part) {
    for (int64_t kind = 0; kind < plan->kinds; kind++) {
        if (kind) putchar(',');
        print_text(plan->kind_name[kind]);
        for (int phase = 0, shown = 0; phase < 2; phase++) {
            if (!(plan->phases >> phase & 1)) continue;
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

static void print_part(const Plan *plan, int64_t rank) {
    const Part *part = plan->parts + rank;
    printf("{\"rank\":%lld,\"layouts\":[", (long long)rank);
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
    for (int t = RUNS; t <= HALO && plan->recurrent_count; t++) {
        printf(t == RUNS ? "],\"recurrent\":[" : ",");
        print_table(t, part->recurrent + t - RUNS);
    }
    printf("]}");
}

static void print_plan(const Plan *plan) {
    Value id = get(plan->map, "id", BIN, "envelope");
    printf("{\"id\":\"");
    for (int i = 0; i < 32; i++) printf("%02x", id.bytes.at[i]);
    printf("\",\n");
    print_section("header", plan);
    print_section("layouts", plan);
    print_section("moves", plan);
    if (plan->rank >= 0) {
        printf("\"rank\":%lld,\n\"part\":", (long long)plan->rank);
        print_part(plan, plan->rank);
    }
    for (int64_t rank = 0; rank < plan->ranks && plan->rank < 0; rank++) {
        printf(rank ? ",\n" : "\"parts\":[");
        print_part(plan, rank);
    }
    printf(plan->rank < 0 ? "]}\n" : "}\n");
}

/* ------------------------------------------------------------------------------------------ a case of the suite */

double *take(Bytes *in, int64_t count) {
    double *found = allot(count, sizeof *found);
    if (count * 8 > in->end - in->at) refuse("inputs.f64 ends too soon");
    for (int64_t i = 0; i < count; i++, in->at += 8) {
        uint64_t bits = 0;
        for (int byte = 0; byte < 8; byte++) bits |= (uint64_t)in->at[byte] << 8 * byte;
        memcpy(found + i, &bits, 8);
    }
    return found;
}

void give(FILE *out, double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    for (int byte = 0; byte < 8; byte++) fputc((int)(bits >> 8 * byte & 255), out);
}

/* Reads one component of home rows from the inputs; `give_home` writes it to the outputs. */
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

/* Sets the source and the target layout of a move. */
static void ends_of(const Plan *plan, int64_t move, int64_t ends[2]) {
    Bytes in = plan->moves.bytes;
    for (int64_t i = 0; i <= move; i++) {
        next(&in);
        for (int n = 0; n < 2; n++) ends[n] = place_of(whole(&in, 0), plan->layout_name, plan->layout_count, "no layout");
    }
}

/* Sets the token of each of a rank's rows in a layout. */
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
    if (plan.rank >= 0) refuse("a slice is of one rank: all ranks are run");
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
    for (int64_t kind = 0; kind < plan.recurrent_count; kind++) run_recurrent(&plan, &in, out, kind);
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
