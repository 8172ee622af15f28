// The mask: queries by keys, each piece in the colour of the rank that computes it; zooms from the whole batch down to a block.

const STRIPE = 5;  // pixels per stripe: if ranks share the heads, stripes show one share after another

class Mask {
  constructor(plan, section) {
    Object.assign(this, { plan, section, run: null, document: -1, lit: null });
    const find = (name) => section.querySelector(name);
    this.canvas = find("canvas.cells");
    this.canvas.setAttribute("aria-label", "Mask of the batch. Arrows move, plus and minus zoom, N and P go from document to document; the text below describes the middle.");
    this.port = new Viewport(this.canvas, find(".zoom"), this, { left: 54, top: 8, bottom: 24 });
    this.only = find(".only");
    this.only.max = plan.ranks - 1;
    this.only.addEventListener("input", () => this.port.redraw());
    this.choice = find(".document");
    const { start, length } = plan.documents;
    this.tokens = start.at(-1) + length.at(-1);
    this.choice.append(make("option", { value: -1 }, `all ${whole.format(start.length)}`));
    const longest = [...length.keys()].sort((a, b) => length[b] - length[a]).slice(0, 200);
    this.choice.append(...longest.map((at) => make("option", { value: at }, `${at}: ${whole.format(length[at])} tokens`)));
    this.choice.addEventListener("change", () => this.show(Number(this.choice.value)));
    this.port.setFull({ x0: 0, x1: this.tokens, y0: 0, y1: this.tokens });
    this.strip = new Strip(this, find("canvas.documents"));
    if (length[longest[0]] < this.tokens / 4) this.show(longest[0]);  // all documents would be a thin diagonal
  }

  use(run) {
    this.run = run;
    if (run.mask?.void) this.setReadout(`The mask is not shown: ${run.mask.void}`);
    else this.slots = [...new Set(run.mask.heads)].filter((heads) => heads > 0).sort((a, b) => a - b);
    if (this.slots?.length > 1) this.setReadout(`Ranks share the heads: stripes show ${this.slots.length} shares in turn.`);
    this.port.redraw();
  }

  show(document) {
    this.document = document;
    this.choice.value = String(document);
    const { start, length } = this.plan.documents;
    if (document < 0) { this.port.fit(); return; }
    const [low, room] = [start[document], length[document] * 0.04];
    const range = [low - room, low + length[document] + room];
    this.port.show({ x0: range[0], x1: range[1], y0: range[0], y1: range[1] });
    this.setReadout(`document ${document}: ${whole.format(length[document])} tokens from ${whole.format(low)}`);
  }

  key(name) {
    if (name !== "n" && name !== "p") return false;
    const count = this.plan.documents.length.length;
    this.show((this.document + (name === "n" ? 1 : -1) + count) % count);
    return true;
  }

  /** Outlines the tasks of an instruction. */
  highlight(rank, instruction) { this.lit = { rank, instruction }; this.port.redraw(); }

  settled() { this.setReadout(this.describe((this.port.view.y0 + this.port.view.y1) / 2, (this.port.view.x0 + this.port.view.x1) / 2)); }
  hover(x, y) { return x < this.port.left ? "" : this.describe(this.port.atY(y), this.port.atX(x)); }
  click(x, y) { this.setReadout(this.describe(this.port.atY(y), this.port.atX(x))); }
  setReadout(text) { this.section.querySelector(".readout").textContent = text; }

  inside(at, query, key) {
    const { mask } = this.run, row = query - mask.query[at], column = key - mask.key[at], rows = mask.rows[at], keys = mask.keys[at];
    return row >= 0 && row < rows && column >= 0 && column < keys
      && row + keys - 1 - column >= mask.future[at] && rows - 1 - row + column >= mask.past[at];
  }

  describe(query, key) {
    query = Math.floor(query);
    key = Math.floor(key);
    if (!this.run || this.run.mask.void || query < 0 || key < 0 || query >= this.tokens || key >= this.tokens) return "";
    const { mask } = this.run, found = [];
    for (let at = 0; at < mask.query.length; at += 1) if (this.inside(at, query, key)) found.push(at);
    const where = `query ${place(this.plan, query, 1)}, key ${place(this.plan, key, 1)}`;
    if (!found.length) return `${where}: masked`;
    const ranks = [...new Set(found.map((at) => mask.rank[at]))], first = found[0];
    return `${where}: rank ${ranks.join(", ")}${ranks.length > 1 ? " (shares of the heads)" : ""}\n${whole.format(mask.rows[first])} × ${whole.format(mask.keys[first])} tokens, instruction ${mask.instruction[first]}`;
  }

  draw(context, port) {
    const { start, length } = this.plan.documents;
    context.save();
    context.beginPath();
    context.rect(port.left, port.top, port.wide, port.high);
    context.clip();
    if (this.run && !this.run.mask.void) this.pieces(context, port);
    context.strokeStyle = theme.colours.pale;
    context.lineWidth = 0.7;
    for (let at = Math.max(lastBelow(start, port.view.x0, 0, start.length), 0); at < start.length && start[at] < port.view.x1; at += 1) {
      const x = port.x(start[at]), y = port.y(start[at]), wide = port.x(start[at] + length[at]) - x;
      if (wide > 3) context.strokeRect(x, y, wide, port.y(start[at] + length[at]) - y);
    }
    context.restore();
    this.axes(context, port);
    this.strip.port.redraw();
  }

  pieces(context, port) {
    this.ranks(context, port, 0);
    if (this.slots.length === 1) this.ranks(context, port, this.slots[0]);
    if (this.slots.length < 2) return;
    this.slots.forEach((heads, slot) => {
      context.save();
      context.beginPath();
      for (let y = port.top + slot * STRIPE; y < port.height; y += STRIPE * this.slots.length) context.rect(port.left, y, port.wide, STRIPE);
      context.clip();
      this.ranks(context, port, heads);
      context.restore();
    });
  }

  ranks(context, port, heads) {
    const { mask } = this.run, { ptr, order } = mask.byRank, only = this.only.value === "" ? -1 : Number(this.only.value);
    for (let rank = 0; rank < this.plan.ranks; rank += 1) {
      if (ptr[rank] === ptr[rank + 1]) continue;
      context.globalAlpha = only >= 0 && only !== rank ? 0.12 : 1;
      context.fillStyle = theme.rank(this.plan, rank);
      context.beginPath();
      for (let at = ptr[rank]; at < ptr[rank + 1]; at += 1) if (mask.heads[order[at]] === heads) this.outline(context, port, order[at]);
      context.fill();
    }
    context.globalAlpha = 1;
    if (!this.lit) return;
    const { rank, instruction } = this.lit;
    context.beginPath();
    for (let at = ptr[rank]; at < ptr[rank + 1]; at += 1) if (mask.instruction[order[at]] === instruction) this.outline(context, port, order[at]);
    context.strokeStyle = theme.colours.path;
    context.lineWidth = 1.5;
    context.stroke();
  }

  /** A band as a polygon: its rectangle, less the corners that its diagonals cut off. */
  outline(context, port, at) {
    const { mask } = this.run, q0 = mask.query[at], k0 = mask.key[at], q1 = q0 + mask.rows[at], k1 = k0 + mask.keys[at];
    const { x0, x1, y0, y1 } = port.view;
    if (q1 < y0 || q0 > y1 || k1 < x0 || k0 > x1) return;
    const x = port.x(k0), y = port.y(q0), wide = port.x(k1) - x, high = port.y(q1) - y;
    const future = mask.future[at], past = mask.past[at];
    if ((!future && !past) || (wide < 2 && high < 2)) { context.rect(x, y, Math.max(wide, 1), Math.max(high, 1)); return; }
    let corners = [[k0, q0], [k1, q0], [k1, q1], [k0, q1]];
    if (future) corners = cut(corners, (k, q) => k - q + q0 - k1 + 0.5 + future);  // keeps k - q <= k1 - q0 - 0.5 - future
    if (past) corners = cut(corners, (k, q) => q - k - (q1 - k0 - 0.5 - past));
    corners.forEach(([k, q], i) => (i ? context.lineTo(port.x(k), port.y(q)) : context.moveTo(port.x(k), port.y(q))));
    context.closePath();
  }

  axes(context, port) {
    context.fillStyle = theme.colours.pale;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const across = ticks(port.view.x0, port.view.x1, port.wide / 90), down = ticks(port.view.y0, port.view.y1, port.high / 60);
    for (const token of across) context.fillText(tokensAt(token, across[1] - across[0]), Math.min(port.x(token), port.width - 26), port.height - 11);
    context.textAlign = "right";
    for (const token of down) context.fillText(tokensAt(token, down[1] - down[0]), port.left - 6, Math.min(Math.max(port.y(token), 8), port.height - 26));
  }
}

/** All documents side by side, longer ones taller, in the colours of the ranks that compute their queries; a frame
 * marks the visible part of the mask. A click shows a document. */
class Strip {
  constructor(mask, canvas) {
    this.mask = mask;
    canvas.setAttribute("aria-label", "Documents of the batch, side by side. Arrows move, plus and minus zoom, N and P go from document to document.");
    this.port = new Viewport(canvas, make("span"), this, { flat: true, left: 54, top: 3, bottom: 3 });
    this.longest = mask.plan.documents.length.reduce((a, b) => Math.max(a, b), 1);
    this.port.setFull({ x0: 0, x1: mask.tokens, y0: 0, y1: 1 });
  }

  key(name) { return this.mask.key(name); }
  at(x) { const { start } = this.mask.plan.documents; return Math.max(lastBelow(start, this.port.atX(x), 0, start.length), 0); }
  click(x) { this.mask.show(this.at(x)); }
  hover(x) { return x < this.port.left ? "" : `document ${this.at(x)}: ${whole.format(this.mask.plan.documents.length[this.at(x)])} tokens`; }

  draw(context, port) {
    const { plan, run } = this.mask, { start, length } = plan.documents, { view } = this.mask.port;
    const bar = (document, from, to) => {
      const high = Math.max(port.high * Math.sqrt(length[document] / this.longest), 2), x = port.x(from);
      context.fillRect(x, port.top + port.high - high, Math.max(port.x(to) - x, 0.5), high);
    };
    context.save();
    context.beginPath();
    context.rect(port.left, 0, port.wide, port.height);
    context.clip();
    context.fillStyle = theme.colours.wait;
    for (let at = 0; at < start.length; at += 1) bar(at, start[at], start[at] + length[at]);
    if (run && !run.mask.void) {
      const { query, rows, rank } = run.mask;
      for (let at = 0; at < query.length; at += 1) {
        context.fillStyle = theme.rank(plan, rank[at]);
        bar(lastBelow(start, query[at], 0, start.length), query[at], query[at] + rows[at]);
      }
    }
    context.strokeStyle = theme.colours.path;
    context.lineWidth = 2;
    context.strokeRect(port.x(view.x0), 1, Math.max(port.x(view.x1) - port.x(view.x0), 2), port.height - 2);
    context.restore();
  }
}

/** The part of a convex polygon where `beyond` is at most 0 (Sutherland and Hodgman, 1974). */
function cut(corners, beyond) {
  const kept = [];
  corners.forEach((corner, at) => {
    const before = corners[(at + corners.length - 1) % corners.length], a = beyond(...before), b = beyond(...corner);
    if ((a <= 0) !== (b <= 0)) kept.push(before.map((value, i) => value + ((corner[i] - value) * a) / (a - b)));
    if (b <= 0) kept.push(corner);
  });
  return kept;
}
