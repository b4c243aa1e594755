// Light or dark: the system's setting, unless the reader chooses. The choice is kept where the browser lets the page keep it.
const theme = (() => {
  const NAME = "refusion_eval-theme";
  const THEMES = ["system", "light", "dark"];
  const changed = new EventTarget();

  function recall() {
    try {
      return THEMES.includes(localStorage.getItem(NAME)) ? localStorage.getItem(NAME) : THEMES[0];
    } catch {
      return THEMES[0];
    }
  }

  function choose(name) {
    document.documentElement.dataset.theme = name;
    try {
      localStorage.setItem(NAME, name);
    } catch {
      // The choice then lasts as long as the page is open.
    }
    changed.dispatchEvent(new Event("change"));
  }

  function button() {
    const list = dom.el("select", { "aria-label": "Colours", onchange: () => choose(list.value) },
      THEMES.map((name) => dom.el("option", { value: name }, `${name[0].toUpperCase()}${name.slice(1)}`)));
    list.value = recall();
    choose(list.value);
    return dom.el("div.theme", {}, dom.el("span.muted", { "aria-hidden": "true" }, "Colours"), list);
  }

  // A colour of CSS as the browser computes it, for canvases.
  function colour(text) {
    const probe = dom.el("i");
    probe.style.color = text;
    document.body.append(probe);
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  }

  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => changed.dispatchEvent(new Event("change")));
  }

  return { button, colour, changed };
})();
