// The traffic matrix: senders down, receivers across; of nodes if there are many ranks.

class Traffic {
  constructor(plan, section) {
    Object.assign(this, { plan, section, size: plan.ranks > FOLD ? plan.ranks_per_node : 1 });
    this.count = Math.ceil(plan.ranks / this.size);
    const find = (name) => section.querySelector(name);
    this.canvas = find("canvas");
    this.canvas.setAttribute("aria-label", "Bytes from sender (down) to receiver (across). Arrows move, plus and minus zoom; the text below describes the middle.");
    this.port = new Viewport(this.canvas, find(".zoom"), this, { left: 46, top: 8, bottom: 24 });
    find(".of").append(make("option", { value: "all" }, "all"), ...plan.runs.map((run, at) => make("option", { value: at }, `${run.kind}, ${run.phase}`)));
    find(".of").addEventListener("change", (event) => this.use(event.target.value));
    this.port.setFull({ x0: 0, x1: this.count, y0: 0, y1: this.count });
    this.use("all");
  }

  async use(which) {
    const runs = which === "all" ? this.plan.runs : [this.plan.runs[which]], { count, size } = this, perNode = this.plan.ranks_per_node;
    const cells = new Float64Array(count * count), sums = { inside: 0, between: 0 };
    for (const run of runs) {
      const { source, target, bytes: sizes } = (await ready(run, this.plan)).transfers;
      for (let at = 0; at < sizes.length; at += 1) {
        cells[Math.floor(source[at] / size) * count + Math.floor(target[at] / size)] += sizes[at];
        sums[Math.floor(source[at] / perNode) === Math.floor(target[at] / perNode) ? "inside" : "between"] += sizes[at];
      }
    }
    this.cells = cells;
    this.most = cells.reduce((a, b) => Math.max(a, b), 0);
    this.least = cells.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), this.most);
    const total = sums.inside + sums.between;
    this.section.querySelector(".sums").replaceChildren(sortable([
      { name: "where", text: true, value: ([name]) => name, cell: ([name]) => name },
      { name: "bytes", value: ([, sum]) => sum, cell: ([, sum]) => gauge(total ? sum / total : 0, bytes(sum)) },
      { name: "share", value: ([, sum]) => sum, cell: ([, sum]) => percent(total ? sum / total : 0) },
    ], [["inside nodes", sums.inside], ["between nodes", sums.between]], { caption: "Bytes inside and between nodes" }));
    this.port.redraw();
  }

  draw(context, port) {
    if (!this.cells) return;
    const { count } = this, low = Math.log(this.least || 1), span = Math.log(this.most || 1) - low || 1, { x0, x1, y0, y1 } = port.view;
    context.save();
    context.beginPath();
    context.rect(port.left, port.top, port.wide, port.high);
    context.clip();
    for (let row = Math.max(Math.floor(y0), 0); row < Math.min(y1, count); row += 1) {
      for (let column = Math.max(Math.floor(x0), 0); column < Math.min(x1, count); column += 1) {
        const sent = this.cells[row * count + column];
        if (!sent) continue;
        const part = (Math.log(sent) - low) / span;
        context.fillStyle = theme.dark ? `hsl(205 75% ${22 + 58 * part}%)` : `hsl(215 70% ${84 - 62 * part}%)`;
        const x = port.x(column), y = port.y(row);
        context.fillRect(x, y, port.x(column + 1) - x + 0.3, port.y(row + 1) - y + 0.3);
      }
    }
    if (this.size === 1) this.nodes(context, port);
    context.restore();
    this.axes(context, port);
  }

  nodes(context, port) {
    context.fillStyle = theme.colours.pale;
    for (let rank = 0; rank <= this.count; rank += this.plan.ranks_per_node) {
      context.fillRect(port.x(rank) - 0.5, port.top, 1, port.high);
      context.fillRect(port.left, port.y(rank) - 0.5, port.wide, 1);
    }
  }

  axes(context, port) {
    context.fillStyle = theme.colours.pale;
    context.textBaseline = "middle";
    const few = (low, high, room) => ticks(low, high, room / 45).filter((value) => Number.isInteger(value) && value < this.count);
    context.textAlign = "center";
    for (const at of few(port.view.x0, port.view.x1, port.wide)) context.fillText(at, port.x(at + 0.5), port.height - 11);
    context.textAlign = "right";
    for (const at of few(port.view.y0, port.view.y1, port.high)) context.fillText(at, port.left - 6, port.y(at + 0.5));
  }

  describe(row, column) {
    row = Math.floor(row);
    column = Math.floor(column);
    if (!this.cells || row < 0 || column < 0 || row >= this.count || column >= this.count) return "";
    const what = this.size > 1 ? "node" : "rank", sent = this.cells[row * this.count + column];
    const near = this.size > 1 ? (row === column ? ", inside the node" : "") : Math.floor(row / this.plan.ranks_per_node) === Math.floor(column / this.plan.ranks_per_node) ? ", inside a node" : ", between nodes";
    return `${what} ${row} → ${what} ${column}: ${sent ? bytes(sent) : "nothing"}${near}`;
  }

  hover(x, y) { return x < this.port.left || y < this.port.top ? "" : this.describe(this.port.atY(y), this.port.atX(x)); }
  settled() { this.setReadout(this.describe((this.port.view.y0 + this.port.view.y1) / 2, (this.port.view.x0 + this.port.view.x1) / 2)); }
  click(x, y) { this.setReadout(this.hover(x, y)); }
  setReadout(text) { this.section.querySelector(".readout").textContent = text; }
}
