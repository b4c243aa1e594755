// Systems by tasks in one metric, best first.
const matrix = (() => {
  const MEAN = "mean";

  // One entry for each run, or for each of several settings within a run, with its cells by task.
  // A task without samples is there too, so that its mark is seen.
  function entries(cells, metric, apart) {
    const found = new Map();
    for (const cell of cells) {
      if (!measured(cell, metric) && cell.samples) continue;
      const key = `${cell.run} ${store.variant(cell)} ${apart(cell)}`;
      if (!found.has(key)) found.set(key, { first: cell, byTask: new Map() });
      found.get(key).byTask.set(format.task(cell), cell);
    }
    return [...found.values()];
  }

  function measured(cell, metric) {
    const figure = cell && format.figure(cell, metric);
    return figure && figure.value !== null ? figure : null;
  }

  // The columns in order; the first is the one that rows are sorted by, the mean if there is one. Tasks without any figure come last.
  function columns(rows, metric) {
    const cells = rows.flatMap(({ byTask }) => [...byTask.values()]);
    const names = [...new Set(cells.map(format.task))].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
    const place = (name) => {
      const own = cells.filter((cell) => format.task(cell) === name && measured(cell, metric));
      return own.some((cell) => cell.mean) ? 0 : own.length ? 1 : 2;
    };
    return names.sort((one, other) => place(one) - place(other));
  }

  // `link` gives the address of a figure; `apart` is what tells apart rows of one run, besides settings.
  const toTask = (cell) => (cell.mean ? null : `${router.link("task", cell.task)}?system=${cell.number}`);
  function table(cells, metric, sort, sortBy, link = toTask, apart = () => "") {
    const rows = entries(cells, metric, apart);
    if (!rows.length) return dom.el("p.empty", {}, "Nothing matches: tick a system and a task.");
    const names = columns(rows, metric);
    const [key, direction] = names.includes(sort[0]) || sort[0] === "system" ? sort : [names[0], format.isCost(metric) ? 1 : -1];
    const value = (row) => (key === "system" ? store.title(row.first) : measured(row.byTask.get(key), metric)?.value ?? null);
    rows.sort((one, other) => overview.order(value(one), value(other), direction) || one.first.number - other.first.number);
    const scales = new Map(names.map((name) => [name, scale(rows, name, metric)]));
    const machines = new Set(rows.map(({ first }) => format.machine(first)));
    // The notes above the table say once that all tasks are mini.
    const short = (name) => (names.every((one) => /^mini_|\(mini\)$/.test(one)) ? name.replace(/^mini_/, "") : name);
    const head = (name, label, css) => overview.head([name, label], [key, direction], sortBy, css);
    return dom.el("table.figures.matrix", {},
      dom.el("caption.hidden", {}, `${format.metricLabel(metric)} of every system on every task`),
      dom.el("thead", {}, dom.el("tr", {}, head("system", "System", "th"),
        names.map((name) => head(name, short(name), "th.number")))),
      dom.el("tbody", {}, rows.map((row) => dom.el("tr", {},
        dom.el("th.system", { scope: "row" }, store.title(row.first),
          machines.size > 1 && (format.isSpeed(metric) || apart(row.first)) && dom.el("small", {}, format.machine(row.first))),
        names.map((name) => entry(row.byTask.get(name), name, metric, scales.get(name), link))))));
  }

  // The range of a column's intervals.
  function scale(rows, name, metric) {
    const figures = rows.map((row) => measured(row.byTask.get(name), metric)).filter(Boolean);
    return {
      low: Math.min(...figures.map(({ value, low }) => low ?? value)),
      high: Math.max(...figures.map(({ value, high }) => high ?? value)),
    };
  }

  function entry(cell, name, metric, { low, high }, link) {
    const attributes = { "data-label": name };
    if (!cell) return dom.el("td.number", attributes, dom.el("span.none", { title: "not measured" }, "–"));
    const figure = measured(cell, metric);
    const shown = overview.figure(cell, metric);
    const body = !figure || link(cell) === null ? shown : dom.el("a.plain", { href: link(cell) }, shown);
    return dom.el("td.number", attributes, body, overview.marks(cell, format.isSpeed(metric)), figure && overview.whisker(figure, low, high));
  }

  const CAPTION = "Brackets and bars: 95% intervals, bars on the range of their column. The command compare says whether two systems differ, item by item.";

  return { table, MEAN, CAPTION };
})();
