// The page of a server: asks for a token if one is needed, and shows plans and metrics every second, the last hour every five.

const page = (selector) => document.querySelector(selector);
const seconds = (value) => (value >= 1 ? `${digits(value)} s` : `${digits(1000 * value)} ms`);
const TOKEN = "apportion-token", EVERY_MS = 1000, HOUR_ROUNDS = 5;
const { release } = JSON.parse(page("#data").textContent);

async function get(path, accept = "*/*") {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { accept, ...(token && { authorization: `Bearer ${token}` }) };
  const response = await fetch(path, { headers, cache: "no-store", credentials: "omit" });
  if (response.ok || path === "/readyz") return response;
  const problem = await response.json().catch(() => ({ detail: `status ${response.status}` }));
  throw Object.assign(new Error(problem.detail), { status: response.status });
}

let rounds = 0, hour = null;
async function watch() {
  try {
    const [plans, metrics, ready] = await Promise.all([get("/v1/plans"), get("/metrics"), get("/readyz")]);
    if (rounds % HOUR_ROUNDS === 0) hour = await (await get("/v1/hour")).json();
    rounds += 1;
    show((await plans.json()).plans, read(await metrics.text()), hour, await ready.json());
  } catch (error) {
    if (error.status === 401) return askForToken(sessionStorage.getItem(TOKEN) ? error.message : "");
    lamp("lost", `no answer: ${error.message}`);
  }
  setTimeout(watch, EVERY_MS);
}

function askForToken(wrong) {
  lamp("lost", "a token is needed");
  page(".shown").hidden = true;
  page(".ask").hidden = false;
  page(".wrong").textContent = wrong;
  page("#content").setAttribute("aria-busy", "false");
  page(".ask input").focus();
}

function lamp(state, text) {
  const element = page(".lamp");
  element.dataset.state = state;
  if (element.textContent !== text) element.textContent = text;
}

// ---- metrics

/** Parses the text format of Prometheus: name and labels -> value. */
function read(text) {
  const lines = text.split("\n").filter((line) => line && !line.startsWith("#"));
  return new Map(lines.map((line) => line.split(/ (?=[^ ]*$)/)).map(([name, value]) => [name.replace(/^apportion_/, ""), Number(value)]));
}

let before = null;
function deliveriesPerSecond(count) {
  const now = { count, at: performance.now() }, last = before;
  before = now;
  return last ? (1000 * Math.max(0, now.count - last.count)) / (now.at - last.at) : 0;
}

// ---- content

function show(plans, figures, { minutes, tenants }, ready) {
  const figure = (name) => figures.get(name) ?? 0;
  lamp(ready.status, `${ready.status === "ok" ? "ready" : `degraded: ${ready.reason}`} · ${release}`);
  page(".ask").hidden = true;
  page(".shown").hidden = false;
  page(".leave").hidden = !sessionStorage.getItem(TOKEN);
  const cards = [
    [whole.format(figure('plans_total{state="ready"}')), "plans ready"],
    [whole.format(figure("queued")), "wait for a worker"],
    [whole.format(figure("running")), "being planned"],
    [whole.format(figure('plans_total{state="refused"}')), "refused"],
    [duration(tenants[0].planning_s), "planning, median of the last hour"],
    [duration(tenants[0].planning_99_s), "planning, 99th percentile of the last hour"],
    [digits(deliveriesPerSecond(figure("deliveries_total"))), "slices delivered per second"],
    [whole.format(figure("streams")), "open streams"],
  ];
  put(page(".now"), cards, () => cards.map(([value, name]) => make("div", { class: "card" }, make("b", {}, value), make("span", {}, name))));
  put(page(".hour"), minutes, () => CHARTS.map(([title, name, format]) => chart(title, minutes.map((minute) => minute[name]), format)));
  put(page(".tenants"), tenants, () => [rowsOf(
    ["tenant", "waiting", "ready", "refused", "planning", "planning, 99 %", "waited"],
    tenants.map((row) => [row.tenant || "all", ...[row.waiting, row.ready, row.refused].map(whole.format), ...[row.planning_s, row.planning_99_s, row.waited_s].map(duration)]),
  )]);
  put(page(".plans"), plans, () => [plans.length ? table(plans) : make("p", { class: "about" }, "Nothing has been submitted since the server started.")]);
  const rows = [
    ["Memory of the server", bytes(figure("process_resident_memory_bytes"))],
    ["Plans in memory", bytes(figure("cached_bytes"))],
    ["Delivered", `${whole.format(figure("deliveries_total"))} slices, ${bytes(figure("delivered_bytes_total"))}`],
    ["Found in the store", whole.format(figure("store_hits_total"))],
    ["Failed calls to the store", whole.format(figure("store_errors_total"))],
    ["Workers that died", whole.format(figure("worker_deaths_total"))],
  ];
  put(page(".store"), rows, () => rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  page("#content").setAttribute("aria-busy", "false");
}

/** Replaces the content of an element if its data has changed; keeps the focus. */
function put(element, data, makeContent) {
  const mark = JSON.stringify(data);
  if (element.shownMark === mark) return;
  const focus = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  element.replaceChildren(...makeContent());
  element.shownMark = mark;
  if (focus) element.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
}

const duration = (value) => (value === null ? "–" : seconds(value));

/** [title, field of a minute, its value as text]. */
const CHARTS = [
  ["plans ahead of the ranks", "ahead", whole.format], ["median wait of the first rank", "waited_s", duration],
  ["median planning time", "planning_s", duration], ["plans made", "planned", whole.format], ["plans found in the store", "stored", whole.format],
];

/** A bar for each of sixty minutes, as long as its share of the largest. */
function chart(title, values, format) {
  const most = Math.max(...values.map((value) => value ?? 0)), now = values.at(-1) ?? values.findLast((value) => value !== null) ?? null;
  const bars = values.map((value, at) => {
    const bar = make("i", { title: `${59 - at} minutes ago: ${format(value)}` });
    bar.style.height = `${most ? (100 * (value ?? 0)) / most : 0}%`;
    return bar;
  });
  const summary = `${now === null ? "–" : format(now)} now, ${format(most)} at most`;
  return make("div", { class: "card chart" }, make("span", {}, title), make("div", { role: "img", "aria-label": `${title} over the last hour: ${summary}` }, ...bars), make("span", {}, summary));
}

function rowsOf(names, rows) {
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col", class: name.startsWith("plan,") ? "text" : "" }, name)));
  const cell = (content) => (content instanceof Element && content.matches("td") ? content : make("td", {}, content));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell)))));
}

function table(plans) {
  return rowsOf(["key", "state", "ranks", "job", "tenant", "planning", "plan, or why there is none"], plans.map((plan) => [
    plan.state === "ready" ? opener(plan.key) : plan.key.slice(0, 12),
    make("td", { class: plan.state }, plan.state),
    ...[plan.ranks, plan.job.slice(0, 8), plan.tenant, duration(plan.seconds || null)].map(String),
    make("td", { class: "wide" }, plan.detail || plan.id.slice(0, 12)),
  ]));
}

function opener(key) {
  const text = key.slice(0, 12);
  return make("button", { type: "button", "data-key": key, title: `Report of ${key}`, onclick: () => report(key, text) }, text);
}

async function report(key, text) {
  const opened = window.open("", "_blank"); // before any await: later the browser would block it as a pop-up
  page(".note").textContent = `Making the report of ${text} …`;
  try {
    const response = await get(`/v1/plans/${key}`, "text/html");
    const address = URL.createObjectURL(await response.blob());
    if (opened) opened.location = address;
    page(".note").textContent = opened ? "" : "The browser blocked a pop-up of this page: allow it, and click again.";
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  } catch (error) {
    opened?.close();
    page(".note").textContent = `No report: ${error.message}`;
  }
}

startTheme();
page(".ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, page(".ask input").value);
  page(".ask input").value = "";
  watch();
});
page(".leave").addEventListener("click", () => { sessionStorage.removeItem(TOKEN); location.reload(); });
watch();
