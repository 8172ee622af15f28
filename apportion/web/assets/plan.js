// The sections of one plan, which share unpacked data and the selected span.

/** Unpacks a run, once, and sorts its work and transfers by rank. */
function ready(run, plan) {
  run.ready ??= (async () => {
    const [work, transfers] = await Promise.all([unpack(run.work), unpack(run.transfers)]);
    const ptr = new Uint32Array(plan.ranks + 1);
    for (const rank of work.rank) ptr[rank + 1] += 1;
    for (let rank = 0; rank < plan.ranks; rank += 1) ptr[rank + 1] += ptr[rank];
    const attends = new Set(Object.entries(run.names).filter(([, name]) => name === "attend" || name === "attend_grad").map(([code]) => Number(code)));
    Object.assign(run, {
      work, transfers, attends, workPtr: ptr,
      received: grouped(transfers.target, transfers.start, plan.ranks),
      sent: grouped(transfers.source, transfers.start, plan.ranks),
    });
    return run;
  })();
  return run.ready;
}

/** Unpacks the mask of a run; a mask that equals another run's shares its columns. */
async function readyMask(run, plan) {
  if (!run.mask || run.mask.void || run.mask.byRank) return run;
  if (run.mask.same === undefined) run.mask = await unpack(run.mask);
  else {
    const other = (await readyMask(plan.runs[run.mask.same], plan)).mask;
    run.mask = { ...other, ...(await unpack({ instruction: run.mask.instruction })) };
  }
  run.mask.byRank ??= grouped(run.mask.rank, run.mask.query, plan.ranks);
  return run;
}

/** Draws a plan into `root`. Resolves when the page is ready for use. */
async function drawPlan(root, plan) {
  root.replaceChildren(document.getElementById("plan-template").content.cloneNode(true));
  const section = (name) => root.querySelector(`section.${name}`);
  [plan.ofRanks, plan.documents] = await Promise.all([plan.ofRanks ?? unpack(plan.of_ranks), plan.unpacked ? plan.documents : unpack(plan.documents)]);
  plan.unpacked = true;
  figures(plan, section("figures"));
  const timeline = new Timeline(plan, section("timeline"));
  rankTable(plan, section("ranks"));
  searchTable(plan, section("search"));
  const masked = plan.runs.some((run) => run.mask);
  section("mask").hidden = !masked;
  const mask = masked ? new Mask(plan, section("mask")) : null;
  timeline.onPick = (rank, instruction) => mask?.highlight(rank, instruction);
  timeline.onRun = async (run) => { if (mask) mask.use(await readyMask(run, plan)); };
  await ready(plan.runs[0], plan);
  if (mask) mask.use(await readyMask(plan.runs[0], plan));
  new Traffic(plan, section("traffic"));
}

/** Tabs of plans, one of which is visible. */
function planTabs(root, plans, shown = plans.length > 1) {
  const box = make("div"), tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "Plans" });
  const choose = async (at) => {
    [...tabs.children].forEach((tab, i) => { tab.setAttribute("aria-selected", String(i === at)); tab.tabIndex = i === at ? 0 : -1; });
    await drawPlan(box, plans[at]);
  };
  plans.forEach((plan, at) => tabs.append(make("button", { type: "button", role: "tab", onclick: () => choose(at) }, plan.name)));
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], at = [...tabs.children].indexOf(document.activeElement);
    if (!step || at < 0) return;
    const next = (at + step + plans.length) % plans.length;
    tabs.children[next].focus();
    choose(next);
  });
  root.append(...(shown ? [tabs] : []), box);
  return choose;
}
