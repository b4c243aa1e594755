// The leaderboard: systems by tasks, then one task on one machine at a time, each figure with the way to its records;
// published figures apart.
const board = (() => {
  const { index } = store;
  const others = index.published ?? []; // a report has none

  // A task, told apart by version where there are several, whose figures must not be compared.
  const versions = new Map();
  for (const cell of store.cells) versions.set(format.task(cell), new Set(versions.get(format.task(cell))).add(cell.version));
  const taskOf = (cell) => (versions.get(format.task(cell)).size > 1 && !cell.mean ? `${format.task(cell)}, version ${cell.version}` : format.task(cell));

  // Benchmarks of which only published figures are here.
  const isReal = (cell) => !cell.mini && !cell.mean;
  const onlyPublished = [...new Set(others.map(({ task }) => task))]
    .filter((name) => !store.cells.some((cell) => isReal(cell) && cell.benchmark === name));
  const measured = [...new Set(store.cells.map(taskOf))];
  const machinesOf = (task) => [...new Set(store.cells.filter((cell) => taskOf(cell) === task).map(format.machine))];

  function view(main) {
    const query = router.query();
    const tasks = [...measured, ...onlyPublished];
    let task = tasks.includes(query.get("task")) ? query.get("task") : measured[0];
    let machine = query.get("machine");
    let sort = ["accuracy", -1];
    router.trail(["Leaderboard", null]);
    const [controls, figures, published] = [dom.el("div.controls", { role: "group", "aria-label": "Filters" }), dom.el("div"), dom.el("div")];
    const cells = () => store.cells.filter((cell) => taskOf(cell) === task && format.machine(cell) === machine);
    const plots = frontier.planes(cells, ({ number }) => { location.hash = router.link("point", number); });
    const plotted = dom.el("div", {}, plots.node);
    const drawFigures = () => dom.replace(figures, rows(cells(), sort, (key, direction) => {
      sort = [key, direction];
      drawFigures();
      figures.querySelector(`[data-key="${CSS.escape(key)}"]`).focus();
    }));
    const draw = () => {
      const machines = machinesOf(task);
      if (!machines.includes(machine)) machine = machines[0] ?? null;
      router.note({ task, machine: machines.length > 1 ? machine : null });
      dom.replace(controls,
        filters.select("Task", tasks.map((name) => [name, measured.includes(name) ? name : `${name} (published only)`]), task, (value) => {
          task = value;
          draw();
        }),
        machines.length > 0 && filters.select("Machine", machines.map((name) => [name, name || "unknown"]), machine, (value) => {
          machine = value;
          draw();
        }));
      plotted.hidden = !machines.length;
      drawFigures();
      if (machines.length) plots.draw();
      else plots.close();
      const benchmark = measured.includes(task) ? cells()[0].benchmark : task;
      const isMini = measured.includes(task) && cells()[0].mini;
      dom.replace(published, isMini ? dom.el("p.empty", {}, "Others measured the benchmark itself, of which a mini task is a synthetic look-alike. ",
        "Choose the benchmark among the tasks to see their figures.") : ofOthers(benchmark));
    };
    const ranking = dom.el("div.table-place.limited", { tabindex: "0", role: "region", "aria-label": "Ranking" });
    let [metric, rank] = [COLUMNS[0][0], [matrix.MEAN, -1]];
    const drawRanking = () => dom.replace(ranking, matrix.table(store.cells, metric, rank, (key, direction) => {
      rank = [key, direction];
      drawRanking();
      ranking.querySelector(`[data-key="${CSS.escape(key)}"]`).focus();
    }, (cell) => router.link("point", cell.number), format.machine));
    const choice = filters.select("Metric", COLUMNS, metric, (value) => {
      [metric, rank] = [value, [matrix.MEAN, -1]];
      drawRanking();
    });
    dom.replace(main,
      dom.el("div.headline", {}, dom.el("h1", {}, "Leaderboard"), dom.el("p.lead", {}, lead())),
      index.warnings.length > 0 && dom.el("details.run", {}, dom.el("summary", {}, format.count(index.warnings.length, "note"), " on what compares with what"),
        dom.el("ul.notes", {}, index.warnings.map((note) => dom.el("li", {}, note)))),
      dom.el("section", { "aria-labelledby": "ranking" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "ranking" }, "Systems by tasks"), dom.el("div.controls", {}, choice)), ranking,
        dom.el("p.caption", {}, matrix.CAPTION)),
      dom.el("section", { "aria-labelledby": "measured" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "measured" }, "Measured"), controls), plotted, figures,
        dom.el("p.caption", {}, "Figures of one task on one machine, which are the only ones that compare. In brackets: 95% interval by item. ",
          "A system's name, or a press on a point, leads to its settings and records.")),
      dom.el("section", { "aria-labelledby": "published" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "published" }, "Published by others")), published),
      dom.el("p.caption", {}, "Files: ", dom.el("a", { href: "figures.csv", download: true }, "figures.csv"), " (measured), ",
        dom.el("a", { href: "published.csv", download: true }, "published.csv"), "."));
    drawRanking();
    draw();
    return plots.close;
  }

  function lead() {
    const machines = new Set(store.cells.map(format.machine));
    const tasks = new Set(store.cells.filter((cell) => !cell.mean).map(taskOf));
    return [format.count(index.runs.length, "run"), format.count(tasks.size, "task"), format.count(machines.size, "machine"),
      format.count(others.reduce((sum, { values }) => sum + Object.keys(values).length, 0), "published figure")].join(" · ");
  }

  const COLUMNS = [["accuracy", "Accuracy, %"], ["tps", "TPS"], ["tpf", "TPF"]];

  function rows(cells, [key, direction], sortBy) {
    if (!cells.length) return dom.el("p.empty", {}, "No run of this task is here.");
    const value = (cell) => (key === "system" ? store.title(cell) : format.figure(cell, key)?.value ?? null);
    const sorted = [...cells].sort((one, other) => overview.order(value(one), value(other), direction) || one.number - other.number);
    const head = (name, label, css) => overview.head([name, label], [key, direction], sortBy, css);
    return dom.el("div.table-place", { tabindex: "0", role: "region", "aria-label": "Measured figures" }, dom.el("table.figures", {},
      dom.el("caption.hidden", {}, "Measured figures of every system"),
      dom.el("thead", {}, dom.el("tr", {}, head("system", "System", "th"), COLUMNS.map(([name, label]) => head(name, label, "th.number")),
        dom.el("th.number", { scope: "col" }, dom.el("span.sort", {}, "n")), dom.el("th", { scope: "col" }, dom.el("span.sort", {}, "Records")))),
      dom.el("tbody", {}, sorted.map((cell) => dom.el("tr", {},
        dom.el("th.system", { scope: "row" }, dom.el("a", { href: router.link("point", cell.number) }, store.title(cell)), overview.marks(cell, true)),
        COLUMNS.map(([name, label]) => dom.el("td.number", { "data-label": label }, overview.figure(cell, name))),
        dom.el("td.number", { "data-label": "n" }, cell.items || "–"),
        dom.el("td", { "data-label": "Records" }, dom.el("code", { title: cell.facts.Records || null }, (cell.facts.Records || "not in the file").slice(0, 12))))))));
  }

  // Published figures of a benchmark: first where sources print different numbers for one system, then all of them.
  function ofOthers(benchmark) {
    const own = others.filter(({ task }) => task === benchmark);
    if (!own.length) return dom.el("p.empty", {}, "No published figure of this task is known here.");
    const groups = index.differing.filter(({ task }) => task === benchmark);
    return [groups.length > 0 && table("Where sources print different numbers for one system: each with its settings and source", ["System", "Figure", "Numbers"], groups.map(({ metric, places }) => [
      name(others[places[0]]), dom.el("span.whole", {}, LABELS[metric]),
      dom.el("ul.sources", {}, places.map((place) => others[place]).map((row) =>
        dom.el("li", {}, dom.el("b", {}, row.values[metric]), " ", row.said || "no settings stated", dom.el("small", {}, row.source)))),
    ])),
    dom.el("details.run", {}, dom.el("summary", {}, `All ${format.count(own.length, "row")} of published figures`),
      table("All published figures", ["System", ...Object.values(LABELS), "Settings and notes", "Source"], own.map((row) => [
        name(row), ...Object.keys(LABELS).map((metric) => row.values[metric] || dom.el("span.none", { title: "not published" }, "–")),
        row.said || "none stated", row.source])))];
  }

  const LABELS = { score: "Accuracy, %", tps: "TPS", tpf: "TPF" };
  const name = ({ label, backbone }) => [label, backbone && dom.el("small", {}, backbone)];

  // A table whose rows are cells in the order of its heads; the first names the row.
  function table(label, heads, rows) {
    const css = (head) => (Object.values(LABELS).includes(head) ? ".number" : "");
    return dom.el("div.table-place.limited.narrow", { tabindex: "0", role: "region", "aria-label": label }, dom.el("table.figures.plain-table", {},
      dom.el("caption", {}, label),
      dom.el("thead", {}, dom.el("tr", {}, heads.map((head) => dom.el(`th${css(head)}`, { scope: "col" }, head)))),
      dom.el("tbody", {}, rows.map(([first, ...cells]) => dom.el("tr", {}, dom.el("th.system", { scope: "row" }, first),
        cells.map((cell, place) => dom.el(`td${css(heads[place + 1])}`, { "data-label": heads[place + 1] }, cell)))))));
  }

  // One point: all its figures, its settings, and the records that it is from.
  function point(main, number) {
    const cell = store.cells[Number(number)];
    if (!cell) return view(main);
    router.trail(["Leaderboard", `#/?${new URLSearchParams({ task: taskOf(cell), machine: format.machine(cell) })}`], [store.title(cell), null]);
    const names = format.columns.filter((metric) => format.figure(cell, metric));
    const { Command: command, ...facts } = cell.facts;
    const list = (entries) => dom.el("dl.facts", {}, entries.map(([name, value]) => [dom.el("dt", {}, name), dom.el("dd", {}, value)]));
    dom.replace(main,
      dom.el("div.headline", {}, dom.el("h1", {}, store.title(cell)), dom.el("p.lead", {}, taskOf(cell), overview.marks(cell, true))),
      dom.el("dl.tiles", {}, COLUMNS.map(([name, label]) => dom.el("div", {}, dom.el("dt", {}, label), dom.el("dd", {}, overview.figure(cell, name))))),
      cell.notes.length > 0 && dom.el("section", { "aria-label": "Notes" }, dom.el("ul.notes", {}, cell.notes.map((note) => dom.el("li", {}, note)))),
      dom.el("section", { "aria-labelledby": "origin" }, dom.el("div.section-head", {}, dom.el("h2", { id: "origin" }, "Where it is from")),
        dom.el("div.run", {}, list(Object.entries(facts))), command && runs.command(command)),
      dom.el("section", { "aria-labelledby": "settings" }, dom.el("div.section-head", {}, dom.el("h2", { id: "settings" }, "Settings")),
        dom.el("div.run", {}, list(Object.entries(cell.settings)))),
      dom.el("section", { "aria-labelledby": "all" }, dom.el("div.section-head", {}, dom.el("h2", { id: "all" }, "All figures")),
        dom.el("div.run", {}, list(names.map((metric) => [format.metricLabel(metric), overview.figure(cell, metric)])))));
    return null;
  }

  return { view, point };
})();
