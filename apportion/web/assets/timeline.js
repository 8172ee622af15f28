// The timeline of every rank: its compute stream, below it the rounds that it receives and sends, and the critical path.

class Timeline {
  constructor(plan, section, onPick) {
    Object.assign(this, { plan, section, onPick, run: null, picked: null, row: 0, open: new Set() });
    const find = (name) => section.querySelector(name);
    this.canvas = find("canvas");
    this.canvas.setAttribute("aria-label", `Timeline of ${plan.ranks} ranks. Arrows move, plus and minus zoom, N and P go from span to span, up and down from row to row.`);
    this.folded = plan.ranks > FOLD;
    this.port = new Viewport(this.canvas, find(".zoom"), this, { flat: true, left: this.folded ? 74 : 40, bottom: 26 });
    plan.runs.forEach((run, at) => find(".run").append(make("option", { value: at }, `${run.kind}, ${run.phase}: ${time(run.makespan_us)}`)));
    find(".run").addEventListener("change", (event) => this.use(plan.runs[event.target.value]));
    find(".path").addEventListener("change", () => this.port.redraw());
    this.fold = find(".fold");
    this.fold.hidden = !this.folded;
    this.fold.addEventListener("click", () => this.unfold());
    this.legend(find(".legend"));
    this.canvas.parentElement.addEventListener("scroll", () => this.port.redraw());
    this.use(plan.runs[0]);
  }

  async use(run) {
    await ready(run, this.plan);
    this.run = run;
    this.picked = null;
    this.layout();
    this.port.setFull({ x0: 0, x1: run.makespan_us || 1, y0: 0, y1: 1 });
    this.steps();
    this.setReadout(`${run.kind} ${run.phase}: ${time(run.makespan_us)}, of which ${percent(run.efficiency)} is useful, balanced work`);
    if (this.onRun) this.onRun(run);
  }

  /** Lays out the rows: ranks [first, end), y, high. */
  layout() {
    const size = this.folded ? this.plan.ranks_per_node : 1;
    const count = Math.ceil(this.plan.ranks / size), high = this.folded ? 10 : Math.min(Math.max(Math.floor(560 / count), 10), 34);
    this.rows = [];
    let y = 4;
    const add = (first, end, size) => { this.rows.push({ first, end, y, high: size }); y += size; };
    for (let node = 0; node < count; node += 1) {
      const first = node * size, end = Math.min(first + size, this.plan.ranks);
      if (this.folded && this.open.has(node)) for (let rank = first; rank < end; rank += 1) add(rank, rank + 1, 13);
      else add(first, end, high);
    }
    this.bottom = y;
    this.rowOf = new Uint32Array(this.plan.ranks);
    this.rows.forEach((row, at) => this.rowOf.fill(at, row.first, row.end));
  }

  height() { return (this.bottom ?? 300) + 28; }

  unfold() {
    const nodes = Math.ceil(this.plan.ranks / this.plan.ranks_per_node);
    if (this.open.size) this.open.clear(); else for (let node = 0; node < nodes; node += 1) this.open.add(node);
    this.fold.textContent = this.open.size ? "Fold nodes" : "Unfold nodes";
    this.layout();
    this.port.resize();
  }

  legend(box) {
    const items = [["accent", "attention, in the rank's colour"], ["other", "other work"], ["wait", "waits for a round"], ["even", "a round in flight (upper line: in, lower: out)"], ["path", "critical path"]];
    const keys = items.map(([name, text]) => { const key = make("i", { class: "key" }); key.style.background = `var(--${name})`; return make("span", {}, key, text); });
    keys[0].firstChild.style.background = "linear-gradient(90deg, hsl(205 70% 46%), hsl(28 90% 46%), hsl(160 75% 46%))";
    box.replaceChildren(...keys);
  }

  // --- drawing

  draw(context, port) {
    if (!this.run) return;
    const { scrollTop, clientHeight } = this.canvas.parentElement, foot = Math.min(this.bottom, scrollTop + clientHeight - 28);
    this.axis(context, port, foot);
    context.save();
    context.beginPath();
    context.rect(port.left, 0, port.wide, foot);
    context.clip();
    for (const row of this.rows) this.drawRow(context, port, row);
    if (this.section.querySelector(".path").checked) this.drawPath(context, port);
    this.drawPicked(context, port);
    context.restore();
    this.names(context, port, foot);
  }

  /** Draws the axis. foot: the lower end of the visible rows. */
  axis(context, port, foot) {
    context.textBaseline = "middle";
    context.textAlign = "center";
    const few = ticks(port.view.x0 / 1000, port.view.x1 / 1000, port.wide / 110), step = few.length > 1 ? few[1] - few[0] : 1;
    const places = Math.min(Math.max(0, Math.ceil(-Math.log10(step))), 6);
    for (const ms of few) {
      const x = Math.round(port.x(1000 * ms)) + 0.5;
      context.fillStyle = theme.colours.grid;
      context.fillRect(x, 0, 1, foot);
      context.fillStyle = theme.colours.pale;
      context.fillText(`${ms.toFixed(places)}${ms === few.at(-1) ? " ms" : ""}`, Math.min(Math.max(x, port.left + 10), port.width - 24), foot + 13);
    }
  }

  names(context, port, foot) {
    context.textAlign = "right";
    let last = -20;
    for (const row of this.rows) {
      const middle = row.y + row.high / 2;
      if (middle - last < 11 || middle > foot) continue;
      last = middle;
      context.fillStyle = this.rows[this.row] === row && document.activeElement === this.canvas ? theme.colours.ink : theme.colours.pale;
      const node = row.end - row.first > 1;
      context.fillText(node ? `node ${row.first / this.plan.ranks_per_node}` : `${this.folded ? "rank " : ""}${row.first}`, port.left - 6, middle);
    }
  }

  drawRow(context, port, row) {
    const ranks = row.end - row.first, each = (row.high - 1) / ranks;
    for (let rank = row.first; rank < row.end; rank += 1) {
      const y = row.y + (rank - row.first) * each, lanes = ranks === 1;
      this.drawWork(context, port, rank, y, lanes ? (row.high - 1) * 0.62 : each);
      if (!lanes) continue;
      const thin = Math.max((row.high - 1) * 0.17, 1);
      this.drawLane(context, port, this.run.received, rank, y + (row.high - 1) * 0.64, thin);
      this.drawLane(context, port, this.run.sent, rank, y + (row.high - 1) * 0.83, thin);
    }
  }

  drawWork(context, port, rank, y, high) {
    const { work, workPtr, codes, attends } = this.run, { x0, x1 } = port.view;
    const colour = theme.rank(this.plan, rank), { wait, other } = theme.colours;
    let at = Math.max(lastBelow(work.start, x0, workPtr[rank], workPtr[rank + 1]), workPtr[rank]);
    for (let drawn = -1; at < workPtr[rank + 1] && work.start[at] < x1; at += 1) {
      const from = port.x(work.start[at]), to = port.x(work.end[at]);
      if (to - drawn < 0.35) continue;
      drawn = to;
      const op = work.op[at];
      context.fillStyle = attends.has(op) ? colour : op === codes.wait ? wait : other;
      if (op !== codes.wait) context.fillRect(from, y, Math.max(to - from, 0.5), high);
      else context.fillRect(from, y + high * 0.36, Math.max(to - from, 0.5), Math.max(high * 0.28, 1));
    }
  }

  drawLane(context, port, lane, rank, y, high) {
    const { transfers } = this.run, { x0, x1 } = port.view, end = lane.ptr[rank + 1];
    let parity = -1, drawn = -1;
    for (let at = lane.ptr[rank]; at < end; at += 1) {
      const transfer = lane.order[at];
      if (transfers.start[transfer] > x1) break;
      if (transfers.end[transfer] < x0) continue;
      const from = port.x(transfers.start[transfer]), to = port.x(transfers.end[transfer]);
      if (to - drawn < 0.35) continue;
      drawn = to;
      const odd = transfers.round[transfer] % 2;
      if (odd !== parity) { context.fillStyle = odd ? theme.colours.odd : theme.colours.even; parity = odd; }
      context.fillRect(from, y, Math.max(to - from - 0.4, 0.5), high);
    }
  }

  drawPath(context, port) {
    context.strokeStyle = theme.colours.path;
    context.fillStyle = theme.colours.path;
    context.lineWidth = 1.5;
    for (const step of this.run.path) {
      const row = this.rows[this.rowOf[step.rank]], middle = row.y + row.high / 2, from = port.x(step.start_us), to = port.x(step.end_us);
      if (step.kind === "transfer") {
        const source = this.rows[this.rowOf[step.peer]];
        context.beginPath();
        context.moveTo(from, source.y + source.high / 2);
        context.lineTo(to, middle);
        context.stroke();
      } else {
        context.strokeRect(from + 0.75, row.y - 0.5, Math.max(to - from - 1.5, 0.5), row.high);
      }
    }
  }

  drawPicked(context, port) {
    if (!this.picked) return;
    const { rank, start, end } = this.picked, row = this.rows[this.rowOf[rank]];
    context.strokeStyle = theme.colours.ink;
    context.lineWidth = 2;
    context.strokeRect(port.x(start) - 1, row.y - 1, Math.max(port.x(end) - port.x(start), 1) + 2, row.high + 1);
  }

  // --- pointer and keyboard

  find(x, y) {
    const row = this.rows?.find((item) => y >= item.y && y < item.y + item.high);
    if (!row || x < this.port.left) return null;
    const ranks = row.end - row.first, part = (y - row.y) / (row.high - 1);
    const rank = Math.min(row.first + Math.floor(part * ranks), row.end - 1), us = this.port.atX(x);
    if (ranks === 1 && part > 0.63) return { rank, lane: part > 0.82 ? "sent" : "received", us };
    return { rank, lane: "work", us };
  }

  hover(x, y) {
    const found = this.find(x, y);
    return found ? this.describe(found) : "";
  }

  describe({ rank, lane, us }) {
    const { work, workPtr, transfers } = this.run, reach = 2 * (this.port.view.x1 - this.port.view.x0) / this.port.wide;
    if (lane !== "work") {
      const byRank = this.run[lane], found = [];
      for (let at = byRank.ptr[rank]; at < byRank.ptr[rank + 1] && found.length < 4; at += 1) {
        const transfer = byRank.order[at];
        if (transfers.start[transfer] - reach <= us && us <= transfers.end[transfer] + reach) found.push(this.transfer(transfer));
      }
      return found.join("\n") || `rank ${rank} ${lane === "sent" ? "sends" : "receives"} nothing at ${time(us)}`;
    }
    const at = lastBelow(work.start, us + reach, workPtr[rank], workPtr[rank + 1]);
    if (at < workPtr[rank] || work.end[at] < us - reach) return `rank ${rank} is idle at ${time(us)}`;
    return this.span(at);
  }

  transfer(at) {
    const { transfers, tensors, folded } = this.run, name = tensors[transfers.tensor[at]];
    const ends = folded ? `nodes of ranks ${transfers.source[at]} → ${transfers.target[at]}` : `rank ${transfers.source[at]} → rank ${transfers.target[at]}`;
    const cause = transfers.cause[at];
    const wait = cause >= 0 ? `; waited for the port until ${tensors[transfers.tensor[cause]]} ${transfers.source[cause]} → ${transfers.target[cause]} was sent` : "";
    return `${name} tile, ${bytes(transfers.bytes[at])}, ${ends}, round ${transfers.round[at]}, ${time(transfers.start[at])} + ${time(transfers.end[at] - transfers.start[at])}${wait}`;
  }

  span(at) {
    const { work, names, codes, attends } = this.run, op = work.op[at], lines = [];
    const what = names[op] ?? `op ${op}`, long = work.end[at] - work.start[at];
    lines.push(`rank ${work.rank[at]}: ${what}, ${time(long)} from ${time(work.start[at])} (instruction ${work.instruction[at]}${work.round[at] >= 0 ? `, round ${work.round[at]}` : ""})`);
    if (attends.has(op)) lines.push(this.tasks(work.rank[at], work.instruction[at]));
    if (op === codes.wait && work.transfer[at] >= 0) lines.push(`waits for: ${this.transfer(work.transfer[at])}`);
    return lines.filter(Boolean).join("\n");
  }

  tasks(rank, instruction) {
    const { mask } = this.run;
    if (!mask || mask.void) return "";
    const { ptr, order } = mask.byRank, found = [];
    for (let at = ptr[rank]; at < ptr[rank + 1]; at += 1) if (mask.instruction[order[at]] === instruction) found.push(order[at]);
    const rows = found.slice(0, 4).map((piece) => `queries ${place(this.plan, mask.query[piece], mask.rows[piece])} × keys ${place(this.plan, mask.key[piece], mask.keys[piece])}`);
    return [`${found.length} ${found.length === 1 ? "task" : "tasks"}`, ...rows, found.length > 4 ? `and ${found.length - 4} more` : ""].filter(Boolean).join("\n");
  }

  key(name) {
    if (name === "ArrowUp" || name === "ArrowDown") {
      this.row = Math.min(Math.max(this.row + (name === "ArrowUp" ? -1 : 1), 0), this.rows.length - 1);
      const { first, end, y } = this.rows[this.row];
      this.canvas.parentElement.scrollTop = Math.max(0, y - 100);
      this.setReadout(end - first > 1 ? `node ${first / this.plan.ranks_per_node}; Enter unfolds it` : `rank ${first}`);
    } else if (name === "n" || name === "p") this.next(name === "n" ? 1 : -1);
    else if (name === "Enter" && this.folded) this.toggle(this.rows[this.row].first);
    else return false;
    this.port.redraw();
    return true;
  }

  next(step) {
    const { work, workPtr } = this.run, rank = this.rows[this.row].first;
    const from = this.picked && this.picked.rank === rank ? this.picked.at + step : step > 0 ? workPtr[rank] : workPtr[rank + 1] - 1;
    if (from < workPtr[rank] || from >= workPtr[rank + 1]) return;
    this.pick(from);
  }

  pick(at) {
    const { work } = this.run;
    this.picked = { at, rank: work.rank[at], start: work.start[at], end: work.end[at] };
    const { x0, x1 } = this.port.view, half = (x1 - x0) / 2, middle = (work.start[at] + work.end[at]) / 2;
    if (work.end[at] > x1 || work.start[at] < x0) this.port.show({ x0: middle - half, x1: middle + half });
    this.setReadout(this.span(at));
    if (this.onPick) this.onPick(work.rank[at], work.instruction[at]);
    this.port.redraw();
  }

  toggle(rank) {
    const node = Math.floor(rank / this.plan.ranks_per_node);
    if (this.open.has(node)) this.open.delete(node); else this.open.add(node);
    this.layout();
    this.row = this.rowOf[rank];
    this.port.resize();
  }

  click(x, y) {
    if (x < this.port.left && this.folded) {
      const row = this.rows.find((item) => y >= item.y && y < item.y + item.high);
      if (row) this.toggle(row.first);
      return;
    }
    const found = this.find(x, y);
    if (!found) return;
    this.row = this.rowOf[found.rank];
    if (found.lane !== "work") { this.setReadout(this.describe(found)); return; }
    const { work, workPtr } = this.run, at = lastBelow(work.start, found.us, workPtr[found.rank], workPtr[found.rank + 1]);
    if (at >= workPtr[found.rank]) this.pick(at);
  }

  setReadout(text) { this.section.querySelector(".readout").textContent = text; }

  steps() {
    const list = this.section.querySelector(".steps ol");
    list.replaceChildren(...this.run.path.map((step) => make("li", {}, make("button", { type: "button", onclick: () => this.goTo(step) }, step.text))));
  }

  goTo({ start_us, end_us, rank, text }) {
    const room = Math.max(end_us - start_us, this.run.makespan_us / 50);
    this.port.show({ x0: start_us - room, x1: end_us + room });
    this.row = this.rowOf[rank];
    this.setReadout(text);
  }
}

/** Describes a range of tokens of the batch: the range in its document, and the document. */
function place(plan, token, count) {
  const at = lastBelow(plan.documents.start, token, 0, plan.documents.start.length), from = token - plan.documents.start[at];
  return `[${whole.format(from)}, ${whole.format(from + count)}) of document ${at}`;
}
