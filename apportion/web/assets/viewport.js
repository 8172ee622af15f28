// A canvas that can be moved and zoomed with wheel, fingers, keys and buttons. Its owner draws the content.

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = !text;
    if (!text) return;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
    box.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

class Viewport {
  /** owner: draw(context, view), hover(x, y, view) -> text, and optionally height(), click(x, y), key(name) -> whether
   * it handled the key. flat: only x is zoomed. left, top, bottom: margins for labels, in pixels. */
  constructor(canvas, buttons, owner, { flat = false, left = 56, top = 0, bottom = 24 } = {}) {
    Object.assign(this, { canvas, owner, flat, left, top, bottom, fingers: new Map(), moved: 0 });
    this.context = canvas.getContext("2d");
    this.full = { x0: 0, x1: 1, y0: 0, y1: 1 };
    this.view = { ...this.full };
    for (const [label, name, act] of [["−", "Zoom out", () => this.zoom(1.5)], ["+", "Zoom in", () => this.zoom(1 / 1.5)], ["fit", "Show everything", () => this.fit()]]) {
      buttons.append(make("button", { type: "button", "aria-label": name, title: name, onclick: act }, label));
    }
    this.listen();
    new ResizeObserver(() => this.resize()).observe(canvas);
    theme.watchers.add(() => this.redraw());
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.0025), ...this.place(event));
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, ...this.place(event)));
    canvas.addEventListener("pointerdown", (event) => {
      this.fingers.set(event.pointerId, event);
      this.moved = 0;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => (this.fingers.has(event.pointerId) ? this.drag(event) : this.hover(event)));
    canvas.addEventListener("pointerup", (event) => {
      if (this.fingers.size === 1 && this.moved < 4 && this.owner.click) this.owner.click(...this.pixel(event), event);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.fingers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** The pointer's position in pixels of the canvas. */
  pixel(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** The pointer's position in coordinates of the content. */
  place(event) { const [x, y] = this.pixel(event); return [this.atX(x), this.atY(y)]; }
  get wide() { return Math.max(this.width - this.left - 8, 1); }
  get high() { return Math.max(this.height - this.top - this.bottom, 1); }
  x(value) { return this.left + ((value - this.view.x0) / (this.view.x1 - this.view.x0)) * this.wide; }
  y(value) { return this.top + ((value - this.view.y0) / (this.view.y1 - this.view.y0)) * this.high; }
  atX(pixel) { return this.view.x0 + ((pixel - this.left) / this.wide) * (this.view.x1 - this.view.x0); }
  atY(pixel) { return this.view.y0 + ((pixel - this.top) / this.high) * (this.view.y1 - this.view.y0); }

  hover(event) { tip.show(event, this.owner.hover(...this.pixel(event), event) || ""); }

  drag(event) {
    const before = this.fingers.get(event.pointerId), distance = this.fingerDistance();
    this.fingers.set(event.pointerId, event);
    this.moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    if (this.fingers.size === 2 && distance) this.zoom(distance / (this.fingerDistance() || distance), ...this.place(event));
    else this.move((before.clientX - event.clientX) / this.wide, (before.clientY - event.clientY) / this.high);
    tip.hide();
  }

  fingerDistance() {
    if (this.fingers.size !== 2) return 0;
    const [a, b] = [...this.fingers.values()];
    return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), "0": () => this.fit(),
      ArrowLeft: () => this.move(-0.1, 0), ArrowRight: () => this.move(0.1, 0), ArrowUp: () => this.move(0, -0.1), ArrowDown: () => this.move(0, 0.1),
      Escape: () => tip.hide(),
    };
    if (this.owner.key && this.owner.key(event.key)) event.preventDefault();
    else if (actions[event.key]) { actions[event.key](); event.preventDefault(); }
  }

  setFull(full) { this.full = full; this.view = { ...full }; this.resize(); }
  fit() { this.show(this.full); }

  /** Shows a range, limited to the full range. */
  show({ x0, x1, y0 = this.full.y0, y1 = this.full.y1 }) {
    const range = (low, high, first, last) => {
      const size = Math.min(Math.max(high - low, (last - first) / 1e7), last - first);
      const from = Math.min(Math.max((low + high - size) / 2, first), last - size);
      return [from, from + size];
    };
    const [a, b] = range(x0, x1, this.full.x0, this.full.x1);
    const [c, d] = this.flat ? [this.full.y0, this.full.y1] : range(y0, y1, this.full.y0, this.full.y1);
    this.view = { x0: a, x1: b, y0: c, y1: d };
    this.redraw();
  }

  zoom(by, x = (this.view.x0 + this.view.x1) / 2, y = (this.view.y0 + this.view.y1) / 2) {
    const { x0, x1, y0, y1 } = this.view;
    this.show({ x0: x - (x - x0) * by, x1: x + (x1 - x) * by, y0: y - (y - y0) * by, y1: y + (y1 - y) * by });
    if (this.owner.settled) this.owner.settled();
  }

  move(x, y) {
    const { x0, x1, y0, y1 } = this.view, right = x * (x1 - x0), down = y * (y1 - y0);
    this.show({ x0: x0 + right, x1: x1 + right, y0: y0 + down, y1: y1 + down });
    if (this.owner.settled) this.owner.settled();
  }

  resize() {
    if (this.owner.height) this.canvas.style.height = `${this.owner.height()}px`;
    const { width, height } = this.canvas.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    if (!width || !height) return;
    Object.assign(this, { width, height });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      if (!this.width || !this.canvas.isConnected) return;
      const ratio = devicePixelRatio || 1;
      this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.context.fillStyle = theme.colours.plot;
      this.context.fillRect(0, 0, this.width, this.height);
      this.context.font = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
      this.owner.draw(this.context, this);
    });
  }
}

/** About `about` round numbers between two values. */
function ticks(low, high, about) {
  const raw = (high - low) / Math.max(about, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw) ?? raw;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}
