// The page of a server: asks for a key where one is needed, reads the stream of states and shows each.

const page = (selector) => document.querySelector(selector);
const seconds = (value) => (value >= 1 ? `${digits(value)} s` : `${digits(1000 * value)} ms`);
const count = (value, what) => `${whole.format(value)} ${what}${value === 1 ? "" : "s"}`;
const NAMES = { r: "ready", p: "a worker plans it", q: "waits for a worker", x: "cannot be planned", ".": "not submitted" };
const RETRY_MS = 2000;

/** The key lives here and nowhere else: not in an address, not in storage, not in a cookie. */
let key = "";
let version = "";

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// ---- the stream

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

async function watch() {
  for (;;) {
    try {
      const response = await fetch("/watch", { headers: headers(), cache: "no-store", credentials: "omit" });
      if (response.status === 401) return askForKey(key ? await reason(response) : "");
      if (!response.ok) throw new Error(await reason(response));
      page(".ask").hidden = true;
      page(".leave").hidden = !key;
      for await (const state of events(response)) show(state);
      lamp("lost", "the server has ended the stream");
    } catch (error) {
      lamp("lost", `no answer: ${error.message}`);
    }
    await new Promise((go) => setTimeout(go, RETRY_MS));
  }
}

async function reason(response) {
  try { return (await response.json()).detail; } catch { return `status ${response.status}`; }
}

function askForKey(wrong) {
  lamp("lost", "a key is needed");
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

// ---- what is shown

function show(state) {
  version = state.version;
  lamp(state.state, `${state.state} · ${version}`);
  page(".shown").hidden = false;
  showCards(state);
  showJobs(state);
  showSpread(state.planning);
  showWorkers(state.workers);
  showFailures(state);
  showStore(state.store);
  page("#content").setAttribute("aria-busy", "false");
}

/** Replaces what an element shows, unless that is what it shows already: whoever reads or has the focus there stays. */
function put(element, said, make_) {
  const mark = JSON.stringify(said);
  if (element.shownMark === mark) return;
  const focus = element.contains(document.activeElement) ? document.activeElement.dataset.place : undefined;
  element.replaceChildren(...make_());
  element.shownMark = mark;
  if (focus) element.querySelector(`[data-place="${CSS.escape(focus)}"]`)?.focus();
}

function showCards(state) {
  const streams = state.jobs.flatMap((job) => job.streams);
  const ahead = streams.length ? Math.min(...streams.map((stream) => stream.ahead)) : null;
  const cards = [
    [whole.format(state.jobs.length + state.more_jobs), "jobs"],
    [ahead === null ? "–" : whole.format(ahead), "plans ahead of the ranks, the stream that has least"],
    [quantile(state.planning, 0.5), "planning, median"],
    [`${state.workers.alive} of ${state.workers.size}`, "workers alive"],
    [whole.format(state.waiting), "readers wait for a plan"],
    [whole.format(state.store.unplanned), "iterations wait to be planned"],
    [whole.format(state.deliveries), "plans handed to ranks"],
    [whole.format(state.refused + state.quarantined), "batches without a plan"],
  ];
  put(page(".cards"), cards, () => cards.map(([value, name]) => make("div", { class: "card" }, make("b", {}, value), make("span", {}, name))));
}

function showJobs(state) {
  const none = [make("p", { class: "about" }, "There are no jobs. Make one: apportion job create NAME --ranks 64 --recipe fcp")];
  put(page(".jobs"), [state.jobs, state.more_jobs, state.aside], () => {
    const aside = Object.entries(state.aside).map(([name, why]) =>
      make("div", { class: "job" }, make("h3", {}, name), make("p", { class: "wrong" }, `set aside: ${why}`)));
    const more = state.more_jobs ? [make("p", { class: "about" }, `and ${count(state.more_jobs, "job")} more`)] : [];
    const jobs = state.jobs.map(jobOf);
    return jobs.length + aside.length ? [...aside, ...jobs, ...more] : none;
  });
}

function jobOf(job) {
  const head = make("h3", {}, job.name);
  const about = make("p", { class: "about" }, `${job.recipe} on ${count(job.ranks, "rank")}, ${job.lookahead} iterations ahead`);
  const streams = job.streams.length ? job.streams.flatMap((stream) => streamOf(job, stream)) : [make("p", { class: "about" }, "no epoch has begun")];
  return make("div", { class: "job" }, head, about, ...streams);
}

function streamOf(job, stream) {
  const waiting = stream.waiting ? `, ${count(stream.waiting, "reader")} waiting` : "";
  const pace = stream.front ? `, ${seconds(stream.step_s)} a step` : "";
  const text = `${stream.stream}: epoch ${stream.epoch}, ranks are at iteration ${whole.format(stream.front)}, ` +
    `${count(stream.ahead, "plan")} ahead, ${whole.format(stream.queued)} queued${waiting}${pace}`;
  const cells = [...stream.states].map((letter, at) => cellOf(job, stream, letter, stream.first + at));
  return [make("p", {}, text), make("div", { class: "strip", role: "group", "aria-label": `iterations of ${job.name}, ${stream.stream}` }, ...cells)];
}

function cellOf(job, stream, letter, number) {
  const kind = { ".": "none" }[letter] ?? letter;
  const look = `${kind}${number < stream.front ? " past" : ""}${number === stream.front ? " front" : ""}`;
  const title = `iteration ${number}: ${NAMES[letter]}`;
  if (letter !== "r") return make("i", { class: look, title, role: "img", "aria-label": title });
  const place = `${job.name}/${stream.epoch}/${number}`;
  const open_ = () => report(job.name, stream.epoch, number);
  return make("button", { type: "button", class: look, title: `${title}; opens its report`, "aria-label": title, "data-place": place, onclick: open_ });
}

function quantile(spread, share) {
  const total = spread.counts.reduce((sum, one) => sum + one, 0);
  if (!total) return "–";
  let seen = 0;
  for (const [at, one] of spread.counts.entries()) {
    seen += one;
    if (seen >= share * total) return at < spread.bounds_s.length ? `≤ ${seconds(spread.bounds_s[at])}` : `> ${seconds(spread.bounds_s.at(-1))}`;
  }
  return "–";
}

function showSpread(spread) {
  put(page(".spread"), spread, () => {
    const total = spread.counts.reduce((sum, one) => sum + one, 0), most = Math.max(1, ...spread.counts);
    const mean = total ? `, ${seconds(spread.sum_s / total)} on average` : "";
    page(".spread-said").textContent = total
      ? `${count(total, "plan")} at the worker${mean}; half take ${quantile(spread, 0.5)}, 95 of 100 ${quantile(spread, 0.95)}.`
      : "Nothing has been planned since the server started.";
    const used = spread.counts.map((one, at) => [one, at]).filter(([one]) => one);
    const first = used.length ? used[0][1] : 0, last = used.length ? used.at(-1)[1] : -1;
    const rows = spread.counts.slice(first, last + 1).map((one, at) => [one, first + at]);
    return rows.flatMap(([one, at]) => [
      make("span", {}, at < spread.bounds_s.length ? `≤ ${seconds(spread.bounds_s[at])}` : `> ${seconds(spread.bounds_s.at(-1))}`),
      bar(one / most),
      make("span", {}, whole.format(one)),
    ]);
  });
}

function bar(share) {
  const element = make("b", { "aria-hidden": "true" });
  element.style.width = `${100 * share}%`; // by script: the policy allows no style in markup
  return element;
}

function showWorkers(workers) {
  const text = `${workers.alive} of ${workers.size} alive, ${whole.format(workers.restarts)} replaced, ${count(workers.at_workers, "task")} at them.`;
  put(page(".workers-said"), text, () => [text]);
  const rows = workers.busy.map((one) => [one.job, one.epoch, one.iteration, seconds(Math.round(10 * one.since_s) / 10)]);
  put(page(".busy"), rows, () => [table(["job", "epoch", "iteration", "for"], rows, "No worker plans now.")]);
}

function showFailures(state) {
  const rows = state.failures.map((one) => [one.job, one.epoch, one.iteration, one.type, one.detail]);
  put(page(".failures"), rows, () => [table(["job", "epoch", "iteration", "", "why"], rows, "None.")]);
}

function table(names, rows, none) {
  if (!rows.length) return make("p", { class: "about" }, none);
  const wide = names.indexOf("why");
  const head = make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name))));
  const body = rows.map((row) => make("tr", {}, ...row.map((value, at) => make("td", at === wide ? { class: "wide" } : {}, String(value)))));
  return make("table", {}, head, make("tbody", {}, ...body));
}

function showStore(store) {
  const share = store.most_bytes ? ` of ${bytes(store.most_bytes)}, ${percent(store.pack_bytes / store.most_bytes)}` : "";
  const rows = [
    ["Place", store.place],
    ["Plans", `${whole.format(store.packs)}, ${bytes(store.pack_bytes)}${share}`],
    ["In memory", `${whole.format(store.cached)}, ${bytes(store.cache_bytes)}`],
    ["Waiting requests", `${whole.format(store.unplanned)}, ${bytes(store.unplanned_bytes)}`],
    ...(store.free_bytes === null ? [] : [["Free on its disk", bytes(store.free_bytes)]]),
    ["Failed calls", whole.format(store.errors)],
  ];
  put(page(".store"), rows, () => rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

// ---- reports

async function report(job, epoch, iteration) {
  const opened = window.open("", "_blank"); // at once: later it would be a pop-up that nobody asked for
  say(`The report of iteration ${iteration} of ${job} is being made …`);
  try {
    const path = `/v1/jobs/${job}/epochs/${epoch}/iterations/${iteration}/report`;
    const response = await fetch(path, { headers: headers(), credentials: "omit" });
    if (!response.ok) throw new Error(await reason(response));
    const address = URL.createObjectURL(await response.blob());
    if (opened) opened.location = address;
    say(opened ? "" : "The browser does not let this page open another one: allow it, and click again.");
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  } catch (error) {
    opened?.close();
    say(`No report: ${error.message}`);
  }
}

function say(text) {
  page(".note").textContent = text;
}

// ---- start

function startWatch() {
  startTheme();
  put(page(".keys"), "keys", () => Object.entries(NAMES).map(([letter, name]) => make("span", {}, make("i", { class: letter === "." ? "none" : letter }), name)));
  page(".ask").addEventListener("submit", (event) => {
    event.preventDefault();
    key = page(".ask input").value;
    page(".ask input").value = "";
    watch();
  });
  page(".leave").addEventListener("click", () => location.reload());
  watch();
}

startWatch();
