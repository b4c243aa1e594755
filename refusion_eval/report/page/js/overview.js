// The first view: systems by tasks with their ranking, the frontier plots, every figure, and how the runs were made.
const overview = (() => {
  const KINDS = ["systems", "tasks", "metrics"];
  const options = {
    systems: () => store.cells.map(store.systemName), tasks: () => store.cells.map(format.task), metrics: () => format.columns,
  };

  // What is ticked: all but what the address leaves out; at first only the main metrics.
  function chosen() {
    const query = router.query();
    const ticked = Object.fromEntries(KINDS.map((kind) => {
      const left = new Set(JSON.parse(query.get(kind) || "[]"));
      return [kind, new Set(options[kind]().filter((name) => !left.has(name)))];
    }));
    const main = format.MAIN.filter((name) => format.columns.includes(name));
    if (!query.has("metrics") && main.length) ticked.metrics = new Set(main);
    const sort = (name, first) => (query.has(name) ? JSON.parse(query.get(name)) : first);
    return { ...ticked, metric: query.get("metric") || main[0] || format.columns[0], sort: sort("sort", ["task", 1]), rank: sort("rank", [matrix.MEAN, -1]) };
  }

  function view(main) {
    const now = safely(chosen);
    router.trail(["Overview", null]);
    const ranking = dom.el("div.table-place.limited", { tabindex: "0", role: "region", "aria-label": "Ranking" });
    const figures = dom.el("div.table-place");
    const visible = () => store.cells.filter((cell) => now.systems.has(store.systemName(cell)) && now.tasks.has(format.task(cell)));
    const plots = frontier.section(visible);
    const sorted = (place, name, draw) => (key, direction) => {
      now[name] = [key, direction];
      router.note({ [name]: JSON.stringify(now[name]) });
      draw();
      const again = place.querySelector(`[data-key="${CSS.escape(key)}"]`);
      if (again && again.offsetParent) again.focus();
    };
    const drawRanking = () => dom.replace(ranking, matrix.table(visible(), now.metric, now.rank, sorted(ranking, "rank", drawRanking)));
    const drawFigures = () => dom.replace(figures, rows(visible().sort(compare(now.sort)), now, sorted(figures, "sort", drawFigures)));
    const refresh = (kind) => {
      const all = [...new Set(options[kind]())];
      const left = all.filter((name) => !now[kind].has(name));
      router.note({ [kind]: left.length ? JSON.stringify(left) : null });
      drawRanking();
      drawFigures();
      plots.draw();
    };
    const pairs = (kind) => [...new Set(options[kind]())].map((name) => [name, kind === "metrics" ? format.metricLabel(name) : name]);
    const choice = (kind, title) => filters.choice(title, pairs(kind), now[kind], () => refresh(kind));
    dom.replace(main,
      dom.el("div.headline", {}, dom.el("h1", {}, "Runs"), dom.el("p.lead", {}, lead())),
      notes(),
      dom.el("section", { "aria-labelledby": "ranking" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "ranking" }, "Systems by tasks"),
          dom.el("div.controls", { role: "group", "aria-label": "Filters" },
            filters.select("Metric", pairs("metrics"), now.metric, (value) => {
              now.metric = value;
              now.rank = [matrix.MEAN, -1];
              router.note({ metric: value, rank: null });
              drawRanking();
            }),
            choice("systems", "Systems"), choice("tasks", "Tasks"))),
        ranking,
        dom.el("p.caption", {}, matrix.CAPTION)),
      plots.node,
      dom.el("section", { "aria-labelledby": "figures" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "figures" }, "All figures"),
          dom.el("div.controls", {}, choice("metrics", "Metrics"), files.buttons("figures", () => exported(visible())))),
        figures,
        dom.el("p.caption", {}, "In brackets: 95% interval by item. ",
          "TPS: tokens kept a second, one request at a time. TPF: tokens kept a forward.")),
      runs.section());
    drawRanking();
    drawFigures();
    plots.draw();
    return plots.close;
  }

  // An address that was cut or edited is read as one without choices.
  function safely(read) {
    try {
      return read();
    } catch {
      router.note(Object.fromEntries([...router.query().keys()].map((name) => [name, null])));
      return read();
    }
  }

  function notes() {
    const all = [...runs.unfinished(), ...store.index.warnings];
    return all.length > 0 && dom.el("ul.notes", { "aria-label": "What to know before comparing" }, all.map((note) => dom.el("li", {}, note)));
  }

  function lead() {
    const samples = store.cells.reduce((sum, cell) => sum + (cell.mean ? 0 : cell.samples), 0);
    const tasks = new Set(store.cells.filter((cell) => !cell.mean).map((cell) => cell.task));
    const dates = store.index.runs.flatMap((run) => [run.began, run.ended]).filter(Boolean).sort();
    const seconds = store.index.runs.reduce((sum, run) => sum + run.seconds, 0);
    return [format.count(store.index.runs.length, "run"), format.count(tasks.size, "task"), format.count(samples, "sample"),
      dates.length > 0 && `${format.date(dates[0])} to ${format.date(dates.at(-1))}`, `${format.seconds(seconds)} of decoding`].filter(Boolean).join(" · ");
  }

  function exported(cells) {
    return cells.flatMap((cell) => Object.entries(cell.metrics).map(([metric, { value, low, high, unit, n, note }]) => ({
      run: cell.about.id, system: cell.system, settings: store.variant(cell), task: cell.task, version: cell.version, mini: cell.mini,
      metric, value, ci_low: low, ci_high: high, unit, n, hardware: format.machine(cell), note,
    })));
  }

  function sortValue(cell, key) {
    if (key === "system") return store.systemName(cell);
    if (key === "task") return format.task(cell);
    if (key === "n") return cell.items;
    const found = format.figure(cell, key);
    return found && found.value !== null ? found.value : null;
  }

  // What has no value comes last either way.
  function order(a, b, direction) {
    if (a === null || b === null) return (a === null) - (b === null);
    return direction * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  }

  // Means are never sorted in among the tasks: they come after them.
  const compare = ([key, direction]) => (one, other) => one.mean - other.mean
    || order(sortValue(one, key), sortValue(other, key), direction)
    || order(format.task(one), format.task(other), 1) || one.number - other.number;

  function rows(cells, { metrics: ticked, sort }, sortBy) {
    if (!cells.length) return dom.el("p.empty", {}, "Nothing matches: tick a system and a task.");
    const metrics = format.columns.filter((name) => ticked.has(name));
    const heads = [["task", "Task"], ["system", "System"], ["n", "n"], ...metrics.map((name) => [name, format.metricLabel(name)])];
    return [sorter(heads, sort, sortBy), table(cells, metrics, heads, sort, sortBy)];
  }

  function table(cells, metrics, heads, sort, sortBy) {
    return dom.el("table.figures", {},
      dom.el("caption.hidden", {}, "Figures of every system on every task"),
      dom.el("thead", {}, dom.el("tr", {}, heads.map((one) => head(one, sort, sortBy, ["task", "system"].includes(one[0]) ? "th" : "th.number")))),
      dom.el("tbody", {}, cells.map((cell) => row(cell, metrics))));
  }

  function head([key, label], [by, direction], sortBy, css) {
    const state = by === key ? (direction > 0 ? "ascending" : "descending") : "none";
    const first = key === "task" || key === "system" || format.isCost(key) ? 1 : -1;
    return dom.el(css, { scope: "col", "aria-sort": state },
      dom.el("button.sort", { type: "button", "data-key": key, onclick: () => sortBy(key, by === key ? -direction : first) }, label,
        dom.el("span.arrow", { "aria-hidden": "true" }, by === key ? (direction > 0 ? "▲" : "▼") : "")));
  }

  // On a phone a row is a card without column heads, so sorting has a list of its own.
  function sorter(heads, sort, sortBy) {
    const choices = heads.flatMap(([key, label]) => [[`${key} 1`, `${label}, rising`], [`${key} -1`, `${label}, falling`]]);
    return dom.el("div.narrow-only", {}, filters.select("Sort by", choices, sort.join(" "), (value) => {
      const at = value.lastIndexOf(" ");
      sortBy(value.slice(0, at), Number(value.slice(at + 1)));
    }));
  }

  function row(cell, metrics) {
    const name = format.task(cell);
    const title = cell.mean ? dom.el("span", {}, name) : dom.el("a", { href: router.link("task", cell.task) }, name);
    const variant = store.variant(cell);
    return dom.el(cell.mean ? "tr.mean" : "tr", {},
      dom.el("th", { scope: "row" }, title, marks(cell, metrics.some(format.isSpeed))),
      dom.el("td.system", {}, store.systemName(cell), variant && dom.el("small", {}, variant)),
      dom.el("td.number", { "data-label": "n" }, cell.items || "–"),
      metrics.map((metric) => dom.el("td.number", { "data-label": format.metricLabel(metric) }, figure(cell, metric))));
  }

  function figure(cell, metric) {
    const found = format.figure(cell, metric);
    if (!found || found.value === null) return dom.el("span.none", { title: "not measured" }, "–");
    const digits = found.unit === "percent" ? 1 : undefined;
    return [dom.el("b", { title: found.note || null }, format.number(found.value, digits)),
      found.low !== null && [" ", dom.el("span.interval", {}, `[${format.number(found.low, digits)}, ${format.number(found.high, digits)}]`)]];
  }

  // An interval on a line between two bounds.
  function whisker({ value, low, high }, from, to) {
    if (low === null || !(to > from)) return null;
    const share = (at) => `${(100 * (at - from)) / (to - from)}%`;
    const [range, point] = [dom.el("i.range"), dom.el("i.point")];
    range.style.left = share(low);
    range.style.width = share(from + high - low);
    point.style.left = share(value);
    return dom.el("span.whisker", { "aria-hidden": "true" }, range, point);
  }

  function marks(cell, besideSpeed) {
    const shown = format.marks(cell, besideSpeed);
    return shown.length > 0 && [" ", dom.el("span.marks", {}, shown.map(({ kind, label, sentence }) =>
      dom.el(`span.mark-word.${kind.split(" ")[0]}`, { title: sentence }, label, dom.el("span.hidden", {}, `: ${sentence}`))))];
  }

  return { view, marks, figure, whisker, head, order, table };
})();
