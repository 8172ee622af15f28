// Colours of ranks and of canvas elements, in a light and a dark theme.
// Hues after Okabe and Ito (2008), which the colour-blind can distinguish: one per node, lighter and darker for its ranks.

const HUES = [[205, 70], [28, 90], [160, 75], [325, 45], [50, 80], [198, 75], [268, 40], [12, 65]];

/** The colour of a rank: its own hue if there are few ranks, else the hue of its node and its own lightness. */
function rankColour(plan, rank, dark) {
  if (plan.ranks <= HUES.length) {
    const [hue, strength] = HUES[rank];
    return `hsl(${hue} ${strength}% ${dark ? 58 : 46}%)`;
  }
  const node = Math.floor(rank / plan.ranks_per_node), place = rank % plan.ranks_per_node;
  const [hue, strength] = HUES[node % HUES.length];
  const turn = (plan.ranks_per_node > 1 ? place / (plan.ranks_per_node - 1) : 0.5) + (Math.floor(node / HUES.length) % 3) * 0.11;
  return `hsl(${hue} ${strength}% ${(dark ? 40 : 30) + 36 * (turn % 1.01)}%)`;
}

const theme = {
  dark: false,
  colours: {},
  ofRank: new Map(),
  watchers: new Set(),
  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["page", "ink", "pale", "line", "path", "other", "wait", "even", "odd", "plot", "grid", "accent", "bar"]) {
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.ofRank.clear();
    for (const watcher of this.watchers) watcher();
  },
  rank(plan, rank) {
    const key = `${plan.ranks}/${plan.ranks_per_node}/${rank}`;
    if (!this.ofRank.has(key)) this.ofRank.set(key, rankColour(plan, rank, this.dark));
    return this.ofRank.get(key);
  },
};

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print"), choice = document.getElementById("theme");
  const apply = () => {
    theme.dark = !paper.matches && (choice.value === "dark" || (choice.value === "auto" && system.matches));
    document.documentElement.toggleAttribute("data-dark", theme.dark);
    theme.read();
  };
  for (const changed of [system, paper, choice]) changed.addEventListener("change", apply);
  apply();
}
