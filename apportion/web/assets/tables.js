// Tables that sort, bars in their cells, and the figures of a plan.

/** A table that sorts by a click on a heading. columns: { name, value(row) for sorting, cell(row) -> text or element,
 * text: whether the column is text }. sorted: index of the column that is sorted at first, ascending. */
function sortable(columns, rows, { caption, sorted = null, mark = () => "" } = {}) {
  const body = make("tbody"), head = make("tr"), table = make("table", {}, make("caption", { class: "skip" }, caption || ""), make("thead", {}, head), body);
  let by = sorted, down = sorted === null;
  const fill = () => {
    const order = [...rows];
    if (by !== null) {
      const { value } = columns[by];
      order.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return (typeof x === "string" ? x.localeCompare(y) : x - y) * (down ? -1 : 1);
      });
    }
    body.replaceChildren(...order.map((row) => make("tr", { class: mark(row) }, ...columns.map(({ cell, text, wide }) => make("td", { class: wide ? "wide" : text ? "text" : "" }, cell(row))))));
    columns.forEach((_, at) => head.children[at].setAttribute("aria-sort", at !== by ? "none" : down ? "descending" : "ascending"));
  };
  columns.forEach(({ name, text }, at) => {
    const sort = () => { down = by === at ? !down : !text; by = at; fill(); };
    head.append(make("th", { scope: "col", class: text ? "text" : "" }, make("button", { type: "button", onclick: sort }, name)));
  });
  fill();
  table.refill = fill;
  return table;
}

/** A figure, next to a bar as long as its share of the largest figure. */
function gauge(share, text) {
  const bar = make("i");
  bar.style.width = `${100 * Math.min(Math.max(share || 0, 0), 1)}%`;
  return make("span", { class: "gauge" }, make("span", {}, bar), make("em", {}, text));
}

const FOLD = 128;  // up to this number each rank has a row; above it, each node

const RANK_COLUMNS = [
  ["work", "work (pairs)", pairs],
  ["tokens", "tokens", whole.format],
  ["memory", "work memory", bytes],
  ["received_bytes", "bytes in", bytes],
  ["sent_bytes", "bytes out", bytes],
  ["compute_us", "busy", time],
  ["exposed_us", "waiting", time],
];

function rankTable(plan, section) {
  const nodes = plan.ranks > FOLD, size = nodes ? plan.ranks_per_node : 1, count = Math.ceil(plan.ranks / size);
  section.querySelector(".hint").textContent = nodes
    ? `A row is a node: the largest of its ${size} ranks.`
    : "One call of each attention kind, forward and backward; work counts forward pairs, over heads and layers. Click a heading to sort.";
  const rows = Array.from({ length: count }, (_, at) => at);
  const peaks = {}, most = {};
  for (const [name] of RANK_COLUMNS) {
    peaks[name] = rows.map((row) => plan.ofRanks[name].subarray(row * size, (row + 1) * size).reduce((a, b) => Math.max(a, b), 0));
    most[name] = peaks[name].reduce((a, b) => Math.max(a, b), 0);
  }
  const label = (row) => {
    const key = make("i", { class: "key" });
    key.style.background = theme.rank(plan, row * size);
    return make("span", {}, key, nodes ? `node ${row}` : String(row));
  };
  const table = sortable([
    { name: nodes ? "node" : "rank", value: (row) => -row, cell: label },
    ...RANK_COLUMNS.map(([name, title, format]) => ({
      name: title, value: (row) => peaks[name][row], cell: (row) => gauge(peaks[name][row] / most[name], format(peaks[name][row])),
    })),
  ], rows, { caption: "Figures of ranks" });
  theme.watchers.add(() => table.isConnected && table.refill());
  section.querySelector(".bars").replaceChildren(table);
}

function figures(plan, section) {
  section.querySelector(".verdict").replaceChildren(make("b", {}, plan.verdict[0]), ` ${plan.verdict[1]}`);
  section.querySelector(".about").textContent = `Plan ${plan.id.slice(0, 16)}, recipe ${plan.recipe}, ${plan.ranks} ranks in nodes of ${plan.ranks_per_node}, simulated on ${plan.hardware}.`;
  const phase = (name) => plan.runs.filter((run) => run.phase === name).reduce((sum, run) => sum + run.makespan_us, 0);
  const total = phase("forward") + phase("backward"), ideal = plan.runs.reduce((sum, run) => sum + run.ideal_us, 0);
  const wait = plan.ofRanks.exposed_us.reduce((a, b) => Math.max(a, b), 0);
  const sent = plan.ofRanks.sent_bytes.reduce((a, b) => a + b, 0);
  const cards = [
    [time(phase("forward")), "forward, simulated"], [time(phase("backward")), "backward, simulated"],
    [percent(total ? ideal / total : 1), "of the time is useful, balanced work"],
    [time(wait), "longest wait of any rank"], [bytes(sent), "sent by all ranks"],
  ];
  section.querySelector(".cards").replaceChildren(...cards.map(([value, name]) => make("div", { class: "card" }, make("b", {}, value), make("span", {}, name))));
  const format = (row, name) => (row[name] === null ? "–" : UNITS[row.unit](row[name]));
  section.querySelector(".figures-table").replaceChildren(sortable([
    { name: "figure", text: true, value: (row) => row.name, cell: (row) => row.name },
    { name: "this plan", value: (row) => row.value, cell: (row) => format(row, "value") },
    { name: "lower bound", value: (row) => row.bound, cell: (row) => format(row, "bound") },
    { name: "ratio", value: (row) => row.gap, cell: (row) => (row.gap === null ? "–" : row.gap.toFixed(3)) },
    { name: "remark", text: true, wide: true, value: (row) => row.void || "", cell: (row) => row.void || "" },
  ], plan.figures, { caption: "Figures next to their bounds" }));
  lost(plan, section.querySelector(".lost"));
  section.querySelector(".summary").replaceChildren(...plan.summary.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

const LOSSES = {
  ideal: ["balanced work at full speed", "#0072b2"], inherent: ["short and sparse documents", "#56b4e9"], cutting: ["cutting", "#009e73"],
  launches: ["kernel launches", "#f0e442"], rows: ["row work", "#cc79a7"], imbalance: ["imbalance", "#e69f00"], contention: ["contention", "#999999"], stalls: ["waiting", "#d55e00"],
};

function lost(plan, box) {
  const parts = Object.entries(plan.lost_ms).filter(([, ms]) => ms > 0), total = parts.reduce((sum, [, ms]) => sum + ms, 0);
  const strip = make("div", { class: "strip", role: "img", "aria-label": parts.map(([name, ms]) => `${(LOSSES[name] || [name])[0]} ${percent(ms / total)}`).join(", ") });
  const names = make("div", { class: "names" });
  for (const [name, ms] of parts) {
    const [title, colour] = LOSSES[name] || [name, "#999999"], bar = make("i", { title: `${title}: ${time(1000 * ms)}` }), key = make("i", { class: "key" });
    bar.style.flex = `${ms} 0 0`;
    bar.style.background = colour;
    key.style.background = colour;
    strip.append(bar);
    names.append(make("span", {}, key, `${title} ${time(1000 * ms)} (${percent(ms / total)})`));
  }
  box.replaceChildren(strip, names);
}

function searchTable(plan, section) {
  const { search } = plan;
  section.hidden = !search;
  if (!search) return;
  const why = search.stopped ? `The search ended at its limit of ${search.stopped}` : "The search ended when there was nothing left to try";
  section.querySelector(".ended").textContent = `${search.recipe.name} is the best of ${search.steps} tried, ${digits(search.ms)} ms per layer; balanced and without communication it would take ${digits(search.ideal_ms)} ms. ${why}${search.most_steps ? ` (at most ${search.most_steps} steps)` : ""}.`;
  const best = JSON.stringify(search.recipe);
  const steps = (row) => Object.entries(row.recipe.steps).filter(([, value]) => value && value !== "none").map(([step, value]) => `${step}: ${typeof value === "object" ? Object.entries(value).map(([name, options]) => name + (Object.keys(options || {}).length ? ` ${JSON.stringify(options)}` : "")).join(", ") : value}`).join("; ");
  section.querySelector(".tried").replaceChildren(sortable([
    { name: "recipe", text: true, value: (row) => row.recipe.name, cell: (row) => row.recipe.name },
    { name: "ms per layer", value: (row) => row.ms, cell: (row) => (row.refused !== null ? "refused" : row.ms === null ? `> ${digits(row.least_ms, 4)}` : digits(row.ms, 4)) },
    { name: "steps, or reason of refusal", text: true, wide: true, value: steps, cell: (row) => row.refused ?? steps(row) },
  ], search.tried, { caption: "Recipes that were tried", mark: (row) => (JSON.stringify(row.recipe) === best ? "best" : "") }));
}
