// The page that compares recipes, and the page that compares two plans.

async function comparePage(root, data) {
  const { comparison } = data, names = data.plans.map((plan) => plan.name);
  const total = (row) => (row.forward_ms === null ? null : row.forward_ms + row.backward_ms);
  const best = comparison.rows.filter((row) => total(row) !== null).reduce((a, b) => (a && total(a) <= total(b) ? a : b), null)?.recipe;
  const most = Math.max(...comparison.rows.map((row) => total(row) ?? 0)), moved = Math.max(...comparison.rows.map((row) => row.bytes?.total ?? 0));
  const faster = comparison.rows.find((row) => row.recipe === best)?.speedup?.median;
  const section = make("section", { "aria-label": "Recipes" }), box = make("div");
  let chosen = null, choose = null;
  const open = (row) => { chosen = row.recipe; table.refill(); choose(names.indexOf(row.recipe)); box.scrollIntoView({ behavior: "smooth" }); };
  const number = (name, value, format) => ({ name, value, cell: (row) => (value(row) === null || value(row) === undefined ? "–" : format(value(row), row)) });
  const table = sortable([
    { name: "recipe", text: true, value: (row) => row.recipe, cell: (row) => (names.includes(row.recipe) ? make("button", { type: "button", onclick: () => open(row) }, row.recipe) : row.recipe) },
    number("forward + backward", total, (value) => gauge(value / most, `${digits(value, 4)} ms`)),
    number("speed-up", (row) => row.speedup?.median ?? null, (value) => `${value.toFixed(2)}×`),
    number("forward", (row) => row.forward_ms, UNITS.ms),
    number("backward", (row) => row.backward_ms, UNITS.ms),
    number("of attain\u00adable", (row) => row.of_attainable, percent),
    number("longest wait", (row) => row.exposed_ms, UNITS.ms),
    number("bytes", (row) => row.bytes?.total ?? null, (value) => gauge(value / moved, bytes(value))),
    number("between nodes", (row) => row.bytes?.inter_node ?? null, bytes),
    number("compute imbalance", (row) => row.imbalance?.compute ?? null, percent),
    number("planning", (row) => row.planning_ms?.p50 ?? null, UNITS.ms),
  ], comparison.rows, { caption: "Recipes on the same batches", sorted: 1, mark: (row) => [row.recipe === best ? "best" : "", row.recipe === chosen ? "chosen" : ""].join(" ").trim() });
  section.append(
    make("h2", {}, "Recipes compared"),
    make("p", { class: "hint" }, `Medians over ${comparison.batches} ${comparison.batches === 1 ? "batch" : "batches"} of ${comparison.workload}; one call of each attention kind; speed-ups relative to ${comparison.baseline}. A name opens the recipe's plan for the batch of median time.`),
    make("p", { class: "verdict" }, best ? make("b", {}, `${best} is the fastest${faster > 1.005 ? `, ${faster.toFixed(2)} times as fast as ${comparison.baseline}` : ""}.`) : "No recipe can plan these batches.", " Its timeline is below."),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Recipes on the same batches" }, table),
    ...comparison.rows.filter((row) => row.reason || row.unverified).map((row) => make("p", {}, `${row.recipe}: ${row.reason || row.unverified}`)),
  );
  root.append(section, box);
  choose = planTabs(box, data.plans, false);
  if (data.plans.length) { chosen = names.includes(best) ? best : names[0]; table.refill(); await choose(names.indexOf(chosen)); }
}

async function diffPage(root, data) {
  const { diff } = data, [a, b] = data.plans.map((plan) => plan.name), section = make("section", { "aria-label": "Differences" });
  const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const text = (name, read, wide = true) => ({ name, text: true, wide, value: read, cell: read });
  const table = (title, columns, rows) => make("div", { class: "scroll bars", tabindex: "0", role: "region", "aria-label": title }, sortable(columns, rows, { caption: title }));
  section.append(make("h2", {}, "Differences"), make("p", { class: "hint" }, diff.equal ? "The plans are equal." : `A is ${a}, B is ${b}.`));
  if (diff.values.length) section.append(make("h3", {}, "Values"), table("Values that differ", [text("field", (row) => row.field), text("A", (row) => shorten(shown(row.a))), text("B", (row) => shorten(shown(row.b)))], diff.values));
  const parts = [...diff.layouts.map((name) => `layout ${name}`), ...(diff.moves ? ["moves"] : [])];
  if (parts.length) section.append(make("p", {}, `Also: ${parts.join(", ")}.`));
  if (diff.programs.length) {
    section.append(make("h3", {}, `Programs that differ: ${whole.format(diff.programs.length)}`), table("Programs that differ", [
      { name: "rank", value: (row) => row.rank, cell: (row) => String(row.rank) },
      text("program", (row) => `${row.kind} ${row.phase}`, false),
      text("instructions, A | B", (row) => Object.entries(row.counts).map(([op, [x, y]]) => `${op} ${x} | ${y}`).join(", ")),
      text("first line of A", (row) => shorten(shown(row.a))), text("first line of B", (row) => shorten(shown(row.b))),
    ], diff.programs));
  }
  const box = make("div");
  root.append(section, box);
  await planTabs(box, data.plans)(0);
}
